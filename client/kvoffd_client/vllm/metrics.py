"""The connector's metrics on vLLM's Prometheus page. The daemon has its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from kvoffd_proto import messages as m

CONNECTED = "vllm:kvoffd_connected"
LOOKUPS = "vllm:kvoffd_lookups"
LOOKUP_WAITS = "vllm:kvoffd_lookup_waits"
LOOKUP_WAITS_TIMED_OUT = "vllm:kvoffd_lookup_waits_timed_out"
LATE_LOOKUPS = "vllm:kvoffd_late_lookups"
FAILED_LOADS = "vllm:kvoffd_failed_loads"
FAILED_STORES = "vllm:kvoffd_failed_stores"
DEFERRED_STORES = "vllm:kvoffd_deferred_stores"
SLOW_LOADS = "vllm:kvoffd_slow_loads_skipped"
PAUSED_STORES = "vllm:kvoffd_paused_stores"
IGNORED_HINTS = "vllm:kvoffd_unknown_hints"
PREFILL_RATE = "vllm:kvoffd_prefill_tokens_per_second"
LOAD_RATE = "vllm:kvoffd_load_tokens_per_second"

_GAUGES = {
    CONNECTED: "1 while the scheduler is connected to the kvoffd daemon, else 0.",
    PREFILL_RATE: "Measured prefill rate in tokens per second; 0 while unknown.",
    LOAD_RATE: "Rate of loads in tokens per second, the median of the last two minutes; 0 without loads.",
}
_COUNTERS = {
    LOOKUPS: "Lookups sent to the kvoffd daemon.",
    LOOKUP_WAITS: "Times that the scheduler waited for a lookup's answer: at most 1 ms per step, 5 ms if idle.",
    LOOKUP_WAITS_TIMED_OUT: "Such waits that ended without an answer; each suspends waiting for 0.1 s.",
    LATE_LOOKUPS: "Lookups whose answer the engine stopped waiting for.",
    FAILED_LOADS: "Loads that failed; their requests were recomputed.",
    FAILED_STORES: "Stores of which at least one block was not stored.",
    SLOW_LOADS: "Requests whose blocks were found but not loaded because computing was faster.",
    PAUSED_STORES: m.PAUSED_STORES,
    DEFERRED_STORES: "Stores deferred because the kvoffd daemon's credit was used up.",
    IGNORED_HINTS: "Hints in requests that were not known, could not be read or sent, or were too many.",
}
DEFINITIONS: dict[str, OffloadingMetricMetadata] = {
    **{name: OffloadingGaugeMetadata(documentation=text) for name, text in _GAUGES.items()},
    **{name: OffloadingCounterMetadata(documentation=text) for name, text in _COUNTERS.items()},
}

REPORTED = (SLOW_LOADS, PAUSED_STORES, LATE_LOOKUPS, IGNORED_HINTS)
"""Counters for the arguments of ``SchedulerClient.report``, in that order."""


class Counters(Counter[str]):
    """The manager's counters since it started."""

    def __init__(self) -> None:
        super().__init__()
        self._taken = Counter[str]()
        self._connected: bool | None = None

    def take(self, connected: bool, rates: Callable[[], tuple[float, float]]) -> OffloadingConnectorStats | None:
        """Return the counts since the last call; None if there are none, as in most of the engine's steps.

        ``rates`` returns the rates of prefill and loads in tokens per second; called only if there are counts.
        """
        changes = self - self._taken
        if not changes and connected == self._connected:
            return None
        self._taken, self._connected = Counter(self), connected
        stats = OffloadingConnectorStats()
        for name, count in changes.items():
            stats.increase_counter(name, count)
        prefill_rate, load_rate = rates()
        for name, value in ((CONNECTED, int(connected)), (PREFILL_RATE, prefill_rate), (LOAD_RATE, load_rate)):
            stats.set_gauge(name, value)
        return stats
