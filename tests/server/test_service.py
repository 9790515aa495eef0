"""What a service does at moments that no client can choose: over an engine and mappings that end when a test says."""

from __future__ import annotations

import gc
import logging
import os
import random
import socket
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from math import inf
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import numpy.typing as npt
import pytest

from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.config import Config, ServerLimits
from kvoffd.errors import BadBlockIds, KvoffdError
from kvoffd.server.events import EventLog
from kvoffd.server.handlers import OPERATOR_WAIT_S, Pending, handlers_of
from kvoffd.server.jobs import QUIET_S, checked_parts
from kvoffd.server.lifeline import Connection
from kvoffd.server.lookups import Lookups
from kvoffd.server.loop_share import LOOP_BURST_S, LOOP_SHARE
from kvoffd.server.persistence import State
from kvoffd.server.scrubber import Scrubber
from kvoffd.server.service import MAX_PENDING, QUESTIONS
from kvoffd.server.session import ClientProcess, Session
from kvoffd.server.sessions import credit_of_all_bytes, may_connect
from kvoffd.server.tier_supervisor import TierSupervisor
from kvoffd.system.mappings import HostMapping
from kvoffd.system.rare_warnings import RareWarnings
from kvoffd.tiers.peer_caller import Calls
from kvoffd.transfer.engine import CopyEngine, EngineMemory, OnMapped, Transfer
from kvoffd.transfer.plan import CopyEnd, Direction, build_layouts
from kvoffd_client.worker_client import Job, submit_of
from kvoffd_proto import codec
from kvoffd_proto import messages as m
from kvoffd_proto.admin import Clear, ListPrompts, PromptsListed, ResetFleet
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import GroupTransfer
from kvoffd_proto.stats import DaemonStats, Stats, StatsReply
from tests.kit.cases import case
from tests.kit.slot_cache import CacheRig, keys_of
from tests.sim.parts import NoStateFile, make_pool, make_service

NAMESPACE, REGISTRATION, KEY = b"n" * 32, b"r" * 16, b"12345678"
POOL_BYTES, PAGE, BLOCKS = 1 << 20, 8192, 4
ADDRESS = 1 << 40


class Bench(CopyEngine):
    """A service, its host, and its engine, which copies nothing: the oldest copy ends when a test says so."""

    def __init__(
        self,
        limits: ServerLimits | None = None,
        make_tiers: Callable[[Bench, Cache, EventLog], TierSupervisor] | None = None,
    ) -> None:
        self.copies: list[Transfer] = []
        self.now = 100.0
        queue: Any = SimpleNamespace(submit=self.copies.append)
        super().__init__(dict.fromkeys(Direction, queue))
        self.posted = deque[Callable[[], None]]()
        host: Any = SimpleNamespace(
            now=lambda: self.now,
            post=self.posted.append,
            random=random.Random(1).randbytes,
            map_memfd=lambda fd, size: HostMapping(ADDRESS, size),
            unmap=lambda segments, then: then(),
        )
        self.pool = make_pool(POOL_BYTES, None)
        self.config, self.state = Config(pool_bytes=POOL_BYTES, limits=limits or ServerLimits()), State(NoStateFile())
        tiers = (lambda cache, events, pool: make_tiers(self, cache, events)) if make_tiers is not None else None
        self.service = make_service(self.config, self.pool, None, self, host, self.state, tiers)

    def end_copy(self) -> None:
        self.copies[0].on_done(self.copies.pop(0), CopyEnd.DONE)
        while self.posted:
            self.posted.popleft()()

    def ask(self, session: Session, message: m.AnyRequest) -> list[m.AnyReply]:
        """The replies to a request that are there at once."""
        self.service.handle(session.route, codec.encode(message))
        return [codec.decode_reply(frame) for _, frame in self.service.outgoing()[1]]

    def session(self, role: m.Role = m.Role.WORKER, *, registers: bool = True, label: str = "test") -> Session:
        """In the namespace; a worker has its memory registered."""
        lifeline: Any = SimpleNamespace(alive=lambda: True, close_descriptor=os.close)
        session = self.service.sessions.open(lifeline, ClientProcess(0, 1, 1))
        self.ask(session, m.Hello(1, m.PROTOCOL_VERSION, role, "test", "test"))
        groups = [m.GroupSpec("full", 16)]
        self.ask(session, m.OpenNamespace(1, NAMESPACE, label, 1, len(KEY), groups, "{}"))
        if registers and role is m.Role.WORKER:
            assert isinstance(self.register(session, 0)[0], m.Registered)
        return session

    def register(self, session: Session, segment_id: int) -> list[m.AnyReply]:
        self.service.sessions.attach(session, segment_id, os.open(os.devnull, os.O_RDONLY))
        memory, layout = m.MemfdHandle(segment_id, BLOCKS * PAGE), m.TensorLayout(0, 0, PAGE, BLOCKS)
        what = [memory], [layout], [[m.PageRef(0, PAGE)]]
        return self.ask(session, m.Register(1, NAMESPACE, REGISTRATION, 0, 1, *what))

    def copy(self, session: Session, *lease: int) -> None:
        """Submit a store of ``KEY``, or a load under a lease."""
        job = Job(7, [GroupTransfer.of([KEY], [0])], *lease)
        self.ask(session, submit_of(2, REGISTRATION, len(KEY), [job]))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.pool.close()


def test_what_became_of_prompts_is_kept_with_the_reason_of_a_miss(bench: Bench) -> None:
    scheduler, admin = bench.session(m.Role.SCHEDULER), bench.session(m.Role.ADMIN)

    def report(
        name: str, key: bytes = b"", group: int = 0, reason: str = "", outcome: str = "missed"
    ) -> m.PromptReport:
        return m.PromptReport(name, 1.0, 100, 3, 2, 0, 0, outcome, 0, group, key, reason)

    def send(reports: list[m.PromptReport], namespace: bytes = NAMESPACE) -> m.AnyReply:
        (reply,) = bench.ask(scheduler, m.ReportPrompts(1, namespace, reports))
        return reply

    def found(*which: Any) -> list[m.PromptReport]:
        (listed,) = bench.ask(admin, ListPrompts(1, *which))
        assert isinstance(listed, PromptsListed)
        return [one.report for one in listed.prompts]

    known = [report("short"), report("new", KEY), report("reasoned", KEY, reason="partial")]
    known += [report("given up", outcome="late"), report("given up early", KEY, outcome="late")]
    assert isinstance(send(known), m.Done)
    for wrong in (
        [report("a", KEY[1:])],
        [report("a", 2 * KEY)],
        [report("a"), report("a", KEY, group=7)],
        [report("a" * 129)],
        [report("a")] * 257,
    ):
        assert isinstance(send(wrong), m.Error)
    assert isinstance(send([report("a")], b"x" * 32), m.Error)
    reasons = {"short": "", "new": "unknown", "reasoned": "partial", "given up": "late", "given up early": "unknown"}
    assert {one.request: one.reason for one in found()} == reasons
    assert [one.request for one in found("o")] == ["short", "reasoned"]
    assert [one.request for one in found("", 1)] == ["given up early"]
    for number in range(6):
        send([report(f"{number}-{one}") for one in range(200)])
    assert [one.request for one in found()] == [f"{number}-{one}" for number in range(1, 6) for one in range(200)]


def test_a_key_that_another_prompt_computes_is_missed_for_that(bench: Bench) -> None:
    """Until it is offered for storing, or a minute has passed without that. The prompt that came first lacks it."""
    first, second, admin = (bench.session(role) for role in (m.Role.SCHEDULER, m.Role.SCHEDULER, m.Role.ADMIN))
    worker, leases = bench.session(), count(1 << 32)

    def missed(session: Session, *, twice: bool = False) -> str:
        lease = next(leases)
        for _ in range(1 + twice):
            bench.ask(session, m.Lookup(1, NAMESPACE, lease, [m.GroupKeys(0, KEY)], reported=True))
        outcome = 1.0, 512, 1, 0, 0, 0, "missed", 0, 0, KEY, "", 1
        report = m.PromptReport(f"prompt {lease}", *outcome, lease_id=lease)
        bench.ask(session, m.ReportPrompts(1, NAMESPACE, [report]))
        (listed,) = bench.ask(admin, ListPrompts(1, f"prompt {lease}"))
        assert isinstance(listed, PromptsListed)
        return listed.prompts[0].report.reason

    assert missed(first, twice=True) == "unknown", "nobody else computes it"
    assert missed(second) == missed(first) == "computing"
    bench.now += 60
    assert missed(second) == "unknown"
    assert missed(first) == "computing"
    bench.copy(worker)
    bench.end_copy()
    bench.ask(first, m.Invalidate(1, NAMESPACE, [m.GroupKeys(0, KEY)]))
    assert missed(first) == "invalidated", "it was stored since"
    (stats,) = bench.ask(admin, Stats(1))
    assert isinstance(stats, StatsReply)
    assert stats.stats.since_start.misses == {"unknown": 3, "computing": 3, "invalidated": 1}


def test_the_reason_of_a_key_in_any_group_is_that_by_which_it_was_counted(bench: Bench) -> None:
    scheduler, admin, fingerprint = bench.session(m.Role.SCHEDULER), bench.session(m.Role.ADMIN), bytes([7]) * 32
    groups = [m.GroupSpec("full", 16), m.GroupSpec("sliding_window", 16, 32)]
    keys = [bytes([one]) * len(KEY) for one in range(4)]
    bench.ask(scheduler, m.OpenNamespace(1, fingerprint, "two groups", 1, len(KEY), groups, "{}"))
    cache = bench.service.cache
    namespace = cache.namespaces.required(fingerprint)
    cache.blocks.record_misses(namespace.group(1), keys[2], MissReason.EVICTED)
    asked = [m.GroupKeys(0, b"".join(keys)), m.GroupKeys(1, b"".join(keys))]
    bench.ask(scheduler, m.Lookup(1, fingerprint, 1 << 32, asked, reported=True))
    cache.blocks.record_misses(namespace.group(1), keys[2], MissReason.CORRUPT)
    report = m.PromptReport("two", 1.0, 64, 8, 0, 0, 0, "missed", 0, 1, keys[2], "partial", 7, lease_id=1 << 32)
    bench.ask(scheduler, m.ReportPrompts(1, fingerprint, [report]))
    (listed,) = bench.ask(admin, ListPrompts(1))
    assert isinstance(listed, PromptsListed)
    assert listed.prompts[0].report.reason == "evicted"
    assert namespace.counters.misses == {MissReason.UNKNOWN: 7, MissReason.EVICTED: 1}


def test_late_lookups_are_of_the_minute_in_which_they_were_late(bench: Bench) -> None:
    """They are reported later, all at once if the daemon stood still."""
    scheduler, admin = bench.session(m.Role.SCHEDULER), bench.session(m.Role.ADMIN)

    def late(number: int = 0, age_s: float = 0.0) -> tuple[int, int, int]:
        """In the last minute and hour, and since the start, after a report of further ones."""
        if number:
            bench.ask(scheduler, m.ReportEngine(1, NAMESPACE, 100.0, late_lookups=number, late_age_s=age_s))
        (stats,) = bench.ask(admin, Stats(1))
        assert isinstance(stats, StatsReply)
        windows = stats.stats.last_minute, stats.stats.last_hour, stats.stats.since_start
        return tuple(one.late_lookups for one in windows)  # type: ignore[return-value]

    for _ in range(200):
        bench.now += 1
        bench.service.traffic.tick()
    assert late(5, 100.0) == (0, 5, 5)
    assert late(3) == (3, 8, 8)
    assert late(2, 1e6) == (3, 8, 10)
    for _ in range(70):
        bench.now += 1
        bench.service.traffic.tick()
    assert late() == (0, 8, 10)


def test_jobs_that_failed_are_of_the_hour_in_which_they_ended(bench: Bench) -> None:
    worker, admin = bench.session(), bench.session(m.Role.ADMIN)
    bench.copy(worker, 1 << 32)  # a load under no lease

    def counts() -> tuple[int, ...]:
        (stats,) = bench.ask(admin, Stats(1))
        assert isinstance(stats, StatsReply)
        load = stats.stats.load
        return load.jobs, load.failed_jobs, load.last_hour_jobs, load.last_hour_failed_jobs

    assert counts() == (1, 1, 1, 1)
    for _ in range(80):
        bench.now += 60
        bench.service.jobs.tick()
    assert counts() == (1, 1, 0, 0)


def test_each_prompts_tokens_are_counted_once(bench: Bench) -> None:
    scheduler, admin = bench.session(m.Role.SCHEDULER), bench.session(m.Role.ADMIN)

    def send(outcome: m.Outcome, *tokens: int, again: bool = False) -> m.AnyReply:
        total, own, loaded, other = tokens
        given = {"own_tokens": own, "loaded_tokens": loaded, "other_tokens": other, "again": again}
        report = m.PromptReport("r", 1.0, total, 0, 0, 0, 0, outcome, **given)
        (reply,) = bench.ask(scheduler, m.ReportPrompts(1, NAMESPACE, [report]))
        return reply

    for outcome in m.Outcome:  # also of prompts that looked nothing up
        assert isinstance(send(outcome, 100, 10, 20, 30), m.Done)
    assert isinstance(send(m.Outcome.LOADED, 100, 110, 20, 0, again=True), m.Done), "its own tokens too"
    refused = send(m.Outcome.LOADED, 100, 60, 41, 0)
    assert isinstance(refused, m.Error)
    assert refused.code is ErrorCode.MALFORMED
    assert "prompt of 100 tokens did not have 101" in refused.message
    refused = send(m.Outcome.LOADED, m.MAX_PROMPT + 1, 0, 0, 0)
    assert isinstance(refused, m.Error), "a few of them would not fit any answer"
    (listed,) = bench.ask(admin, ListPrompts(1))
    assert isinstance(listed, PromptsListed)
    each, times = {"computed": 40, "engine": 10, "pool": 20, "other": 30}, len(m.Outcome) - 1
    shown = {one.report.outcome: one.tokens for one in listed.prompts if not one.report.again}
    assert shown == {outcome: {} if outcome is m.Outcome.DROPPED else each for outcome in m.Outcome}
    assert listed.prompts[-1].tokens == {}
    (counted,) = bench.ask(admin, Stats(1))
    assert isinstance(counted, StatsReply)
    expected = {source: times * tokens for source, tokens in each.items()}
    assert counted.stats.since_start.prompt_tokens == counted.stats.namespaces[0].prompt_tokens == expected


def test_the_time_that_a_lease_has_left_is_that_at_the_answer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from the request's arrival, a lookup that took 1 ms promised 1 ms more than there was."""
    worker, scheduler = bench.session(), bench.session(m.Role.SCHEDULER)
    bench.copy(worker)
    bench.end_copy()
    leases, ttl_s = bench.service.cache.leases, bench.service.cache.leases.ttl_s
    opens, gives = leases.open, leases.give

    def delayed(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        bench.now += 0.25
        return call(*given, **named)

    monkeypatch.setattr(leases, "open", partial(delayed, opens))
    monkeypatch.setattr(leases, "give", partial(delayed, gives))
    (reply,) = bench.ask(scheduler, m.Lookup(1, NAMESPACE, scheduler.id << 32, [m.GroupKeys(0, KEY)]))
    assert isinstance(reply, m.LookupReply)
    assert reply.ttl_ms == 1000 * ttl_s - 250


def test_leases_that_ended_count_no_more_and_their_ids_are_as_good_as_new_ones() -> None:
    """Also while their blocks are still to be unpinned."""
    bench = Bench(ServerLimits(max_leases=2))
    worker, scheduler = bench.session(), bench.session(m.Role.SCHEDULER)
    bench.copy(worker)
    bench.end_copy()
    service, first = bench.service, 1 << 32
    service.cache.leases.ended_at_once = 0

    def look_up(lease: int) -> ErrorCode | int:
        (reply,) = bench.ask(scheduler, m.Lookup(1, NAMESPACE, first + lease, [m.GroupKeys(0, KEY)]))
        assert isinstance(reply, m.LookupReply | m.Error)
        return reply.code if isinstance(reply, m.Error) else reply.pinned

    assert [look_up(1), look_up(2), look_up(1), look_up(3)] == [1, 1, 1, ErrorCode.TOO_MANY]
    bench.ask(scheduler, m.Release(1, [first + 1, first + 2]))
    assert service.cache.blocks.pinned_blocks == 1
    assert [look_up(3), look_up(2), look_up(1)] == [1, 1, ErrorCode.TOO_MANY]
    assert service.cache.leases.of(scheduler.id).leases == 2
    bench.pool.close()


@pytest.mark.parametrize("waits", [False, True])
def test_a_reply_that_cannot_be_encoded_is_an_error_for_its_client_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, waits: bool
) -> None:
    reply = m.Done(5, 2**70)
    exchange, _ = bench.service.handlers[Clear]
    answer = Pending(lambda late: reply) if waits else reply
    monkeypatch.setitem(bench.service.handlers, Clear, (exchange, lambda *_: answer))
    admin = bench.session(m.Role.ADMIN)
    (refused,) = bench.ask(admin, Clear(5))
    assert isinstance(refused, m.Error)
    assert (refused.request_id, refused.code) == (5, ErrorCode.INTERNAL)
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"]
    assert bench.service.request_counts.errors == {"internal": 1}
    assert not bench.service.waiting
    assert isinstance(bench.ask(admin, ListPrompts(6))[0], PromptsListed)


def test_periodic_work_that_fails_each_time_keeps_no_other_from_being_done(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise RuntimeError("a bug")

    bench.session()
    for part in (bench.service.mapper, bench.service.traffic, bench.service.tier_supervisor):
        monkeypatch.setattr(part, "tick", fails)
    bench.service.state.generations.hear(NAMESPACE, 7)
    with pytest.raises(ExceptionGroup) as caught:
        bench.service.tick()
    assert len(caught.value.exceptions) == 3
    assert not bench.service.state.generations.voided


def test_each_kind_of_request_has_one_handler(bench: Bench) -> None:
    parts = [handler.__self__ for _, handler in bench.service.handlers.values()]  # type: ignore[attr-defined]
    parts = list(dict.fromkeys(parts))
    assert handlers_of(parts).keys() == m.EXCHANGES.keys()
    with pytest.raises(AssertionError, match=r"without a handler: .*Lookup"):
        handlers_of(part for part in parts if not isinstance(part, Lookups))
    with pytest.raises(AssertionError, match="two handlers of"):
        handlers_of([*parts, parts[0]])


def test_a_frame_that_is_no_request_is_refused_by_its_number_and_logged_as_its_sessions(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client waits for the reply to that number; the log said that it had no session."""
    caplog.set_level(logging.DEBUG)
    worker, most = bench.session(), bench.config.limits.max_frame_bytes
    large = codec.encode(m.Lookup(7, NAMESPACE, 1 << 32, [m.GroupKeys(0, bytes(most))]))
    for frame, code in ((codec.encode(("stats", 7, "x")), ErrorCode.MALFORMED), (large, ErrorCode.TOO_LARGE)):
        bench.service.handle(worker.route, frame)
        ((_, reply),) = bench.service.outgoing()[1]
        refused = codec.decode_reply(reply)
        assert isinstance(refused, m.Error)
        assert (refused.request_id, refused.code) == (7, code)
        assert f"session {worker.id} (test)" in caplog.messages[-1]
    assert bench.service.request_counts.errors == {"malformed": 1, "too_large": 1}


def test_a_clear_of_all_nodes_counts_the_blocks_of_its_own_namespace(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those that another node voided, which are dropped with them."""
    worker, admin, generations = bench.session(), bench.session(m.Role.ADMIN), bench.service.state.generations
    bench.copy(worker)
    bench.end_copy()

    def void_everywhere(fingerprint: bytes) -> tuple[dict[str, Any], Calls]:
        generations.hear(fingerprint, 8)
        return {"a store": SimpleNamespace(ended=True, problem="")}, Calls({}, {}, ended=True)

    monkeypatch.setattr(TierSupervisor, "shares", True)
    monkeypatch.setattr(bench.service.tier_supervisor, "void_everywhere", void_everywhere)
    generations.hear(NAMESPACE, 7)
    for fingerprint in (b"o" * 32, NAMESPACE):
        (done,) = bench.ask(admin, ResetFleet(1, fingerprint))
        assert isinstance(done, m.Done)
        assert (done.count, bench.service.cache.namespaces[NAMESPACE].ready_blocks) == (0, 0)


# --- jobs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("label", "kept"), [("test", True), (f"{m.BENCH_LABEL}copy", False)])
def test_a_reset_of_a_bench_is_not_in_the_state_file(bench: Bench, label: str, kept: bool) -> None:
    """Each run has a fingerprint of its own: many runs would displace the resets of engines."""
    worker, scheduler = bench.session(label=label), bench.session(m.Role.SCHEDULER)
    bench.copy(worker)
    bench.end_copy()
    bench.ask(scheduler, m.Reset(1, NAMESPACE))
    assert bench.service.cache.namespaces[NAMESPACE].ready_blocks == 0
    bench.ask(bench.session(m.Role.ADMIN), Clear(1, NAMESPACE))
    resets = bench.service.state.generations.resets
    assert (NAMESPACE in resets.generations, NAMESPACE in resets.unshared) == (kept, kept)


def test_job_that_ended_is_freed_without_the_collector(bench: Bench) -> None:
    """A plan may have 100,000 pieces; the garbage collector looks for it late. Engines are idle soon after the last."""
    worker, jobs = bench.session(), bench.service.jobs
    gc.disable()
    try:
        bench.copy(worker)
        job = ref(next(iter(jobs.running)))
        assert jobs.quiet_at == inf
        bench.end_copy()
        assert job() is None
        assert jobs.quiet_at == pytest.approx(100.0 + QUIET_S)
    finally:
        gc.enable()


def test_a_copy_counts_for_its_session_with_all_its_bytes(bench: Bench) -> None:
    first, second, scheduler = bench.session(), bench.session(), bench.session(m.Role.SCHEDULER)
    bench.copy(first)
    bench.end_copy()
    lease = scheduler.id << 32
    bench.ask(scheduler, m.Lookup(1, NAMESPACE, lease, [m.GroupKeys(0, KEY)]))
    bench.copy(second, lease)
    assert [(load.session, load.nbytes) for load in bench.copies] == [(second.id, PAGE)]
    bench.end_copy()
    job = Job(8, [GroupTransfer.of([KEY, KEY[::-1], KEY[1:] + KEY[:1]], [0, 1, 2])])
    bench.ask(first, submit_of(3, REGISTRATION, len(KEY), [job]))
    assert [(store.session, store.nbytes) for store in bench.copies] == [(first.id, 2 * PAGE)], "one key is there"
    bench.end_copy()


def test_load_fails_when_others_find_its_block_corrupt(bench: Bench) -> None:
    """As the scrubber does, while the load's own bytes were compared already, or are not to be."""
    cache, worker, scheduler = bench.service.cache, bench.session(), bench.session(m.Role.SCHEDULER)
    bench.copy(worker)
    bench.end_copy()
    lease = scheduler.id << 32
    bench.ask(scheduler, m.Lookup(1, NAMESPACE, lease, [m.GroupKeys(0, KEY)]))
    bench.copy(worker, lease)
    (check,) = cache.integrity.checks(cache.slots.in_use.nonzero()[0])
    for checksum in (1, 2):  # that of the store, which took none, and of what is there now
        cache.integrity.check(check.slot, check.sequence, checksum)
    bench.end_copy()
    bench.service.outgoing()
    (result,) = worker.completions.replay()[-1].results
    assert (result.error, result.failed) == (ErrorCode.CHECKSUM, [m.GroupKeys(0, KEY)])


def test_load_compares_what_an_earlier_daemon_wrote_until_somebody_has_compared_it(bench: Bench) -> None:
    """Whatever share of the loads is compared."""
    cache, worker, scheduler = bench.service.cache, bench.session(), bench.session(m.Role.SCHEDULER)
    bench.copy(worker)
    bench.end_copy()
    (check,) = cache.integrity.checks(cache.slots.in_use.nonzero()[0])
    cache.table.records["checksum"][check.slot] = 5  # as it is found in an earlier daemon's pool
    compared: list[object] = []
    for number in (1, 2):
        lease = scheduler.id << 32 | number
        bench.ask(scheduler, m.Lookup(1, NAMESPACE, lease, [m.GroupKeys(0, KEY)]))
        bench.copy(worker, lease)
        checksums = bench.copies[0].checksums
        compared.append(checksums and checksums.expected)
        if checksums is not None:
            checksums.sums[:] = [5]
        bench.end_copy()
    assert compared == [[5], None]


def test_the_policy_knows_what_was_asked_for_before_it_judges_a_store(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows the reply to a lookup may be put off, but not beyond the next message that needs it."""
    seen, cache = list[str](), bench.service.cache
    cache.prompts.watchers.append(lambda chains: seen.append("asked"))
    admit = cache.policy.admit
    monkeypatch.setattr(cache.policy, "admit", lambda *given: seen.append("judged") or admit(*given))  # type: ignore[func-returns-value]
    scheduler, worker = bench.session(m.Role.SCHEDULER), bench.session()
    bench.ask(scheduler, m.Lookup(3, NAMESPACE, 1 << 32, [m.GroupKeys(0, KEY)]))
    assert not seen
    bench.copy(worker)
    assert seen == ["asked", "judged"]


# --- the scrubber ------------------------------------------------------------------------------


def test_checksums_that_stores_left_out_are_taken_when_there_is_time() -> None:
    rig = CacheRig(units=64, region_units=8)
    space = rig.open("one")
    ticket = rig.begin(space, 0, 0, keys_of(1, 2, 3))
    slots = ticket[0].slots.tolist()
    rig.commit(ticket, checksum=0)
    scrubber = Scrubber(rig.cache, lambda: 0.0)
    assert scrubber.has_work
    checks = scrubber.next_step()
    assert sorted(check.slot for check in checks) == sorted(slots)
    scrubber.finish_step(checks, [100 + check.slot for check in checks])
    assert not scrubber.has_work
    assert rig.table.records["checksum"][slots].tolist() == [100 + slot for slot in slots]
    assert rig.cache.integrity.checked_slots == 0, "there was nothing to compare with"
    scrubber.start()
    checks = scrubber.next_step()
    scrubber.finish_step(checks, [100 + check.slot for check in checks])
    assert (scrubber.report(1).checked_slots, scrubber.report(1).mismatches) == (3, 0)


def test_a_step_of_scrubbing_reads_no_more_than_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of engines wait for it."""
    rig = CacheRig(units=64, region_units=8)
    rig.commit(rig.begin(rig.open("one"), 0, 0, keys_of(1, 2, 3)), checksum=0)
    monkeypatch.setattr("kvoffd.server.scrubber.STEP_BYTES", 1)
    scrubber = Scrubber(rig.cache, lambda: 0.0)
    for _ in range(3):
        (check,) = scrubber.next_step()
        scrubber.finish_step([check], [7])
    assert not scrubber.has_work


def test_a_step_of_scrubbing_looks_at_few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if nothing is left to read, as after a clear: a large pool would keep the loop for long."""
    rig = CacheRig(units=64, region_units=8)
    rig.commit(rig.begin(space := rig.open("one"), 0, 0, keys_of(*range(20))))
    monkeypatch.setattr("kvoffd.server.scrubber.LOOKED_AT_ONCE", 2)
    monkeypatch.setattr("kvoffd.server.scrubber.LOOKS", 3)
    scrubber = Scrubber(rig.cache, lambda: 0.0)
    scrubber.start()
    rig.cache.reset(space)
    while rig.cache.background():
        pass
    for _ in range(3):
        assert not scrubber.next_step()
        assert (scrubber.report(1).running, scrubber.report(1).slots, scrubber.report(1).done_slots) == (True, 20, 0)
    while scrubber.has_work:
        assert not scrubber.next_step()
    assert scrubber.report(1).done_slots == 20


class Parts:
    """An array of which one may only look at small parts."""

    def __init__(self, whole: npt.NDArray[np.bool_], most: int) -> None:
        self._whole, self._most = whole, most

    def __getitem__(self, part: slice | int) -> Any:
        assert np.size(self._whole[part]) <= self._most
        return self._whole[part]

    def __array__(self, *_: object, **__: object) -> npt.NDArray[np.bool_]:
        raise AssertionError("all slots at once")


@pytest.mark.parametrize("at_once", [1, 5])
def test_a_scrub_looks_at_no_more_than_a_region_at_once_and_finds_all(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """A pool of 1 TiB has 128 million slot numbers: looking at all of them takes a tenth of a second and more."""
    rig = CacheRig(units=64, region_units=8)
    rig.commit(rig.begin(space := rig.open("one"), 0, 0, keys_of(*range(30))))
    rig.cache.invalidate(space, [(0, keys_of(*range(0, 30, 3)))])
    slots = rig.cache.slots
    used = np.flatnonzero(slots.in_use)
    assert (slots.used_slots, slots.used_end) == (len(used), used[-1] + 1)
    monkeypatch.setattr("kvoffd.server.scrubber.LOOKED_AT_ONCE", at_once)
    monkeypatch.setattr("kvoffd.server.scrubber._STEP_SLOTS", 3)
    monkeypatch.setattr(slots, "in_use", Parts(slots.in_use, slots.slots_per_region))
    scrubber, found = Scrubber(rig.cache, lambda: 0.0), list[int]()
    scrubber.start()
    while scrubber.has_work:
        checks = scrubber.next_step()
        found += [check.slot for check in checks]
        scrubber.finish_step(checks, [check.checksum for check in checks])
    assert found == used.tolist()
    report = scrubber.report(1)
    assert (report.slots, report.done_slots, report.checked_slots) == (20, 20, 20)


@pytest.mark.parametrize("slots", [1, 3])
def test_a_scrub_asked_for_in_the_last_step_of_another_is_that_one(slots: int) -> None:
    """It is still running: its counts stay, and it ends with its last step."""
    rig = CacheRig(units=64, region_units=8)
    rig.commit(rig.begin(rig.open("one"), 0, 0, keys_of(*range(slots))))
    scrubber = Scrubber(rig.cache, lambda: 0.0)
    scrubber.start()
    checks = scrubber.next_step()
    assert (scrubber.report(1).running, scrubber.report(1).done_slots) == (True, 0)
    scrubber.start()
    scrubber.finish_step(checks, [7] * len(checks))
    report = scrubber.report(2)
    assert (report.running, report.slots, report.done_slots, report.checked_slots) == (False, slots, slots, slots)
    assert not scrubber.has_work


@pytest.mark.parametrize("step_bytes", [1, 1 << 20])
def test_a_step_of_scrubbing_that_failed_is_read_again(monkeypatch: pytest.MonkeyPatch, step_bytes: int) -> None:
    """Any step of a pass, the last one too; no slot counts as done before it was compared."""
    rig = CacheRig(units=64, region_units=8)
    rig.commit(rig.begin(rig.open("one"), 0, 0, keys_of(1, 2, 3)))
    monkeypatch.setattr("kvoffd.server.scrubber.STEP_BYTES", step_bytes)
    scrubber = Scrubber(rig.cache, lambda: 0.0)
    scrubber.start()
    steps = 0
    while scrubber.has_work:
        lost = scrubber.next_step()
        assert scrubber.report(1).running
        assert scrubber.has_work
        checks = scrubber.next_step()
        assert checks == lost
        scrubber.finish_step(checks, [7] * len(checks))
        steps += 1
        assert steps <= 3
    report = scrubber.report(1)
    assert (report.running, report.done_slots, report.checked_slots, report.mismatches) == (False, 3, 3, 0)


# --- registrations ---------------------------------------------------------------------------------


def test_register_of_a_session_that_ends_meanwhile(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU maps in a thread of its own. Until it has, the registration's id is taken; then nothing is held."""
    service, worker, mapping = bench.service, bench.session(registers=False), list[tuple[dict[int, int], OnMapped]]()
    monkeypatch.setattr(service.mapper, "map", lambda *given: mapping.append(given[-2:]))
    assert bench.register(worker, 1) == []
    (refused,) = bench.register(worker, 2)
    assert isinstance(refused, m.Error)
    assert refused.code is ErrorCode.BAD_GEOMETRY
    ((fds, mapped),) = mapping
    service.sessions.end(worker, lambda: None)
    unmapped = list[Callable[[], None]]()
    mapped(EngineMemory(bench, [(ADDRESS, BLOCKS * PAGE)], None, unmapped.append))
    assert (len(unmapped), worker.registrations) == (1, {})
    for fd in fds.values():
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    assert service.outgoing()[1] == []


def test_a_peer_that_wrote_before_it_died_is_dead() -> None:
    """What it wrote is unread, and would hide its end from who peeks; a store of it must not be committed."""
    ours, theirs = socket.socketpair()
    lifeline = Connection(ours, os.close)
    theirs.send(b"unread")
    assert lifeline.alive()
    theirs.close()
    assert not lifeline.alive()
    lifeline.close()
    assert not lifeline.alive()


# --- what a job names ------------------------------------------------------------------------------


def checks(keys: int, block_ids: Sequence[int], first_block: int, blocks_per_key: int, *, storing: bool) -> None:
    """Check a job of a worker that has 16 blocks in one tensor, and 4 in another where a key has one block."""
    namespace = Namespace(NAMESPACE, "test", 1, len(KEY), [m.GroupSpec("full", 16)], "")
    tensors = [m.TensorLayout(0, 0, 1024, 16), m.TensorLayout(0, 0, 4096, 4)]
    pages = [m.PageRef(0, 1024)] if blocks_per_key > 1 else [m.PageRef(0, 1024), m.PageRef(1, 1024)]
    layouts = build_layouts([(ADDRESS, 16384)], tensors, [pages], blocks_per_key)
    key_counts, id_counts, first_blocks = (struct.pack("<I", number) for number in (keys, len(block_ids), first_block))
    names = b"".join([KEY[:-1] + bytes([number]) for number in range(keys)])
    group = m.GroupBlocks(0, key_counts, id_counts, first_blocks, names, np.array(block_ids, "<i4").tobytes())
    batch = m.Stores([1], [group]) if storing else m.Loads([1], [1], [False], [group])
    checked_parts(SimpleNamespace(namespace=namespace, layouts=layouts), batch, storing=storing)  # type: ignore[arg-type]


def test_block_ids_must_fit_the_keys_and_the_shortest_tensor() -> None:
    for number, keys, first_block, store, load in (
        (8, 2, 0, True, True),
        (7, 2, 0, False, True),
        (7, 2, 1, True, True),
        (5, 2, 0, False, True),
        (4, 2, 0, False, False),
        (9, 2, 0, False, False),
        (8, 2, 1, False, False),
        (1, 1, 3, True, True),
        (4, 2, 4, False, False),
        (9, 2, 2**32 - 1, False, False),
        (0, 1, 0, False, False),
        (0, 1, 3, False, False),
        (0, 0, 0, False, False),
    ):
        for storing, good in ((True, store), (False, load)):
            with case(number, keys, first_block, storing), nullcontext() if good else pytest.raises(BadBlockIds):
                checks(keys, range(number), first_block, 4, storing=storing)
    for storing in (False, True):
        checks(3, [0, 3, 1], 0, 1, storing=storing)
        with pytest.raises(BadBlockIds, match=r"Block id 4 .* to 3"):
            checks(3, [0, 4, 1], 0, 1, storing=storing)


def test_each_job_of_a_message_has_its_own_keys_and_blocks() -> None:
    keys, ids, first_blocks = (struct.pack("<3I", *column) for column in ((2, 0, 1), (4, 0, 1), (0, 0, 1)))
    group = m.GroupBlocks(0, keys, ids, first_blocks, KEY * 3, bytes(4 * 5))
    spans = group.spans(3, len(KEY), 2, store=True)
    assert spans == [m.JobSpan(0, 0, 2, 0, 4, 0), m.JobSpan(2, 2, 3, 4, 5, 1)]


# --- statistics ----------------------------------------------------------------------------------


def test_a_client_that_asks_for_statistics_all_the_time_gets_a_part_of_the_loop(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for its answers, and they are of the time when they come; engines do not wait."""
    admin, scheduler = bench.session(m.Role.ADMIN), bench.session(m.Role.SCHEDULER)
    statistics, read_s, seconds, reads = bench.service.statistics, 0.02, 20.0, 0
    read = statistics.read

    def read_slowly() -> DaemonStats:
        nonlocal reads
        reads += 1
        bench.now += read_s
        return read()

    monkeypatch.setattr(statistics, "read", read_slowly)
    for _ in range(10):
        assert isinstance(bench.ask(admin, Stats(1))[0], StatsReply), "a few in a row are answered at once"
    began, reads = bench.now, 0
    replies = bench.ask(admin, Stats(2))
    while bench.now < began + seconds:
        if replies:
            (reply,) = replies
            assert isinstance(reply, StatsReply)
            assert reply.stats.uptime_seconds == pytest.approx(bench.now - statistics.started_at)
            replies = bench.ask(admin, Stats(2))
        else:
            (found,) = bench.ask(scheduler, m.Lookup(3, NAMESPACE, scheduler.id << 32, [m.GroupKeys(0, KEY)]))
            assert isinstance(found, m.LookupReply)
            bench.now += 0.01
            replies = [codec.decode_reply(frame) for _, frame in bench.service.outgoing()[1]]
    most = LOOP_SHARE * seconds + LOOP_BURST_S
    assert most / 2 < reads * read_s <= most + read_s


@pytest.mark.parametrize("kind", QUESTIONS, ids=lambda kind: kind.__name__)
def test_operators_take_turns_while_one_asks_all_the_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: type[m.AnyRequest]
) -> None:
    """One who asks now and then waits for one answer to the other, not for all that it has asked."""
    greedy, polite, gone = (bench.session(m.Role.ADMIN) for _ in range(3))
    exchange, handler = bench.service.handlers[kind]
    fields = {"namespace": NAMESPACE, "group": 0, "position": 0, "limit": 1}
    asked = {name: value for name, value in fields.items() if name in kind.__struct_fields__}

    def slowly(session: Session, request: Any) -> Any:
        bench.now += 0.1
        return handler(session, request)

    monkeypatch.setitem(bench.service.handlers, kind, (exchange, slowly))

    def ask(session: Session, request_id: int) -> None:
        bench.service.handle(session.route, codec.encode(kind(request_id, **asked)))

    def answered() -> list[int]:
        return [codec.decode_reply(frame).request_id for _, frame in bench.service.outgoing()[1]]

    ids = iter(range(10, 1000))
    ask(greedy, next(ids))
    while answered():
        ask(greedy, next(ids))
    for _ in range(20):
        ask(greedy, next(ids))
    ask(gone, 1)
    ask(polite, 2)
    ask(greedy, next(ids))
    bench.service.sessions.end(gone, lambda: None)
    order: list[int] = []
    while 2 not in order:
        bench.now += 0.01
        order += answered()
        ask(greedy, next(ids))
    assert len(order) == 2


def test_a_question_whose_turn_does_not_come_is_refused_in_time(bench: Bench) -> None:
    """Forty operators ask at once for what takes a second each: those who were first have their answers."""
    sessions = [bench.session(m.Role.ADMIN) for _ in range(40)]
    read = bench.service.statistics.read

    def read_slowly() -> DaemonStats:
        bench.now += 1.0
        return read()

    bench.service.statistics.read = read_slowly  # type: ignore[method-assign]
    asked_at, replies = bench.now, list[m.AnyReply]()
    for session in sessions:
        replies += bench.ask(session, Stats(1))
    while len(replies) < len(sessions):
        bench.now += 0.01
        replies += [codec.decode_reply(frame) for _, frame in bench.service.outgoing()[1]]
    refused = [reply for reply in replies if isinstance(reply, m.Error)]
    assert {error.code for error in refused} == {ErrorCode.TOO_MANY}
    assert 0 < len(sessions) - len(refused) < 10
    assert bench.now - asked_at < OPERATOR_WAIT_S + 3


def test_a_step_of_the_loop_looks_at_the_question_in_turn_and_not_at_all_that_wait(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of many sessions may have sixty-four of them, and the loop sends after each request."""
    read, looks = bench.service.statistics.read, 0

    def read_slowly() -> DaemonStats:
        bench.now += 1.0
        return read()

    class Counted(Pending):
        def __getattribute__(self, name: str) -> Any:
            nonlocal looks
            looks += 1
            return super().__getattribute__(name)

    monkeypatch.setattr(bench.service.statistics, "read", read_slowly)
    monkeypatch.setattr("kvoffd.server.loop_share.Pending", Counted)
    admins, scheduler = [bench.session(m.Role.ADMIN) for _ in range(8)], bench.session(m.Role.SCHEDULER)
    for session in admins:
        for number in range(MAX_PENDING):
            bench.ask(session, Stats(number + 1))
    waiting, looks = bench.service.waiting, 0
    assert waiting > 7 * MAX_PENDING
    (found,) = bench.ask(scheduler, m.Lookup(3, NAMESPACE, scheduler.id << 32, [m.GroupKeys(0, KEY)]))
    assert isinstance(found, m.LookupReply)
    assert looks <= 4 * len(admins)
    (refused,) = bench.ask(admins[-1], Stats(MAX_PENDING + 2))
    assert isinstance(refused, m.Error)
    assert refused.code is ErrorCode.TOO_MANY


def test_operators_that_are_refused_and_ask_again_have_a_turn_before_those_that_had_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve ask all the time, and their line is longer than a question may wait."""
    read = bench.service.statistics.read

    def read_slowly() -> DaemonStats:
        bench.now += 0.5
        return read()

    monkeypatch.setattr(bench.service.statistics, "read", read_slowly)
    of_route = {session.route: session for session in (bench.session(m.Role.ADMIN) for _ in range(12))}
    answered, refused = Counter[bytes](), 0
    for session in of_route.values():
        bench.service.handle(session.route, codec.encode(Stats(1)))
    until = bench.now + 10 * OPERATOR_WAIT_S
    while bench.now < until:
        bench.now += 0.01
        for route, frame in bench.service.outgoing()[1]:
            if isinstance(codec.decode_reply(frame), m.Error):
                refused += 1
            else:
                answered[route] += 1
            bench.service.handle(route, codec.encode(Stats(1)))
    assert refused
    assert answered.keys() == of_route.keys()
    assert max(answered.values()) - min(answered.values()) <= 1


def test_a_stop_of_the_daemon_is_no_long_reading_of_statistics(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs nobody the time for which the process stood still."""
    admin, statistics = bench.session(m.Role.ADMIN), bench.service.statistics
    read = statistics.read

    def stopped_in_between() -> DaemonStats:
        bench.now += 600.0
        return read()

    with monkeypatch.context() as patched:
        patched.setattr(statistics, "read", stopped_in_between)
        bench.ask(admin, Stats(1))
    assert isinstance(bench.ask(admin, Stats(2))[0], StatsReply)


# --- credit, and who may connect -------------------------------------------------------------------


def test_ids_of_sessions_begin_again_after_the_largest(bench: Bench) -> None:
    """A greeting with a larger one is none: no client could connect any more."""
    first, second = bench.session(), bench.session(m.Role.SCHEDULER)
    bench.service.sessions._last_id = m.END_OF_SESSION_IDS - 2
    ids = [bench.session(m.Role.SCHEDULER).id for _ in range(2)]
    assert [first.id, second.id, *ids] == [1, 2, m.END_OF_SESSION_IDS - 1, 3]


def test_sessions_that_come_and_go_in_a_loop_do_not_fill_a_disk_with_lines(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rare = RareWarnings(logging.getLogger("kvoffd.server.sessions"), logging.INFO, 5)
    monkeypatch.setattr("kvoffd.server.sessions._come_and_gone", rare)
    for _ in range(10):
        bench.service.sessions.end(bench.session(), lambda: None)
    lines = [one.getMessage() for one in caplog.records if one.name == "kvoffd.server.sessions"]
    assert [line.partition(" ended")[0].partition(":")[0] for line in lines] == [
        *("Session 1", "Session 1 (worker test)", "Session 2", "Session 2 (worker test)", "Session 3")
    ]


def test_credit_is_an_eighth_of_the_pool_among_writers(bench: Bench) -> None:
    for pool_bytes, credit in ((1 << 20, 1 << 17), (8 << 30, 1 << 30), (64 << 30, 1 << 30)):
        cache: Any = SimpleNamespace(slots=SimpleNamespace(pool_bytes=pool_bytes))
        assert credit_of_all_bytes(Config(), cache) == credit
    sessions, whole = bench.service.sessions, POOL_BYTES // 8
    bench.session(m.Role.SCHEDULER)
    bench.session(registers=False)
    bench.session()
    assert sessions.credit_bytes == whole
    second = bench.session()
    assert sessions.credit_bytes == whole // 2
    (welcome,) = bench.ask(second, m.Hello(3, m.PROTOCOL_VERSION, m.Role.WORKER, "test", "test"))
    assert isinstance(welcome, m.Welcome)
    assert welcome.credit_bytes == whole // 2, "also when it says Hello again"


def test_a_new_writer_is_welcomed_with_its_part_of_the_credit(bench: Bench) -> None:
    """Until its first store has ended it hears of no other."""
    bench.session()
    lifeline: Any = SimpleNamespace(alive=lambda: True, close_descriptor=os.close)
    new = bench.service.sessions.open(lifeline, ClientProcess(0, 1, 1))
    (welcome,) = bench.ask(new, m.Hello(1, m.PROTOCOL_VERSION, m.Role.WORKER, "test", "test"))
    assert isinstance(welcome, m.Welcome)
    assert welcome.credit_bytes == POOL_BYTES // 16


def test_descriptors_of_all_sessions_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed descriptor makes space for another one, of any session."""
    monkeypatch.setattr(bench.service.sessions, "_max_attached", 600)
    first, second = bench.session(registers=False), bench.session(registers=False)
    attach = partial(bench.service.sessions.attach, fd=-1)
    for number in range(600):
        attach((first, second)[number % 2], number)
    for session in (first, second):
        with pytest.raises(KvoffdError, match="600 descriptors"):
            attach(session, 600)
    del first.attached[0]
    attach(second, 600)
    with pytest.raises(KvoffdError, match="600 descriptors"):
        attach(first, 601)


def test_peers_of_the_group_or_of_those_named_may_connect() -> None:
    group, uid = os.getegid(), os.geteuid()
    for peer, config, allowed in (
        (ClientProcess(1, 4242, group), Config(), True),
        (ClientProcess(1, 4242, group + 1), Config(), False),
        (ClientProcess(1, 4242, group), Config(allowed_gids=(group + 1,)), False),
        (ClientProcess(1, 4242, group + 1), Config(allowed_gids=(group + 1,)), True),
        (ClientProcess(1, 4242, group + 1), Config(allowed_uids=(4242,)), True),
        (ClientProcess(1, uid, group + 1), Config(allowed_gids=(group + 2,)), True),
        (ClientProcess(1, 0, group + 1), Config(allowed_gids=(group + 2,)), True),
    ):
        assert may_connect(peer, config) is allowed, (peer, config.allowed_uids, config.allowed_gids)
