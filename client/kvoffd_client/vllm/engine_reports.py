"""Reports of an engine to the daemon: its prefill rate, what it counted, and why it can store nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvoffd_client.vllm import metrics
from kvoffd_client.vllm.engine_namespace import EngineNamespace
from kvoffd_proto.messages import MAX_REPORTED

REPORT_EVERY_S = 10.0
"""Time between two reports."""


class EngineReports:
    """Sends reports of what has changed. Old values are repeated too: the daemon may have been restarted.

    Args:
        clock: clock such as time.monotonic().
        counters: the engine's counters.

    Attributes:
        due_at: time of the next report.
    """

    def __init__(self, namespace: EngineNamespace, clock: Callable[[], float], counters: metrics.Counters) -> None:
        self._namespace, self._clock, self._counters = namespace, clock, counters
        self.due_at = clock() + REPORT_EVERY_S
        self._reported, self._reported_late_times = Counter[str](), 0.0
        """Counters, and ``PromptWaits.late_times_sum``, at the last report that was sent."""
        self._reported_problem = ""

    def send(self, prefill_rate: float, late_times_sum: float) -> None:
        """Send a report, unless there is nothing to report. What cannot be sent now is part of the next one.

        Args:
            prefill_rate: tokens per second; 0 while unknown.
            late_times_sum: ``PromptWaits.late_times_sum``.
        """
        self.due_at = self._clock() + REPORT_EVERY_S
        changes = self._counters - self._reported
        counts = [min(changes[name], MAX_REPORTED) for name in metrics.REPORTED]
        late, since_last = changes[metrics.LATE_LOOKUPS], late_times_sum - self._reported_late_times
        late_age_s = self._clock() - since_last / late if late else 0.0
        problem = self._namespace.problem
        if any((prefill_rate, *counts, problem, self._reported_problem)):
            if not self._namespace.client.report(prefill_rate, *counts, problem=problem, late_age_s=late_age_s):
                return
            self._reported, self._reported_late_times = Counter(self._counters), late_times_sum
            self._reported_problem = problem
