"""What a job copies: three arrays, planned once, executed by any engine. Pure.

``GroupLayout`` says where the pages of a group's blocks lie in an engine's memory. It is checked once, when a worker
registers, so that copies need no checks but those of their block ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvoffd.errors import BadGeometry, OutOfBounds
from kvoffd_proto.messages import PageRef, TensorLayout

_MAX_SHARD_BYTES = 2**62
PIECES_AT_ONCE = 32_768
"""Of a plan: arrays that do not fit the processor's caches cost several times as much for each piece."""

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
    """

    destination: UInt64Array
    source: UInt64Array
    size: UInt64Array
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class GroupLayout:
    """One KV cache group of one worker; arrays have one element per layer, in slot order (L layers, see ``_runs``).

    A slot is layer-major: sub-block ``s`` (engine block ``s`` of a key) of layer ``l`` lies at
    ``slot_page_offset[l] + s * page_bytes[l]``, where ``slot_page_offset[l]`` is the sum of ``blocks_per_key *
    page_bytes`` over the layers before. So neighbouring engine blocks of a layer are neighbours in the slot too.
    """

    tensor_address: npt.NDArray[np.uint64]  # [L] address of engine block 0
    stride: npt.NDArray[np.uint64]  # [L] bytes between engine blocks
    page_bytes: npt.NDArray[np.uint64]  # [L] bytes of an engine block that belong to the layer
    slot_page_offset: npt.NDArray[np.uint64]  # [L] offset of the layer in a slot
    blocks_per_key: int
    block_limit: int  # block ids lie below it: the engine blocks of the shortest tensor
    block_bytes: int  # bytes of an engine block in all layers
    shard_bytes: int  # bytes of a whole shard


def build_layouts(
    segments: Sequence[tuple[int, int]],
    tensors: Sequence[TensorLayout],
    groups: Sequence[Sequence[PageRef]],
    blocks_per_key: int,
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
    return [_build_layout(segments, tensors, index, pages, blocks_per_key) for index, pages in enumerate(groups)]


def _build_layout(
    segments: Sequence[tuple[int, int]],
    tensors: Sequence[TensorLayout],
    group: int,
    pages: Sequence[PageRef],
    blocks_per_key: int,
) -> GroupLayout:
    if not pages:
        raise BadGeometry(
            f"Group {group} has no layers; register the page of every layer that the group has on this rank."
        )
    # Each pair once: a client may name the same page very often.
    for tensor, nbytes in dict.fromkeys((page.tensor, page.page_bytes) for page in pages):
        if not 0 <= tensor < len(tensors):
            raise OutOfBounds(f"Group {group} names tensor {tensor}, but only {len(tensors)} tensors were registered.")
        _check_tensor(segments, tensor, tensors[tensor], nbytes)
    runs = _runs(segments, tensors, pages, merge=blocks_per_key == 1)
    address, stride, page_bytes = (np.array(column, dtype=np.uint64) for column in zip(*runs, strict=True))
    block_bytes = sum(page.page_bytes for page in pages)
    shard_bytes = blocks_per_key * block_bytes
    if shard_bytes > _MAX_SHARD_BYTES:
        raise BadGeometry(f"A shard of group {group} would have {shard_bytes} bytes; register fewer blocks per key.")
    ends = np.cumsum(page_bytes * np.uint64(blocks_per_key), dtype=np.uint64)
    return GroupLayout(
        tensor_address=address,
        stride=stride,
        page_bytes=page_bytes,
        slot_page_offset=np.concatenate((np.zeros(1, dtype=np.uint64), ends[:-1])),
        blocks_per_key=blocks_per_key,
        block_limit=min(tensors[page.tensor].num_blocks for page in pages),
        block_bytes=block_bytes,
        shard_bytes=shard_bytes,
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
            f"Tensor {index} names segment {tensor.segment}, but only {len(segments)} segments were registered."
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
            f"Tensor {index} ends at byte {end} of segment {tensor.segment}, which has only {size} bytes."
        )


def plan_blocks(
    layout: GroupLayout,
    direction: Direction,
    block_ids: npt.NDArray[np.int32],
    position: npt.NDArray[np.int64],
    slot_address: UInt64Array,
    chosen: npt.NDArray[np.bool_] | None = None,
) -> Plan:
    """Plan the copies of one group, of one job or of several, whose block ids were checked.

    Args:
        block_ids: [m] engine blocks.
        position: [m] where each of them belongs: ``key * blocks_per_key + sub-block``; ascending.
        slot_address: [keys] address of each key's slot; ignored where the key is not chosen.
        chosen: [keys] which keys to copy; all when None.

    Neighbours that touch on both sides become one piece. Pieces are ordered as the slots have them, key, layer,
    sub-block, so that every slot is filled from its first byte on.
    """
    per_key, layers, keys = layout.blocks_per_key, layout.page_bytes.size, slot_address.size
    at_once = max(1, PIECES_AT_ONCE // (layers * per_key))
    if keys > at_once:
        firsts = range(0, keys, at_once)
        bounds = [*np.searchsorted(position, np.array(firsts) * per_key).tolist(), block_ids.size]
        plans = []
        for first, begin, end in zip(firsts, bounds, bounds[1:], strict=False):
            some = slice(first, first + at_once)
            wanted = None if chosen is None else chosen[some]
            ids, places = block_ids[begin:end], position[begin:end] - first * per_key
            plans.append(plan_blocks(layout, direction, ids, places, slot_address[some], wanted))
        return concatenate(plans)
    ids = block_ids.astype(np.uint64)
    key = position if per_key == 1 else position // per_key
    if chosen is not None:
        wanted = chosen[key]
        key, position, ids = key[wanted], position[wanted], ids[wanted]
    if ids.size == 0:
        return concatenate([])
    # [m, L]: one row per engine block, one column per layer.
    engine = layout.tensor_address + ids[:, None] * layout.stride
    pool = slot_address[key][:, None] + layout.slot_page_offset
    if per_key > 1:
        pool += (position % per_key).astype(np.uint64)[:, None] * layout.page_bytes
    size = np.empty(engine.shape, dtype=np.uint64)
    size[:] = layout.page_bytes
    engine, pool, size = engine.reshape(-1), pool.reshape(-1), size.reshape(-1)
    if per_key > 1:
        layer = np.tile(np.arange(layers, dtype=np.int64), ids.size)
        order = np.argsort(np.repeat(key, layers) * layers + layer, kind="stable")  # key, layer, sub-block
        engine, pool, size = engine[order], pool[order], size[order]
    begins = np.ones(size.size, dtype=np.bool_)  # which pieces do not continue the one before them on both sides
    begins[1:] = (engine[:-1] + size[:-1] != engine[1:]) | (pool[:-1] + size[:-1] != pool[1:])
    if not begins.all():
        heads = begins.nonzero()[0]
        size = np.add.reduceat(size, heads)
        engine, pool = engine[heads], pool[heads]
    nbytes = int(ids.size) * layout.block_bytes
    return Plan(engine, pool, size, nbytes) if direction is Direction.LOAD else Plan(pool, engine, size, nbytes)


def concatenate(plans: Sequence[Plan]) -> Plan:
    """Return one plan that copies what all of ``plans`` do."""
    if len(plans) == 1:
        return plans[0]
    if not plans:
        empty = np.empty(0, dtype=np.uint64)
        return Plan(empty, empty, empty, 0)
    return Plan(
        np.concatenate([plan.destination for plan in plans]),
        np.concatenate([plan.source for plan in plans]),
        np.concatenate([plan.size for plan in plans]),
        sum(plan.nbytes for plan in plans),
    )
