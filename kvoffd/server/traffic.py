"""Traffic of engines by namespace, and in total over the last minute, hour and day, and since the start."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Counters, MissReason, Namespace
from kvoffd.observe.meters import MINUTE_S, CounterSteps, CounterWindows
from kvoffd_proto.stats import Lifetime, Window

SAMPLE_EVERY_S = 1.0
_MISSES, _NO_SPACE, _TOKENS = "misses", "no_space", "prompt_tokens"
_MAPS = _MISSES, _NO_SPACE, _TOKENS
"""Counters of a namespace that are maps. Here an entry of one is a count with a name such as ``misses evicted``."""
_SPEED = "prefill_tokens_per_second"
"""The only one of ``Counters`` that does not grow."""
COUNTED = tuple(name for name in Counters.__slots__ if name not in (*_MAPS, _SPEED))
"""Counters that are numbers."""
_GPU_SECONDS = "saved_gpu_seconds"
_numbers_of, _maps_of = attrgetter(*COUNTED), attrgetter(*_MAPS)
_MISSES_OF = {reason: f"{_MISSES} {reason.name.lower()}" for reason in MissReason}
_FOUND = ("pool", "keys_ready"), ("disk", "found_disk"), ("shared", "found_shared")
"""Sources of found keys, and the counters of the keys that each had."""
_SAME_IN_TRAFFIC = tuple(sorted({*Window.__struct_fields__} & {*COUNTED}))
"""Counters that Traffic has under the same name."""


class _Counted(NamedTuple):
    """Counts of a namespace at the last call of ``total``."""

    source: tuple[object, ...]
    """Its counters."""
    counts: Mapping[str, float]
    figures: dict[str, Any]
    """Result of ``figures`` for the counts; empty until ``of_namespace`` needs it."""


class TrafficCounts:
    """Totals and windows over all namespaces but those of benches. For the service's thread.

    Args:
        earlier: totals of earlier daemons.
    """

    def __init__(self, cache: Cache, clock: Callable[[], float], earlier: Lifetime) -> None:
        self._cache, self._clock, self._earlier = cache, clock, earlier
        self._started_at, self._began = clock(), time.time()
        self._windows = CounterWindows(clock)
        self._steps = CounterSteps(clock)
        self._no_space = CounterWindows(clock)
        """Blocks that were not stored for lack of space, by cause and namespace."""
        self._sampled_at = float("-inf")
        self._total = defaultdict[str, float](int)
        self._counted: dict[Namespace, _Counted] = {}
        """Counts of each namespace that are in the totals."""
        self.gone_namespaces = 0
        """Number of forgotten namespaces that had counted something."""

    def tick(self) -> None:
        now = self._clock()
        if now - self._sampled_at >= SAMPLE_EVERY_S:
            self._sampled_at = now
            total = self.total()
            self._windows.sample(total)
            self._steps.sample(total)
            of_engines = [one for one in self._cache.namespaces.values() if not one.of_bench]
            self._no_space.sample(
                {
                    _no_space_name(cause, one): blocks
                    for one in of_engines
                    for cause, blocks in one.counters.no_space.items()
                }
            )

    def namespace_forgotten(self, namespace: Namespace) -> None:
        """Keep a namespace's counts in the totals after it was forgotten."""
        self._add_new_counts(namespace)
        if (counted := self._counted.pop(namespace, None)) is not None and counted.counts:
            self.gone_namespaces += 1

    def total(self) -> Mapping[str, float]:
        """Return the counts of all namespaces since the start."""
        for namespace in self._cache.namespaces.values():
            self._add_new_counts(namespace)
        return self._total.copy()

    def _add_new_counts(self, namespace: Namespace) -> None:
        """Add a namespace's counts since the last call to the totals, which never fall."""
        if namespace.of_bench:
            return
        counters, counted = namespace.counters, self._counted.get(namespace)
        source = _numbers_of(counters), *(dict(counts) for counts in _maps_of(counters))
        if counted is not None and counted.source == source:  # as of most of many namespaces
            return
        counts, before = counts_of(namespace), {} if counted is None else counted.counts
        for name, count in counts.items():
            self._total[name] += count - before.get(name, 0)
        self._counted[namespace] = _Counted(source, counts, {})

    def of_namespace(self, namespace: Namespace) -> dict[str, Any]:
        """Return the fields of a Traffic for a namespace, as of the last ``total()``; of a bench's, which it does not
        count, as of now."""
        if (counted := self._counted.get(namespace)) is None:
            return figures(counts_of(namespace))
        if not counted.figures:
            counted.figures.update(figures(counted.counts))
        return counted.figures

    def date_back(self, name: str, count: int, age_s: float) -> None:
        """Have the windows count events, which a counter has just counted, at the time when they were."""
        if count:
            self._windows.date_back(name, count, age_s)

    def since_start(self, total: Mapping[str, float]) -> Window:
        """Return the traffic since the start. ``total``, here and below: the result of ``total()``, found once for all
        periods of a reply, so that they agree."""
        return Window(seconds=self._clock() - self._started_at, **figures(total))

    def in_last(self, window_s: float, total: Mapping[str, float]) -> Window:
        """Return the traffic of the last minute, hour or day, one of ``WINDOWS_S``."""
        seconds, gained = self._windows.gained(window_s, total)
        return Window(seconds=seconds, **figures(gained))

    def most_refused(self, cause: str, among: Iterable[Namespace]) -> Namespace | None:
        """Return the one of these namespaces of which the most blocks got no space for a cause in the last minute; None
        if no one's did."""
        named = {_no_space_name(cause, one): one for one in among if not one.of_bench}
        now = {name: one.counters.no_space[cause] for name, one in named.items()}
        _, gained = self._no_space.gained(MINUTE_S, now)
        name = max(gained, key=gained.__getitem__, default="")
        return named[name] if gained.get(name, 0) > 0 else None  # one that was opened again counts from 0

    def last_hour_in_steps(self, total: Mapping[str, float]) -> list[tuple[float, Window]]:
        """Return the traffic of the last hour in steps, oldest first, each with the seconds since its end."""
        now = self._clock()
        return [
            (now - step.until, Window(seconds=step.seconds, **figures(step.gained)))
            for step in self._steps.last_hour(total)
        ]

    def lifetime(self, total: Mapping[str, float]) -> Lifetime:
        """Return the totals of this daemon and earlier ones."""
        earlier = self._earlier
        return Lifetime(
            earlier.since or self._began,
            earlier.loaded_tokens + int(total.get("loaded_tokens", 0)),
            earlier.saved_seconds + total.get("saved_seconds", 0.0),
        )


def counts_of(namespace: Namespace) -> dict[str, float]:
    """Return a namespace's counts that are not 0."""
    counters = namespace.counters
    counts = {name: count for name, count in zip(COUNTED, _numbers_of(counters), strict=True) if count}
    if counters.saved_seconds:
        counts[_GPU_SECONDS] = counters.saved_seconds * namespace.world_size
    for reason, count in counters.misses.items():
        counts[_MISSES_OF[reason]] = count
    for cause, count in counters.no_space.items():
        counts[f"{_NO_SPACE} {cause}"] = count
    for source, count in counters.prompt_tokens.items():
        counts[f"{_TOKENS} {source}"] = count
    return counts


@cache
def _place_of(name: str) -> tuple[str, str] | None:
    """Return the map that has a count, and its entry there; None for a number."""
    of_map, _, entry = name.partition(" ")
    return (of_map, entry) if entry else None


def figures(counts: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of a Traffic for counts such as those of ``counts_of``.

    Every requested key was loaded, not needed, or a miss.
    """
    maps: dict[str, dict[str, int]] = {name: {} for name in _MAPS}
    for name, count in counts.items():
        if count and (place := _place_of(name)) is not None:
            maps[place[0]][place[1]] = int(count)
    misses, causes = maps[_MISSES], maps[_NO_SPACE]
    found = {source: int(count) for source, name in _FOUND if (count := counts.get(name, 0))}
    loaded = int(counts.get("loaded_keys", 0))
    not_needed = max(0, int(counts.get("covered_keys", 0)) - loaded)
    return {name: counts.get(name, 0) for name in _SAME_IN_TRAFFIC} | {
        _GPU_SECONDS: counts.get(_GPU_SECONDS, 0.0),
        "misses": misses,
        "prompt_tokens": maps[_TOKENS],
        "found_keys": found,
        "not_needed_keys": not_needed,
        "asked_keys": loaded + not_needed + sum(misses.values()),
        "no_space_keys": sum(causes.values()),
        "no_space_causes": causes,
    }


def _no_space_name(cause: str, namespace: Namespace) -> str:
    """Return the name of the counter of a namespace's blocks that got no space for a cause."""
    return f"{cause} {namespace.fingerprint.hex()}"
