"""The connector's own metrics in vLLM's Prometheus page. The daemon has more in its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

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
PREFILL_RATE = "vllm:kvoffd_prefill_tokens_per_second"
LOAD_RATE = "vllm:kvoffd_load_tokens_per_second"

_GAUGES = {
    CONNECTED: "1 while the scheduler is connected to the kvoffd daemon, else 0.",
    PREFILL_RATE: "Prompt tokens that the engine computes a second, as learned; 0 before it is known.",
    LOAD_RATE: "Tokens that loads bring a second, the median of the last two minutes; 0 without loads.",
}
_COUNTERS = {
    LOOKUPS: "Lookups sent to the kvoffd daemon.",
    LOOKUP_WAITS: "Times that the scheduler waited for a lookup's answer: 1 ms a step at most, 5 if it is idle.",
    LOOKUP_WAITS_TIMED_OUT: "Waits of these in which no answer came; each ends all such waiting for 0.1 s.",
    LATE_LOOKUPS: ("Lookups that counted as misses since no answer came in the time that computing the prompt takes."),
    FAILED_LOADS: "Loads that failed; their requests were recomputed.",
    FAILED_STORES: "Stores of which at least one block was not stored.",
    SLOW_LOADS: ("Requests whose blocks were there and were not loaded, since computing was measured to be faster."),
    PAUSED_STORES: "Stores that were left out while stores paused, since vLLM had waited for them too often.",
    DEFERRED_STORES: "Stores put off since the kvoffd daemon's credit was used up.",
}
DEFINITIONS: dict[str, OffloadingMetricMetadata] = {
    **{name: OffloadingGaugeMetadata(documentation=text) for name, text in _GAUGES.items()},
    **{name: OffloadingCounterMetadata(documentation=text) for name, text in _COUNTERS.items()},
}

REPORTED = (SLOW_LOADS, PAUSED_STORES, LATE_LOOKUPS)
"""Counters that are reported to the daemon too, as ``SchedulerClient.report`` has them."""


class Counters(Counter[str]):
    """The manager's counters since it started."""

    def __init__(self) -> None:
        super().__init__()
        self._taken = Counter[str]()
        self._connected: bool | None = None

    def take(self, connected: bool, rates: Callable[[], tuple[float, float]]) -> OffloadingConnectorStats | None:
        """Return what was counted since the last call; None when nothing was, as in most of the engine's steps.

        ``rates``: tokens a second that are computed, and that loads bring; asked for only where there is something.
        """
        news = self - self._taken
        if not news and connected == self._connected:
            return None
        self._taken, self._connected = Counter(self), connected
        stats = OffloadingConnectorStats()
        for name, count in news.items():
            stats.increase_counter(name, count)
        prefill_rate, load_rate = rates()
        for name, value in ((CONNECTED, int(connected)), (PREFILL_RATE, prefill_rate), (LOAD_RATE, load_rate)):
            stats.set_gauge(name, value)
        return stats
