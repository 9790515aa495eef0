"""When a request stops waiting for blocks that come up from disk. Pure."""

from __future__ import annotations

from dataclasses import dataclass

BEST_EFFORT = "best_effort"
WAIT = "wait"
LIMIT = "limit"
MODES = (BEST_EFFORT, WAIT, LIMIT)

LEAST_PAUSE_S = 0.002
MOST_PAUSE_S = 0.05


@dataclass(frozen=True)
class WaitRule:
    """What all requests of an engine have in common.

    Attributes:
        mode: ``best_effort`` takes what is ready and does not wait; ``wait`` waits until the daemon gives up what does
            not come; ``limit`` waits for ``limit_s`` seconds, and not at all where the daemon's guess is longer.
        limit_s: for ``limit``, counted from the first answer in which something was pending.
    """

    mode: str = LIMIT
    limit_s: float = 1.0


@dataclass
class DiskWait:
    """One request's waiting.

    Attributes:
        since: when the first answer came in which something was pending; None before.
        over: it waits no more, whatever is pending still.
    """

    rule: WaitRule
    since: float | None = None
    over: bool = False

    def goes_on(self, expected_s: float, now: float) -> bool:
        """Whether pending keys are worth waiting for, the daemon's guess being that it takes ``expected_s`` more."""
        if self.since is None:
            self.since = now
        if self.rule.mode == BEST_EFFORT or (
            self.rule.mode == LIMIT and now - self.since + expected_s >= self.rule.limit_s
        ):
            self.over = True
        return not self.over


def pause_s(expected_s: float) -> float:
    """After how many seconds to ask again: half of what is expected, within bounds."""
    return min(MOST_PAUSE_S, max(LEAST_PAUSE_S, expected_s / 2))
