"""The policy that learns, before clients that send whatever is worst for it, and after years."""

from __future__ import annotations

import random
import struct
import zlib

import pytest

from kvoffd.cache.namespace import Namespace
from kvoffd.cache.policies import make_policy
from kvoffd.cache.policies.learned import Policy
from kvoffd_proto.messages import READY
from tests.kit.cache_harness import CacheHarness, keys_of
from tests.kit.learned_check import check_learned, policy_of

MIB = 1 << 20
MOST_SEEN = 2**16 - 1


def record_of(rig: CacheHarness) -> bytes:
    return b"".join(policy_of(rig).record())


def ask(rig: CacheHarness, namespace: Namespace, chain: list[int]) -> bytes:
    answer = rig.cache.lookup(namespace, 7, 1, [(0, keys_of(*chain))])
    rig.cache.touch(7)
    rig.cache.release(1, [7])
    return answer.states[0]


def test_one_request_for_more_than_the_pool_makes_nothing_forgotten_and_nothing_old() -> None:
    rig = CacheHarness(regions=10, region_bytes=4 * MIB, policy="learned")  # 40 blocks
    polite, hostile = rig.open("polite", shard_bytes=(MIB,)), rig.open("hostile", world_size=8, shard_bytes=(4 * MIB,))
    for first in range(0, 600, 20):
        ask(rig, polite, list(range(first, first + 10)))
    known, before = policy_of(rig).known, policy_of(rig).known.now
    remembered = policy_of(rig).ghosts
    ask(rig, hostile, list(range(50_000)))
    assert known.now - before <= rig.slots.pool_bytes
    assert remembered <= policy_of(rig).ghosts <= remembered + 1
    check_learned(policy_of(rig))


def test_what_is_too_much_is_forgotten_a_little_with_each_request() -> None:
    rig = CacheHarness(regions=512, region_bytes=32 * MIB, policy="learned")
    small, large = rig.open("small", shard_bytes=(MIB // 16,)), rig.open("large", shard_bytes=(32 * MIB,))
    for first in range(0, 60_000, 3000):
        ask(rig, small, list(range(first, first + 3000)))
    policy = policy_of(rig)
    forgotten, left = [], policy.ghosts
    for first in range(0, 512 * 50, 512):  # each as much as the pool holds
        ask(rig, large, list(range(first, first + 512)))
        forgotten.append(left + 512 - policy.ghosts)
        left = policy.ghosts
    assert sum(forgotten) >= 60_000
    assert max(forgotten) <= 2048 + 2 * 512
    check_learned(policy)


@pytest.mark.parametrize("asked_first", [False, True])
def test_what_is_stored_without_being_asked_for_is_forgotten_too(asked_first: bool) -> None:
    rig = CacheHarness(regions=10, region_bytes=16 * MIB, policy="learned")  # 160 blocks
    namespace = rig.open(shard_bytes=(MIB,))
    worth_more = list(range(1_000_000, 1_000_160))
    for _ in range(8 if asked_first else 0):  # the policy declines then
        ask(rig, namespace, worth_more)
        rig.put(namespace, keys_of(*worth_more))
    for first in range(0, 50_000, 500):
        rig.put(namespace, keys_of(*range(first, first + 500)))
    policy = policy_of(rig)
    assert (namespace.counters.declined_keys > 0) is asked_first
    assert policy.known.known_keys <= 17 * 160 + 2 * 500
    assert policy.nbytes < MIB
    check_learned(policy)


def test_the_memory_of_keys_that_are_forgotten_is_given_back_where_keys_before_them_have_blocks() -> None:
    rig = CacheHarness(regions=16, region_bytes=16 * MIB, policy="learned")  # 4,096 blocks
    namespace = rig.open(shard_bytes=(MIB // 16,))
    for first in range(0, 300 * 2000, 2000):
        ask(rig, namespace, list(range(first, first + 2000)))
        rig.put(namespace, keys_of(first))
    policy = policy_of(rig)
    assert len(policy) == 300
    assert policy.nbytes < rig.slots.pool_bytes // 50
    check_learned(policy)


def test_a_request_made_of_very_many_parts_is_taken_from_its_end() -> None:
    """Each of its keys was seen another number of times than the next one."""
    rig = CacheHarness(regions=8, region_bytes=1024 * MIB, policy="learned")
    namespace = rig.open(shard_bytes=(MIB,))
    chain = list(range(1300))
    for count in range(1, len(chain) + 1):
        ask(rig, namespace, chain[:count])
    rig.put(namespace, keys_of(*chain))
    policy = policy_of(rig)
    assert policy.known.spans > 1200
    check_learned(policy)
    order = [int.from_bytes(block.key, "big") for block in policy.candidates()]
    assert sorted(order) == chain
    assert order[:900] == sorted(order[:900], reverse=True)


def counted(record: bytes, seen: int) -> bytes:
    """Its first span was seen, and its conversation went on, so often."""
    changed = bytearray(record)
    struct.pack_into("=II", changed, 20, seen, seen)
    struct.pack_into("=I", changed, len(changed) - 4, zlib.crc32(changed[:-4]))
    return bytes(changed)


@pytest.mark.parametrize("seen", [MOST_SEEN, MOST_SEEN + 1, 2**30])
def test_what_is_asked_for_for_ever_is_counted_no_further(seen: int) -> None:
    rig = CacheHarness(regions=10, region_bytes=4 * MIB, policy="learned")
    ask(rig, rig.open(shard_bytes=(MIB,)), [1, 2, 3])
    heir = CacheHarness(regions=10, region_bytes=4 * MIB, policy="learned")
    policy = policy_of(heir)
    policy.go_on(counted(record_of(rig), seen))
    namespace = heir.open(shard_bytes=(MIB,))
    for _ in range(3):
        ask(heir, namespace, [1, 2, 3])
        worth = policy.worth_of(namespace, 0, keys_of(1))
        assert (worth.requests, worth.turn) == (MOST_SEEN, MOST_SEEN)
        next_one = make_policy("learned", heir.slots.pool_bytes)
        next_one.go_on(record_of(heir))  # is not refused
    check_learned(policy)


def test_a_record_whose_spans_take_keys_from_each_other_leaves_no_loose_ends() -> None:
    """The last span that was read is gone, and its number is of the rest of another one, when one comes that has it as
    its child."""
    rig = CacheHarness(regions=10, region_bytes=4 * MIB, policy="learned")
    namespace = rig.open(shard_bytes=(MIB,))
    for chain in ([1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13]):
        ask(rig, namespace, chain)
    record, head, ends = record_of(rig), 40, (40 + 8 * 8, 80 + 8 * 8 + 8 * 3)
    first, last, rest = record[: ends[0]], record[ends[0] : ends[1]], bytearray(record[ends[1] : -4])
    thief = bytearray(last[:head]) + last[head:] + first[head + 8 * 2 : head + 8 * 4]
    struct.pack_into("=I", thief, 16, 5)  # keys
    thief[34] = 1  # it has a child
    struct.pack_into("=Q", rest, 48, 3)  # spans
    crafted = first + last + thief + rest
    policy = make_policy("learned", rig.slots.pool_bytes)
    assert isinstance(policy, Policy)
    policy.go_on(crafted + struct.pack("=I", zlib.crc32(crafted)))
    check_learned(policy)


def test_a_block_larger_than_the_pool_does_not_spoil_the_record() -> None:
    rig = CacheHarness(regions=2, region_bytes=4 * MIB, policy="learned")
    namespace = rig.open(world_size=4, shard_bytes=(4 * MIB,))
    ask(rig, namespace, [1, 2, 3])
    rig.put(namespace, keys_of(1, 2, 3))
    next_one = make_policy("learned", rig.slots.pool_bytes)
    next_one.go_on(record_of(rig))
    check_learned(policy_of(rig))


def test_time_that_is_counted_anew_changes_no_decision() -> None:
    """The same requests for blocks of a MiB and for blocks so large that time would pass all numbers."""
    sizes = (MIB, 2**48)
    rigs = [CacheHarness(regions=10, region_bytes=4 * size, policy="learned") for size in sizes]
    spaces = [rig.open(shard_bytes=(size,)) for rig, size in zip(rigs, sizes, strict=True)]
    rng, found, backward, last = random.Random(7), [0, 0], 0, 0
    for _ in range(4000):
        first = 20 * rng.randrange(12)
        chain = list(range(first, first + rng.randint(1, 18)))
        for number, (rig, space) in enumerate(zip(rigs, spaces, strict=True)):
            found[number] += ask(rig, space, chain).count(READY)
            rig.put(space, keys_of(*chain))
        now = policy_of(rigs[1]).known.now
        backward, last = backward + (now < last), now
    assert backward >= 2
    assert found[0] == pytest.approx(found[1], rel=0.01)
    for rig in rigs:
        check_learned(policy_of(rig))
    make_policy("learned", rigs[1].slots.pool_bytes).go_on(record_of(rigs[1]))
