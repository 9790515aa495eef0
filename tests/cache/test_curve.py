"""The hit-ratio curve, held against the daemon's own cache with the policy lru."""

from __future__ import annotations

import os
from collections.abc import Iterable
from random import Random

import numpy as np
import pytest

from kvoffd.cache import curve
from kvoffd.cache.asked_keys import AskedKeys, PromptUse, settle_prompt
from kvoffd.cache.block_table import BlockIds
from kvoffd.cache.curve import SIZES, HitRatioCurve
from kvoffd.cache.learned import Learned
from kvoffd.cache.namespace import Group, MissReason, Namespace
from kvoffd.cache.policy import Chain
from kvoffd.simulate.replay import open_cache, open_namespace, replay, serve
from kvoffd.simulate.trace import KEY_BYTES, RequestTrace
from kvoffd_proto.messages import GroupSpec
from kvoffd_proto.stats import PolicyClass

MIB = 1 << 20
NOTHING: BlockIds = np.empty(0, np.uint32)


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same hashes each time: of 32 keys two may share a place, one of which then counts as stored."""
    monkeypatch.setattr(os, "urandom", lambda size: bytes(range(size)))


def chain_of(*keys: int) -> bytes:
    return b"".join(key.to_bytes(KEY_BYTES, "big") for key in keys)


def ask(watched: HitRatioCurve, group: Group, requests: Iterable[bytes]) -> None:
    """Ask for prompts, each of which is stored before the next."""
    for keys in requests:
        watched.requested(Chain(group, keys, NOTHING))
        watched.stored(group, keys)


def group_of(block_bytes: int = MIB, label: str = "tiny", name: int = 0, tokens: int = 512) -> Group:
    namespace = Namespace(bytes([name]) * 32, label, 1, KEY_BYTES, [GroupSpec("full", tokens)], "{}")
    group = Group(1 + name, namespace, 0)
    group.set_sizes([block_bytes], [block_bytes])
    return group


def conversations(requests: int, seed: int, spread: int) -> RequestTrace:
    """Chats of a common first block, that grow by some blocks, twelve turns at most, and are left by and by."""
    random, made = Random(seed), 0
    chats: list[list[int]] = []
    asked = []
    for _ in range(requests):
        at = len(chats) - 1 - int(random.expovariate(1 / spread))
        if at < 0 or len(chats[at]) > 40 or random.random() < 0.3:
            at = len(chats)
            chats.append([0])
        new = random.randrange(1, 8)
        chats[at] = [*chats[at], *range(made + 1, made + 1 + new)]
        made += new
        asked.append(chain_of(*chats[at]))
    return RequestTrace("made", 512, asked)


@pytest.mark.parametrize("tokens", [512, 16])
@pytest.mark.parametrize("reported_late", [False, True])
def test_what_another_engine_computes_at_the_same_time_is_found_at_no_size(tokens: int, reported_late: bool) -> None:
    """Two engines get the same new prompts at once, twice. The second time the first's blocks are there."""
    watched, group = HitRatioCurve(64 * MIB, lambda: 0.0), group_of(MIB * tokens // 512, tokens=tokens)
    count = 2048 // tokens
    prompts = [chain_of(*range(first, first + count)) for first in range(0, 8 * count, count)]
    for keys in prompts:
        if reported_late:  # its outcome comes after its store
            watched.requested(Chain(group, keys, NOTHING))
            watched.stored(group, keys)
            watched.requested(Chain(group, keys, NOTHING, ready_prefix=count))
        else:
            for _ in range(2):
                watched.requested(Chain(group, keys, NOTHING))
            watched.stored(group, keys)
    expected = 0.5 if reported_late else 0.0
    assert watched.in_all().lru_hit_ratio["10"] == pytest.approx(expected, abs=0.01)
    for keys in prompts:
        watched.requested(Chain(group, keys, NOTHING, ready_prefix=count))
    assert watched.in_all().lru_hit_ratio["10"] == pytest.approx((2 * expected + 1) / 3, abs=0.01)


@pytest.mark.parametrize("tokens", [512, 16])
@pytest.mark.parametrize("reason", [MissReason.UNKNOWN, MissReason.COMPUTING, MissReason.PARTIAL])
def test_what_was_not_stored_when_it_was_asked_for_is_found_at_no_size_however_late_that_is_counted(
    tokens: int, reason: MissReason
) -> None:
    """Engines report prompts up to a second later, when what two of them computed is stored."""
    watched, group = HitRatioCurve(64 * MIB, lambda: 0.0), group_of(MIB * tokens // 512, tokens=tokens)
    keys, count = chain_of(*range(4096 // tokens)), 4096 // tokens

    def count_late(reasons: bytes) -> None:
        asked = AskedKeys(group.namespace, reported=True)
        asked.found(Chain(group, keys, NOTHING), reasons)
        watched.stored(group, keys)
        for chain, own in settle_prompt([asked], PromptUse([0], [0], None), lambda chain, first: b""):
            watched.requested(chain, own)

    for _ in range(4):
        count_late(bytes([reason]) * count)
    assert watched.in_all().lru_hit_ratio["10"] == 0.0
    count_late(bytes([MissReason.EVICTED]) * (count // 2) + bytes([reason]) * (count // 2))
    assert watched.in_all().lru_hit_ratio["10"] == pytest.approx(0.1, abs=0.02), "half of the fifth prompt"
    count_late(bytes([MissReason.EVICTED]) * count)
    assert watched.in_all().lru_hit_ratio["10"] == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("tokens", [512, 16])
def test_a_store_that_is_known_before_its_prompt_is_counted_is_a_store(tokens: int) -> None:
    watched, group = HitRatioCurve(64 * MIB, lambda: 0.0), group_of(MIB * tokens // 512, tokens=tokens)
    keys = chain_of(*range(2048 // tokens))
    watched.stored(group, keys)
    for _ in range(2):
        watched.requested(Chain(group, keys, NOTHING))
    assert watched.in_all().lru_hit_ratio["1"] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("tokens", [512, 16])
def test_what_an_engine_had_itself_is_used_but_not_counted(tokens: int) -> None:
    """No pool of any size would have brought it. It is as recent as all that was asked for."""
    watched, group = HitRatioCurve(64 * MIB, lambda: 0.0), group_of(MIB * tokens // 512, tokens=tokens)
    count = 4096 // tokens
    for _ in range(3):
        watched.requested(Chain(group, chain_of(*range(count)), NOTHING, ready_prefix=count // 4), own=count // 2)
        watched.stored(group, chain_of(*range(count)))
    found = watched.in_all()
    assert (found.asked_tokens, found.found_tokens) == (3 * 2048, 0)
    assert found.lru_hit_ratio["1"] == pytest.approx(2 / 3, abs=0.1)
    watched.requested(Chain(group, chain_of(*range(count)), NOTHING, ready_prefix=count))
    found = watched.in_all()
    assert (found.asked_tokens, found.found_tokens) == (3 * 2048 + 4096, 4096)
    assert found.lru_hit_ratio["1"] == pytest.approx(8 / 10, abs=0.1)


def test_blocks_without_tokens_weigh_the_same_in_the_curve_and_in_the_policy() -> None:
    """The curve judges the policy: what is the last part of a prompt to one is not nothing to the other."""
    described: list[list[PolicyClass]] = []
    for tokens in (0, 512):
        watched, group, policy = HitRatioCurve(64 * MIB, lambda: 0.0), group_of(tokens=tokens), Learned(64 * MIB)
        chain = Chain(group, chain_of(*range(8)), NOTHING)
        watched.requested(chain)
        policy.requested([chain])
        assert watched.in_all().asked_tokens == 8 * 512
        described.append(policy.describe().classes)
    assert described[0] == described[1]


def ratios_of(trace: RequestTrace, pool: int) -> dict[str, float]:
    watched, group = HitRatioCurve(pool * MIB, lambda: 0.0), group_of()
    ask(watched, group, trace.requests)
    return watched.in_all().lru_hit_ratio


def test_while_all_keys_are_watched_the_curve_is_that_of_an_lru() -> None:
    trace = conversations(250, seed=1, spread=30)
    found = ratios_of(trace, 200)
    for size in SIZES:
        assert 100 * found[f"{size:g}"] == pytest.approx(replay(trace, "lru", round(200 * size)).hit_percent, abs=0.5)
    assert found["0.1"] < found["1"] < found["10"]


def test_a_key_that_stands_twice_in_a_request_counts_once() -> None:
    watched, group = HitRatioCurve(100 * MIB, lambda: 0.0), group_of()
    ask(watched, group, (chain_of(1, 2), chain_of(3, 1, 3, 3)))
    assert watched.in_all().asked_tokens == 4 * 512
    assert watched.in_all().lru_hit_ratio["1"] == pytest.approx(1 / 4)


def test_what_is_forgotten_stays_a_part_of_all() -> None:
    now = [0.0]
    watched, kept, gone = HitRatioCurve(100 * MIB, lambda: now[0]), group_of(), group_of(name=1)
    for group, times in ((kept, 1), (gone, 4)):
        ask(watched, group, [chain_of(1, 2)] * times)
    before = watched.in_all()
    watched.namespace_forgotten(gone.namespace)
    watched.namespace_forgotten(group_of(name=2).namespace)
    assert watched.in_all() == before
    assert before.asked_tokens == 5 * 2 * 512
    assert before.lru_hit_ratio["1"] == pytest.approx(3 / 5)
    assert watched.of_namespaces([gone.namespace])[0].asked_tokens == 0
    now[0] = curve.HALVED_EVERY_S
    watched.tick()
    assert watched.in_all().asked_tokens == before.asked_tokens // 2


def test_a_sample_tells_nearly_the_same() -> None:
    # More different blocks than are kept, so that one stands for several: all are asked for twice, in one order.
    trace = RequestTrace("cycle", 512, [chain_of(*range(at, at + 16)) for at in range(0, 200_000, 16)] * 2)
    found = ratios_of(trace, 250_000)
    assert found["0.7"] == pytest.approx(0, abs=0.005)
    assert found["1"] == found["10"] == pytest.approx(0.5, abs=0.005)


def test_memory_is_bounded_and_what_is_seen_ends_at_ten_pools() -> None:
    watched, group = HitRatioCurve(1000 * MIB, lambda: 0.0), group_of()
    before = watched.nbytes
    ask(watched, group, (chain_of(*range(first, first + 64)) for first in range(0, 3000 * 64, 64)))
    assert watched.nbytes <= before + 64 * 48 < 8 * MIB
    assert 0.95 * 10_000 * MIB < watched.seen_bytes <= 10_000 * MIB
    assert watched.in_all().lru_hit_ratio["10"] == 0


def test_each_namespace_has_its_own_curve_in_a_pool_of_all() -> None:
    traces = [conversations(400, 1, 10), conversations(400, 2, 60)]
    watched, groups = HitRatioCurve(200 * MIB, lambda: 0.0), [group_of(name=1), group_of(name=2)]
    for requests in zip(*(trace.requests for trace in traces), strict=True):
        for group, keys in zip(groups, requests, strict=True):
            ask(watched, group, [keys])
    for size in ("0.2", "0.5", "1", "2"):
        blocks = int(200 * float(size))
        cache = open_cache("lru", blocks)
        opened = [open_namespace(cache, trace, bytes([number]) * 32) for number, trace in enumerate(traces)]
        for requests in zip(*(trace.requests for trace in traces), strict=True):
            for namespace, keys in zip(opened, requests, strict=True):
                serve(cache, namespace, keys)
        for group, true, trace in zip(groups, opened, traces, strict=True):
            found = true.counters.prefix_keys_ready / trace.accesses
            assert watched.of_namespaces([group.namespace])[0].lru_hit_ratio[size] == pytest.approx(found, abs=0.006)


@pytest.mark.parametrize("shared", [8, 50, 130])
def test_prompts_of_small_blocks_part_and_end_anywhere(shared: int) -> None:
    """No prompt is whole pieces long, nor does what prompts begin with end with one."""
    random, made = Random(shared), 10**6
    chats: list[list[int]] = []
    asked = []
    for _ in range(600):
        at = len(chats) - 1 - int(random.expovariate(1 / 40))
        if at < 0 or len(chats[at]) > shared + 60 or random.random() < 0.3:
            at = len(chats)
            chats.append(list(range(1000 * (at % 3), 1000 * (at % 3) + shared)))
        new = random.randrange(2, 25)
        chats[at] = [*chats[at], *range(made, made + new)]
        made += new
        asked.append(chain_of(*chats[at]))
    trace, pool = RequestTrace("small", 16, asked), 40 * (shared + 30)
    watched, group = HitRatioCurve(pool * MIB // 32, lambda: 0.0), group_of(MIB // 32, tokens=16)
    ask(watched, group, trace.requests)
    found = watched.in_all().lru_hit_ratio
    for size in (0.1, 0.5, 1.0, 2.0):
        true = replay(trace, "lru", round(pool * size)).hit_percent
        assert 100 * found[f"{size:g}"] == pytest.approx(true, abs=1.5)
