"""The ceiling of the daemon's copy lanes, in small: every byte of every transfer is counted, or the program fails."""

from __future__ import annotations

from kvoffd.transfer.cuda.gpu_copy import STEP_PIECES
from tests.bench.daemon import KIB
from tests.bench.lane_ceiling import measure


def test_batches_are_full_and_large_pieces_are_copied_alone() -> None:
    assert measure(2, 8 * KIB, 3)["pieces_per_call"] == STEP_PIECES
    assert measure(2, 256 * KIB, 3)["pieces_per_call"] == 1
