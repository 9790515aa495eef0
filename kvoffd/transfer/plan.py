"""What a job copies: three arrays, planned once, executed by any engine. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kvoffd.transfer.layout import GroupLayout

UInt64Array = npt.NDArray[np.uint64]


class Direction(Enum):
    """Which way bytes move."""

    STORE = "store"
    """Engine to pool."""
    LOAD = "load"
    """Pool to engine."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Copies ``size[i]`` bytes from ``source[i]`` to ``destination[i]``, in any order. Arrays are uint64, [pieces].

    ``whole_after`` of a store, int64, [slots]: where copied in the plan's order, the slot of each chosen key is whole
    once so many bytes are in place; ascending.
    """

    destination: UInt64Array
    source: UInt64Array
    size: UInt64Array
    nbytes: int
    whole_after: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def pieces(self) -> int:
        """Number of copies, after merging."""
        return int(self.size.size)


def plan_copy(
    layout: GroupLayout,
    direction: Direction,
    block_ids: npt.NDArray[np.int32],
    first_block: int,
    slot_address: UInt64Array,
    chosen: npt.NDArray[np.bool_] | None = None,
) -> Plan:
    """Plans one group's part of a job that ``check_blocks`` has passed.

    Args:
        block_ids: [m] engine blocks, beginning ``first_block`` blocks into key 0.
        slot_address: [keys] address of each key's slot; ignored where the key is not chosen.
        chosen: [keys] which keys to copy; all when None.

    Neighbours that touch on both sides become one piece. Pieces are ordered as the slots have them, key, layer,
    sub-block, so that every slot is filled from its first byte on.
    """
    per_key = layout.blocks_per_key
    layers = layout.page_bytes.size
    position = np.arange(first_block, first_block + block_ids.size, dtype=np.int64)
    key, sub = position // per_key, position % per_key
    ids = block_ids.astype(np.uint64)
    if chosen is not None:
        kept = chosen[key]
        key, sub, ids = key[kept], sub[kept], ids[kept]
    if ids.size == 0:
        empty = np.empty(0, dtype=np.uint64)
        return Plan(empty, empty, empty, 0)
    # [m, L]: one row per engine block, one column per layer.
    engine = layout.tensor_address + ids[:, None] * layout.stride
    pool = slot_address[key][:, None] + layout.slot_page_offset + sub.astype(np.uint64)[:, None] * layout.page_bytes
    size = np.broadcast_to(layout.page_bytes, engine.shape)
    row = np.broadcast_to(np.arange(ids.size)[:, None], engine.shape)
    if per_key > 1:
        order = _slot_order(key, ids.size, layers)
        engine, pool, size = (array.reshape(-1)[order] for array in (engine, pool, size))
        row = row.reshape(-1)[order]
    else:
        engine, pool, size = (array.reshape(-1) for array in (engine, pool, size))
        row = row.reshape(-1)
    heads = _merge_heads(engine, pool, size)
    if heads.size < size.size:
        size = np.add.reduceat(size, heads)
        engine, pool, row = engine[heads], pool[heads], row[heads]
    nbytes = int(ids.size) * int(layout.page_bytes.sum())
    size = np.ascontiguousarray(size)
    if direction is Direction.LOAD:
        return Plan(engine, pool, size, nbytes)
    every = np.arange(slot_address.size) if chosen is None else np.flatnonzero(chosen)
    # Pieces are ordered by the key they begin in, and may reach into keys that follow.
    ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(size, dtype=np.int64)))
    return Plan(pool, engine, size, nbytes, ends[np.searchsorted(key[row], every, side="right")])


def concatenate(plans: Sequence[Plan]) -> Plan:
    """One plan that does all of ``plans``."""
    if len(plans) == 1:
        return plans[0]
    if not plans:
        empty = np.empty(0, dtype=np.uint64)
        return Plan(empty, empty, empty, 0)
    nbytes = [plan.nbytes for plan in plans]
    starts = [0, *accumulate(nbytes)][:-1]
    return Plan(
        np.concatenate([plan.destination for plan in plans]),
        np.concatenate([plan.source for plan in plans]),
        np.concatenate([plan.size for plan in plans]),
        sum(nbytes),
        np.concatenate([plan.whole_after + before for plan, before in zip(plans, starts, strict=True)]),
    )


def _slot_order(key: npt.NDArray[np.int64], rows: int, layers: int) -> npt.NDArray[np.int64]:
    """Indices that put the flattened [rows, layers] pieces in the order key, layer, sub-block."""
    keys = np.repeat(key, layers)
    layer = np.tile(np.arange(layers, dtype=np.int64), rows)
    return np.argsort(keys * layers + layer, kind="stable")


def _merge_heads(engine: UInt64Array, pool: UInt64Array, size: UInt64Array) -> npt.NDArray[np.int64]:
    """Indices of the pieces that do not continue the one before them on both sides."""
    continues = (engine[:-1] + size[:-1] == engine[1:]) & (pool[:-1] + size[:-1] == pool[1:])
    return np.concatenate((np.zeros(1, dtype=np.int64), np.flatnonzero(~continues) + 1))
