"""What engines asked for and got: by namespace, in windows and in sum."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.observe.meters import DAY_S
from kvoffd.server.traffic import COUNTED, TrafficCounts, counts_of
from kvoffd_proto.messages import GroupSpec
from kvoffd_proto.stats import MISS_REASONS, Lifetime
from tests.kit.clock import Clock
from tests.kit.lines import lines_of


def namespace(number: int, label: str = "model") -> Namespace:
    return Namespace(number.to_bytes(32, "little"), label, 1, 32, [GroupSpec("full", 16)], "{}")


def counts(clock: Clock, spaces: dict[bytes, Namespace], earlier: Lifetime | None = None) -> TrafficCounts:
    cache = cast(Cache, SimpleNamespace(namespaces=spaces))
    return TrafficCounts(cache, clock, earlier or Lifetime())


def open_all(*spaces: Namespace) -> dict[bytes, Namespace]:
    return {one.fingerprint: one for one in spaces}


def test_every_reason_of_a_miss_has_its_meaning() -> None:
    assert {reason.name.lower() for reason in MissReason} == MISS_REASONS.keys()


def test_counts_of_a_namespace_that_has_counted_nothing_since_are_not_added_again() -> None:
    """64 namespaces took 3 ms of the loop, once a second and for each answer to ``stats``."""
    spaces = [namespace(number) for number in range(8)]
    for space in spaces:
        for name in COUNTED:
            setattr(space.counters, name, 3)
        space.counters.misses.update(MissReason)
    traffic = counts(Clock(), open_all(*spaces))
    assert traffic.total()["lookups"] == 3 * len(spaces)
    each = lines_of(lambda: counts_of(spaces[0]))
    assert lines_of(traffic.total) < len(spaces) * (each + 15)
    spaces[2].counters.lookups += 4
    assert traffic.total()["lookups"] == 3 * len(spaces) + 4
    assert traffic.of_namespace(spaces[2])["lookups"] == 7


def test_seconds_saved_count_for_each_rank() -> None:
    """They are paid for: a second of an engine on four GPUs is four. Those of a day are a window of their own."""
    clock, space = Clock(), namespace(1)
    space.world_size = 4
    traffic = counts(clock, open_all(space))
    space.counters.prefill_tokens_per_second = 100.0
    for hour in range(30):
        clock.now += 3600.0
        space.counters.count_loaded({0: 500, 20: 300}.get(hour, 0))
        traffic.tick()
    total = traffic.total()
    assert traffic.since_start(total).saved_gpu_seconds == 4 * 8.0
    assert traffic.in_last(DAY_S, total).saved_gpu_seconds == 4 * 3.0


def test_totals_go_on_from_those_of_earlier_daemons() -> None:
    clock, space = Clock(), namespace(1)
    spaces = open_all(space)
    traffic = counts(clock, spaces, Lifetime(5.0, 100, 2.5))
    space.counters.lookups, space.counters.prefill_tokens_per_second = 1, 100.0
    space.counters.count_loaded(50)
    assert traffic.lifetime(traffic.total()) == Lifetime(5.0, 150, 3.0)
    spaces.clear()
    traffic.namespace_forgotten(space)
    assert traffic.lifetime(traffic.total()) == Lifetime(5.0, 150, 3.0), "sums never fall"


def test_the_namespace_without_space_is_that_of_the_last_minute() -> None:
    """And not the one that had the least since the daemon's start."""
    clock, before, now = Clock(), namespace(1), namespace(2)
    every = [before, now]
    traffic = counts(clock, open_all(*every))
    assert traffic.most_refused("quota", every) is None
    before.counters.no_space["quota"] = 1000
    assert traffic.most_refused("quota", every) is before
    for _ in range(90):
        clock.now += 1.0
        traffic.tick()
    assert traffic.most_refused("quota", every) is None
    now.counters.no_space.update(quota=3, pinned=5)
    before.counters.no_space["pinned"] = 4
    assert (traffic.most_refused("quota", every), traffic.most_refused("pinned", every)) == (now, now)
    before.counters.no_space["quota"] += 10
    assert traffic.most_refused("quota", [now]) is now, "of those that are asked about"
