"""Memory for plans: one engine buffer, one pool buffer, and the plain way to copy between them."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from kvoffd.transfer.plan import Direction, GroupLayout, Plan, plan_blocks

Bytes = npt.NDArray[np.uint8]


def random_bytes(nbytes: int, seed: int = 0) -> Bytes:
    """Random bytes, the same for each seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def address_of(buffer: Bytes) -> int:
    """The buffer's first address."""
    return int(buffer.ctypes.data)


def plan_copy(
    layout: GroupLayout,
    direction: Direction,
    block_ids: npt.NDArray[np.int32],
    first_block: int,
    slot_address: npt.NDArray[np.uint64],
    chosen: npt.NDArray[np.bool_] | None = None,
) -> Plan:
    """Plan one group's part of one job: ``block_ids`` ([m]) begin ``first_block`` blocks into key 0."""
    position = np.arange(first_block, first_block + block_ids.size, dtype=np.int64)
    return plan_blocks(layout, direction, block_ids, position, slot_address, chosen)


def execute(plan: Plan) -> None:
    """Executes a plan one piece after the other."""
    for piece in zip(plan.destination.tolist(), plan.source.tolist(), plan.size.tolist(), strict=True):
        ctypes.memmove(*piece)


def reference_copy(
    layers: list[tuple[int, int, int]],
    blocks_per_key: int,
    direction: Direction,
    block_ids: list[int],
    first_block: int,
    slot_address: list[int],
    chosen: list[bool] | None,
) -> int:
    """What a plan must do, said as plainly as can be: the definition of a slot's layout. Returns the bytes.

    ``layers`` are address, stride and page bytes of each.
    """
    nbytes = 0
    for number, block in enumerate(block_ids):
        key, sub = divmod(first_block + number, blocks_per_key)
        if chosen is not None and not chosen[key]:
            continue
        at = slot_address[key]
        for address, stride, page in layers:
            engine, pool = address + block * stride, at + sub * page
            if direction is Direction.STORE:
                ctypes.memmove(pool, engine, page)
            else:
                ctypes.memmove(engine, pool, page)
            at += blocks_per_key * page
            nbytes += page
    return nbytes
