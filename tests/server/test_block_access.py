"""What writing a block asks of the cache, without a daemon."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.server.block_access import MAX_WRITES, BlockWriter
from kvoffd.server.engine_memory import MemoryMapper
from kvoffd.server.jobs import JobRunner
from kvoffd.server.session import CompletionLog, Lifeline, Peer, Session
from kvoffd.system.mappings import map_memfd
from kvoffd.transfer.cuda.gpus import Gpus
from kvoffd.transfer.engine import Transfer
from kvoffd.transfer.host_engine import HostEngine
from kvoffd.transfer.plan import Outcome
from kvoffd_client import SharedMemory
from kvoffd_proto.blocks import PutBlocks, PutShard
from kvoffd_proto.errors import ErrorCode
from tests.kit.cache_harness import SLOT_UNIT, CacheHarness, begin_store, keys_of
from tests.kit.invariants import check_invariants

GPUS = Gpus(0, 0, library="/no/driver")


def test_blocks_are_put_on_the_numa_node_of_their_ranks_stores_which_stays() -> None:
    rig = CacheHarness()
    space = rig.open(world_size=2)
    for rank in range(2):
        rig.cache.abort_store(begin_store(rig.cache, space, rank, 0, keys_of(1), node=rank + 5))
    rig.slots.requested_nodes.clear()
    engine = HostEngine()
    assert engine.close(10)  # so that it cancels what it is given
    ended: list[bytes | KvoffdError] = []

    def call(what: Callable[[], None]) -> None:
        what()

    runner = JobRunner(rig.cache, rig.clock, 10.0, call)
    writer = BlockWriter(Config(), rig.cache, MemoryMapper(engine, map_memfd, call, GPUS), 0, runner)
    session = Session(1, b"t" * 16, Peer(0, 0, 0), Lifeline(), 0.0, CompletionLog(1, 1))
    with SharedMemory(SLOT_UNIT, "put") as memory:
        session.segments[1] = os.dup(memory.fd)
        shards = [[PutShard(0, b"\x01" * 8)] * 2]
        request = PutBlocks(1, session.token, space.fingerprint, 1, memory.size_bytes, 0, keys_of(2), shards)
        writer.write(session, space, request, ended.append)
        session.close_memory()
    assert not session.jobs
    assert not runner.unfinished
    (error,) = ended
    assert isinstance(error, KvoffdError)
    assert error.code is ErrorCode.CANCELLED
    assert rig.slots.requested_nodes == [5, 6]
    assert space.nodes == {0: 5, 1: 6}
    check_invariants(rig.cache)


class HangingEngine(HostEngine):
    """Takes transfers and never ends them."""

    def submit(self, transfer: Transfer) -> None:
        pass


def test_a_write_whose_copy_hangs_is_refused_and_keeps_its_slots_until_the_copy_has_ended() -> None:
    rig = CacheHarness()
    space = rig.open()
    engine = HangingEngine()
    answers: list[bytes | KvoffdError] = []
    runner = JobRunner(rig.cache, rig.clock, 10.0, lambda what: what())
    memory_mapper = MemoryMapper(engine, map_memfd, lambda what: what(), GPUS)
    writer = BlockWriter(Config(), rig.cache, memory_mapper, 0, runner)
    session = Session(1, b"t" * 16, Peer(0, 0, 0), Lifeline(), 0.0, CompletionLog(1, 1))
    free_bytes = rig.slots.free_bytes
    with SharedMemory(SLOT_UNIT, "put") as memory:
        session.segments[1] = os.dup(memory.fd)
        request = PutBlocks(
            1, session.token, space.fingerprint, 1, memory.size_bytes, 0, keys_of(2), [[PutShard(0, b"\x01" * 8)]]
        )
        writer.write(session, space, request, answers.append)
        (job,) = session.jobs.values()
        runner.transfer_overdue(job)
        (error,) = answers
        assert isinstance(error, KvoffdError)
        assert error.code is ErrorCode.DEADLINE
        drained: list[bool] = []
        session.end(lambda: drained.append(True))
        session.close_memory()
        assert (runner.unfinished, rig.slots.free_bytes < free_bytes, drained) == (1, True, [])
        runner.transfer_done(job, Outcome.DONE)
        assert (runner.unfinished, rig.slots.free_bytes, drained) == (0, free_bytes, [True])
    assert len(answers) == 1
    assert engine.close(10)
    rig.cache.pool_usage()


def test_writes_whose_copies_hang_count_against_the_bound_of_their_session() -> None:
    rig = CacheHarness()
    space = rig.open()
    engine = HangingEngine()
    answers: list[bytes | KvoffdError] = []
    runner = JobRunner(rig.cache, rig.clock, 10.0, lambda what: what())
    writer = BlockWriter(Config(), rig.cache, MemoryMapper(engine, map_memfd, lambda what: what(), GPUS), 0, runner)
    session = Session(1, b"t" * 16, Peer(0, 0, 0), Lifeline(), 0.0, CompletionLog(1, 1))
    with SharedMemory(SLOT_UNIT, "put") as memory:
        session.segments[1] = os.dup(memory.fd)
        for number in range(MAX_WRITES + 1):
            shards = [[PutShard(0, b"\x01" * 8)]]
            request = PutBlocks(
                number, session.token, space.fingerprint, 1, memory.size_bytes, 0, keys_of(number + 1), shards
            )
            if number < MAX_WRITES:
                writer.write(session, space, request, answers.append)
                runner.transfer_overdue(*session.jobs.values())
        assert (len(answers), len(session.jobs)) == (MAX_WRITES, 0)
        with pytest.raises(KvoffdError) as refusal:
            writer.write(session, space, request, answers.append)
        assert refusal.value.code is ErrorCode.TOO_MANY
        for job in list(session.hanging):
            runner.transfer_done(job, Outcome.FAILED)
        writer.write(session, space, request, answers.append)
        (job,) = session.jobs.values()
        runner.transfer_done(job, Outcome.FAILED)
        session.close_memory()
    assert engine.close(10)
    rig.cache.pool_usage()
