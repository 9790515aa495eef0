"""Nothing outside the registered tensors can be named."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from kvoffd.errors import BadBlockIds, BadGeometry, OutOfBounds
from kvoffd.transfer.plan import GroupLayout, build_layouts, check_count, check_ids
from kvoffd_proto.messages import PageRef, TensorLayout
from tests.kit.cases import case

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


def test_block_ids_must_fit_the_keys() -> None:
    layout = build(TensorLayout(0, 0, 1024, 16), PageRef(0, 1024), blocks_per_key=4)
    for count, keys, first_block, store, load in (
        (8, 2, 0, True, True),
        (7, 2, 0, False, True),
        (7, 2, 1, True, True),
        (5, 2, 0, False, True),
        (4, 2, 0, False, False),
        (9, 2, 0, False, False),
        (8, 2, 1, False, False),
        (1, 1, 3, True, True),
        (4, 2, 4, False, False),
        (9, 2, -1, False, False),
        (0, 1, 0, False, False),
        (0, 1, 3, False, False),
        (0, 0, 0, False, False),
    ):
        for exact, good in ((True, store), (False, load)):
            with case(count, keys, first_block, exact), nullcontext() if good else pytest.raises(BadBlockIds):
                check_count(layout, count, keys, first_block, exact)


def test_one_block_id_out_of_range_refuses_the_job() -> None:
    layout = build(TensorLayout(0, 0, 1024, 16), PageRef(0, 1024))
    check_ids(layout, np.array([0, 15, 0], dtype=np.int32))
    for wrong in (-1, 16, 2**31 - 1, -(2**31)):
        with pytest.raises(BadBlockIds, match=f"Block id {wrong} .* run to 15"):
            check_ids(layout, np.array([0, wrong, 15], dtype=np.int32))
    # The shortest tensor of a group counts.
    tensors = [TensorLayout(0, 0, 1024, 16), TensorLayout(0, 0, 1024, 4)]
    (layout,) = build_layouts(SEGMENTS, tensors, [[PageRef(0, 1024), PageRef(1, 1024)]], 1)
    with pytest.raises(BadBlockIds, match="run to 3"):
        check_ids(layout, np.array([4], dtype=np.int32))
