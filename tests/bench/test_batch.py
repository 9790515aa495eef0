"""The table of batches is measured and printed, with a small batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.batch import ALONE, KVOFFD, PRIORITY, SAMPLES, SORTED, Bench, Workload, differing, row
from tests.kit.models import make_tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(900)]

WORK = Workload(documents=4, prompts=8, held=2, document_tokens=320, sampled=2, samples=2)
ORDERS = (SORTED, PRIORITY, SAMPLES)


def test_each_side_answers_the_batch(tmp_path: Path) -> None:
    bench = Bench(WORK, make_tiny_llama(tmp_path / "tiny"), v2=False)
    by_side = {side: bench.run(side, 4, ORDERS) for side in (ALONE, KVOFFD)}
    for order in ORDERS:
        found = {side: by_order[order] for side, by_order in by_side.items()}
        assert found[KVOFFD].prompt_tokens == 8 * 352
        assert found[KVOFFD].cached >= found[KVOFFD].loaded
        assert differing(found) == 0
        assert row(4, order, found)[:2] == ["4", order]
    assert [by_side[side][SORTED].cached for side in by_side] == [4 * 320, 4 * 320]
