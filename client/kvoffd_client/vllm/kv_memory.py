"""A worker's KV memory: allocated as shared memory on a CPU, exported on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from msgspec.structs import replace
from torch.overrides import TorchFunctionMode
from vllm.v1.kv_offload.base import CanonicalKVCaches

from kvoffd_client.cuda_export import GpuSegment, export_segments
from kvoffd_client.errors import KvoffdClientError
from kvoffd_client.memory import Registration, SharedMemory
from kvoffd_proto.messages import PageRef, TensorLayout


class NotShareable(Exception):
    """The worker's KV memory cannot be shared with the daemon. The message says why."""


class SharedKvMemory(TorchFunctionMode):
    """While active, ``torch.zeros(n, dtype=torch.int8)`` on the CPU allocates a sealed memfd, which is zero.

    vLLM allocates all its KV tensors by that call (v1/worker/utils.py, allocate_kv_cache). Other calls pass through.

    Attributes:
        memories: the allocated memory, kept for the life of the process because vLLM's tensors use it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memories: list[SharedMemory] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        size = args[0] if func is torch.zeros and len(args) == 1 else None
        if not isinstance(size, int) or size <= 0 or kwargs.get("dtype") is not torch.int8:
            return func(*args, **kwargs)
        if torch.device(kwargs.get("device") or "cpu").type != "cpu":
            return func(*args, **kwargs)
        memory = SharedMemory(size, name="kvoffd-kv")
        self.memories.append(memory)
        return torch.frombuffer(memory.view, dtype=torch.int8)


def registration_of(
    kv_caches: CanonicalKVCaches,
    memories: Sequence[SharedMemory],
    shard: int,
    blocks_per_chunk: int,
) -> Registration:
    """Return the registration of a worker's KV tensors: their places in shared memory.

    Raises NotShareable if a tensor is not in shareable memory.
    """
    tensors = [cache.tensor for cache in kv_caches.tensors]
    kinds = {tensor.device.type for tensor in tensors}
    with ExitStack() as undo:
        offered: Sequence[SharedMemory | GpuSegment] = memories
        reason = (
            "vLLM did not allocate its KV cache in kvoffd's shared memory (get_mem_pool_context was not called, or "
            "another connector's was)."
        )
        if kinds == {"cuda"}:
            reason = "A KV tensor spans several allocations."
            try:
                offered = export_segments([_span(tensor) for tensor in tensors])
            except KvoffdClientError as error:
                raise NotShareable(str(error)) from error
            for segment in offered:
                undo.callback(segment.close)
        elif kinds != {"cpu"}:
            raise NotShareable(
                f"The KV cache is in {' and '.join(sorted(kinds))} memory; kvoffd serves NVIDIA GPUs and CPUs."
            )
        layouts = [_layout_in(offered, tensor, reason) for tensor in tensors]
        undo.pop_all()  # nothing is undone: the registration owns the segments now
    used = sorted({layout.segment for layout in layouts})
    return Registration(
        rank=shard,
        blocks_per_key=blocks_per_chunk,
        memories=tuple(offered[index] for index in used),
        tensors=tuple(replace(layout, segment=used.index(layout.segment)) for layout in layouts),
        groups=tuple(
            tuple(PageRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs) for refs in kv_caches.group_data_refs
        ),
    )


class RecordedEvent:
    """An event after everything launched so far on this thread's current stream; its waiter sleeps."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()

    def synchronize(self) -> None:
        # A new thread uses GPU 0: waiting there would create a context of some hundred MiB (vllm-project/vllm#37449).
        torch.cuda.set_device(self._device)
        self._event.synchronize()


def _layout_in(memories: Sequence[SharedMemory | GpuSegment], tensor: torch.Tensor, reason: str) -> TensorLayout:
    """Return the layout of a tensor. Raises NotShareable with this reason if no memory contains all of it."""
    address, size = _span(tensor)
    for index, memory in enumerate(memories):
        begin = int(memory.view.ctypes.data) if isinstance(memory, SharedMemory) else memory.address
        if begin <= address and address + size <= begin + memory.size_bytes:
            stride_bytes = int(tensor.stride(0)) * int(tensor.element_size())
            return TensorLayout(index, address - begin, stride_bytes, int(tensor.shape[0]))
    raise NotShareable(reason)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return (address, size in bytes) of a tensor of pages, [blocks, page], from its first byte to its last."""
    blocks, page = int(tensor.shape[0]), int(tensor.shape[1])
    return int(tensor.data_ptr()), ((blocks - 1) * int(tensor.stride(0)) + page) * int(tensor.element_size())
