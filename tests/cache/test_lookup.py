"""Look-ups and leases: what is told, what is pinned, for how long."""

from __future__ import annotations

import pytest

from kvoffd.cache.blocks import Blocks
from kvoffd.cache.namespace import BlockState, Namespace
from kvoffd.cache.pins import LeaseTable
from kvoffd.errors import BadGeometry, BadKeys, NotReady, UnknownLease
from tests.kit.cache_harness import SLOT_UNIT, CacheHarness, begin_store, keys_of, made
from tests.kit.invariants import check_invariants

A, W, R = BlockState.ABSENT, BlockState.WRITING, BlockState.READY


def test_a_lookup_tells_the_state_of_every_key_of_every_group() -> None:
    rig = CacheHarness()
    namespace = rig.open(shard_bytes=(SLOT_UNIT, SLOT_UNIT))
    rig.put(namespace, keys_of(1, 3))
    rig.put(namespace, keys_of(2), group=1)
    begin_store(rig.cache, namespace, 0, 1, keys_of(4))
    answer = rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1, 2, 3)), (1, keys_of(2, 4)), (0, b"")])
    assert answer.states == [bytes([R, A, R]), bytes([R, W]), b""]
    assert answer.pinned == 3
    check_invariants(rig.cache)


def test_equal_keys_of_two_groups_or_namespaces_are_different_blocks() -> None:
    rig = CacheHarness()
    one, two = rig.open("a", shard_bytes=(SLOT_UNIT, SLOT_UNIT)), rig.open("b")
    rig.put(one, keys_of(1))
    assert rig.states(one, keys_of(1), group=1) == [A]
    assert rig.states(two, keys_of(1)) == [A]


def test_a_lookup_that_finds_nothing_makes_no_lease() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    assert rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1))]).pinned == 0
    assert len(rig.cache.leases) == 0


def test_asking_twice_pins_once_and_counts_once() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1, 2))
    first = rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1, 2, 3))])
    assert rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1, 2, 3))]) == first
    check_invariants(rig.cache)
    assert namespace.counters.lookups == 1
    assert rig.cache.release(1, [5]) == 1
    assert rig.cache.blocks.pinned_blocks == 0


def test_asking_again_never_calls_ready_what_the_lease_does_not_hold() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    rig.put(namespace, keys_of(1))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1, 2, 3))])
    rig.put(namespace, keys_of(2))
    begin_store(rig.cache, namespace, 0, 0, keys_of(3))
    answer = rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1, 2, 3))])
    assert answer.states == [bytes([R, A, W])]
    with pytest.raises(NotReady):
        rig.cache.begin_load(namespace, 0, 5, 0, keys_of(2))
    check_invariants(rig.cache)


def test_a_key_twice_in_a_lookup_is_harmless() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1, 2))
    answer = rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1, 2, 1)), (0, keys_of(2, 3))])
    assert answer.states == [bytes([R, R, R]), bytes([R, A])]
    assert answer.pinned == 4
    assert rig.cache.leases.held(1).keys == 4, "so that whoever asks often has no more pins than others"
    assert rig.cache.blocks.pinned_blocks == 2
    check_invariants(rig.cache)
    rig.cache.release(1, [5])
    check_invariants(rig.cache)


def test_a_lease_of_somebody_else_is_refused_and_untouched() -> None:
    rig = CacheHarness()
    namespace, other = rig.open("a"), rig.open("b")
    rig.put(namespace, keys_of(1))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1))])
    with pytest.raises(UnknownLease):
        rig.cache.lookup(namespace, 5, 2, [(0, keys_of(1))])
    with pytest.raises(UnknownLease):
        rig.cache.lookup(other, 5, 1, [(0, keys_of(1))])
    assert rig.cache.release(2, [5]) == 0
    assert rig.cache.blocks.pinned_blocks == 1


@pytest.mark.parametrize(
    ("groups", "error"), [([(0, keys_of(1)), (0, b"short")], BadKeys), ([(0, keys_of(1)), (1, b"")], BadGeometry)]
)
def test_a_bad_lookup_is_refused_whole(groups: list[tuple[int, bytes]], error: type[Exception]) -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1))
    with pytest.raises(error):
        rig.cache.lookup(namespace, 5, 1, groups)
    assert rig.cache.blocks.pinned_blocks == 0
    assert namespace.counters.lookups == 0
    check_invariants(rig.cache)


def test_a_lease_ends_when_its_time_is_over_and_not_before() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1))])
    rig.clock.now += 29.9
    assert rig.cache.expire() == 0
    rig.clock.now += 0.1
    assert rig.cache.expire() == 1
    assert rig.cache.blocks.pinned_blocks == 0
    with pytest.raises(UnknownLease):
        rig.cache.begin_load(namespace, 0, 5, 0, keys_of(1))


def test_releasing_is_once_and_twice_is_no_error() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1))])
    rig.cache.lookup(namespace, 6, 1, [(0, keys_of(1))])
    assert rig.cache.release(1, [5, 5, 77]) == 1
    assert rig.cache.release(1, [5]) == 0
    assert rig.cache.blocks.pinned_blocks == 1


def test_the_pins_of_an_owner_that_died_go_and_no_others() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1, 2))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1, 2))])
    rig.cache.lookup(namespace, 6, 1, [(0, keys_of(1))])
    rig.cache.lookup(namespace, 7, 2, [(0, keys_of(2))])
    assert rig.cache.leases.count_of(1) == 2
    assert rig.cache.end_owner(1) == 2
    assert rig.cache.end_owner(1) == 0
    assert rig.cache.leases.count_of(1) == 0
    assert rig.cache.blocks.pinned_blocks == 1
    check_invariants(rig.cache)


def test_lookups_are_counted_by_key_and_by_unbroken_run() -> None:
    rig = CacheHarness()
    namespace = rig.open(shard_bytes=(SLOT_UNIT, SLOT_UNIT))
    rig.put(namespace, keys_of(1, 2, 4))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1, 2, 3, 4)), (1, keys_of(1))])
    counters = namespace.counters
    assert (counters.lookups, counters.keys_asked, counters.keys_ready, counters.prefix_keys_ready) == (1, 5, 3, 2)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_touching_a_lease_makes_leaves_go_before_roots(policy: str) -> None:
    rig = CacheHarness(policy=policy)
    namespace = rig.open()
    rig.put(namespace, keys_of(1, 2, 3))
    rig.put(namespace, keys_of(9))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1, 2, 3))])
    rig.cache.touch(5)
    order = [block.key for block in rig.cache.policy.candidates()]
    assert order == [keys_of(9), keys_of(3), keys_of(2), keys_of(1)]


def test_touching_after_blocks_were_dropped_or_the_lease_ended_is_harmless() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1, 2))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1, 2))])
    made(rig.cache.invalidate(namespace, [(0, keys_of(1))]))
    rig.cache.touch(5)
    rig.cache.release(1, [5])
    rig.cache.touch(5)
    check_invariants(rig.cache)


@pytest.mark.parametrize("next_call", ["store", "invalidate", "clear", "expire", "load"])
def test_whatever_comes_next_finds_the_blocks_of_a_lookup_pinned(next_call: str) -> None:
    rig = CacheHarness(regions=1, region_bytes=4 * SLOT_UNIT)
    namespace = rig.open()
    rig.put(namespace, keys_of(1, 2, 3, 4))
    assert rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1, 9, 2, 3, 4))]).pinned == 4
    # Nothing in between, not even a look at the books: the pins are entered late, and must not be too late.
    if next_call == "store":
        assert begin_store(rig.cache, namespace, 0, 0, keys_of(9)).dropped == [0]
    elif next_call == "invalidate":
        made(rig.cache.invalidate(namespace, [(0, keys_of(1, 2, 3, 4))]))
    elif next_call == "clear":
        made(rig.cache.clear_all())
    elif next_call == "expire":
        assert rig.cache.expire() == 0
    else:
        assert len(rig.cache.begin_load(namespace, 0, 5, 0, keys_of(1, 2, 3, 4)).offsets) == 4
    assert rig.cache.blocks.pinned_blocks == 4
    check_invariants(rig.cache)


def test_a_lease_that_ends_right_after_its_lookup_leaves_no_pin() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1, 2))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1, 2))])
    assert rig.cache.end_owner(1) == 1
    assert rig.cache.blocks.pinned_blocks == 0
    check_invariants(rig.cache)


def use_all_room(rig: CacheHarness, namespace: Namespace) -> None:
    rig.put(namespace, keys_of(*range(100, 100 + rig.slots.pool_bytes // SLOT_UNIT)))


EVICTING = {
    "begin_store": use_all_room,
    "invalidate": lambda rig, namespace: made(rig.cache.invalidate(namespace, [(0, keys_of(1, 2))])),
    "clear": lambda rig, namespace: made(rig.cache.clear_all()),
    "expire": lambda rig, namespace: rig.cache.expire(),
    "evict": lambda rig, namespace: rig.cache.blocks.evict([b for b in rig.cache.policy.candidates() if not b.pins]),
    "blocks": lambda rig, namespace: rig.cache.blocks,
    "leases": lambda rig, namespace: rig.cache.leases,
}


@pytest.mark.parametrize("evicting", EVICTING)
def test_what_a_lookup_just_found_is_pinned_before_anything_else_happens(evicting: str) -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1, 2))
    shards = [namespace.index[0][keys_of(number)].shards[0] for number in (1, 2)]
    assert rig.cache.lookup(namespace, 1, 1, [(0, keys_of(1, 2))]).pinned == 2
    EVICTING[evicting](rig, namespace)
    assert [rig.slots.records[shard.offset][0] for shard in shards] == ["ready", "ready"], "their slots are held"
    ticket = rig.cache.begin_load(namespace, 0, 1, 0, keys_of(1, 2))
    assert ticket.offsets == [shard.offset for shard in shards]
    rig.cache.end_load([ticket], ok=True)
    assert rig.cache.blocks.pinned_blocks == 0
    check_invariants(rig.cache)


def test_blocks_and_leases_are_reached_only_where_deferred_pins_are_entered() -> None:
    """The cache and whoever uses it have no attribute that leads to them past the properties."""
    rig = CacheHarness()
    attributes = {name: value for name, value in vars(rig.cache).items() if isinstance(value, Blocks | LeaseTable)}
    assert set(attributes) == {"_LeasedBlocks__blocks", "_LeasedBlocks__leases"}
