"""What a job copies: three arrays, planned by the thread that copies, executed by any engine. Pure.

``GroupLayout`` says where the pages of a group's blocks lie in an engine's memory. It is checked once, when a worker
registers, so that copies need no checks but those of their block ids.
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
from kvoffd.system.native import native
from kvoffd_proto.messages import PageRef, TensorLayout

_MAX_SHARD_BYTES = 2**62
UInt64Array = npt.NDArray[np.uint64]


class Direction(Enum):
    STORE = "store"  # engine to pool
    LOAD = "load"  # pool to engine


class Outcome(Enum):
    DONE = "done"  # every byte is in place
    CANCELLED = "cancelled"  # it never started; nothing was written
    DEADLINE = "deadline"  # its time was over; the destination may be half written
    FAILED = "failed"  # the copy failed or was abandoned; the destination may be half written
    CORRUPT = "corrupt"  # a slot to load from does not hold what was stored in it; nothing was written


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Copies ``size[i]`` bytes from ``source[i]`` to ``destination[i]``, in any order.

    Arrays are uint64, [pieces], each in one piece of memory: C reads them. Pieces that touch on both sides are merged.
    ``allocations``: see ``GroupLayout``.
    """

    destination: UInt64Array
    source: UInt64Array
    size: UInt64Array
    nbytes: int
    allocations: UInt64Array = field(default_factory=lambda: np.empty(0, np.uint64))


@dataclass(frozen=True, slots=True, eq=False)
class GroupLayout:
    """One KV cache group of one worker.

    A slot is layer-major: sub-block ``s`` (engine block ``s`` of a key) of a layer lies at ``offset + s *
    page_bytes``, where ``offset`` is the sum of ``blocks_per_key * page_bytes`` over the layers before. So neighbouring
    engine blocks of a layer are neighbours in the slot too.
    """

    layers: UInt64Array
    """[L, 4] in slot order (see ``_runs``): the address of engine block 0, bytes between engine blocks, bytes of an
    engine block that belong to the layer (``page_bytes``), ``offset`` in a slot."""
    blocks_per_key: int
    block_limit: int  # block ids lie below it: the engine blocks of the shortest tensor
    block_bytes: int  # bytes of an engine block in all layers
    shard_bytes: int  # bytes of a whole shard
    allocations: UInt64Array
    """Where each of several allocations on a GPU begins, ascending. Rows of one copy lie in one of them, so that pieces
    are ordered by layer then. Empty for other memory."""


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
        OutOfBounds: a tensor or a page reaches outside its segment, or names a segment or tensor that is not there.
        BadGeometry: pages overlap their neighbours, a group has no layers, or a shard is absurdly large.
    """
    if blocks_per_key < 1:
        raise BadGeometry(f"A key cannot cover {blocks_per_key} engine blocks; it must cover at least one.")
    for index, tensor in enumerate(tensors):
        _check_tensor(segments, index, tensor, page_bytes=1)
    several = sorted(address for address, _ in segments) if on_gpu and len(segments) > 1 else []
    allocations = np.array(several, np.uint64)
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
    # Each pair once: a client may name the same page very often.
    for tensor, nbytes in dict.fromkeys((page.tensor, page.page_bytes) for page in pages):
        if not 0 <= tensor < len(tensors):
            raise OutOfBounds(
                f"Group {group} names tensor {tensor} and there are {len(tensors)}; name one that is registered."
            )
        _check_tensor(segments, tensor, tensors[tensor], nbytes)
    runs = _runs(segments, tensors, pages, merge=blocks_per_key == 1)
    block_bytes = sum(page.page_bytes for page in pages)
    shard_bytes = blocks_per_key * block_bytes
    if shard_bytes > _MAX_SHARD_BYTES:
        raise BadGeometry(f"A shard of group {group} would have {shard_bytes} bytes; register fewer blocks per key.")
    ends = accumulate(blocks_per_key * page_bytes for *_, page_bytes in runs)
    return GroupLayout(
        layers=np.array(
            [(*run, end - blocks_per_key * run[2]) for run, end in zip(runs, ends, strict=True)], np.uint64
        ),
        blocks_per_key=blocks_per_key,
        block_limit=min(tensors[page.tensor].num_blocks for page in pages),
        block_bytes=block_bytes,
        shard_bytes=shard_bytes,
        allocations=allocations,
    )


def _runs(
    segments: Sequence[tuple[int, int]], tensors: Sequence[TensorLayout], pages: Sequence[PageRef], *, merge: bool
) -> list[tuple[int, int, int]]:
    """Return address, stride and page bytes of each layer; with ``merge`` layers that touch in every block are one.

    All layers of a block touch where an engine's memory is block-outermost. A slot has them in the same order, so that
    its bytes are the same, in one piece. Not where a key covers several blocks: a slot is layer-major.
    """
    runs: list[tuple[int, int, int]] = []
    for page in pages:
        tensor = tensors[page.tensor]
        address, stride = segments[tensor.segment][0] + tensor.offset_bytes, tensor.stride_bytes
        before = runs[-1] if merge and runs else (0, 0, 0)
        if (before[0] + before[2], before[1]) == (address, stride):
            runs[-1] = (before[0], stride, before[2] + page.page_bytes)
        else:
            runs.append((address, stride, page.page_bytes))
    return runs


def _check_tensor(segments: Sequence[tuple[int, int]], index: int, tensor: TensorLayout, page_bytes: int) -> None:
    """Check with Python's ints throughout: numpy's would wrap around where a hostile client wants them to."""
    if not 0 <= tensor.segment < len(segments):
        raise OutOfBounds(
            f"Tensor {index} names segment {tensor.segment} and there are {len(segments)}; name one that is registered."
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
            f"Tensor {index} ends at byte {end} of segment {tensor.segment}, which has only {size} bytes; end it there."
        )


class BlockCopy(NamedTuple):
    """The blocks of one group that a job copies. Their ids were checked, and that they fit the keys."""

    layout: GroupLayout
    block_ids: npt.NDArray[np.int32]
    """[m] engine blocks, of one key after the other."""
    slots: UInt64Array
    """[keys] address of each key's slot; 0 where the key is not copied."""
    first_blocks: Mapping[int, int]
    """By number of a key, how many engine blocks are left out at its start, where there are any."""


def plan_blocks(direction: Direction, copies: Sequence[BlockCopy]) -> Plan:
    """Plan a job.

    Neighbours that touch on both sides become one piece. Pieces are ordered as the slots have them, key, layer,
    sub-block, so that every slot is filled from its first byte on; but see ``GroupLayout.allocations``.
    """
    most = sum([copy.block_ids.size * len(copy.layout.layers) for copy in copies])
    columns = np.empty(3 * most, np.uint64)
    planned = array("Q", [0, 0, *range(begin := columns.ctypes.data, begin + 24 * most, 8 * most or 1)])
    for layout, block_ids, slots, first_blocks in copies:
        firsts = array("H", bytes(2 * slots.size if first_blocks else 0))
        for key, first in first_blocks.items():
            firsts[key] = first
        # To ask a new array for its address takes longer than to copy a few blocks' numbers.
        native().plan_blocks(
            *(layout.layers.ctypes.data, len(layout.layers), layout.allocations.size, layout.blocks_per_key),
            *(block_ids.tobytes(), block_ids.size, slots.tobytes(), slots.size),
            *(firsts.tobytes() if first_blocks else None, planned.buffer_info()[0]),
        )
    pieces, nbytes = planned[:2]
    engine, pool, size = (columns[at : at + pieces] for at in (0, most, 2 * most))
    to, source = (engine, pool) if direction is Direction.LOAD else (pool, engine)
    return Plan(to, source, size, nbytes, *(copy.layout.allocations for copy in copies[:1]))
