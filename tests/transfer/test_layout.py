"""Nothing outside the registered tensors can be named."""

from __future__ import annotations

import pytest

from kvoffd.errors import BadGeometry, OutOfBounds
from kvoffd.transfer.plan import GroupLayout, build_layouts
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
