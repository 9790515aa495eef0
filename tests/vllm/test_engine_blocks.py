"""Single blocks of real engines: what BlockClient reads is the KV cache, and what it puts an engine loads."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from kvoffd_client import BlockClient, KvoffdClientError
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import EngineProcess, cached, prompt, tokens, wait_connected, wait_stored
from tests.kit.fork_servers import forked
from tests.kit.models import make_tiny_llama
from tests.kit.runner_v2 import wanted
from tests.kit.shapes import PATIENCE_S, Shape, make_tiny_deepseek, make_tiny_gemma3
from tests.vllm.block_examples import check_examples, open_blocks

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
PROMPT = prompt(3, 700)
LIMITS = {"lease_ttl_s": 200, "job_deadline_s": 200}
"""For ranks that starve each other."""
EXAMPLES_S = 200.0
CALLS = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Lets a test call a function in the workers."""
SHAPES = {
    "tensor-parallel": Shape(make_tiny_llama, {"tensor_parallel": 2}, workers=2),
    "mla": Shape(make_tiny_deepseek, varies=True),
    "mla-tensor-parallel": Shape(make_tiny_deepseek, {"tensor_parallel": 2}, workers=2, varies=True),
    "hybrid": Shape(make_tiny_gemma3, {"num_blocks": 1600}),
    "blocks-per-chunk": Shape(extra={"blocks_per_chunk": 4}),
}


def check_blocks(shape: Shape, model: Path) -> None:
    """Every block has the bytes of one block of the KV cache in each layer, and gives the same tokens elsewhere."""
    options = {"lookup_deadline_ms": 1000 * PATIENCE_S, **shape.extra}
    settings = {"patient": True, "extra_config": options, "environ": CALLS, **shape.settings}
    with DaemonProcess("256MiB", limits=LIMITS) as first, DaemonProcess("256MiB", limits=LIMITS) as second:
        with EngineProcess(model, first.directory, **settings) as engine:
            wait_connected(first.directory, shape.workers, PATIENCE_S)
            (cold,) = engine.generate([PROMPT])
            wait_stored(first.directory)
            pages = engine.call("kv_pages")
            engine.forget()
            (own,) = engine.generate([PROMPT])
            wait_stored(first.directory)
        with EngineProcess(model, second.directory, **settings) as other:
            wait_connected(second.directory, shape.workers, PATIENCE_S)
            with open_blocks(first.directory) as here, open_blocks(second.directory) as there:
                count = sum(move(here, there, group, pages) for group in range(len(here.namespace.groups)))
                assert count == wait_stored(first.directory).ready_blocks == wait_stored(second.directory).ready_blocks
            (loaded,) = other.generate([PROMPT])
    assert cached([own]) == cached([loaded]) != [0]
    assert tokens([loaded]) == tokens([own])
    assert shape.varies or tokens([own]) == tokens([cold])


def move(here: BlockClient, there: BlockClient, group: int, pages: list[list[list[list[bytes]]]]) -> int:
    """Compare each block of a group with the engine's pages, and put it; returns how many there are."""
    keys = list(here.keys(group=group, limit=7))
    for key in keys:
        kv = [here.get(key, group=group, rank=rank) for rank in range(here.namespace.world_size)]
        for layers, cache in zip(kv, pages, strict=False):
            digests = [[sha256(page.numpy()).digest() for page in layer] for layer in layers]
            at = [cache[group][0].index(digest) for digest in digests[0]]
            for number, of_layer in enumerate(digests):
                assert of_layer == [cache[group][number][block] for block in at], (group, key.hex(), number)
        assert there.put(key, kv, group=group)
        assert not there.put(key, kv, group=group)
        changed = [[layer.clone() for layer in layers] for layers in kv]
        changed[-1][0][0, 0] ^= 1
        with pytest.raises(KvoffdClientError, match="with other bytes"):
            there.put(key, changed, group=group)
    return len(keys)


def test_blocks_are_the_kv_cache(model: Path) -> None:
    check_blocks(Shape(), model)


def test_the_page_s_examples_read_keys_and_values(model: Path, tmp_path: Path) -> None:
    """They import vLLM: so they run in a process that is forked from the one that has."""
    period = 7
    tokens_of_prompt = [100 + at % period for at in range(300)]
    with DaemonProcess("256MiB") as daemon, EngineProcess(model, daemon.directory, patient=True) as engine:
        wait_connected(daemon.directory, 1)
        engine.generate([tokens_of_prompt])
        wait_stored(daemon.directory)
        failure = tmp_path / "failure"
        process = forked(check_examples, (daemon.directory, tokens_of_prompt, period, failure), v2=wanted())
        process.start()
        try:
            process.join(EXAMPLES_S)
            assert process.exitcode == 0
        finally:
            process.kill()  # else the end of the tests waits for one that hangs
    assert not failure.exists(), failure.read_text()


@pytest.mark.shapes
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_of_shape(name: str, tmp_path: Path) -> None:
    check_blocks(SHAPES[name], SHAPES[name].make(tmp_path / name))
