"""What a node lends to its peers: pinned until it is returned, its deadline or the helper's end, and within limits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import msgspec
import numpy as np
import pytest

from kvoffd.cache.namespace import Namespace
from kvoffd.server.lender import LEASE_S, MAX_LEASES_EACH, MAX_VOIDED, PeerServer
from kvoffd.tiers.generations import Generations
from kvoffd.tiers.peer_messages import (
    BUSY,
    FIND,
    FOLLOW,
    GENERATION_BYTES,
    LENT,
    MAX_BLOCKS,
    MAX_FOLLOWED,
    PIN,
    RELEASE,
    Find,
    Follow,
    Pin,
    Pinned,
)
from kvoffd.tiers.peer_process import HelperProcess
from kvoffd.tiers.peer_store import PeerStore
from tests.kit.slot_cache import UNIT, CacheRig, keys_of

ROUTE, ONE = b"\0peer", bytes(32)


class Rig:
    def __init__(self, units: int = 64) -> None:
        self.rig = CacheRig(units, units)
        self.generations = Generations()
        self.saved = True
        self.server = PeerServer(self.rig.cache, self.rig.clock, lambda: self.saved, self.generations)
        self.asker_has = 0
        """Generation of namespaces that the peer knows."""

    def find(self, namespace: Namespace, *numbers: int) -> list[int]:
        return self.ask(namespace, *numbers)[1]

    def ask(self, namespace: Namespace, *numbers: int) -> tuple[int, list[int]]:
        """Return the generation that a peer is told, and what is there."""
        find = Find(namespace.fingerprint, self.asker_has, 0, 8, keys_of(*numbers))
        answer = self.server.answer(ROUTE, 1, FIND, msgspec.msgpack.encode(find))
        assert answer is not None
        return int.from_bytes(answer[:GENERATION_BYTES], "little"), list(answer[GENERATION_BYTES:])

    def follow(self, namespace: Namespace, generation: int, cleared_at: int = 0) -> tuple[int, bool]:
        """Tell it a generation, of a clear at this time or of none; return its own, and whether it says that it is
        kept."""
        wanted = msgspec.msgpack.encode(Follow(namespace.fingerprint, generation, b"", cleared_at))
        answer = self.server.answer(ROUTE, 1, FOLLOW, wanted)
        assert answer is not None
        return int.from_bytes(answer[:GENERATION_BYTES], "little"), answer[GENERATION_BYTES:] == b"\1"

    def drop(self, namespace: Namespace) -> None:
        """Drop a namespace's blocks, as a daemon does for those that were voided."""
        self.rig.cache.reset(namespace, generation=self.generations.void_here(namespace.fingerprint))
        self.generations.followed(namespace.fingerprint)

    def pin(self, namespace: Namespace, *numbers: int, ident: int = 7, lengths: tuple[int, ...] = (UNIT,)) -> Pinned:
        wanted = Pin(Find(namespace.fingerprint, self.asker_has, 0, 8, keys_of(*numbers)), list(lengths))
        answer = self.server.answer(ROUTE, ident, PIN, msgspec.msgpack.encode(wanted))
        assert answer is not None
        return msgspec.msgpack.decode(answer, type=Pinned)

    def release(self, ident: int = 7) -> None:
        assert self.server.answer(ROUTE, ident, RELEASE, b"") is None

    @property
    def pinned(self) -> int:
        return self.rig.cache.life.usage.pinned_blocks


def test_it_says_where_blocks_lie_and_what_their_checksums_are() -> None:
    rig = Rig()
    namespace = rig.rig.open("a", world_size=2)
    rig.rig.store(namespace, keys_of(1, 2))
    assert rig.find(namespace, 1, 2, 3) == [1, 1, 0]
    pinned = rig.pin(namespace, 3, 2, 1, lengths=(UNIT, UNIT))
    assert list(pinned.there) == [0, 1, 1]
    blocks = rig.rig.blocks(namespace, keys_of(2, 1))
    slots = rig.rig.cache.blocks.slots(blocks, 2)
    assert np.frombuffer(pinned.offsets, "<u8").tolist() == rig.rig.slots.offsets(slots).ravel().tolist()
    assert np.frombuffer(pinned.checksums, "<u8").tolist() == [7] * 4
    assert rig.pinned == 2
    rig.release()
    assert rig.pinned == 0


def test_a_lease_ends_at_its_deadline_and_with_the_helper() -> None:
    rig = Rig()
    namespace = rig.rig.open()
    rig.rig.store(namespace, keys_of(1, 2))
    assert rig.pin(namespace, 1).seconds == LEASE_S
    rig.rig.clock.now += LEASE_S - 0.1
    rig.pin(namespace, 2, ident=8)
    rig.server.tick()
    assert (rig.server.leases, rig.pinned) == (2, 2)
    rig.rig.clock.now += 0.2
    rig.server.tick()
    assert (rig.server.leases, rig.pinned) == (1, 1)
    rig.release()
    rig.server.end_all()
    assert (rig.server.leases, rig.server.pinned_bytes, rig.pinned) == (0, 0, 0)


def test_peers_may_pin_an_eighth_of_the_pool() -> None:
    rig = Rig(64)
    namespace = rig.rig.open()
    rig.rig.store(namespace, keys_of(*range(30)))
    assert list(rig.pin(namespace, 99, *range(30)).there) == [0, *[LENT] * 8, *[BUSY] * 22]
    assert list(rig.pin(namespace, 20, 99, ident=8).there) == [BUSY, 0]
    assert rig.server.refused == 2


def test_peers_may_pin_what_is_reserved_for_promotions() -> None:
    """A slow store's prompts may have all of it for long."""
    rig = Rig()
    namespace = rig.rig.open()
    rig.rig.store(namespace, keys_of(1, 2))
    rig.rig.cache.leases.withheld_bytes = rig.rig.cache.leases.leasable_bytes
    for ident in range(2):
        assert list(rig.pin(namespace, 1 + ident, ident=ident).there) == [LENT]


def test_one_peer_gets_a_few_leases() -> None:
    rig = Rig(256)
    namespace = rig.rig.open()
    rig.rig.store(namespace, keys_of(1))
    for ident in range(MAX_LEASES_EACH):
        assert sum(rig.pin(namespace, 1, ident=100 + ident).there) == 1
    assert list(rig.pin(namespace, 1, ident=99).there) == [BUSY]
    assert rig.server.refused == 1


def test_an_id_that_is_used_again_lends_nothing_twice() -> None:
    rig = Rig()
    namespace = rig.rig.open()
    rig.rig.store(namespace, keys_of(1, 2))
    rig.pin(namespace, 1)
    assert LENT not in rig.pin(namespace, 2).there
    rig.release()
    rig.release()
    assert rig.pinned == 0


def test_nothing_is_lent_of_another_namespace_other_lengths_or_one_that_an_engine_reset() -> None:
    rig = Rig()
    namespace, other = rig.rig.open("a"), rig.rig.open("b")
    rig.rig.store(namespace, keys_of(1))
    assert rig.find(other, 1) == [0]
    assert sum(rig.pin(namespace, 1, lengths=(UNIT - 1,)).there) == 0
    rig.generations.stop_sharing(namespace.fingerprint)
    assert rig.find(namespace, 1) == [0]
    assert sum(rig.pin(namespace, 1).there) == 0
    assert rig.pinned == 0


def test_to_a_peer_with_another_generation_nothing_is_lent() -> None:
    """Either end may have followed a reset of all nodes that the other has not followed: blocks of before are void."""
    rig = Rig()
    namespace = rig.rig.open()
    rig.rig.store(namespace, keys_of(1))
    rig.asker_has = 7
    assert rig.ask(namespace, 1) == (7, [0]), "it follows"
    assert rig.generations.voided == {namespace.fingerprint}
    assert rig.ask(namespace, 1) == (7, [0]), "what it has is of before until somebody has dropped it"
    assert sum(rig.pin(namespace, 1).there) == 0
    rig.generations.followed(namespace.fingerprint)
    assert rig.ask(namespace, 1) == (7, [1]), "it was dropped, and computed again"
    for rig.asker_has in (0, 6):
        assert rig.ask(namespace, 1) == (7, [0]), "the peer does not take what it will have to void"
        assert sum(rig.pin(namespace, 1).there) == 0
    assert not rig.generations.voided


def test_it_says_that_it_follows_a_reset_of_all_nodes_once_the_next_daemon_would_know_of_it() -> None:
    rig = Rig()
    namespace = rig.rig.open()
    rig.rig.store(namespace, keys_of(1))
    rig.saved = False
    assert rig.follow(namespace, 5) == (5, False)
    rig.generations.followed(namespace.fingerprint)
    assert rig.follow(namespace, 5) == rig.follow(namespace, 0) == (5, False)
    rig.saved = True
    assert rig.follow(namespace, 5) == rig.follow(namespace, 0) == (5, True)


@pytest.mark.parametrize("clock_is_ahead_us", [0, 3600 * 10**6])
def test_two_clears_with_one_number_are_two(clock_is_ahead_us: int) -> None:
    """Numbers are seconds: two nodes that do not know of each other may have cleared in the same one."""
    rig = Rig()
    namespace = rig.rig.open()
    rig.asker_has = 7
    first = rig.generations.now() + clock_is_ahead_us
    assert rig.follow(namespace, 7, first) == (7, False)
    rig.drop(namespace)
    rig.rig.store(namespace, keys_of(1))
    assert rig.follow(namespace, 7, first) == rig.follow(namespace, 7) == (7, True)
    second = rig.generations.now() + clock_is_ahead_us + 1
    assert rig.ask(namespace, 1) == (7, [1])
    assert rig.follow(namespace, 7, second) == (7, False)
    assert rig.ask(namespace, 1) == (7, [0]), "it was stored before the second"
    rig.drop(namespace)
    rig.rig.store(namespace, keys_of(2))
    for cleared_at in (0, first, second):
        assert rig.follow(namespace, 7, cleared_at) == (7, True), "each is carried out once"
    assert rig.ask(namespace, 1, 2) == (7, [0, 1])


def test_a_clear_that_a_node_has_heard_of_elsewhere_is_carried_out_once() -> None:
    rig = Rig()
    namespace = rig.rig.open()
    cleared_at = rig.generations.now()
    rig.follow(namespace, 7)
    rig.drop(namespace)
    rig.rig.store(namespace, keys_of(1))
    assert rig.follow(namespace, 7, cleared_at) == (7, True)
    assert rig.follow(namespace, 6, cleared_at + 10**9) == (7, True), "it has another number, and is told so"


def test_a_clear_is_not_said_to_be_done_while_there_is_too_much_to_follow() -> None:
    rig = Rig()
    namespace = rig.rig.open()
    rig.follow(namespace, 7)
    rig.drop(namespace)
    others = {number.to_bytes(32, "big") for number in range(MAX_VOIDED)}
    rig.generations.voided |= others
    second = rig.generations.now() + 10**6
    assert rig.follow(namespace, 7, second) == (7, False)
    rig.generations.voided -= others
    assert rig.follow(namespace, 7, second) == (7, False), "it is told again, and drops what it has"
    rig.drop(namespace)
    assert rig.follow(namespace, 7, second) == (7, True)


def test_what_is_of_a_generation_that_cannot_be_written_down_is_lent() -> None:
    """A next daemon that does not know of it is told by who asks, before it lends."""
    rig = Rig()
    namespace = rig.rig.open()
    rig.saved, rig.asker_has = False, 5
    rig.follow(namespace, 5)
    rig.generations.followed(namespace.fingerprint)
    rig.rig.store(namespace, keys_of(1))
    assert rig.ask(namespace, 1) == (5, [1])
    assert rig.ask(namespace) == (5, []), "nobody has to ask again"
    assert sum(rig.pin(namespace, 1).there) == 1


def test_a_peer_cannot_have_it_follow_everything() -> None:
    rig = Rig()
    namespace = rig.rig.open()
    for rig.asker_has in (-1, 2**40, 2**63):
        assert rig.follow(namespace, rig.asker_has) == (0, True)
        assert rig.ask(namespace, 1) == (0, [0]), "such a number could hardly be raised again"
    rig.generations.voided |= {number.to_bytes(32, "big") for number in range(MAX_VOIDED)}
    rig.asker_has = 7
    assert rig.ask(namespace, 1) == (0, [0]), "later, and lends nothing until then"
    for fingerprint in list(rig.generations.voided):
        rig.generations.followed(fingerprint)
    assert rig.ask(namespace, 1) == (7, [0])


def test_a_block_without_a_checksum_is_not_lent() -> None:
    rig = Rig()
    namespace = rig.rig.open()
    rig.rig.commit(rig.rig.begin(namespace, 0, 0, keys_of(1)), checksum=0)
    assert sum(rig.pin(namespace, 1).there) == 0


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff" * 50,
        msgspec.msgpack.encode(Find(ONE, 0, 0, 0, b"1234")),
        msgspec.msgpack.encode(Find(ONE, 0, 0, 3, b"1234")),
        msgspec.msgpack.encode(Find(ONE, 0, -1, 65, b"")),
        msgspec.msgpack.encode(Find(b"a" * 9999, 7, 0, 8, b"")),
        msgspec.msgpack.encode(Pin(Find(ONE, 0, 0, 8, keys_of(*range(MAX_BLOCKS + 1))), [1])),
        msgspec.msgpack.encode(Pin(Find(ONE, 0, 0, 8, keys_of(*range(100))), [1] * 1000)),
    ],
)
@pytest.mark.parametrize("kind", [FIND, PIN])
def test_what_is_no_request_has_an_answer_without_anything(payload: bytes, kind: int) -> None:
    """Without one it would count as in progress in the helper, of whose requests there is a limit for all peers."""
    rig = Rig()
    rig.rig.open()
    assert rig.server.answer(ROUTE, 1, kind, payload) == b""
    assert (rig.server.leases, rig.server.refused, rig.generations.voided) == (0, 1, set())


def test_a_peer_is_told_when_a_clear_was() -> None:
    asked = list[Follow]()

    def call(kind: int, peer: int, payload: bytes, deadline: float) -> tuple[int, bytes]:
        asked.append(follow := msgspec.msgpack.decode(payload, type=Follow))
        return 1, follow.generation.to_bytes(GENERATION_BYTES, "little") + b"\1"

    store = PeerStore(cast(HelperProcess, SimpleNamespace(call=call)), 0)
    assert store.clear(ONE, 0, 7, 123, 1.0) == store.raise_generation(ONE, 0, 7, 1.0) == 7
    assert asked == [Follow(ONE, 7, b"", 123), Follow(ONE, 7)]


@pytest.mark.parametrize("earlier_build", [False, True])
def test_a_peer_is_asked_about_all_namespaces_in_one_message(earlier_build: bool) -> None:
    """One of an earlier build answers about the first alone, and is asked about the others one by one."""
    rig, asked = Rig(), list[Follow]()
    every = [number.to_bytes(32, "big") for number in range(10)]
    for number, fingerprint in enumerate(every):
        rig.generations.hear(fingerprint, number)

    def call(kind: int, peer: int, payload: bytes, deadline: float) -> tuple[int, bytes]:
        asked.append(follow := msgspec.msgpack.decode(payload, type=Follow))
        if earlier_build:
            payload = msgspec.msgpack.encode([follow.fingerprint, follow.generation])
        answer = rig.server.answer(ROUTE, 1, kind, payload)
        assert answer is not None
        return 1, answer

    store = PeerStore(cast(HelperProcess, SimpleNamespace(call=call, check=lambda: None)), 0)
    assert store.generations(every, 1.0) == list(range(10))
    assert len(asked) == (10 if earlier_build else 1)
    assert store.generations(every[3:4], 1.0) == [3]
    assert store.generations([], 1.0) == []
    many = [number.to_bytes(32, "big") for number in range(2 * MAX_FOLLOWED)]
    asked.clear()
    if not earlier_build:
        assert store.generations(many, 1.0) == [*range(10), *[0] * (len(many) - 10)]
        assert len(asked) == 2


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff" * 50,
        msgspec.msgpack.encode(Follow(b"a" * 9999, 7)),
        msgspec.msgpack.encode(Follow(ONE, 7, b"a" * 33)),
        msgspec.msgpack.encode(Follow(ONE, 7, bytes(32 * (MAX_FOLLOWED + 1)))),
    ],
)
def test_what_tells_no_generation_is_not_followed(payload: bytes) -> None:
    rig = Rig()
    assert rig.server.answer(ROUTE, 1, FOLLOW, payload) == b""
    assert (rig.server.refused, rig.generations.voided) == (1, set())


def test_a_flood_gets_a_part_of_the_loops_time() -> None:
    rig = Rig()
    namespace = rig.rig.open()
    rig.rig.store(namespace, keys_of(1))
    rig.server._spent_s = 1.0
    rig.server._window_at = rig.rig.clock.now
    assert rig.find(namespace, 1) == [0]
    assert rig.server.refused == 1
    rig.rig.clock.now += 0.3
    assert rig.find(namespace, 1) == [1]
