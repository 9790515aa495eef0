"""What engines asked for and got: by namespace, in windows and in sum."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.server.traffic import TrafficCounts, counts_of
from kvoffd_proto.messages import GroupSpec
from kvoffd_proto.stats import MAX_NAMESPACE_ROWS, MISS_REASONS, Lifetime
from tests.kit.clock import Clock


def namespace(number: int, label: str = "model") -> Namespace:
    return Namespace(number.to_bytes(32, "little"), label, 1, 32, [GroupSpec("full", 16)], "{}")


def ask(space: Namespace, found: int, missed: int) -> None:
    space.counters.lookups += 1
    space.counters.keys_ready += found
    space.counters.misses[MissReason.EVICTED] += missed


def counts(clock: Clock, spaces: dict[bytes, Namespace], earlier: Lifetime | None = None) -> TrafficCounts:
    cache = cast(Cache, SimpleNamespace(namespaces=spaces))
    return TrafficCounts(cache, clock, earlier or Lifetime())


def open_all(*spaces: Namespace) -> dict[bytes, Namespace]:
    return {one.fingerprint: one for one in spaces}


def test_every_reason_of_a_miss_has_its_meaning() -> None:
    assert {reason.name.lower() for reason in MissReason} == MISS_REASONS.keys()


def test_no_counter_falls_whichever_namespaces_have_a_row() -> None:
    clock, spaces = Clock(), open_all(*map(namespace, range(MAX_NAMESPACE_ROWS + 3)))
    traffic = counts(clock, spaces)
    for number, space in enumerate(spaces.values()):
        ask(space, number, 1)
    before: dict[str, int] = {}
    for step in range(4):
        largest, others = traffic.choose_rows()
        assert len(largest) == MAX_NAMESPACE_ROWS
        rows = {one.fingerprint.hex(): int(counts_of(one).get("lookups", 0)) for one in largest}
        rows["other"] = others[0].lookups
        assert all(count >= before.get(name, 0) for name, count in rows.items())
        before = rows
        rest = next(one for one in spaces.values() if one not in largest)
        gone = rest if step % 2 else largest[0]  # one in the row of the others, or with its own
        del spaces[gone.fingerprint]
        traffic.namespace_forgotten(gone)
        spaces |= open_all(namespace(1000 + step))


def test_namespaces_that_begin_alike_are_not_two_rows_of_one_id() -> None:
    one, other = (
        Namespace(bytes(31) + bytes([last]), "model", 1, 32, [GroupSpec("full", 16)], "{}") for last in (1, 2)
    )
    ask(one, 1, 0)
    ask(other, 1, 0)
    largest, others = counts(Clock(), open_all(one, other)).choose_rows()
    assert (len(largest), [row.lookups for row in others]) == (1, [1])


def test_totals_go_on_from_those_of_earlier_daemons() -> None:
    clock, space = Clock(), namespace(1)
    traffic = counts(clock, open_all(space), Lifetime(5.0, 100, 2.5))
    space.counters.lookups, space.counters.prefill_tokens_per_second = 1, 100.0
    space.counters.loaded(50)
    assert traffic.lifetime(traffic.total()) == Lifetime(5.0, 150, 3.0)
    traffic.namespace_forgotten(space)
    assert traffic.lifetime(traffic.total()) == Lifetime(5.0, 150, 3.0), "sums never fall"
