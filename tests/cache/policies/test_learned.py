"""The policy that learns what comes back: its books under any order of requests, and what it makes of made-up loads."""

from __future__ import annotations

import ctypes
import functools
import random
import re
import struct
import subprocess
import tempfile
import zlib
from collections import deque
from collections.abc import Callable
from itertools import count, cycle, islice
from math import nan
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvoffd
from kvoffd.cache import learned
from kvoffd.cache.block_table import BlockTable
from kvoffd.cache.curve import HitRatioCurve
from kvoffd.cache.learned import BINS, CLASSES, FIRST_STAY, JUDGED_AFTER, Learned, LruFallback
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.cache.policy import Chain
from kvoffd.simulate.replay import replay
from kvoffd_proto.messages import READY
from kvoffd_proto.stats import HitCurve
from tests.kit.amount import TIMES
from tests.kit.cuda_abi import compiler
from tests.kit.made_up_loads import LOADS, Traffic, chat_among_single_requests, trace_of
from tests.kit.slot_cache import UNIT, CacheRig, check_invariants, keys_of

CHECK = Path(__file__).with_name("learned_check.c")
REMEMBERED_POOLS = 16
"""As in learned.c."""
GHOST_BYTES = 140
MIB = 1 << 20


@functools.cache
def checker() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory, "check.so")
        headers = Path(kvoffd.__file__).parent / "cache"
        flags = ["-std=gnu11", "-O1", "-fPIC", "-shared", f"-I{headers}"]
        subprocess.run([compiler(), *flags, "-o", made, CHECK], check=True)
        return ctypes.CDLL(str(made))


def policy_of(rig: CacheRig) -> Learned:
    assert isinstance(rig.policy, Learned)
    return rig.policy


def check_learned(rig: CacheRig) -> None:
    """Every known key has one place, every block is at the place of its key, and what is counted is so."""
    policy = policy_of(rig)
    line = checker().check_learned(ctypes.c_void_p(policy._at))
    assert not line, f"{CHECK}:{line}: {CHECK.read_text().splitlines()[line - 1].strip()}"
    ready = np.flatnonzero(rig.cache.blocks.state == READY).tolist()
    assert sorted(policy.first(len(ready) + 1).tolist()) == ready


def learned_rig(units: int, region_units: int, unit: int = UNIT) -> CacheRig:
    return CacheRig(units, region_units, "learned", unit, leased_share=1.0)


def test_the_page_has_the_names_of_the_code() -> None:
    folder = Path(learned.__file__).parent
    code = (folder / "learned.c").read_text() + (folder / "learned.py").read_text()
    named = re.findall(r"`([A-Z][A-Z_]+)`", (folder / "LEARNED.md").read_text())
    assert [name for name in named if not re.search(rf"\b{name}\b", code)] == []


def bytes_of(policy: Learned) -> int:
    """Memory of what it knows of keys."""
    return policy.nbytes - learned_rig(16, 4).policy.nbytes


def look(rig: CacheRig, namespace: Namespace, chain: list[int], group: int = 0) -> bytes:
    return rig.look(namespace, keys_of(*chain), group)


def ask(rig: CacheRig, namespace: Namespace, chain: list[int]) -> bytes:
    """A request and its store."""
    return rig.ask(namespace, keys_of(*chain))


chains = st.lists(st.integers(0, 40), max_size=12)
prefixes = st.builds(lambda first, length: list(range(first, first + length)), st.integers(0, 30), st.integers(0, 20))
steps = st.one_of(
    st.tuples(st.just("ask"), st.one_of(chains, prefixes), st.integers(0, 1)),
    st.tuples(st.just("store"), st.one_of(chains, prefixes).map(lambda c: list(dict.fromkeys(c))), st.integers(0, 1)),
    st.tuples(st.just("drop"), chains, st.integers(0, 1)),
)


@settings(max_examples=20 * TIMES**2)
@given(st.lists(steps, max_size=60))
def test_its_books_are_right_after_any_requests(order: list[tuple[str, list[int], int]]) -> None:
    rig = learned_rig(24, 8)
    namespace = rig.open("a", sizes=(UNIT, 2 * UNIT))
    bench = rig.open("bench b")
    for what, chain, group in order:
        if what == "ask":
            look(rig, namespace, chain, group)
        elif what == "store":
            rig.store(namespace, keys_of(*chain), group)
            if group:
                rig.ask(bench, keys_of(*chain[:4]))
        else:
            rig.cache.invalidate(namespace, [(group, keys_of(*chain))])
        check_learned(rig)
    check_invariants(rig.cache)


def documents(count: int, blocks: int, requests: int) -> list[list[int]]:
    """Requests for some documents, one after the other, again and again."""
    every = [list(range(number * blocks, (number + 1) * blocks)) for number in range(count)]
    return list(islice(cycle(every), requests))


def test_single_requests_do_not_evict_what_comes_back() -> None:
    shared = documents(30, 20, 1200)
    once = [list(range(10**6 + number * 30, 10**6 + number * 30 + 30)) for number in range(1200)]
    trace = trace_of([request for pair in zip(shared, once, strict=True) for request in pair])
    lru, learned = (replay(trace, policy, 800) for policy in ("lru", "learned"))
    assert learned.hit_percent > lru.hit_percent + 20
    assert learned.written < lru.written / 2


def conversations(rng: random.Random, tokens: int) -> list[list[int]]:
    """Prompts of growing conversations, in blocks of so many tokens; the same text whatever the tokens."""
    open_: dict[int, list[int]] = {}
    requests, fresh = [], 0
    for _ in range(1500):
        name = rng.randrange(60)
        grown = 1024 * rng.randint(1, 4)
        text = open_.get(name, [])
        if rng.random() < 0.2:
            text = []
        text = [*text, *range(fresh, fresh + grown // 1024)]
        fresh += grown // 1024
        open_[name] = text
        per = 1024 // tokens
        requests.append([unit * per + part for unit in text for part in range(per)])
    return requests


def test_an_lru_that_the_curve_overrates_is_tried_once() -> None:
    """Requests that come at once find nothing yet, and the curve counts them as found: the pool is none the worse."""

    class Curve(HitRatioCurve):
        def in_all(self) -> HitCurve:
            asked = policy.known.now
            return HitCurve(asked, asked // 2, {"1": 0.55})

    policy = policy_of(learned_rig(32, 4, MIB))
    fallback = LruFallback(Curve(32 * MIB, lambda: 0.0), policy)
    seen = []
    for _ in range(1000):
        policy.known.now += policy.known.lifetime
        fallback.judge()
        seen.append(policy.known.as_lru)
    assert seen.count(1) == FIRST_STAY
    assert seen[JUDGED_AFTER]
    assert not seen[JUDGED_AFTER + FIRST_STAY + 1]


@pytest.mark.parametrize("lifetimes", [1.5, 2, 3, 10])
def test_without_any_evidence_the_oldest_go_first(lifetimes: float) -> None:
    """Requests of which none comes back, until there is evidence that none does and they are declined."""
    rig = learned_rig(32, 16, MIB)
    namespace = rig.open("a")
    requests = [list(range(first, first + 8)) for first in range(0, int(lifetimes * 32), 8)]
    for request in requests:
        ask(rig, namespace, request)
    kept = [rig.states(namespace, keys_of(*request)).count(READY) for request in requests]
    assert kept == [0] * (len(requests) - 4) + [8] * 4


def nights(days: int) -> list[list[int]]:
    """Conversations by day, that go on soon or never, and the same hundred documents every night."""
    rng, numbers, requests = random.Random(3), count(10**6), []
    for _ in range(days):
        going: list[list[int]] = [[] for _ in range(30)]
        for _ in range(250):
            at = rng.randrange(30)
            going[at] = [] if len(going[at]) > 8 else going[at]
            going[at] = going[at] + list(islice(numbers, rng.randint(1, 3)))
            requests.append(going[at])
        requests += [list(range(10 * document, 10 * document + 6)) for document in range(100)]
    return requests


def made_up(load: str) -> list[list[int]]:
    return list(islice(LOADS[load](Traffic(1)), 6000))


LEADS: dict[str, tuple[Callable[[], list[list[int]]], list[int], float]] = {
    "documents in a cycle, twice the pool": (lambda: documents(100, 20, 3000), [1000], 46),  # of 48 that are possible
    "conversations that go on by chance": (lambda: conversations(random.Random(5), 1024), [100, 400], -0.8),
    "a pool that has just become full": (lambda: chat_among_single_requests(1, 5000), [1500, 2500, 3500], 4),
    "the same documents every night": (lambda: nights(10), [1100], 8),
    # In a third of all blocks an LRU loses nothing; of its oldest ones there is no evidence at first.
    "a chat in much space": (lambda: made_up("chat"), [11943], -0.3),
    "a scan, then documents": (lambda: made_up("a scan of 3,000 requests, then 400 documents"), [14304], -0.3),
}
"""Requests, sizes of pools in blocks, and how many points of hit ratio the policy is ahead of an LRU, at least."""


LONG = "a pool that has just become full", "a chat in much space", "a scan, then documents"  # 12 to 46 s of a CPU


@pytest.mark.parametrize("load", [pytest.param(load, marks=[pytest.mark.nightly] * (load in LONG)) for load in LEADS])
def test_it_learns_what_comes_back(load: str) -> None:
    requests, pools, lead = LEADS[load]
    trace = trace_of(requests())
    for blocks in pools:
        lru, learned = (replay(trace, policy, blocks) for policy in ("lru", "learned"))
        assert learned.hit_percent > lru.hit_percent + lead, (lru, learned)


def test_the_chance_to_come_back_is_by_kind_and_time_left() -> None:
    rig = learned_rig(40, 4, MIB)  # 40 blocks
    namespace, other = (rig.open(name) for name in "ab")
    for number in range(400):
        first = 8 * (number // 2 % 5) if number % 2 else 1000 + 8 * number  # five documents, or what never returns
        ask(rig, namespace, list(range(first, first + 2)))
    rig.store(other, keys_of(1))
    group, unknown = (space.group(0) for space in (namespace, other))
    pool, policy = rig.slots.pool_bytes, policy_of(rig)
    chances = [policy.chance(group, keys_of(first), part * pool // 4)[0] for part in (0, 1, 2, 8)]
    assert chances == sorted(chances)
    assert chances[0] < 0.01
    assert chances[-1] > 0.9
    assert policy.chance(group, keys_of(1000 + 8 * 398), 2 * pool)[0] < 0.3
    assert policy.chance(unknown, keys_of(1), pool)[0] == 1


@pytest.mark.parametrize("requests", [50, 2000])
def test_the_chance_is_right_however_many_requests_a_lifetime_has(requests: int) -> None:
    """Prompts of three blocks, of which half return, and of six, of which a tenth does: once, after a lifetime."""
    rig, rng, due, first = learned_rig(5 * requests, requests // 10, MIB), random.Random(1), deque[Chain](), 0
    policy, namespace = policy_of(rig), rig.open("a")
    group, namespace.counters.keys_asked = namespace.group(0), 5 * requests
    group.tokens = 512
    for number in range(24 * requests):
        blocks, part = (3, 0.5) if number % 2 else (6, 0.1)
        prompt = Chain(group, keys_of(*range(first, first + blocks)), np.empty(0, np.uint32))
        policy.requested([prompt])
        first += blocks
        if rng.random() < part:
            due.append(prompt)
        if len(due) > 0.3 * requests:
            policy.requested([due.popleft()])
    chances = [policy.chance(group, keys_of(first - number), 4 * rig.slots.pool_bytes)[0] for number in (3, 9)]
    assert chances == pytest.approx([0.5, 0.1], rel=0.2)


def test_a_new_model_is_not_judged_by_another_ones_requests() -> None:
    rig = learned_rig(40, 4)  # 40 blocks
    old, new = rig.open("old"), rig.open("new")

    def request(namespace: Namespace, chain: list[int]) -> int:
        found = ask(rig, namespace, chain).count(READY)
        return found

    kept = [[100 * number + key for key in range(5)] for number in range(8)]
    for number in range(600):
        request(old, kept[number % 8])
        request(old, [100_000 + 5 * number + key for key in range(5)])  # never asked for again
    assert old.counters.rejected_keys > 2000
    assert sum(request(new, [100 * number + key for key in range(5)]) for number in range(7)) == 0
    assert new.counters.rejected_keys == 0
    request(new, [900, 901, 902, 903, 904])
    request(new, [1000, 1001, 1002, 1003, 1004])
    assert new.counters.rejected_keys > 0, "it has asked for as much as the pool holds"
    check_learned(rig)


@pytest.mark.nightly
def test_the_size_of_blocks_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """To what was learned: when it does as an LRU does depends on the curve's sample."""
    monkeypatch.setattr(learned, "MIN_LEAD", 1.0)
    seeds, gaps = (1, 3, 5), []
    for seed in seeds:
        large, small = (trace_of(conversations(random.Random(seed), tokens), tokens) for tokens in (1024, 16))
        first, second = replay(large, "learned", 300), replay(small, "learned", 300 * 1024 // 16)
        percents = [(one.hit_percent, one.percent(one.written)) for one in (first, second)]
        gaps.append(np.subtract(*percents))
    print(gaps)
    for gap in zip(*gaps, strict=True):
        assert sum(map(abs, gap)) / len(seeds) < 0.2


def test_ranks_groups_and_repeated_lookups_count_a_request_once() -> None:
    rig = learned_rig(160, 8)
    namespace = rig.open("a", world_size=2, sizes=(UNIT, UNIT))
    groups = [(0, keys_of(1, 2, 3)), (1, keys_of(1, 2, 3))]
    for again in (False, True, True):
        rig.cache.lookup(namespace, 7, 1, groups, again=again)
        rig.cache.prompts.report()
        rig.cache.leases.end(7, [1])
    for rank in range(2):
        for group in range(2):
            ticket = rig.begin(namespace, rank, group, keys_of(1, 2, 3, 4))  # 4 is what the engine wrote
            assert ticket[0].copy == [0, 1, 2, 3]
            rig.commit(ticket)
    known = policy_of(rig).known
    assert (known.requests, known.now) == (1, 6 * 2 * UNIT)
    assert look(rig, namespace, [1, 2, 3, 4]) == bytes([READY] * 4)
    assert known.requests == 2
    check_learned(rig)


def test_what_one_rank_was_rejected_the_others_are_too() -> None:
    rig = learned_rig(8, 4)  # 4 blocks of two shards
    namespace = rig.open("a", world_size=2)
    for _ in range(40):
        for chain in ([1, 2], [3, 4]):
            ask(rig, namespace, chain)
    look(rig, namespace, [50, 51])
    assert rig.begin(namespace, 0, 0, keys_of(50, 51))[0].rejected == [0, 1]
    assert rig.cache.life.reasons_of(namespace.group(0), keys_of(50)) == bytes([MissReason.REJECTED])
    rig.cache.invalidate(namespace, [(0, keys_of(1, 2, 3, 4))])  # there is room now
    assert rig.begin(namespace, 1, 0, keys_of(50, 51))[0].rejected == [0, 1]
    assert namespace.counters.rejected_keys >= 4


@pytest.mark.parametrize(
    ("unit", "below", "pools", "least"),
    [(MIB, 4, REMEMBERED_POOLS, 300 * REMEMBERED_POOLS), (MIB, 40, 40, 350 * 40), (UNIT, 40, 4, 600)],
)
def test_what_it_remembers_is_bounded(unit: int, below: int, pools: int, least: int) -> None:
    """Of small blocks it remembers less, since what it may take is a share of the pool. Below the pool are tiers."""
    rig = learned_rig(400, 4, unit)
    namespace = rig.open("a")
    rig.policy.remember(below * rig.slots.pool_bytes)
    for first in range(0, 60_000, 60):
        look(rig, namespace, list(range(first, first + 60)))
    policy = policy_of(rig)
    assert least < policy.ghosts <= 400 * (pools + 1)
    assert bytes_of(policy) <= rig.slots.pool_bytes // 50
    assert bytes_of(policy) / policy.known.known_keys <= GHOST_BYTES
    check_learned(rig)


# --- what the next daemon knows ------------------------------------------------------------------


def trained() -> CacheRig:
    rig = learned_rig(40, 4, MIB)
    namespace, rng, once = rig.open("a"), random.Random(3), count(1000)
    for number in range(600):
        first = 20 * rng.randrange(5)
        ask(rig, namespace, list(range(first, first + rng.randint(1, 8))))
        ask(rig, namespace, [next(once) for _ in range(number % 8)])
    return rig


def test_the_next_daemon_knows_what_to_reject() -> None:
    successors = [learned_rig(40, 4, MIB) for _ in range(2)]
    policy_of(successors[1]).restore(policy_of(trained()).state())
    rejected = []
    for successor in successors:
        namespace, once = successor.open("a"), count(10_000, 4)
        for chain in [list(range(4 * number, 4 * number + 4)) for number in range(10)]:
            ask(successor, namespace, chain)
        assert namespace.counters.rejected_keys == 0
        for first in islice(once, 5):
            ask(successor, namespace, list(range(first, first + 4)))
        rejected.append(namespace.counters.rejected_keys)
        check_learned(successor)
    assert rejected == [0, 20]


def test_the_oldest_blocks_of_a_recovered_pool_go_first() -> None:
    rig = learned_rig(8192, 512)
    namespace = rig.open("a")
    group, blocks = namespace.group(0), BlockTable(rig.table.records)
    for first in range(0, 8000, 500):
        rig.store(namespace, keys_of(*range(first, first + 500)))
    order = rig.policy.first(8192).tolist()
    restarted = Learned(rig.slots.pool_bytes)
    restarted.insert(group, np.array(order, np.uint32), blocks.keys(np.array(order, np.uint32), group.key_bytes))
    assert restarted.first(8192).tolist() == order
    assert restarted.known.spans >= 7, "a request for some of a span's keys takes as long as it has keys"


HEAD = 8
"""Bytes of format and checksum."""


def with_count(state: bytes, at: int, form: str, value: float) -> bytes:
    """The state with another count, and its checksum."""
    counts = bytearray(state[HEAD:])
    struct.pack_into(form, counts, at, value)
    return struct.pack("=II", *struct.unpack_from("=I", state), zlib.crc32(counts)) + counts


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "empty": ("cut off", lambda state: b""),
    "bit": ("its checksum is wrong", lambda state: state[:50] + bytes([state[50] ^ 1]) + state[51:]),
    "format": ("another release wrote it", lambda state: struct.pack("=I", 9) + state[4:]),
    "short": ("cut off", lambda state: with_count(state[:-8], 32, "=d", 0)),
    "pool": ("invalid counters", lambda state: with_count(state, 0, "=Q", 0)),
    "time": ("invalid counters", lambda state: with_count(state, 8, "=Q", 2**63)),
    "nan": ("invalid counters", lambda state: with_count(state, 32, "=d", nan)),
    "huge": ("invalid counters", lambda state: with_count(state, 32, "=d", 1e300)),
    "negative": ("invalid counters", lambda state: with_count(state, 32, "=d", -1.0)),
}


def test_damaged_statistics_are_refused_and_change_nothing() -> None:
    state, rig = policy_of(trained()).state(), learned_rig(40, 4, MIB)
    policy = policy_of(rig)
    before = policy.state()
    for sentence, damaged in DAMAGE.values():
        with pytest.raises(ValueError, match=sentence):
            policy.restore(damaged(state))
        assert policy.state() == before
    policy.restore(state)
    assert policy.state() == state
    check_learned(rig)


def test_a_pool_of_another_size_keeps_what_was_learned_by_its_age_in_bytes() -> None:
    def sums(state: bytes) -> npt.NDArray[np.float64]:
        return np.frombuffer(state, np.float64, offset=HEAD + 24)[: 2 * len(CLASSES) * BINS].reshape(2, -1, BINS)

    before = policy_of(trained()).state()
    for factor in (1, 4, 0.25):
        rig = learned_rig(round(factor * 40), 4, MIB)
        policy_of(rig).restore(before)
        old, new = sums(before).sum(axis=1), sums(policy_of(rig).state()).sum(axis=1)
        assert new.sum(axis=1) == pytest.approx(old.sum(axis=1)), "nothing is lost"
        if factor == 4:  # a lifetime and less are a quarter of a lifetime and less
            assert new[:, :2].sum(axis=1) == pytest.approx(old[:, :5].sum(axis=1))
        check_learned(rig)


# --- whatever clients send -----------------------------------------------------------------------


def test_one_huge_request_makes_nothing_forgotten() -> None:
    rig = learned_rig(40, 4, MIB)
    polite, hostile = rig.open("polite"), rig.open("hostile", world_size=8, sizes=(4 * MIB,))
    for first in range(0, 600, 20):
        look(rig, polite, list(range(first, first + 10)))
    known, before = policy_of(rig).known, policy_of(rig).known.now
    remembered = policy_of(rig).ghosts
    look(rig, hostile, list(range(50_000)))
    assert known.now - before <= rig.slots.pool_bytes
    assert remembered <= policy_of(rig).ghosts <= remembered + 1
    check_learned(rig)


@pytest.mark.parametrize("asked_first", [False, True])
def test_what_is_stored_without_being_asked_for_is_forgotten_too(asked_first: bool) -> None:
    rig = learned_rig(160, 16, MIB)
    namespace = rig.open("a")
    more = list(range(1_000_000, 1_000_160))
    for _ in range(8 if asked_first else 0):  # the policy rejects then
        ask(rig, namespace, more)
    for first in range(0, 50_000, 500):
        rig.store(namespace, keys_of(*range(first, first + 500)))
    policy = policy_of(rig)
    assert (namespace.counters.rejected_keys > 0) is asked_first
    assert policy.known.known_keys <= 17 * 160 + 2 * 500
    assert policy.nbytes < MIB
    check_learned(rig)
