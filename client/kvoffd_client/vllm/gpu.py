"""A worker's KV cache on a GPU: exported to the daemon, and its order kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches

from kvoffd_client.cuda.export import GpuSegment, export_segments
from kvoffd_client.cuda.order import Event
from kvoffd_client.errors import KvoffdClientError
from kvoffd_proto.handles import TensorLayout


class NotShareable(Exception):
    """The worker's KV memory cannot be handed to the daemon; the sentence says why."""


def record_event() -> Event:
    """An event behind everything launched so far on this thread's current stream; its waiter sleeps."""
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event


def export_tensors(
    kv_caches: CanonicalKVCaches, export: Callable[[list[tuple[int, int]]], list[GpuSegment]] = export_segments
) -> tuple[list[GpuSegment], list[TensorLayout]]:
    """Export the memory that a worker's KV tensors lie in, and say where in it each of them lies.

    Raises:
        NotShareable: the driver cannot export it.
    """
    spans = [_span(cache.tensor) for cache in kv_caches.tensors]
    try:
        segments = export(spans)
    except KvoffdClientError as reason:
        raise NotShareable(str(reason)) from reason
    layouts = []
    for cache, (address, size) in zip(kv_caches.tensors, spans, strict=True):
        index = next(
            (
                number
                for number, segment in enumerate(segments)
                if segment.address <= address and address + size <= segment.address + segment.size_bytes
            ),
            None,
        )
        if index is None:
            for segment in segments:
                segment.close()
            raise NotShareable(f"The KV tensor at {address:#x} lies in several allocations.")
        tensor = cache.tensor
        stride_bytes = int(tensor.stride(0)) * int(tensor.element_size())
        layouts.append(TensorLayout(index, address - segments[index].address, stride_bytes, int(tensor.shape[0])))
    return segments, layouts


def _span(tensor: Any) -> tuple[int, int]:
    """(address, size in bytes) of a tensor of pages, [blocks, page], from its first byte to its last."""
    blocks, page = int(tensor.shape[0]), int(tensor.shape[1])
    return int(tensor.data_ptr()), ((blocks - 1) * int(tensor.stride(0)) + page) * int(tensor.element_size())
