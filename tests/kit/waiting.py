"""The one way in which tests wait for something that another thread or process does."""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 30.0
FIRST_INTERVAL_S, LONGEST_INTERVAL_S = 0.005, 0.1
WAITED_SHARE = 0.1
"""Of the time that was waited, which passes until the next call: asking a daemon all the time takes a CPU from it."""
LONGER_THAN_A_TEST_S = 3600.0
"""A deadline for calls that must return before it: one that waits for it ends by the time limit of its test."""


def wait_until(
    condition: Callable[[], T],
    deadline_s: float = DEADLINE_S,
    *,
    explain: Callable[[], object] | None = None,
    interval_s: float | None = None,
) -> T:
    """Call ``condition`` until its result is true, and return that result.

    Args:
        condition: what is waited for; its source text is part of the failure's message.
        deadline_s: seconds after which the wait fails.
        explain: gives the state of things for the failure's message; by default the condition's last result is shown.
        interval_s: seconds between two calls; None for few at first, and more when it takes long.

    Raises AssertionError when the deadline is over. What ``condition`` raises ends the wait at once.
    """
    began = time.monotonic()
    while not (result := condition()):
        waited = time.monotonic() - began
        assert waited < deadline_s, _failure(condition, deadline_s, explain() if explain else result)
        pause_s = min(max(FIRST_INTERVAL_S, WAITED_SHARE * waited), LONGEST_INTERVAL_S)
        time.sleep(pause_s if interval_s is None else interval_s)
    return result


def _failure(condition: Callable[[], object], deadline_s: float, state: object) -> str:
    try:
        wanted = inspect.getsource(condition).strip()
    except (OSError, TypeError):  # made by exec, or a builtin
        wanted = repr(condition)
    return f"did not come true within {deadline_s:g} s: {wanted}\nat last: {state}"


def deliver_until(posted: deque[Callable[[], None]], condition: Callable[[], bool]) -> None:
    """Call what is posted to a loop, in this thread, until ``condition`` is true. Raises AssertionError as above."""

    def delivered() -> bool:
        while posted:
            posted.popleft()()
        return condition()

    wait_until(delivered, interval_s=0.001)
