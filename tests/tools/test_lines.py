"""Lines that a call executes are the call's alone."""

from __future__ import annotations

import gc

from tests.kit.lines import lines_of


def _make_garbage() -> None:
    for _ in range(3 * gc.get_threshold()[0]):
        one: list[object] = []
        one.append(one)


def test_lines_of_the_garbage_collector_are_not_counted() -> None:
    """It comes when it likes, and hypothesis, for one, has a callback in it once a test with it has run."""
    collected: list[str] = []

    def callback(phase: str, info: dict[str, int]) -> None:
        collected.append(phase)

    before = lines_of(_make_garbage)
    gc.callbacks.append(callback)
    try:
        _make_garbage()
        assert collected
        assert lines_of(_make_garbage) == before
    finally:
        gc.callbacks.remove(callback)
    assert gc.isenabled()
