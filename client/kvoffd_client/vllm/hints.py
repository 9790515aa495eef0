"""What a request's ``kv_transfer_params`` say under ``"kvoffd"`` of how long its blocks should stay.

They come from end users, over HTTP: nothing in them may end an engine. What is not understood is left out and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvoffd_client.vllm.log import logger
from kvoffd_proto.engine_report import MAX_PRIORITY, MAX_RETAIN_S

PARAM = "kvoffd"
PRIORITY, RETAIN_S, OVER = "priority", "retain_s", "conversation_over"
DEFAULT_RETAIN_S = 600
LOGGED_EVERY_S = 60.0


class Hint(NamedTuple):
    """What is told the daemon when the request has ended."""

    priority: int
    retain_s: float = 0.0


class Hints:
    """Reads hints, and says at most once a minute what is wrong with one."""

    def __init__(self, clock: Callable[[], float], on_bad: Callable[[], None]) -> None:
        self._clock = clock
        self._on_bad = on_bad
        self._log_at = float("-inf")

    def of(self, params: object) -> Hint | None:
        """The hint of a request; None for none, or none that is understood."""
        given = params.get(PARAM) if isinstance(params, Mapping) else None
        if given is None:
            return None
        problem, hint = _parsed(given)
        if problem:
            self._on_bad()
            if self._clock() >= self._log_at:
                self._log_at = self._clock() + LOGGED_EVERY_S
                logger.warning(
                    "kvoffd: a request's hint is not followed, and others in this minute are not told: %s.", problem
                )
        return hint


def _parsed(given: object) -> tuple[str, Hint | None]:
    if not isinstance(given, Mapping):
        return f'kv_transfer_params["{PARAM}"] is no object', None
    if unknown := [name for name in given if name not in (PRIORITY, RETAIN_S, OVER)]:
        return f"{str(unknown[0])[:40]!r} is none of {PRIORITY}, {RETAIN_S} and {OVER}", None
    priority, retain_s, over = given.get(PRIORITY, 0), given.get(RETAIN_S), given.get(OVER, False)
    if type(priority) is not int or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        return f"{PRIORITY} is no whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}", None
    if retain_s is not None and (type(retain_s) not in (int, float) or not 0 <= retain_s <= MAX_RETAIN_S):
        return f"{RETAIN_S} is no number from 0 to {MAX_RETAIN_S}", None
    if type(over) is not bool:
        return f"{OVER} is neither true nor false", None
    if over:
        return "", Hint(-MAX_PRIORITY)
    if retain_s is not None and priority >= 0:
        return "", Hint(max(priority, 1), float(retain_s)) if retain_s else Hint(0)
    return "", Hint(priority, DEFAULT_RETAIN_S if priority > 0 else 0.0)
