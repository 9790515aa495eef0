"""Single blocks of real engines: what BlockClient reads is the KV cache, and what it puts an engine loads."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from kvoffd_client import AdminClient, BlockClient, KvoffdClientError
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import EngineProcess, cached, prompt, tokens, wait_connected, wait_stored
from tests.kit.models import TINY_LLAMA, make_tiny_llama
from tests.kit.shapes import PATIENCE_S, Shape, make_tiny_deepseek, make_tiny_gemma3

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
PROMPT = prompt(3, 700)
LIMITS = {"lease_ttl_s": 200, "job_deadline_s": 200}
"""For ranks that starve each other."""
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
            with open_blocks(first) as here, open_blocks(second) as there:
                count = sum(move(here, there, group, pages) for group in range(len(here.namespace.groups)))
                assert count == wait_stored(first.directory).ready_blocks == wait_stored(second.directory).ready_blocks
            (loaded,) = other.generate([PROMPT])
    assert cached([own]) == cached([loaded]) != [0]
    assert tokens([loaded]) == tokens([own])
    assert shape.varies or tokens([own]) == tokens([cold])


def open_blocks(daemon: DaemonProcess) -> BlockClient:
    with AdminClient(daemon.directory) as admin:
        (one,) = admin.namespaces().namespaces
    return BlockClient(daemon.directory, one.label)


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


def examples() -> dict[str, Any]:
    """Functions of the examples in client/README.md."""
    page = (Path(__file__).parents[2] / "client" / "README.md").read_text()
    section = page.partition("## Single blocks as tensors")[2].partition("\n## ")[0]
    code = "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    names: dict[str, Any] = {}
    exec(re.sub(r"^# Llama.*\n^key_norms.*$", "", code, flags=re.MULTILINE), names)  # noqa: S102 - the page is ours
    return names


def test_the_page_s_examples_read_keys_and_values(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the first layer equal tokens have equal values, and keys of equal length that RoPE has turned."""
    import torch

    page, shape, period = examples(), TINY_LLAMA, 7
    tokens_of_prompt = [100 + at % period for at in range(300)]
    with DaemonProcess("256MiB") as daemon, EngineProcess(model, daemon.directory, patient=True) as engine:
        wait_connected(daemon.directory, 1)
        engine.generate([tokens_of_prompt])
        wait_stored(daemon.directory)
        with open_blocks(daemon) as blocks:
            block_tokens, label = blocks.namespace.groups[0].tokens_per_block, blocks.namespace.label
            keys = page["keys_of"](tokens_of_prompt, block_tokens)
            assert set(keys) == set(blocks.keys())
            view = {"dtype": torch.float32, "shape": (shape.kv_heads, 2 * block_tokens, shape.head_dim)}
            read = [kv[0][0] for _, kv in page["leading_blocks"](blocks, [*keys, bytes(32)], **view)]
            assert "never stored in this namespace" in capsys.readouterr().out
            pairs = [page["keys_and_values"](one) for one in read]
            of_keys, of_values = (torch.cat(parts, dim=1) for parts in zip(*pairs, strict=True))
            assert of_keys.shape == of_values.shape == (shape.kv_heads, len(keys) * block_tokens, shape.head_dim)
            assert of_values[:, period:].allclose(of_values[:, :-period], atol=1e-5)
            isa = engine.call("attention_isa", block_tokens=block_tokens, head_dim=shape.head_dim)
            assert isa in ("vec", "vec16", "neon")
            assert of_keys[:, period:].norm(dim=-1).allclose(of_keys[:, :-period].norm(dim=-1), rtol=1e-4)
            assert not of_keys[:, period:].allclose(of_keys[:, :-period], rtol=1e-2), "RoPE"
        page["key_norms"](daemon.directory, label, keys, **view)
        assert len(re.findall(rf"layer \d: [\d.]+ over {len(keys)} pages", capsys.readouterr().out)) == shape.layers
        assert page["move_prefix"](daemon.directory, daemon.directory, label, keys) == 0, "all are there"


@pytest.mark.shapes
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_of_shape(name: str, tmp_path: Path) -> None:
    check_blocks(SHAPES[name], SHAPES[name].make(tmp_path / name))
