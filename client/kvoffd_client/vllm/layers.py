"""What the pages of vLLM's layers are, for whoever opens a block outside an engine. Nothing is decided by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvoffd_proto.handles import LayerSpec

# vLLM's logical order of a layer's cache, blocks first (v1/kv_cache_interface.py, create_kv_cache_views). With kernels
# that want smaller blocks than the manager's, a page is several kernel blocks.
DIMENSIONS = ("heads", "tokens", "content")


def describe_layers(
    kv_caches: Mapping[str, Any], groups: Sequence[Sequence[str]], num_blocks: int
) -> tuple[tuple[LayerSpec, ...], ...]:
    """Say of each layer of each group what a page of it holds.

    Args:
        kv_caches: vLLM's tensors by layer name, ``[blocks, heads, tokens, content]`` in whatever order of memory.
        groups: layer names of the offloaded groups.
        num_blocks: blocks of vLLM's manager.
    """
    return tuple(tuple(_describe(name, kv_caches.get(name), num_blocks) for name in names) for names in groups)


def _describe(name: str, tensor: Any, num_blocks: int) -> LayerSpec:
    name = name[:256]
    shape: tuple[int, ...] = tuple(getattr(tensor, "shape", ()))
    if len(shape) != 1 + len(DIMENSIONS) or shape[0] % num_blocks:
        return LayerSpec(name)  # states of another kind
    dimensions = [
        ("kernel_blocks", int(shape[0]) // num_blocks, int(tensor.stride(0))),
        *zip(DIMENSIONS, map(int, shape[1:]), map(int, tensor.stride()[1:]), strict=True),
    ]
    kept = [dimension for dimension in dimensions if dimension[0] != "kernel_blocks" or dimension[1] > 1]
    # A dimension of one element may have any stride; it keeps its place before what it would hold.
    kept.sort(key=lambda dimension: dimension[2], reverse=True)
    expected = 1
    for _, size, stride in reversed(kept):
        if size > 1 and stride != expected:
            return LayerSpec(name)  # the page has gaps, or other layers between
        expected *= size
    dtype = str(tensor.dtype).removeprefix("torch.")
    return LayerSpec(name, dtype, [size for _, size, _ in kept], " ".join(of for of, _, _ in kept))
