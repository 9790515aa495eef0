"""Which of many nodes behind a name are connected, and which of a network."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvoffd.config import PEER_PLACES
from kvoffd.server.peer_places import DARK_S, EXCHANGE_S, KEPT_S, PeerPlaces
from kvoffd.tiers.peer_names import PeerName, Resolved
from tests.kit.slot_cache import CacheRig

NAME = PeerName("dns+engines:7400", "engines", 7400)
FIXED = "peer://10.9.0.1:7400"
"""A peer that is configured besides."""


class FakeTier:
    def __init__(self) -> None:
        self.name, self.idle, self.answers, self.found_at = "", True, True, -inf
        self.only_named = self.may_be_away = False
        self.health = SimpleNamespace(problem="")

    def available(self) -> bool:
        return self.answers and bool(self.name)

    def become(self, name: str) -> None:
        assert self.idle
        self.name, self.answers, self.found_at = name, True, -inf


class Rig:
    def __init__(self, *names: PeerName) -> None:
        self.clock = CacheRig(16, 4).clock
        self.addresses: list[str] = [""] * PEER_PLACES
        """As the helper knows them."""
        self.tiers = [FakeTier() for _ in self.addresses]
        self.refuses = False
        self.places = PeerPlaces(
            cast(Any, SimpleNamespace(connect=self.connect, has_reads=lambda number: False)),
            names or [NAME],
            [FIXED],
            lambda source: source,
            self.clock,
            random.Random(1),
        )
        for number, tier in enumerate(self.tiers):
            self.places.add(number, cast(Any, tier), cast(Any, SimpleNamespace(idle=True)))

    def connect(self, number: int, address: str) -> bool:
        if not self.refuses:
            self.addresses[number] = address
        return not self.refuses

    def resolve(self, addresses: Sequence[str]) -> None:
        self.places.resolved(0, Resolved(addresses))
        self.places.tick()

    @property
    def connected(self) -> set[str]:
        named = [tier.name.removeprefix("peer://") for tier in self.tiers]
        assert named == self.addresses
        return set(named) - {""}


def nodes(count: int) -> list[str]:
    return [f"10.0.{number // 250}.{number % 250 + 1}:7400" for number in range(count)]


def test_a_name_that_tells_a_few_of_its_nodes_each_time_replaces_none_that_answers() -> None:
    rig, choose = Rig(), random.Random(2)
    rig.resolve(nodes(8))
    for _ in range(40):
        rig.clock.now += EXCHANGE_S / 20
        rig.resolve(choose.sample(nodes(8), 4))
        assert rig.connected == set(nodes(8))
    rig.clock.now += EXCHANGE_S
    rig.resolve(nodes(2))
    assert rig.connected == set(nodes(2)), "the others were not named for too long"


def test_a_peer_that_is_configured_by_itself_gets_no_place_besides() -> None:
    rig = Rig()
    rig.resolve([FIXED.removeprefix("peer://"), *nodes(2)])
    assert rig.connected == set(nodes(2))


def test_of_a_small_fleet_all_nodes_are_connected_as_they_come_and_go() -> None:
    rig = Rig()
    for there in (3, 8, 5, 0, 2):
        for tier in rig.tiers:
            tier.answers = tier.name.removeprefix("peer://") in nodes(there)
        rig.clock.now += 1
        rig.resolve(nodes(there))
        assert rig.connected == set(nodes(there))
    assert len(rig.places.always_asked) == 2
    assert not any(tier.only_named for tier in rig.places.always_asked)
    assert all(tier.may_be_away for tier in rig.tiers)


def test_of_a_large_fleet_others_are_connected_on_each_node() -> None:
    """So none is asked by all, and news reaches all of them within few steps."""
    chosen = []
    for seed in range(20):
        rig = Rig()
        rig.places._rng.seed(seed)
        rig.resolve(nodes(1000))
        assert len(rig.connected) == PEER_PLACES
        chosen += rig.connected
    assert len(set(chosen)) > 0.8 * len(chosen)


def test_nodes_that_had_blocks_lately_stay_and_the_others_make_place_one_by_one() -> None:
    rig = Rig()
    rig.resolve(nodes(1000))
    kept, before = rig.tiers[2].name, rig.connected
    rig.clock.now += EXCHANGE_S - 1
    rig.tiers[2].found_at = rig.clock.now
    rig.places.tick()
    assert rig.connected == before
    rig.clock.now += 2
    for _ in range(3):
        rig.places.tick()
    assert len(rig.connected - before) == 1
    for _ in range(20):
        rig.clock.now += EXCHANGE_S + 1
        rig.tiers[2].found_at = rig.clock.now
        rig.places.tick()
    assert rig.tiers[2].name == kept
    assert len(rig.connected & before) == 1


def test_a_node_that_does_not_answer_makes_place_soon() -> None:
    rig = Rig()
    rig.resolve(nodes(1000))
    dark = rig.tiers[5]
    name, dark.answers = dark.name, False
    rig.clock.now += DARK_S - 1
    rig.places.tick()
    assert dark.name == name
    rig.clock.now += 2
    rig.places.tick()
    assert dark.name != name
    assert len(rig.connected) == PEER_PLACES
    small = Rig()
    small.resolve(nodes(3))
    before = small.connected
    for tier in small.tiers:
        tier.answers = False
    small.clock.now += DARK_S + 1
    small.places.tick()
    assert small.connected == before, "there is no other one"


def test_what_is_in_use_or_refused_by_the_helper_stays_for_now() -> None:
    rig = Rig()
    rig.refuses = True
    rig.resolve(nodes(3))
    assert rig.connected == set()
    rig.refuses = False
    rig.places.tick()
    assert rig.connected == set(nodes(3))
    for tier in rig.tiers:
        tier.idle, tier.answers = False, tier.name.removeprefix("peer://") in nodes(1)
    rig.clock.now += 1
    rig.resolve(nodes(1))
    assert rig.connected == set(nodes(3))
    for tier in rig.tiers:
        tier.idle = True
    rig.places.tick()
    assert rig.connected == set(nodes(1))


def test_a_name_that_cannot_be_resolved_keeps_its_nodes_and_is_a_problem() -> None:
    rig = Rig()
    assert list(rig.places.problems) == []
    rig.places.resolved(0, Resolved(None, "Name or service not known"))
    assert list(rig.places.problems) == ["The name of dns+engines:7400 cannot be resolved: Name or service not known."]
    rig.resolve(nodes(1000))
    assert list(rig.places.problems) == []
    rig.places.resolved(0, Resolved(None, "try again"))
    rig.places.tick()
    assert len(rig.connected) == PEER_PLACES


def test_that_no_node_behind_a_name_answers_is_a_problem() -> None:
    rig = Rig()
    rig.resolve(nodes(3))
    for tier in rig.places.always_asked:
        cast(Any, tier).answers = False
        cast(Any, tier).health.problem = "It refuses this node."
    (sentence,) = rig.places.problems
    assert sentence.endswith("none of which answers: It refuses this node.")
    cast(Any, rig.places.always_asked[0]).answers = True
    assert list(rig.places.problems) == []


def test_a_request_may_name_a_node_behind_a_name_or_of_a_network() -> None:
    rig = Rig()
    rig.resolve(nodes(1000))
    absent = next(one for one in nodes(1000) if one not in rig.connected)
    host = absent.rpartition(":")[0]
    assert rig.places.find(host) == absent
    assert rig.places.find("10.9.9.9") == ""
    assert rig.places.give(absent, only_named=False) == "", "all were connected just now"
    rig.clock.now += KEPT_S
    assert rig.places.give(absent, only_named=False) == f"peer://{absent}"
    assert f"peer://{absent}" in [tier.name for tier in rig.places.always_asked]
    rig.clock.now += KEPT_S
    assert rig.places.give("192.168.0.1:7400", only_named=True) == "peer://192.168.0.1:7400"
    assert len(rig.places.always_asked) == PEER_PLACES - 1
    assert rig.places.give("192.168.0.1:7400", only_named=True) == "peer://192.168.0.1:7400"
    assert len(rig.connected) == PEER_PLACES


def test_a_node_that_a_request_names_stays_when_the_next_answer_about_its_name_lacks_it() -> None:
    """It went at once: of its place only the time was known when an earlier peer was behind a name."""
    rig, (named, other) = Rig(), nodes(2)
    rig.places.resolved(0, Resolved([named]))
    assert rig.places.give(named, only_named=False)
    rig.resolve([other])
    assert rig.connected == {named, other}
    rig.clock.now += EXCHANGE_S
    rig.resolve([other])
    assert rig.connected == {other}, "it was not listed for long"


def test_a_named_node_gets_the_place_of_the_one_that_had_blocks_longest_ago() -> None:
    """It was that of the one that had come first, though all but the last had blocks until now."""
    rig = Rig()
    rig.resolve(nodes(1000))
    rig.clock.now += 100
    for ago, tier in enumerate(rig.tiers):
        tier.found_at = rig.clock.now - ago
    unused, *others = (tier.name for tier in reversed(rig.tiers))
    assert rig.places.give("192.168.0.1:7400", only_named=True) == "peer://192.168.0.1:7400"
    assert [tier.name for tier in reversed(rig.tiers)] == ["peer://192.168.0.1:7400", *others]
    assert unused not in rig.connected


def test_a_named_node_gets_an_empty_place_before_that_of_another() -> None:
    rig = Rig()
    rig.resolve(nodes(8))
    rig.tiers[5].answers, left = False, rig.tiers[5].name
    stay = [one for one in nodes(8) if f"peer://{one}" != left]
    rig.resolve(stay)
    assert rig.connected == {*stay}
    assert rig.places.give("192.168.0.1:7400", only_named=True), "at once: nobody else's is taken"
    assert rig.connected == {*stay, "192.168.0.1:7400"}


@pytest.mark.parametrize("count", [1, 1000])
def test_nothing_changes_while_the_nodes_stay(count: int) -> None:
    rig = Rig()
    rig.resolve(nodes(count))
    before = rig.connected
    for _ in range(10):
        rig.clock.now += 1.0
        rig.resolve(list(reversed(nodes(count))))
    assert rig.connected == before
