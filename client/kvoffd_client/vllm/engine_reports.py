"""Reports of an engine to the daemon: its prefill rate, what it counted, and why it can store nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvoffd_client.vllm import metrics
from kvoffd_client.vllm.engine_namespace import EngineNamespace
from kvoffd_proto.messages import MAX_REPORTED

REPORT_EVERY_S = 10.0
"""Time between two reports."""


class LateTimes:
    """The times at which lookups were given up since the last report: their mean age, without a list of them."""

    def __init__(self) -> None:
        self._count, self._sum = 0, 0.0

    def add(self, now: float) -> None:
        self._count += 1
        self._sum += now

    def mean_age_s(self, now: float) -> float:
        """Return how long ago they were on average; 0 if there are none."""
        return now - self._sum / self._count if self._count else 0.0

    def clear(self) -> None:
        self._count, self._sum = 0, 0.0


class EngineReports:
    """Sends reports of what has changed. Old values are repeated too: the daemon may have been restarted.

    Args:
        clock: clock such as time.monotonic().
        counters: the engine's counters.

    Attributes:
        due_at: time of the next report.
        late_times: when the lookups were given up that the next report counts; ``PromptWaits`` adds them.
    """

    def __init__(self, namespace: EngineNamespace, clock: Callable[[], float], counters: metrics.Counters) -> None:
        self._namespace, self._clock, self._counters = namespace, clock, counters
        self.due_at = clock() + REPORT_EVERY_S
        self.late_times = LateTimes()
        self._reported = Counter[str]()
        """Counters at the last report that was sent."""
        self._reported_problem = ""

    def send(self, prefill_rate: float) -> None:
        """Send a report, unless there is nothing to report. What cannot be sent now is part of the next one.

        ``prefill_rate``: tokens per second; 0 while unknown.
        """
        self.due_at = self._clock() + REPORT_EVERY_S
        changes = self._counters - self._reported
        counts = [min(changes[name], MAX_REPORTED) for name in metrics.REPORTED]
        late_age_s = self.late_times.mean_age_s(self._clock())
        problem = self._namespace.problem
        if any((prefill_rate, *counts, problem, self._reported_problem)):
            if not self._namespace.client.report(prefill_rate, *counts, problem=problem, late_age_s=late_age_s):
                return
            self._reported = Counter(self._counters)
            self.late_times.clear()
            self._reported_problem = problem
