"""Real engines: what one stored is exported, imported into another daemon, and serves another engine's first prompt.

They start as users' engines do: vLLM spawns their processes, which find the connector on their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from kvoffd_client import BlockClient
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import BLOCK_TOKENS, EngineProcess, full_blocks, prompt, wait_connected, wait_stored
from tests.kit.models import make_tiny_llama
from tests.kit.wire import books

pytestmark = [pytest.mark.engine, pytest.mark.shapes, pytest.mark.timeout(600)]

LENGTH = 1000
BLOCKS = LENGTH // BLOCK_TOKENS


def cli(daemon: DaemonProcess, *arguments: str) -> str:
    """Run kvoffd-cli; its output."""
    command = [sys.executable, "-c", "import sys; from kvoffd_client.cli import main; sys.exit(main())", *arguments]
    done = subprocess.run(
        [*command, "--directory", str(daemon.directory)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_node_is_warmed_from_another_s_cache(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "model")
    file = tmp_path / "blocks.safetensors"
    asked = [prompt(1, LENGTH)]
    with DaemonProcess("128MiB") as first:
        with EngineProcess(model, first.directory, fork=False) as engine:
            wait_connected(first.directory)
            (cold,) = engine.generate(asked)
            assert wait_stored(first.directory).ready_blocks == BLOCKS
        label = model.name
        with BlockClient(first.directory) as client:
            geometry = client.geometry(label)
            (shard,) = geometry.shards[0]
            keys = [info.key for info in client.list_blocks(label)]
            layers = client.get_block(label, keys[0]).shards[0].layers
            layer = layers[0].tensor()
        assert len(keys) == BLOCKS
        facts = json.loads(geometry.description)
        assert len(shard.pages) == len(layers) == facts["groups"][0]["layers"]
        assert all(layer.name for layer in layers), "vLLM's names of the layers"
        assert {layer.dtype for layer in layers} == {"float32"}
        assert "tokens" in layers[0].layout
        assert layers[0].shape[1 + layers[0].layout.split().index("tokens")] == BLOCK_TOKENS
        assert torch.isfinite(layer).all()
        assert layer.std() > 0
        assert f"{BLOCKS} blocks" in cli(first, "blocks", "export", str(file), "--namespace", label)
    with safe_open(file, "pt") as tensors:
        names = list(tensors.keys())
        assert len(names) == BLOCKS
        exported = tensors.get_tensor(f"group0/{keys[0].hex()}/rank0/layers0-{len(layers) - 1}")
    assert torch.equal(exported[0], layer)

    with DaemonProcess("128MiB") as second:
        assert "was opened" in cli(second, "blocks", "import", str(file))
        imported = books(second.directory).store
        with EngineProcess(model, second.directory, fork=False) as engine:
            wait_connected(second.directory)
            (warm,) = engine.generate(asked)
            after = books(second.directory)
    assert cold.cached == 0
    assert warm.cached == full_blocks(LENGTH)
    assert warm.tokens == cold.tokens
    assert warm.finish == "length"
    assert list(after.namespaces) == [geometry.fingerprint]
    assert after.store == imported, "the engine itself stored nothing"
    assert after.load.failed_jobs == 0
