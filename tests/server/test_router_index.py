"""What routers are told, folded as they fold it, beside what the daemon holds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from kvoffd.cache.namespace import Namespace
from kvoffd.server import router_index
from kvoffd.server.router_index import (
    BLOCK_BYTES,
    MAX_BLOCK_TOKENS,
    MAX_BLOCKS_PER_EVENT,
    PUBLISHED_AT_ONCE,
    TOKENS_OF_ONE,
    RouterIndex,
)
from kvoffd_proto.messages import GroupSpec
from kvoffd_proto.router_events import ClearedBlocks, RemovedBlocks, RouterEvent, StoredBlocks, router_hash

BLOCK_TOKENS, KEY_BYTES = 4, 32
ROOT = bytes(KEY_BYTES)
CPU, STORAGE = "CPU", "STORAGE"


def namespace(label: str = "model") -> Namespace:
    groups = [GroupSpec("full_attention", BLOCK_TOKENS), GroupSpec("sliding_window", BLOCK_TOKENS, 128)]
    return Namespace(label.encode().ljust(32, b"."), label, 1, KEY_BYTES, groups, "{}")


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def tokens(number: int) -> bytes:
    return b"".join([(100 * number + at).to_bytes(4, "little") for at in range(BLOCK_TOKENS)])


def expect(index: RouterIndex, of: Namespace, chain: Sequence[int], parent: int = 0, group: int = 0) -> None:
    parents = b"".join([key(number) for number in [parent, *chain[:-1]]])
    index.expect(of, group, [key(number) for number in chain], parents, b"".join(map(tokens, chain)))


class Router:
    """Folds events as routers do: a block whose parent it does not know is not taken.

    ``late``: it has not heard all from the start.
    """

    def __init__(self, *, late: bool = False) -> None:
        self.late = late
        self.blocks: dict[tuple[int, str, int], tuple[int, tuple[int, ...]]] = {}
        self.events: list[RouterEvent] = []

    def take(self, messages: Any) -> Router:
        for _, events in messages:
            for event in events:
                self.apply(event)
        return self

    def apply(self, event: RouterEvent) -> None:
        self.events.append(event)
        if isinstance(event, ClearedBlocks):
            self.blocks.clear()
            return
        if isinstance(event, RemovedBlocks):
            for block in event.block_hashes:
                found = self.blocks.pop((event.group_idx, event.medium, block), None)
                assert found or self.late, "a block was taken back that was not told"
            return
        assert isinstance(event, StoredBlocks)
        parent, size = event.parent_block_hash, event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        known = {block for group, _, block in self.blocks if group == event.group_idx}
        for number, block in enumerate(event.block_hashes):
            if parent is not None and parent not in known:
                assert self.late, "a block came before its parent"
                return
            place = event.group_idx, event.medium, block
            assert place not in self.blocks or self.late, "a block was told twice"
            self.blocks[place] = parent or 0, tuple(event.token_ids[number * size : (number + 1) * size])
            known.add(block)
            parent = block

    def held(self, medium: str = CPU, group: int = 0) -> set[int]:
        return {block for at, where, block in self.blocks if (at, where) == (group, medium)}


@pytest.fixture
def index() -> RouterIndex:
    return RouterIndex("node", 1 << 30)


def test_a_chain_is_one_event_with_the_tokens_of_all_its_blocks(index: RouterIndex) -> None:
    one = namespace()
    expect(index, one, [1, 2, 3])
    assert list(index.take()) == [], "nothing is there yet"
    index.stored(one, 0, [key(number) for number in (1, 2, 3)])
    ((topic, (event,)),) = index.take()
    assert topic == b"kv@node:node@model"
    assert event == StoredBlocks(
        [1, 2, 3],
        None,
        [100, 101, 102, 103, 200, 201, 202, 203, 300, 301, 302, 303],
        4,
        None,
        CPU,
        None,
        0,
        "full_attention",
        None,
    )
    expect(index, one, [4], 3)
    index.stored(one, 0, [key(4)])
    ((_, (event,)),) = index.take()
    assert isinstance(event, StoredBlocks)
    assert (event.block_hashes, event.parent_block_hash) == ([4], 3)


def test_hashes_are_the_last_eight_bytes(index: RouterIndex) -> None:
    assert router_hash(bytes(range(32))) == int.from_bytes(bytes(range(24, 32)), "big")


def test_a_block_without_its_parent_is_told_when_that_comes_and_taken_back_when_it_goes(index: RouterIndex) -> None:
    one, router = namespace(), Router()
    expect(index, one, [1, 2, 3])
    index.stored(one, 0, [key(2), key(3)])
    assert router.take(index.take()).blocks == {}
    index.stored(one, 0, [key(1)])
    assert router.take(index.take()).held() == {1, 2, 3}
    index.removed(one, 0, [key(2)])
    assert router.take(index.take()).held() == {1}
    expect(index, one, [2], 1)
    index.stored(one, 0, [key(2)])
    assert router.take(index.take()).held() == {1, 2, 3}


def test_a_parent_on_disk_is_as_good_as_one_in_the_pool(index: RouterIndex) -> None:
    one, router = namespace(), Router()
    expect(index, one, [1, 2])
    index.stored(one, 0, [key(1), key(2)])
    index.stored(one, 0, [key(1)], STORAGE)
    index.removed(one, 0, [key(1)])
    router.take(index.take())
    assert (router.held(CPU), router.held(STORAGE)) == ({2}, {1})
    index.removed(one, 0, [key(1)], STORAGE)
    assert router.take(index.take()).blocks == {}
    index.removed(one, 0, [key(2)])
    assert (router.take(index.take()).blocks, index.published_blocks) == ({}, 0)


def test_blocks_of_unknown_tokens_are_counted_and_told_once_these_are_known(index: RouterIndex) -> None:
    one, router = namespace(), Router()
    index.stored(one, 0, [key(1)])  # adopted from an earlier daemon
    assert (router.take(index.take()).blocks, index.unpublished_blocks) == ({}, 1)
    expect(index, one, [1])
    assert router.take(index.take()).held() == {1}


def test_clearing_one_of_two_namespaces_says_nothing_of_the_other_s_blocks(index: RouterIndex) -> None:
    one, other, router = namespace("one"), namespace("other"), Router()
    for each, number in ((one, 1), (other, 5)):
        expect(index, each, [number])
        index.stored(each, 0, [key(number)])
    router.take(index.take())
    index.cleared(one)
    assert router.take(index.take()).held() == {5}
    index.cleared(other)
    assert router.take(index.take()).blocks == {}
    assert isinstance(router.events[-1], ClearedBlocks), "there is nobody else: one event says it"
    assert (index.published_blocks, index.index_bytes) == (0, 0)


def test_what_comes_while_a_snapshot_clears_several_topics_is_not_lost(index: RouterIndex) -> None:
    spaces = [namespace(label) for label in ("a", "b", "c")]

    def store(numbers: Sequence[int]) -> None:
        for number, one in zip(numbers, spaces, strict=False):
            expect(index, one, [number])
            index.stored(one, 0, [key(number)])

    store([1, 2])
    Router().take(index.take())
    late, snapshot = Router(late=True), index.snapshot()
    for step in range(3):
        late.take([next(snapshot)])
        store([10 * step + 11, 10 * step + 12, 10 * step + 13])
        late.take(index.take())
    late.take(snapshot)
    assert late.held() == {1, 2, 11, 12, 13, 21, 22, 23, 31, 32, 33}


def test_an_index_that_is_full_tells_no_more_and_takes_no_more_memory() -> None:
    full, one = RouterIndex("node", 3 * (BLOCK_BYTES + 4 * BLOCK_TOKENS)), namespace()
    expect(full, one, list(range(1, 10)))
    full.stored(one, 0, [key(number) for number in range(1, 10)])
    assert full.index_bytes <= 3 * (BLOCK_BYTES + 4 * BLOCK_TOKENS)
    assert Router().take(full.take()).held() == {1}
    assert full.unpublished_blocks == 8


def test_blocks_that_never_come_keep_no_room_from_those_that_do() -> None:
    full, one, router = RouterIndex("node", 20 * (BLOCK_BYTES + 4 * BLOCK_TOKENS)), namespace(), Router()
    for number in range(100, 200):
        expect(full, one, [number])  # as what the policy declines
    chain = list(range(1, 30))
    expect(full, one, chain)
    full.stored(one, 0, [key(number) for number in chain])
    assert router.take(full.take()).held() == set(chain[:18]), "the first ones: behind a gap nothing is of use"
    assert full.index_bytes <= 20 * (BLOCK_BYTES + 4 * BLOCK_TOKENS)


def test_blocks_that_are_expected_and_never_come_are_forgotten(
    index: RouterIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_index, "MAX_EXPECTED", 100)
    one = namespace()
    for number in range(1, 1000):
        expect(index, one, [number], number - 1)
    most = 103 * (BLOCK_BYTES + 4 * BLOCK_TOKENS)
    assert index.index_bytes < most
    index.cleared(one)
    assert index.index_bytes == 0


def test_a_block_that_is_its_own_parent_is_not_told_and_goes_as_others_do(index: RouterIndex) -> None:
    one, router = namespace(), Router()
    expect(index, one, [7], 7)
    index.stored(one, 0, [key(7)])
    assert router.take(index.take()).held() == set()
    index.removed(one, 0, [key(7)])
    assert router.take(index.take()).events == []
    index.cleared(one)
    assert index.index_bytes == 0


def test_a_long_chain_is_told_in_several_events(index: RouterIndex) -> None:
    one, chain = namespace(), list(range(1, 3 * MAX_BLOCKS_PER_EVENT))
    expect(index, one, chain)
    index.stored(one, 0, [key(number) for number in chain])
    messages = list(index.take())
    assert len(messages) == 3
    assert Router().take(messages).held() == set(chain)
    index.removed(one, 0, [key(number) for number in chain])
    assert len(list(index.take())) == 3


@pytest.mark.parametrize("deep", [False, True])
def test_what_comes_after_a_block_is_told_and_taken_back_in_steps(index: RouterIndex, deep: bool) -> None:
    one, router, most = namespace(), Router(), 2000
    for number in range(2, most):
        expect(index, one, [number], number - 1 if deep else 1)
        index.stored(one, 0, [key(number)])
    expect(index, one, [1])
    told = [0]
    for change in (index.stored, index.removed, index.stored):
        change(one, 0, [key(1)])
        expect(index, one, [1])
        while index.has_news:
            router.take(index.take())
            assert abs(len(router.blocks) - told[-1]) <= 2 * PUBLISHED_AT_ONCE + 2
            told.append(len(router.blocks))
    assert max(told) == told[-1] == most - 1
    assert told.count(0) == 2, "before, and when all was taken back"


def test_a_block_that_comes_and_goes_waits_once_while_what_comes_after_it_is_told(index: RouterIndex) -> None:
    one, router, most = namespace(), Router(), 8 * PUBLISHED_AT_ONCE
    for number in range(2, most):
        expect(index, one, [number], 1)
        index.stored(one, 0, [key(number)])
    for _ in range(200):
        expect(index, one, [1])
        index.stored(one, 0, [key(1)])
        index.removed(one, 0, [key(1)])
        assert sum(len(keys) for _, keys, after in index._changed if not after) <= 1
    while index.has_news:
        router.take(index.take())
    assert router.held() == set()


def test_blocks_of_many_tokens_are_told_a_few_at_a_time_and_of_very_many_not_at_all() -> None:
    """Numbers take nine times their bytes, and what makes messages of them is the loop's time."""
    size, chain = 32 * TOKENS_OF_ONE, range(1, 200)
    index, one = RouterIndex("node", 1 << 30), namespace()
    one.groups = (GroupSpec("full_attention", size), GroupSpec("full_attention", MAX_BLOCK_TOKENS + 1))
    for number in reversed(chain):  # the first of the chain brings all others
        index.expect(one, 0, [key(number)], key(number - 1), bytes(4 * size))
        index.stored(one, 0, [key(number)])
    index.expect(one, 1, [key(1)], ROOT, bytes(4 * (MAX_BLOCK_TOKENS + 1)))
    index.stored(one, 1, [key(1)])
    told: set[tuple[int, int]] = set()
    while index.has_news:
        step = [stored_in(events) for _, events in index.take()]
        assert sum(map(tokens_of, step)) <= 2 * PUBLISHED_AT_ONCE * TOKENS_OF_ONE + 2 * size
        for message in [*step, *[stored_in(events) for _, events in index.snapshot()]]:
            assert tokens_of(message) <= MAX_BLOCKS_PER_EVENT * TOKENS_OF_ONE + size
        told |= {(event.group_idx, block) for message in step for event in message for block in event.block_hashes}
    assert told == {(0, number) for number in chain}
    assert index.unpublished_blocks == 1


def tokens_of(events: Sequence[StoredBlocks]) -> int:
    return sum([len(event.token_ids) for event in events])


def stored_in(events: Sequence[RouterEvent]) -> list[StoredBlocks]:
    return [event for event in events if isinstance(event, StoredBlocks)]


@pytest.mark.parametrize("at_once", [PUBLISHED_AT_ONCE, 1])
@pytest.mark.parametrize("seed", range(8))
def test_events_fold_to_what_is_held_and_so_do_snapshots_that_run_meanwhile(
    seed: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random trees of blocks that come and go in two places; a router that was there from the start, and latecomers."""
    monkeypatch.setattr(router_index, "MAX_BLOCKS_PER_EVENT", 3)
    monkeypatch.setattr(router_index, "PUBLISHED_AT_ONCE", at_once)
    rng = random.Random(seed)
    index, one = RouterIndex("node", 1 << 30), namespace()
    parents: dict[int, int] = {}
    held: dict[str, set[int]] = {CPU: set(), STORAGE: set()}
    stored = {one: partial(index.stored, medium=one) for one in (CPU, STORAGE)}
    removed = {one: partial(index.removed, medium=one) for one in (CPU, STORAGE)}
    early, late, snapshot = Router(), Router(), None

    def reachable(number: int) -> bool:
        while number:
            if not any(number in blocks for blocks in held.values()):
                return False
            number = parents[number]
        return True

    def take() -> None:
        for message in index.take():
            early.take([message])
            late.take([message]) if snapshot is not None else None

    lagged = 0
    for step in range(400):
        number = rng.randrange(1, 60)
        parents.setdefault(number, rng.choice([0, *parents]))
        if parents[number] == number:
            parents[number] = 0
        medium = rng.choice([CPU, STORAGE])
        if number in held[medium]:
            if rng.random() < 0.6:
                held[medium].discard(number)
                removed[medium](one, 0, [key(number)])
        else:
            if not any(number in blocks for blocks in held.values()):
                expect(index, one, [number], parents[number])
            held[medium].add(number)
            stored[medium](one, 0, [key(number)])
        if rng.random() < 0.02:
            for blocks in held.values():
                blocks.clear()
            index.cleared(one)
        take()
        if snapshot is None and step % 100 == 50:
            late, snapshot = Router(late=True), index.snapshot()
        elif snapshot is not None and (message := next(snapshot, None)) is not None:
            late.take([message])
        elif snapshot is not None:
            while index.has_news:
                take()
            assert late.blocks == early.blocks
            snapshot = None
        lagged += index.has_news
        for where, blocks in held.items() if not index.has_news else ():
            assert early.held(where) == {one for one in blocks if reachable(one)}
    assert bool(lagged) == (at_once == 1)
    while index.has_news:
        take()
    assert index.published_blocks == len({block for _, _, block in early.blocks})
    index.cleared(one)
    assert index.index_bytes == 0
