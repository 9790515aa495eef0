"""What was counted over the last ten, hundred and thousand seconds: of each namespace, and in all."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from kvoffd.cache.cache import BlockCache
from kvoffd.cache.namespace import Counters, Namespace
from kvoffd.observe.meters import WINDOWS_S, CounterWindows
from kvoffd_proto.messages import RecentStats

SAMPLE_EVERY_S = 0.5
COUNTED = frozenset(RecentStats.__struct_fields__).intersection(Counters.__slots__)


@dataclass(eq=False)
class Recent:
    """Samples the counters of all namespaces; those of benches are in no sum. For the service's thread."""

    _cache: BlockCache
    _clock: Callable[[], float]
    _cpu_clock: Callable[[], float] = time.process_time
    _windows: WeakKeyDictionary[Namespace, CounterWindows] = field(default_factory=WeakKeyDictionary, init=False)
    _in_all: CounterWindows = field(init=False)
    _gone: Counter[str] = field(default_factory=Counter, init=False)
    """What the counters of namespaces that were forgotten since had come to."""
    _sampled_at: float = field(default=float("-inf"), init=False)

    def __post_init__(self) -> None:
        self._started_at = self._clock()
        self._in_all = CounterWindows({"cpu_seconds": self._cpu_clock()}, self._clock)

    def tick(self) -> None:
        """Take a sample when one is due."""
        now = self._clock()
        if now - self._sampled_at < SAMPLE_EVERY_S:
            return
        self._sampled_at = now
        for namespace in self._cache.namespaces:
            self._of(namespace).sample(_counts(namespace))
        self._in_all.sample(self._sum())

    def namespace_forgotten(self, namespace: Namespace) -> None:
        """Go on to count what the namespace counted: sums never fall."""
        if not namespace.of_bench:
            self._gone.update(_counts(namespace))

    def of_namespace(self, namespace: Namespace) -> list[RecentStats]:
        """The windows of one namespace, the shortest first."""
        windows, counts = self._of(namespace), _counts(namespace)
        return [_stats(window_s, *windows.gained(window_s, counts)) for window_s in WINDOWS_S]

    def over(self, window_s: float) -> RecentStats:
        """One of the windows over all namespaces."""
        return _stats(window_s, *self._in_all.gained(window_s, self._sum()))

    def in_all(self) -> list[RecentStats]:
        """The windows over all namespaces, the shortest first, and what there was since the start."""
        whole = _stats(0.0, self._clock() - self._started_at, self._sum())
        return [*(self.over(window_s) for window_s in WINDOWS_S), whole]

    def _of(self, namespace: Namespace) -> CounterWindows:
        if (windows := self._windows.get(namespace)) is None:
            windows = self._windows[namespace] = CounterWindows({}, self._clock)
        return windows

    def _sum(self) -> dict[str, float]:
        total = dict.fromkeys(COUNTED, 0) | self._gone
        for namespace in self._cache.namespaces:
            for name, count in _counts(namespace).items():
                total[name] += count * (not namespace.of_bench)
        return {**total, "cpu_seconds": self._cpu_clock()}


def _counts(namespace: Namespace) -> dict[str, int]:
    return {name: getattr(namespace.counters, name) for name in COUNTED}


def _stats(window_s: float, seconds: float, gained: dict[str, float]) -> RecentStats:
    cpu_seconds = gained.pop("cpu_seconds", 0.0)
    return RecentStats(window_s, seconds, **{k: int(v) for k, v in gained.items()}, cpu_seconds=cpu_seconds)
