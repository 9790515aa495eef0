"""The tokens of prompts by source, as loads and reports say: they add up to all of the prompt."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffd.cache.namespace import Namespace
from kvoffd.cache.prompt_tokens import LOAD_BYTES, POOL, LoadedKeys, PromptTokens, Source, UncountedLoads
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd_proto.messages import READY
from kvoffd_proto.stats import PROMPT_SOURCES
from tests.kit.slot_cache import keys_of
from tests.kit.tiering_harness import TieringHarness
from tests.tiering.test_shared import give

QUIET = TieringSettings(mode=WriteMode.NEVER)
REDIS, PEER = "redis://fake", "peer://node:7400"
STORE = Source("store", REDIS)


class Rig(TieringHarness):
    """A cache with a disk, a store and a peer."""

    def __init__(self) -> None:
        super().__init__(settings=QUIET)
        self.shared, self.peer = self.share(QUIET), self.share(QUIET, PEER)
        self.lease = 0

    def bring(self, space: Namespace, keys: bytes) -> None:
        """Look keys up until they are all in the pool."""
        for _ in range(5):
            if self.states(space, keys) == [READY] * (len(keys) // 8):
                break
            for tier in (self.shared, self.peer):
                tier.answer()
            self.tiering.pump()
            for tier in (self.tier, self.shared, self.peer):
                tier.end_all()
        assert self.states(space, keys) == [READY] * (len(keys) // 8)
        self.stop_waiting()

    def load(self, space: Namespace, keys: bytes, *, ok: bool = True) -> int:
        """Load keys on all ranks, under a lease that ends; return its id."""
        self.lease += 1
        self.cache.lookup(space, 1, self.lease, [(0, keys)], again=True)
        for rank in range(space.world_size):
            ticket = self.cache.begin_load(space, rank, self.lease, 0, keys)
            self.cache.end_load([ticket], is_success=ok, ends_lease=True)
        return self.lease

    def count(self, space: Namespace, lease: int, *tokens: int) -> dict[str, int]:
        return self.cache.prompts.count_tokens(space, 1, lease, PromptTokens(*tokens))


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def space(rig: Rig) -> Namespace:
    return rig.open(world_size=2)


def put_below(rig: Rig, space: Namespace) -> None:
    """Blocks 1 and 2 in the pool, 3 on the disk, 4 in the store, 5 at the peer."""
    rig.put_in_tier(space, keys_of(3))
    rig.put(space, keys_of(1, 2))
    give(rig, rig.shared, space, 4, first=0)
    give(rig, rig.peer, space, 5, first=0)


def test_tokens_are_counted_by_the_place_from_which_their_keys_came(rig: Rig, space: Namespace) -> None:
    put_below(rig, space)
    keys = keys_of(1, 2, 3, 4, 5)
    rig.bring(space, keys)
    first = rig.load(space, keys)
    expected = {"computed": 12, "engine": 8, "pool": 24, "disk": 16, REDIS: 16, PEER: 16}
    assert rig.count(space, first, 92, 8, 72, 0) == expected, "the engine's own cache ends in the first block"
    kinds = expected | {"store": 16, "peer": 16}
    del kinds[REDIS], kinds[PEER]
    assert space.counters.prompt_tokens == kinds
    assert set(kinds) == set(PROMPT_SOURCES) - {"other"}
    assert rig.count(space, rig.load(space, keys), 80, 0, 79, 0) == {"computed": 1, "pool": 79}, "it is there by now"
    assert space.counters.prompt_tokens.total() == 92 + 80


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_load_that_is_too_large_for_one_message_is_counted_whole(rig: Rig, space: Namespace, cut: int) -> None:
    """Its parts are loads of their own under one lease, of which a part may be in the pool as a whole."""
    put_below(rig, space)
    keys = keys_of(1, 2, 3, 4, 5)
    rig.bring(space, keys)
    rig.cache.lookup(space, 1, 1, [(0, keys)], again=True)
    for part in (keys[: 8 * cut], keys[8 * cut :]):
        for rank in range(space.world_size):
            ticket = rig.cache.begin_load(space, rank, 1, 0, part)
            rig.cache.end_load([ticket], is_success=True, ends_lease=part[-8:] == keys[-8:])
    expected = {"computed": 1, "pool": 32, "disk": 16, REDIS: 16, PEER: 16}
    assert rig.count(space, 1, 81, 0, 80, 0) == expected


def test_what_was_not_loaded_stays_where_it_came_from(rig: Rig, space: Namespace) -> None:
    """As that of a failed load, or of one that nobody reports."""
    put_below(rig, space)
    rig.bring(space, keys_of(1, 2, 3))
    assert rig.count(space, rig.load(space, keys_of(1, 2)), 40, 0, 32, 0) == {"computed": 8, "pool": 32}
    assert rig.count(space, 0, 40, 0, 0, 30) == {"computed": 10, "other": 30}
    assert rig.count(space, 99, 40, 0, 20, 0) == {"computed": 20, "pool": 20}, "an unknown lease"
    assert rig.count(space, rig.load(space, keys_of(1, 2, 3), ok=False), 48, 0, 0, 0) == {"computed": 48}
    assert rig.count(space, rig.load(space, keys_of(1, 2, 3)), 48, 0, 48, 0) == {"pool": 32, "disk": 16}


def test_what_was_promoted_for_a_load_that_failed_is_unused_if_it_goes(rig: Rig, space: Namespace) -> None:
    put_below(rig, space)
    rig.bring(space, keys_of(1, 2, 3))
    rig.load(space, keys_of(1, 2, 3), ok=False)
    rig.evict(space, keys_of(3))
    assert rig.source.unused_blocks == 1


def test_the_first_load_imports_no_module() -> None:
    """The daemon's loop would wait for it. In a process of its own, as tests have imported more by now."""
    program = (
        "import sys\n"
        "from tests.kit.slot_cache import keys_of\n"
        "from tests.tiering.test_prompt_tokens import Rig, put_below\n"
        "rig = Rig()\n"
        "space = rig.open(world_size=2)\n"
        "before = set(sys.modules)\n"
        "put_below(rig, space)\n"
        "keys = keys_of(1, 2, 3, 4, 5)\n"
        "rig.bring(space, keys)\n"
        "assert len(rig.count(space, rig.load(space, keys), 80, 0, 80, 0)) == 4\n"
        "print(sorted(set(sys.modules) - before))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert ended.stdout == "[]\n"


def test_loads_without_a_report_are_forgotten() -> None:
    uncounted, keys = UncountedLoads(), LoadedKeys(1, b"\1" * (2**20 - LOAD_BYTES), {1: POOL})
    for number in range(1, 6):
        uncounted.add(1, number, (0, b"key"), keys)
    assert uncounted.take(1, 1) is None
    assert [uncounted.take(1, number) for number in range(2, 6)] == [keys] * 4
    assert (uncounted._nbytes, uncounted._by_lease) == (0, {})


@given(
    st.integers(0, 40),
    st.integers(1, 300),
    st.sampled_from([0, 1, 7, 16]),
    st.data(),
)
def test_the_sum_is_that_of_the_prompt(own: int, loaded: int, each: int, data: st.DataObject) -> None:
    """A key for each token, or those of a window at the end."""
    every = -(-(own + loaded) // max(1, each)) - own // max(1, each)
    numbers = bytes(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=every)))
    disk = Source("disk", "disk")
    keys = LoadedKeys(each, numbers, {1: disk, 2: STORE})
    found = PromptTokens(own + loaded + 5, own, loaded, 2).by_source(keys)
    assert sum(found.values()) == own + loaded + 5
    assert found[Source("computed", "computed")] == 3
    assert min(found.values()) > 0
    if each and len(numbers) == every:
        one_by_one = [numbers[at // each - own // each] for at in range(own, own + loaded)]
        for number, source in enumerate((POOL, disk, STORE)):
            assert found.get(source, 0) == one_by_one.count(number)
