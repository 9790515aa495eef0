"""The check finds assertions that measure, and leaves promised deadlines and counts alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools import wall_times

MEASURE = [
    """
    def test():
        began = time.monotonic()
        first()
        first_s = time.monotonic() - began
        began = time.monotonic()
        second()
        assert time.monotonic() - began < 2 * first_s
    """,
    """
    def test(engine):
        cold, warm = engine.generate([1]), engine.generate([1])
        assert warm.first_token_s <= 1.05 * cold.first_token_s
    """,
    """
    class Model:
        def computed_s(self, engine):
            (answer,) = engine.generate([1])
            return answer.first_token_s

    def test(model, engine):
        assert engine.generate([2])[0].first_token_s <= 2 * model.computed_s(engine)
    """,
    """
    def test():
        ratios = []
        for _ in range(3):
            taken = [(lookup_s(1), lookup_s(2)) for _ in range(100)]
            one, other = (quantiles(each, n=100)[98] for each in zip(*taken))
            ratios.append(other / one)
        assert min(ratios) <= 1.1, ratios

    def lookup_s(node):
        began = time.perf_counter()
        node.lookup()
        return time.perf_counter() - began
    """,
    """
    def test():
        times = []
        for _ in range(20):
            started = time.monotonic()
            lookup()
            times.append(time.monotonic() - started)
        assert median(times) < 0.5
    """,
    """
    class Node:
        def note(self):
            self.ends.append((time.monotonic() - self.began, 1))

        def begin(self):
            self.began = time.monotonic()

    def test(node):
        assert node.ends[0][0] < 0.5 * node.ends[-1][0]
    """,
    """
    def test():
        cold = result["ttft_ms"].pop("cold")
        assert max(ttft for name, ttft in result["ttft_ms"].items()) < cold / 2
    """,
    """
    def test():
        used, began = time.thread_time(), time.monotonic()
        assert (time.thread_time() - used) / (time.monotonic() - began) < 0.01
    """,
]
DO_NOT = [
    """
    def test():
        began = time.monotonic()
        wait()
        assert TIMEOUT_S <= time.monotonic() - began < 5 * TIMEOUT_S
    """,
    """
    def test():
        deadline = time.monotonic() + 10
        while not done():
            assert time.monotonic() < deadline
    """,
    """
    def test(clock):
        began = clock.now
        clock.now += 5
        assert (clock.now - began) / 2 < clock.now - 1
    """,
    """
    def test(engine, link):
        began = time.monotonic()
        answers = engine.generate([1])
        print(time.monotonic() - began, answers[0].first_token_s / 2)
        assert len(answers) == 1
        assert link.answered_bytes < 0.05 * size
    """,
    """
    def test():
        before = time.monotonic()
        mark()
        assert before <= done_at() <= time.monotonic()
    """,
    """
    def test():
        assert meter.quantile(0.5) == 0.15
        assert median([1, 2, 3]) == 2
    """,
]


def found(source: str) -> list[int]:
    lines = source.splitlines()
    indent = len(lines[1]) - len(lines[1].lstrip())
    return [line for line, _ in wall_times.findings("\n".join(line[indent:] for line in lines))]


@pytest.mark.parametrize("source", MEASURE)
def test_what_measures_is_found_where_it_asserts(source: str) -> None:
    (asserted,) = (number for number, line in enumerate(source.splitlines(), 1) if "assert " in line)
    assert found(source) == [asserted]


@pytest.mark.parametrize("source", DO_NOT)
def test_promised_deadlines_and_counts_are_left_alone(source: str) -> None:
    assert found(source) == []


def test_a_file_with_a_finding_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, source, status in (("test_bad.py", MEASURE[1], 1), ("test_good.py", DO_NOT[1], 0)):
        path = tmp_path / name
        path.write_text("if True:" + source)
        assert wall_times.main([str(path)]) == status
        assert capsys.readouterr().out.count(f"{path}:4: `warm.first_token_s <= ") == status
