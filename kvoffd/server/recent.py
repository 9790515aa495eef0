"""What each namespace's counters gained over the last ten, hundred and thousand seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from kvoffd.cache.cache import BlockCache
from kvoffd.cache.namespace import Counters, Namespace
from kvoffd.observe.meters import CounterWindows

SAMPLE_EVERY_S = 0.5


@dataclass(eq=False)
class Recent:
    """Samples the counters of all namespaces. For the service's thread."""

    _cache: BlockCache
    _clock: Callable[[], float]
    _windows: WeakKeyDictionary[Namespace, CounterWindows] = field(default_factory=WeakKeyDictionary, init=False)
    _in_all: CounterWindows = field(init=False)
    _gone: Counter[str] = field(default_factory=Counter, init=False)
    """What the counters of namespaces that were forgotten since had come to."""
    _sampled_at: float = field(default=float("-inf"), init=False)

    def __post_init__(self) -> None:
        self._in_all = CounterWindows({}, self._clock)

    def tick(self) -> None:
        """Take a sample when one is due."""
        now = self._clock()
        if now - self._sampled_at < SAMPLE_EVERY_S:
            return
        self._sampled_at = now
        for namespace in self._cache.namespaces:
            self._of(namespace).sample(counts(namespace.counters))
        self._in_all.sample(self._sum())

    def namespace_forgotten(self, namespace: Namespace) -> None:
        """Go on to count what the namespace counted: sums never fall."""
        self._gone.update(counts(namespace.counters))

    def gained(self, namespace: Namespace, window_s: float) -> tuple[float, dict[str, int]]:
        """Seconds of the window, and what each counter of the namespace gained in it."""
        return self._of(namespace).gained(window_s, counts(namespace.counters))

    def gained_in_all(self, window_s: float) -> tuple[float, dict[str, int]]:
        """As ``gained``, for the sum over all namespaces."""
        return self._in_all.gained(window_s, self._sum())

    def _of(self, namespace: Namespace) -> CounterWindows:
        if (windows := self._windows.get(namespace)) is None:
            windows = self._windows[namespace] = CounterWindows({}, self._clock)
        return windows

    def _sum(self) -> dict[str, int]:
        total = Counter(dict.fromkeys(counts(Counters()), 0))
        total.update(self._gone)
        for namespace in self._cache.namespaces:
            total.update(counts(namespace.counters))
        return dict(total)


def counts(counters: Counters) -> dict[str, int]:
    """The counters by name."""
    return {name: getattr(counters, name) for name in Counters.__slots__}
