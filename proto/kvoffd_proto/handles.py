"""How the daemon reaches an engine's KV memory: segments, tensors in them, groups over tensors."""

from __future__ import annotations

from typing import Annotated

from msgspec import field

from kvoffd_proto.wire import ByteCount, Count, Wire, doc

SegmentId = Annotated[Count, doc("Chosen by the client, unique in its session.")]
GpuUuid = Annotated[bytes, doc("UUID of the GPU (or MIG instance), never an ordinal.", min_length=16, max_length=16)]


class MemfdHandle(Wire, frozen=True, tag="memfd"):
    """Host memory: a memfd that came over the lifeline, sealed against shrinking."""

    segment_id: Annotated[Count, doc("Id under which the descriptor was attached on the lifeline.")]
    size_bytes: Annotated[int, doc("Bytes to map; the file must be at least as large.", ge=1, le=2**63 - 1)]


class CudaIpcHandle(Wire, frozen=True, tag="cuda_ipc"):
    """Ordinary GPU memory: the driver's IPC handle of the base allocation."""

    handle: Annotated[bytes, doc("CUipcMemHandle of the base of the allocation.", min_length=64, max_length=64)]
    size_bytes: Annotated[int, doc("Size of the allocation in bytes.", ge=1, le=2**63 - 1)]
    gpu_uuid: GpuUuid


class CudaVmmHandle(Wire, frozen=True, tag="cuda_vmm"):
    """GPU memory of the virtual memory API: one descriptor per chunk, sent over the lifeline."""

    segment_ids: Annotated[
        list[SegmentId], doc("One attached descriptor per chunk, in address order.", min_length=1, max_length=65536)
    ]
    chunk_bytes: Annotated[list[ByteCount], doc("Size of each chunk in bytes.", min_length=1, max_length=65536)]
    gpu_uuid: GpuUuid


Handle = MemfdHandle | CudaIpcHandle | CudaVmmHandle


class TensorLayout(Wire, frozen=True):
    """One KV tensor: ``num_blocks`` pages at a constant stride inside a segment."""

    segment: Annotated[int, doc("Index into the registration's segments.", ge=0, lt=65536)]
    offset_bytes: Annotated[Count, doc("Offset of block 0 in the segment, in bytes.")]
    stride_bytes: Annotated[int, doc("Distance between neighbouring blocks, in bytes.", ge=1, le=2**63 - 1)]
    num_blocks: Annotated[int, doc("Number of engine blocks in the tensor.", ge=1, lt=2**31)]


class LayerSpec(Wire, frozen=True):
    """Describes a page of one layer for programs that open blocks. The daemon checks nothing by it."""

    name: Annotated[str, doc("The engine's name of the layer; empty if unknown.", max_length=256)] = ""
    dtype: Annotated[str, doc("torch's name of the dtype, such as ``bfloat16``; empty for bytes.", max_length=32)] = ""
    shape: Annotated[
        list[Annotated[int, doc(ge=1, lt=2**31)]],
        doc("Shape of one page, in the order of memory; empty if unknown.", max_length=16),
    ] = field(default_factory=list)
    layout: Annotated[str, doc("Names of the dimensions, separated by blanks; empty if unknown.", max_length=256)] = ""


class PageRef(Wire, frozen=True):
    """One layer's part of a group's block: the first ``page_bytes`` of a page of a tensor."""

    tensor: Annotated[int, doc("Index into the registration's tensors.", ge=0, lt=65536)]
    page_bytes: Annotated[int, doc("Bytes of the page that belong to the layer.", ge=1, lt=2**31)]
    layer: Annotated[LayerSpec | None, doc("What these bytes are; nil if unknown.")] = None
