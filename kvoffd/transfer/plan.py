"""Plans of copies: three arrays, made by the copying thread and executed by any engine. Pure.

A ``GroupLayout`` describes the pages of a group's blocks in an engine's memory. It is checked once, when a worker
registers, so that a copy need only check its block ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffd.errors import BadGeometry, OutOfBounds
from kvoffd.system.native import CHAR_P, NUMBER, VOID_P, declare, native
from kvoffd_proto.messages import PageRef, TensorLayout

declare(
    keep_gil=False,
    plan_blocks=(None, VOID_P, NUMBER, NUMBER, NUMBER, CHAR_P, NUMBER, CHAR_P, NUMBER, CHAR_P, VOID_P),
)

_MAX_SHARD_BYTES = 2**62
UInt64Array = npt.NDArray[np.uint64]


class Direction(Enum):
    STORE = "store"  # engine to pool
    LOAD = "load"  # pool to engine


class CopyEnd(Enum):
    """End of a copy."""

    DONE = "done"  # all bytes were copied
    CANCELLED = "cancelled"  # it did not begin; nothing was written
    DEADLINE = "deadline"  # it was stopped at its deadline; the destination may be partly written
    FAILED = "failed"  # the copy failed or was stopped; the destination may be partly written
    CORRUPT = "corrupt"  # a load's slot does not match its checksum; nothing was written


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Copies ``size[i]`` bytes from ``source[i]`` to ``destination[i]``, in any order.

    Arrays are uint64, [pieces], contiguous: C reads them. Pieces that are adjacent on both sides are merged.
    ``allocations``: see ``GroupLayout``.
    """

    destination: UInt64Array
    source: UInt64Array
    size: UInt64Array
    allocations: UInt64Array = field(default_factory=lambda: np.empty(0, np.uint64))


@dataclass(frozen=True, slots=True, eq=False)
class GroupLayout:
    """One KV cache group of one worker.

    A slot is layer-major: sub-block ``s`` (engine block ``s`` of a key) of a layer is at ``offset + s * page_bytes``,
    where ``offset`` is the sum of ``blocks_per_key * page_bytes`` over the previous layers. So adjacent engine blocks
    of a layer are adjacent in the slot too.
    """

    layers: UInt64Array
    """[L, 4] in slot order (see ``_layers_of``): the address of engine block 0, bytes between engine blocks, bytes of
    an engine block that belong to the layer (``page_bytes``), ``offset`` in a slot."""
    blocks_per_key: int
    block_limit: int  # exclusive limit of block ids: the engine blocks of the shortest tensor
    block_bytes: int  # bytes of an engine block in all layers
    shard_bytes: int  # bytes of a whole shard
    allocations: UInt64Array
    """Addresses of the registration's allocations on a GPU, ascending, if it has several; else empty. If not empty,
    pieces are ordered by layer: a copy of many rows must stay in one allocation, as a layer does."""


def build_layouts(
    segments: Sequence[tuple[int, int]],
    tensors: Sequence[TensorLayout],
    groups: Sequence[Sequence[PageRef]],
    blocks_per_key: int,
    *,
    on_gpu: bool = False,
) -> list[GroupLayout]:
    """Return the layouts of a registration's groups; ``segments`` are (address, size in bytes) of the mapped memory.

    Raises:
        OutOfBounds: a tensor or page exceeds its segment, or refers to a missing segment or tensor.
        BadGeometry: pages overlap, a group has no layers, or a shard is absurdly large.
    """
    if blocks_per_key < 1:
        raise BadGeometry(f"A key cannot cover {blocks_per_key} engine blocks; it must cover at least one.")
    for index, tensor in enumerate(tensors):  # also those without a page: sizes of pages are checked with each group's
        _check_tensor(segments, index, tensor, page_bytes=1)
    has_several = on_gpu and len(segments) > 1
    allocations = np.array(sorted(address for address, _ in segments) if has_several else [], np.uint64)
    return [
        _build_layout(segments, tensors, index, pages, blocks_per_key, allocations)
        for index, pages in enumerate(groups)
    ]


def _build_layout(
    segments: Sequence[tuple[int, int]],
    tensors: Sequence[TensorLayout],
    group: int,
    pages: Sequence[PageRef],
    blocks_per_key: int,
    allocations: UInt64Array,
) -> GroupLayout:
    if not pages:
        raise BadGeometry(
            f"Group {group} has no layers; register the page of every layer that the group has on this rank."
        )
    # Each pair once: a client may repeat a page very often.
    for tensor, nbytes in dict.fromkeys((page.tensor, page.page_bytes) for page in pages):
        if not 0 <= tensor < len(tensors):
            raise OutOfBounds(
                f"Group {group} refers to tensor {tensor}, but there are {len(tensors)}; use one of these."
            )
        _check_tensor(segments, tensor, tensors[tensor], nbytes)
    layers = _layers_of(segments, tensors, pages, merge=blocks_per_key == 1)
    block_bytes = sum(page.page_bytes for page in pages)
    shard_bytes = blocks_per_key * block_bytes
    if shard_bytes > _MAX_SHARD_BYTES:
        raise BadGeometry(f"A shard of group {group} would have {shard_bytes} bytes; register fewer blocks per key.")
    offsets = accumulate((blocks_per_key * page_bytes for *_, page_bytes in layers), initial=0)
    return GroupLayout(
        # The last of the offsets is the slot's end.
        layers=np.array([(*layer, offset) for layer, offset in zip(layers, offsets, strict=False)], np.uint64),
        blocks_per_key=blocks_per_key,
        block_limit=min(tensors[page.tensor].num_blocks for page in pages),
        block_bytes=block_bytes,
        shard_bytes=shard_bytes,
        allocations=allocations,
    )


def _layers_of(
    segments: Sequence[tuple[int, int]], tensors: Sequence[TensorLayout], pages: Sequence[PageRef], *, merge: bool
) -> list[tuple[int, int, int]]:
    """Return address, stride and page bytes of each layer; ``merge``: layers that are adjacent in every block are one.

    They are adjacent if the block is the outermost dimension of an engine's memory. A slot has them in the same order,
    unless a key covers several blocks, since a slot is layer-major.
    """
    layers: list[tuple[int, int, int]] = []
    for page in pages:
        tensor = tensors[page.tensor]
        address, stride = segments[tensor.segment][0] + tensor.offset_bytes, tensor.stride_bytes
        if merge and layers:
            begin, last_stride, nbytes = layers[-1]
            if (begin + nbytes, last_stride) == (address, stride):
                layers[-1] = (begin, stride, nbytes + page.page_bytes)
                continue
        layers.append((address, stride, page.page_bytes))
    return layers


def _check_tensor(segments: Sequence[tuple[int, int]], index: int, tensor: TensorLayout, page_bytes: int) -> None:
    """Raise for an invalid tensor. Uses Python's ints: a hostile client could make NumPy's overflow."""
    if not 0 <= tensor.segment < len(segments):
        raise OutOfBounds(
            f"Tensor {index} refers to segment {tensor.segment}, but there are {len(segments)}; use one of these."
        )
    if page_bytes < 1 or tensor.num_blocks < 1 or tensor.stride_bytes < 1 or tensor.offset_bytes < 0:
        raise BadGeometry(
            f"Tensor {index} has {tensor.num_blocks} blocks at a stride of {tensor.stride_bytes} bytes from offset "
            f"{tensor.offset_bytes}, with pages of {page_bytes} bytes; all but the offset must be positive."
        )
    if tensor.num_blocks > 1 and page_bytes > tensor.stride_bytes:
        raise BadGeometry(
            f"Pages of {page_bytes} bytes overlap in tensor {index}, whose stride is {tensor.stride_bytes} bytes; "
            "register pages no larger than the stride."
        )
    end = tensor.offset_bytes + (tensor.num_blocks - 1) * tensor.stride_bytes + page_bytes
    size = segments[tensor.segment][1]
    if end > size:
        raise OutOfBounds(
            f"Tensor {index} ends at byte {end} of segment {tensor.segment}, which has only {size} bytes; fix its size."
        )


class BlockCopy(NamedTuple):
    """Blocks of one group that a job copies. The ids were checked, and fit the keys."""

    layout: GroupLayout
    block_ids: npt.NDArray[np.int32]
    """[m] engine blocks, in the order of the keys."""
    slots: UInt64Array
    """[keys] address of each key's slot; 0 if the key is not copied."""
    first_blocks: Mapping[int, int]
    """Number of engine blocks to skip at a key's start, by number of the key, if not 0."""


def plan_blocks(direction: Direction, copies: Sequence[BlockCopy]) -> Plan:
    """Return a job's plan.

    Pieces are in the order of the slots: key, layer, sub-block, so that every slot is filled from its first byte on,
    except with ``GroupLayout.allocations``. Pieces that are adjacent on both sides are merged.
    """
    most = sum([copy.block_ids.size * len(copy.layout.layers) for copy in copies])
    columns = np.empty((3, most), np.uint64)
    begin = columns.ctypes.data
    planned = array("Q", [0, begin, begin + 8 * most, begin + 16 * most])  # struct planned: pieces, engine, pool, size
    for layout, block_ids, slots, first_blocks in copies:
        firsts = array("H", bytes(2 * slots.size if first_blocks else 0))
        for key, first in first_blocks.items():
            firsts[key] = first
        # tobytes: getting the address of a new array takes longer than copying a few block ids.
        native().plan_blocks(
            *(layout.layers.ctypes.data, len(layout.layers), layout.allocations.size, layout.blocks_per_key),
            *(block_ids.tobytes(), block_ids.size, slots.tobytes(), slots.size),
            *(firsts.tobytes() if first_blocks else None, planned.buffer_info()[0]),
        )
    engine, pool, size = columns[:, : planned[0]]
    to, source = (engine, pool) if direction is Direction.LOAD else (pool, engine)
    allocations = copies[0].layout.allocations if copies else np.empty(0, np.uint64)  # the same for all groups
    return Plan(to, source, size, allocations)
