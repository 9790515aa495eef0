"""A worker's KV memory: allocated so that it can be shared on a CPU, exported on a GPU, described to the daemon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from msgspec.structs import replace
from torch.overrides import TorchFunctionMode
from vllm.v1.kv_offload.base import CanonicalKVCaches

from kvoffd_client.cuda_export import GpuSegment, export_segments
from kvoffd_client.errors import KvoffdClientError
from kvoffd_client.memory import Registration, SharedMemory
from kvoffd_proto.messages import LayerSpec, PageRef, TensorLayout

# vLLM's logical order of a layer's cache, blocks first (v1/kv_cache_interface.py, create_kv_cache_views). With kernels
# that want smaller blocks than the manager's, a page is several kernel blocks.
DIMENSIONS = ("heads", "tokens", "content")


class NotShareable(Exception):
    """The worker's KV memory cannot be handed to the daemon; the sentence says why."""


class SharedKvMemory(TorchFunctionMode):
    """While active, ``torch.zeros(n, dtype=torch.int8)`` on the CPU comes from a sealed memfd.

    That is the one call with which vLLM allocates the backing of all its KV tensors (v1/worker/utils.py,
    allocate_kv_cache). Everything else passes through. Memory from a memfd is zero already.

    Attributes:
        memories: what was allocated; kept for the life of the process, since vLLM's tensors live in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memories: list[SharedMemory] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and _is_kv_backing(args, kwargs):
            memory = SharedMemory(args[0], name="kvoffd-kv")
            self.memories.append(memory)
            return torch.frombuffer(memory.view, dtype=torch.int8)
        return func(*args, **kwargs)


def _is_kv_backing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    size = args[0] if len(args) == 1 else None
    if kwargs.get("dtype") is not torch.int8 or not isinstance(size, int) or size <= 0:
        return False
    device = kwargs.get("device")
    return device is None or torch.device(device).type == "cpu"


def registration_of(
    kv_caches: CanonicalKVCaches,
    memories: Sequence[SharedMemory],
    rank: int,
    blocks_per_chunk: int,
    layers: Sequence[Sequence[LayerSpec]] = (),
) -> Registration:
    """Return what the daemon must know of a worker's KV tensors: where in shared memory they lie.

    ``layers`` describes the pages of each group (see ``describe_layers``); it is left out where it does not fit the
    tensors. Raises NotShareable when a tensor lies in no memory that can be shared.
    """
    kinds = {cache.tensor.device.type for cache in kv_caches.tensors}
    found: tuple[Sequence[SharedMemory | GpuSegment], list[TensorLayout]]
    if kinds == {"cuda"}:
        found = export_tensors(kv_caches)
    elif kinds == {"cpu"}:
        found = _shared_tensors(kv_caches, memories)
    else:
        raise NotShareable(
            f"The KV cache is in {' and '.join(sorted(kinds))} memory; kvoffd serves NVIDIA GPUs and CPUs."
        )
    groups = []
    for index, refs in enumerate(kv_caches.group_data_refs):
        specs = layers[index] if index < len(layers) and len(layers[index]) == len(refs) else [None] * len(refs)
        pages = zip(refs, specs, strict=True)
        groups.append(tuple(PageRef(ref.tensor_idx, ref.page_size_bytes, layer) for ref, layer in pages))
    return Registration(
        rank=rank,
        blocks_per_key=blocks_per_chunk,
        memories=tuple(found[0]),
        tensors=tuple(found[1]),
        groups=tuple(groups),
    )


def _shared_tensors(
    kv_caches: CanonicalKVCaches, memories: Sequence[SharedMemory]
) -> tuple[list[SharedMemory], list[TensorLayout]]:
    spans = [(int(memory.view.ctypes.data), memory.size_bytes) for memory in memories]
    sentence = (
        "vLLM did not allocate its KV cache in the memory that kvoffd offered (get_mem_pool_context was not called, or "
        "another connector's was)."
    )
    layouts = [_layout_in(spans, cache.tensor, sentence) for cache in kv_caches.tensors]
    used = sorted({layout.segment for layout in layouts})
    placed = [replace(layout, segment=used.index(layout.segment)) for layout in layouts]
    return [memories[index] for index in used], placed


class RecordedEvent:
    """An event behind everything launched so far on this thread's current stream; its waiter sleeps."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()

    def synchronize(self) -> None:
        # A new thread is on GPU 0: to wait there makes a context on it, some hundred MiB (vllm-project/vllm#37449).
        torch.cuda.set_device(self._device)
        self._event.synchronize()


def export_tensors(
    kv_caches: CanonicalKVCaches, export: Callable[[list[tuple[int, int]]], list[GpuSegment]] = export_segments
) -> tuple[list[GpuSegment], list[TensorLayout]]:
    """Export the GPU memory that a worker's KV tensors lie in; return it and where in it each tensor lies.

    Raises NotShareable when the driver cannot export it.
    """
    try:
        segments = export([_span(cache.tensor) for cache in kv_caches.tensors])
    except KvoffdClientError as reason:
        raise NotShareable(str(reason)) from reason
    spans = [(segment.address, segment.size_bytes) for segment in segments]
    with ExitStack() as undo:
        for segment in segments:
            undo.callback(segment.close)
        layouts = [
            _layout_in(spans, tensor, f"The KV tensor at {tensor.data_ptr():#x} lies in several allocations.")
            for tensor in (cache.tensor for cache in kv_caches.tensors)
        ]
        undo.pop_all()
    return segments, layouts


def _layout_in(segments: Sequence[tuple[int, int]], tensor: torch.Tensor, sentence: str) -> TensorLayout:
    """Return where a tensor lies in ``segments``, (address, size in bytes).

    Raises NotShareable with this sentence when it lies in none as a whole.
    """
    address, size = _span(tensor)
    for index, (begin, length) in enumerate(segments):
        if begin <= address and address + size <= begin + length:
            stride_bytes = int(tensor.stride(0)) * int(tensor.element_size())
            return TensorLayout(index, address - begin, stride_bytes, int(tensor.shape[0]))
    raise NotShareable(sentence)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return (address, size in bytes) of a tensor of pages, [blocks, page], from its first byte to its last."""
    blocks, page = int(tensor.shape[0]), int(tensor.shape[1])
    return int(tensor.data_ptr()), ((blocks - 1) * int(tensor.stride(0)) + page) * int(tensor.element_size())


def describe_layers(
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], groups: Sequence[Sequence[str]], num_blocks: int
) -> tuple[tuple[LayerSpec, ...], ...]:
    """Return for each layer of each group what a page of it holds, for whoever opens a block outside an engine.

    Nothing is decided by it. ``kv_caches`` are vLLM's tensors by layer name, ``[blocks, heads, tokens, content]`` in
    whatever order of memory; ``num_blocks`` counts the blocks of vLLM's manager.
    """
    return tuple(tuple(_describe(name, kv_caches.get(name), num_blocks) for name in names) for names in groups)


def _describe(name: str, tensor: torch.Tensor | Sequence[torch.Tensor] | None, num_blocks: int) -> LayerSpec:
    name = name[:256]
    if not isinstance(tensor, torch.Tensor):
        return LayerSpec(name)  # states, which are several tensors
    shape: tuple[int, ...] = tuple(tensor.shape)
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
