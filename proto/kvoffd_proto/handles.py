"""How the daemon reaches an engine's KV memory: segments, tensors in them, groups over tensors."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

SegmentId = Annotated[int, Meta(ge=0, le=2**63 - 1, description="Chosen by the client, unique in its session.")]
Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class MemfdHandle(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="memfd"):
    """Host memory: a memfd that came over the lifeline, sealed against shrinking."""

    segment_id: Annotated[
        int, Meta(ge=0, le=2**63 - 1, description="The id the descriptor was attached under on the lifeline.")
    ]
    size_bytes: Annotated[
        int, Meta(ge=1, le=2**63 - 1, description="Bytes to map; the file must be at least as large.")
    ]


class CudaIpcHandle(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="cuda_ipc"):
    """Ordinary GPU memory: the driver's IPC handle of the base allocation."""

    handle: Annotated[
        bytes, Meta(min_length=64, max_length=64, description="CUipcMemHandle of the base of the allocation.")
    ]
    size_bytes: Annotated[int, Meta(ge=1, le=2**63 - 1, description="Size of the allocation in bytes.")]
    gpu_uuid: Annotated[
        bytes, Meta(min_length=16, max_length=16, description="UUID of the GPU (or MIG instance), never an ordinal.")
    ]


class CudaVmmHandle(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="cuda_vmm"):
    """GPU memory of the virtual memory API: one descriptor per chunk, sent over the lifeline."""

    segment_ids: Annotated[
        list[SegmentId],
        Meta(min_length=1, max_length=65536, description="One attached descriptor per chunk, in address order."),
    ]
    chunk_bytes: Annotated[
        list[Bytes], Meta(min_length=1, max_length=65536, description="Size of each chunk in bytes.")
    ]
    gpu_uuid: Annotated[
        bytes, Meta(min_length=16, max_length=16, description="UUID of the GPU (or MIG instance), never an ordinal.")
    ]


Handle = MemfdHandle | CudaIpcHandle | CudaVmmHandle


class TensorLayout(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One KV tensor: ``num_blocks`` pages at a constant stride inside a segment."""

    segment: Annotated[int, Meta(ge=0, lt=65536, description="Index into the registration's segments.")]
    offset_bytes: Annotated[int, Meta(ge=0, le=2**63 - 1, description="Offset of block 0 in the segment, in bytes.")]
    stride_bytes: Annotated[
        int, Meta(ge=1, le=2**63 - 1, description="Distance between neighbouring blocks, in bytes.")
    ]
    num_blocks: Annotated[int, Meta(ge=1, lt=2**31, description="Number of engine blocks in the tensor.")]


class LayerSpec(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a page of one layer is, for whoever opens a block. Described only: nothing is checked by it."""

    name: Annotated[str, Meta(max_length=256, description="The layer, as the engine names it; empty if unknown.")] = ""
    dtype: Annotated[str, Meta(max_length=32, description="As torch names it, ``bfloat16``; empty for bytes.")] = ""
    shape: Annotated[
        list[Annotated[int, Meta(ge=1, lt=2**31)]],
        Meta(max_length=16, description="Of one page, in the order of memory; empty if unknown."),
    ] = field(default_factory=list)
    layout: Annotated[
        str, Meta(max_length=256, description="What the dimensions are, with blanks between; empty if unknown.")
    ] = ""


class PageRef(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One layer's part of a group's block: the first ``page_bytes`` of a page of a tensor."""

    tensor: Annotated[int, Meta(ge=0, lt=65536, description="Index into the registration's tensors.")]
    page_bytes: Annotated[int, Meta(ge=1, lt=2**31, description="Bytes of the page that belong to the layer.")]
    layer: Annotated[
        LayerSpec | None, Meta(description="What they are, for whoever opens a block; nil if unknown.")
    ] = None
