"""What was counted over the last ten, hundred and thousand seconds: of each namespace, and in all."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from weakref import WeakKeyDictionary

from kvoffd.cache.cache import BlockCache
from kvoffd.cache.namespace import Counters, MissReason, Namespace
from kvoffd.observe.meters import WINDOWS_S, CounterWindows
from kvoffd_proto.stats import RecentStats

SAMPLE_EVERY_S = 0.5
COUNTED = tuple(sorted({*RecentStats.__struct_fields__}.intersection(Counters.__slots__) - {"misses"}))
_counted = attrgetter(*COUNTED)
_MISSES = "misses "
_MISSES_OF = {reason: f"{_MISSES}{reason.name.lower()}" for reason in MissReason}


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
        now = self._clock()
        if now - self._sampled_at < SAMPLE_EVERY_S:
            return
        self._sampled_at = now
        counts = {namespace: _counts(namespace) for namespace in self._cache.namespaces}
        for namespace, counted in counts.items():
            self._of(namespace).sample(counted)
        self._in_all.sample(self._sum(counts))

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
        total = self._sum()
        windows = [_stats(window_s, *self._in_all.gained(window_s, total)) for window_s in WINDOWS_S]
        return [*windows, _stats(0.0, self._clock() - self._started_at, total)]

    def _of(self, namespace: Namespace) -> CounterWindows:
        if (windows := self._windows.get(namespace)) is None:
            windows = self._windows[namespace] = CounterWindows({}, self._clock)
        return windows

    def _sum(self, counts: Mapping[Namespace, dict[str, int]] | None = None) -> dict[str, float]:
        """What all have counted, benches apart; ``counts`` where each was asked already."""
        total = self._gone.copy()
        for namespace in self._cache.namespaces:
            if namespace.of_bench:
                continue
            for name, count in (_counts(namespace) if counts is None else counts[namespace]).items():
                if count:  # there may be a thousand namespaces, most of them idle
                    total[name] += count
        return {**dict.fromkeys(COUNTED, 0), **total, "cpu_seconds": self._cpu_clock()}


def _counts(namespace: Namespace) -> dict[str, int]:
    counts = dict(zip(COUNTED, _counted(namespace.counters), strict=True))
    for reason, count in namespace.counters.misses.items():
        counts[_MISSES_OF[reason]] = count
    return counts


def named(misses: Counter[MissReason]) -> dict[str, int]:
    """Misses by the name of their reason, as they are told."""
    return {reason.name.lower(): count for reason, count in misses.items()}


def _stats(window_s: float, seconds: float, gained: dict[str, float]) -> RecentStats:
    cpu_seconds = gained.pop("cpu_seconds", 0.0)
    counts = {name: int(value) for name, value in gained.items() if not name.startswith(_MISSES)}
    misses = {name.removeprefix(_MISSES): int(gained[name]) for name in gained if name not in counts and gained[name]}
    return RecentStats(window_s, seconds, **counts, misses=misses, cpu_seconds=cpu_seconds)
