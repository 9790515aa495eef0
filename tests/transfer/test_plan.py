"""Plans copy what a plain reference does, byte by byte, and name nothing outside the registered tensors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffd.errors import BadGeometry, OutOfBounds
from kvoffd.transfer.engine import Transfer, host_copy
from kvoffd.transfer.plan import BlockCopy, Direction, GroupLayout, Plan, build_layouts, plan_blocks
from kvoffd_proto.messages import PageRef, TensorLayout
from tests.kit.amount import TIMES
from tests.kit.cases import case
from tests.kit.copy_buffers import address_of, random_bytes


def plan_copy(
    layout: GroupLayout,
    direction: Direction,
    block_ids: npt.NDArray[np.int32],
    first_block: int,
    slot_address: npt.NDArray[np.uint64],
    chosen: npt.NDArray[np.bool_] | None = None,
) -> Plan:
    """Plan one group's part of one job: ``block_ids`` ([m]) begin ``first_block`` blocks into key 0."""
    slots = slot_address if chosen is None else np.where(chosen, slot_address, np.uint64(0))
    return plan_blocks(direction, [BlockCopy(layout, block_ids, slots, {0: first_block})])


def execute(plan: Plan) -> None:
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


@dataclass
class Job:
    """Everything ``plan_copy`` is asked."""

    tensors: list[TensorLayout]
    pages: list[PageRef]
    blocks_per_key: int
    block_ids: list[int]
    first_block: int
    slots: list[int]
    chosen: list[bool] | None
    engine_bytes: int
    pool_bytes: int


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Layers evenly spaced or not, in one tensor or several; blocks in order or not; slots in runs or not."""
    num_blocks = draw(st.integers(1, 12))
    layers = draw(st.integers(1, 5))
    pages = draw(st.lists(st.integers(1, 40), min_size=layers, max_size=layers))
    if draw(st.booleans()):
        pages = [pages[0]] * layers
    together = draw(st.booleans())  # all layers of a block side by side, as vLLM's cross-layer layout has them
    tensors, end = [], 0
    for layer, page in enumerate(pages):
        if together:
            offset, stride = sum(pages[:layer]), sum(pages)
        else:
            stride = page + draw(st.sampled_from([0, 0, 3]))
            offset = end + draw(st.sampled_from([0, 0, 5]))
        tensors.append(TensorLayout(0, offset, stride, num_blocks))
        end = max(end, offset + (num_blocks - 1) * stride + page)
    blocks_per_key = draw(st.integers(1, 4))
    keys = draw(st.integers(1, 5))
    first_block = draw(st.integers(0, blocks_per_key - 1))
    last = draw(st.integers((keys - 1) * blocks_per_key + 1, keys * blocks_per_key))
    count = max(1, last - first_block)
    ids = draw(st.lists(st.integers(0, num_blocks - 1), min_size=count, max_size=count, unique=count <= num_blocks))
    if draw(st.booleans()):
        ids.sort()
    shard = blocks_per_key * sum(pages)
    slot = shard + draw(st.sampled_from([0, 7]))
    order = draw(st.permutations(range(keys))) if draw(st.booleans()) else list(range(keys))
    chosen = draw(st.one_of(st.none(), st.lists(st.booleans(), min_size=keys, max_size=keys)))
    page_refs = [PageRef(layer, page) for layer, page in enumerate(pages)]
    slots = [place * slot for place in order]
    return Job(tensors, page_refs, blocks_per_key, ids, first_block, slots, chosen, end, keys * slot)


@settings(max_examples=50 * TIMES**2)
@given(job=jobs(), direction=st.sampled_from(Direction))
def test_a_plan_copies_what_the_reference_does(job: Job, direction: Direction) -> None:
    def run(how: str) -> tuple[bytes, bytes, int]:
        engine, pool = random_bytes(job.engine_bytes, 1), random_bytes(job.pool_bytes, 2)
        layout = layout_at(address_of(engine), job)
        slots = [address_of(pool) + slot for slot in job.slots]
        if how == "reference":
            one_by_one = [unmerged(address_of(engine), job, page) for page in job.pages]
            nbytes = reference_copy(
                one_by_one, job.blocks_per_key, direction, job.block_ids, job.first_block, slots, job.chosen
            )
        else:
            ids = np.array(job.block_ids, dtype=np.int32)
            chosen = None if job.chosen is None else np.array(job.chosen)
            plan = plan_copy(layout, direction, ids, job.first_block, np.array(slots, dtype=np.uint64), chosen)
            nbytes = int(plan.size.sum())
            if how == "pieces":
                execute(plan)
            else:
                host_copy(Transfer(direction, lambda: plan, 0.0, lambda *_: None))
        return engine.tobytes(), pool.tobytes(), nbytes

    # A load of two keys into one block leaves either's bytes; ids are distinct wherever there are enough of them.
    if direction is Direction.LOAD and len(set(job.block_ids)) < len(job.block_ids):
        return
    expected = run("reference")
    assert run("pieces") == expected
    assert run("loop") == expected


def layout_at(address: int, job: Job) -> GroupLayout:
    (layout,) = build_layouts([(address, job.engine_bytes)], job.tensors, [job.pages], job.blocks_per_key)
    return layout


def unmerged(address: int, job: Job, page: PageRef) -> tuple[int, int, int]:
    """Address, stride and page bytes of one layer, as it was registered."""
    tensor = job.tensors[page.tensor]
    return address + tensor.offset_bytes, tensor.stride_bytes, page.page_bytes


def evenly_spaced(layers: int, blocks: int, page: int, blocks_per_key: int) -> GroupLayout:
    """Layers one after the other in a segment that begins at 2**40; never copied."""
    tensors = [TensorLayout(0, layer * blocks * page, page, blocks) for layer in range(layers)]
    pages = [PageRef(layer, page) for layer in range(layers)]
    (layout,) = build_layouts([(2**40, layers * blocks * page)], tensors, [pages], blocks_per_key)
    return layout


POOL = 2**41
"""Its address."""


def plan_of(layout: GroupLayout, ids: list[int], slots: list[int], first_block: int = 0) -> Plan:
    numbers = np.array(ids, dtype=np.int32)
    return plan_copy(layout, Direction.STORE, numbers, first_block, np.array(slots, dtype=np.uint64) + np.uint64(POOL))


def test_pieces_that_touch_on_both_sides_are_one() -> None:
    plan = plan_of(evenly_spaced(3, 16, 4096, 4), [4, 5, 6, 7], [0])
    assert (plan.size.tolist(), plan.destination.tolist()) == ([4 * 4096] * 3, [POOL, POOL + 16384, POOL + 32768])
    plan = plan_of(evenly_spaced(1, 16, 8192, 1), [3, 4, 5, 9], [0, 8192, 16384, 24576])
    assert plan.size.tolist() == [3 * 8192, 8192]


def test_pieces_of_several_allocations_are_ordered_by_layer() -> None:
    segments = [(2**40 + at, 16 * 4096) for at in (2**30, 0, 2**20)]
    tensors = [TensorLayout(layer, 0, 4096, 16) for layer in range(3)]
    pages = [PageRef(layer, 4096) for layer in range(3)]
    (layout,) = build_layouts(segments, tensors, [pages], 1, on_gpu=True)
    plan = plan_of(layout, [7, 2], [2**20, 0])
    assert plan.source.tolist() == [at + block * 4096 for at, _ in segments for block in (7, 2)]
    assert plan.destination.tolist() == [POOL + at + layer * 4096 for layer in range(3) for at in (2**20, 0)]
    assert plan.allocations.tolist() == sorted(at for at, _ in segments)
    (layout,) = build_layouts(segments, tensors, [pages], 1)
    assert plan_of(layout, [7, 2], [2**20, 0]).destination.tolist()[:3] == [POOL + 2**20 + at for at in (0, 4096, 8192)]


def test_pieces_of_two_allocations_are_never_one() -> None:
    """Where a key ends with the last block of a layer and begins with the first, layers touch on both sides."""
    segments = [(2**40, 2 * 4096), (2**40 + 2 * 4096, 2 * 4096)]
    tensors, pages = [TensorLayout(layer, 0, 4096, 2) for layer in (0, 1)], [PageRef(layer, 4096) for layer in (0, 1)]
    (layout,) = build_layouts(segments, tensors, [pages], 2, on_gpu=True)
    plan = plan_of(layout, [0, 1], [0])
    assert (plan.source.tolist(), plan.size.tolist()) == ([2**40, 2**40 + 8192], [8192, 8192])


def side_by_side(order: list[int], blocks_per_key: int) -> GroupLayout:
    """Four layers of 4 KiB, of which a block has all in one run: strided tensors in one allocation."""
    tensors = [TensorLayout(0, layer * 4096, 4 * 4096, 8) for layer in range(4)]
    pages = [PageRef(layer, 4096) for layer in order]
    (layout,) = build_layouts([(2**40, 8 * 4 * 4096)], tensors, [pages], blocks_per_key)
    return layout


def test_block_outermost_memory_is_one_layer() -> None:
    layout = side_by_side([0, 1, 2, 3], 1)
    assert (layout.layers[:, 1:].tolist(), layout.block_bytes) == ([[16384, 16384, 0]], 16384)
    assert plan_of(layout, [2, 6], [0, 2**20]).size.tolist() == [16384, 16384]
    assert plan_of(layout, [2, 3], [0, 16384]).size.tolist() == [32768]
    # Only where a slot has the layers in the same order, and they touch in every block.
    assert side_by_side([1, 0, 2, 3], 1).layers[:, 2].tolist() == [4096, 4096, 8192]
    assert side_by_side([0, 1, 2, 3], 2).layers[:, 2].tolist() == [4096] * 4
    tensors = [TensorLayout(0, 0, 8192, 4), TensorLayout(0, 4096, 4096, 3)]
    (layout,) = build_layouts([(2**40, 2**20)], tensors, [[PageRef(0, 4096), PageRef(1, 4096)]], 1)
    assert layout.layers[:, 2].tolist() == [4096, 4096]


def test_layers_far_above_the_sign_bit_do_not_wrap() -> None:
    (layout,) = build_layouts([(2**56, 2**40)], [TensorLayout(0, 0, 2**30, 1000)], [[PageRef(0, 2**20)]], 1)
    plan = plan_of(layout, [999], [2**47])
    assert plan.source.tolist() == [2**56 + 999 * 2**30]


# --- layouts: nothing outside the registered tensors can be named ---------------------------------


SEGMENTS = [(1 << 20, 65536), (1 << 30, 4096)]


def build(tensor: TensorLayout, page: PageRef, blocks_per_key: int = 1) -> GroupLayout:
    (layout,) = build_layouts(SEGMENTS, [tensor], [[page]], blocks_per_key)
    return layout


def test_a_tensor_may_end_with_its_segment_and_not_a_byte_later() -> None:
    assert build(TensorLayout(0, 0, 8192, 8), PageRef(0, 8192)).block_limit == 8
    # The last page need not fill its stride, and one block may be larger than it.
    assert build(TensorLayout(0, 8, 8192, 8), PageRef(0, 8184)).block_limit == 8
    assert build(TensorLayout(0, 0, 1, 1), PageRef(0, 65536)).shard_bytes == 65536
    with pytest.raises(OutOfBounds, match="ends at byte 65537 of segment 0, which has only 65536"):
        build(TensorLayout(0, 1, 8192, 8), PageRef(0, 8192))


def test_what_reaches_outside_or_makes_no_sense_is_refused() -> None:
    for tensor, page, error in (
        (TensorLayout(2, 0, 1, 1), PageRef(0, 1), OutOfBounds),
        (TensorLayout(-1, 0, 1, 1), PageRef(0, 1), OutOfBounds),
        (TensorLayout(0, 65536, 1, 1), PageRef(0, 1), OutOfBounds),
        (TensorLayout(0, 2**63 - 1, 2**63 - 1, 2**31 - 1), PageRef(0, 1), OutOfBounds),
        (TensorLayout(0, 0, 2**62, 5), PageRef(0, 1), OutOfBounds),  # 4 * 2**62 is 0 in 64 bits
        (TensorLayout(0, 2**64, 1, 1), PageRef(0, 1), OutOfBounds),
        (TensorLayout(0, -1, 1, 1), PageRef(0, 1), BadGeometry),
        (TensorLayout(0, 0, 0, 2), PageRef(0, 1), BadGeometry),
        (TensorLayout(0, 0, 16, 0), PageRef(0, 1), BadGeometry),
        (TensorLayout(0, 0, 16, 2), PageRef(0, 17), BadGeometry),
        (TensorLayout(0, 0, 16, 2), PageRef(0, 0), BadGeometry),
        (TensorLayout(0, 0, 16, 2), PageRef(1, 1), OutOfBounds),
        (TensorLayout(0, 0, 16, 2), PageRef(-1, 1), OutOfBounds),
    ):
        with case(tensor, page), pytest.raises(error):
            build(tensor, page)
    with pytest.raises(OutOfBounds):  # a tensor that no group uses
        build_layouts(SEGMENTS, [TensorLayout(0, 0, 16, 2), TensorLayout(0, 0, 65536, 2)], [[PageRef(0, 1)]], 1)
    with pytest.raises(BadGeometry, match="Group 1 has no layers"):
        build_layouts(SEGMENTS, [TensorLayout(0, 0, 16, 2)], [[PageRef(0, 1)], []], 1)
    with pytest.raises(BadGeometry, match="fewer blocks per key"):
        build(TensorLayout(0, 0, 16, 2), PageRef(0, 16), 2**60)
    with pytest.raises(BadGeometry, match="at least one"):
        build(TensorLayout(0, 0, 16, 2), PageRef(0, 16), 0)
