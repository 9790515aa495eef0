"""The examples of client/README.md about single blocks, for a process that has imported vLLM, as they do."""

from __future__ import annotations

import io
import re
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from kvoffd_client import AdminClient, BlockClient
from tests.kit.models import TINY_LLAMA


def open_blocks(directory: Path) -> BlockClient:
    with AdminClient(directory) as admin:
        (one,) = admin.namespaces().namespaces
    return BlockClient(directory, one.label)


def examples() -> dict[str, Any]:
    """Functions of the examples in client/README.md."""
    page = (Path(__file__).parents[2] / "client" / "README.md").read_text()
    section = page.partition("## Single blocks as tensors")[2].partition("\n## ")[0]
    code = "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    names: dict[str, Any] = {}
    exec(re.sub(r"^# Llama.*\n^key_norms.*$", "", code, flags=re.MULTILINE), names)  # noqa: S102 - the page is ours
    return names


def check_examples(directory: Path, tokens_of_prompt: list[int], period: int, failure: Path) -> None:
    """In the first layer equal tokens have equal values, and keys of equal length that RoPE has turned."""
    try:
        _check(directory, tokens_of_prompt, period)
    except BaseException:
        failure.write_text(traceback.format_exc())


def _check(directory: Path, tokens_of_prompt: list[int], period: int) -> None:
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    page, shape, printed = examples(), TINY_LLAMA, io.StringIO()
    with redirect_stdout(printed):
        with open_blocks(directory) as blocks:
            block_tokens, label = blocks.namespace.groups[0].tokens_per_block, blocks.namespace.label
            keys = page["keys_of"](tokens_of_prompt, block_tokens)
            assert set(keys) == set(blocks.keys())
            view = {"dtype": torch.float32, "shape": (shape.kv_heads, 2 * block_tokens, shape.head_dim)}
            read = [kv[0][0] for _, kv in page["leading_blocks"](blocks, [*keys, bytes(32)], **view)]
            assert "never stored in this namespace" in printed.getvalue()
            pairs = [page["keys_and_values"](one) for one in read]
            of_keys, of_values = (torch.cat(parts, dim=1) for parts in zip(*pairs, strict=True))
            assert of_keys.shape == of_values.shape == (shape.kv_heads, len(keys) * block_tokens, shape.head_dim)
            assert of_values[:, period:].allclose(of_values[:, :-period], atol=1e-5)
            assert _get_attn_isa(torch.float32, block_tokens, shape.head_dim) in ("vec", "vec16", "neon")
            assert of_keys[:, period:].norm(dim=-1).allclose(of_keys[:, :-period].norm(dim=-1), rtol=1e-4)
            assert not of_keys[:, period:].allclose(of_keys[:, :-period], rtol=1e-2), "RoPE"
        page["key_norms"](directory, label, keys, **view)
        assert len(re.findall(rf"layer \d: [\d.]+ over {len(keys)} pages", printed.getvalue())) == shape.layers
        assert page["move_prefix"](directory, directory, label, keys) == 0, "all are there"
