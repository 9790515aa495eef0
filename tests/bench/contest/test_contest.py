"""The contest in small: two sides answer the batch, and the page has a line for each, lost rows too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.contest.bench import BATCH, QUICK, Bench, cause
from tests.bench.contest.caches import KVOFFD, LMCACHE, NONE
from tests.bench.contest.client import Traffic
from tests.bench.contest.engine import COMPUTED, OUTSIDE, OWN, Counts
from tests.bench.contest.model import make_model
from tests.bench.contest.page import tables
from tests.bench.contest.rows import MAX_CAUSE, Row


def made(side: str, number: int = 1, *, seconds: float = 2.0, answers: list[list[int]] | None = None) -> Row:
    row = Row(BATCH, "batch, random", side, number)
    counts = Counts(prompt_tokens=100, by_source={COMPUTED: 60, OWN: 30, OUTSIDE: 10}, engine_cpu_s=1.5)
    row.fill(Traffic(ttft_s=[0.1, 0.2], gaps_s=[0.01], seconds=seconds, answers=answers or [[1], [2]]), counts)
    return row


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_line_has_both_rounds_and_lost_rows_stay_with_their_cause(tmp_path: Path) -> None:
    lost = Row(BATCH, "batch, random", LMCACHE, 1, lost="it | hangs")
    rows = [made(NONE), made(KVOFFD, seconds=1.0, answers=[[1], [3]]), lost, made(NONE, 2, seconds=4.0)]
    for row in rows:
        row.append(tmp_path / "rows.jsonl")
    assert Row.read(tmp_path / "rows.jsonl") == rows
    text = tables(rows)
    none, kvoffd, lmcache = (cells(line) for line in text.splitlines() if line.startswith("| batch, random"))
    assert none[1:4] == ["none", "2.00, 4.00", "1.00"]
    assert none[9:13] == ["100", "60", "30", "10"]
    assert none[-1] == "yes"
    assert (kvoffd[3], kvoffd[-1]) == ("0.33", "1 of 2 differ")
    assert lmcache[2:4] == ["lost", "-"]
    assert "it / hangs" in text


def test_counts_that_do_not_add_up_are_refused() -> None:
    counts = Counts(prompt_tokens=100, by_source={COMPUTED: 60})
    with pytest.raises(AssertionError, match="counts differ"):
        Row(BATCH, "batch, random", NONE, 1).fill(Traffic(), counts)


def test_a_row_without_an_answer_is_refused() -> None:
    with pytest.raises(AssertionError, match="no request was answered: it hangs"):
        Row(BATCH, "batch, random", NONE, 1).fill(Traffic(failed=["it hangs"]), Counts())


def test_a_long_cause_keeps_its_begin_and_its_end() -> None:
    kept = cause("first" + "\n\n" + "x" * 2 * MAX_CAUSE + " last")
    assert kept.startswith("first x")
    assert kept.endswith("last")


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_two_sides_answer_the_batch(tmp_path: Path) -> None:
    rows: list[Row] = []
    bench = Bench(make_model(tmp_path / "model", quick=True), QUICK, rows.append, {})
    try:
        for side in (NONE, KVOFFD):
            bench.run(side, [BATCH], 1)
    finally:
        bench.close()
    assert [row.lost for row in rows] == [""] * 8
    by_name = {(row.side, row.workload): row for row in rows}
    for row in rows:
        assert row.computed + row.own + row.outside == row.prompt_tokens > 0
        assert not row.failed
        assert row.answers == by_name[NONE, row.workload].answers
        assert row.engine_cpu_s > 0
    assert by_name[NONE, "batch, random"].outside == 0
    # All but the last tokens of each prompt are loaded, or in vLLM's own cache.
    again = by_name[KVOFFD, "batch, random, again"]
    assert again.computed < by_name[NONE, "batch, random, again"].computed
    assert again.outside > 0
