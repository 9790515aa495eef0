"""Stores, lookups and loads over bare sockets: bytes, completions, leases, deaths."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvoffd_client import SharedMemory
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from tests.kit.daemon import DaemonProcess
from tests.kit.steal import TooSlow
from tests.kit.struct_wire import NAMESPACE, WireClient, ids, key, keys, load_of, stats, store_of
from tests.kit.waiting import wait_until

PAGE = 16384
BLOCKS = 32


def fill(memory: SharedMemory, seed: int) -> bytes:
    data = np.random.default_rng(seed).integers(0, 256, memory.size_bytes, dtype=np.uint8)
    memory.view[:] = data
    return data.tobytes()


def page(memory: SharedMemory, block: int) -> bytes:
    return memory.view[block * PAGE : (block + 1) * PAGE].tobytes()


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    with SharedMemory(BLOCKS * PAGE, "test") as shared:
        yield shared


@pytest.fixture
def daemon(shared_daemon: DaemonProcess) -> DaemonProcess:
    """One daemon for the tests that need no settings of their own."""
    return shared_daemon


def test_what_is_stored_comes_back_into_other_blocks_byte_for_byte(worker, scheduler, memory):
    fill(memory, 1)
    registration = worker.register(memory)
    wanted = [page(memory, block) for block in (3, 1, 7)]
    stored = worker.store(registration, 1, keys(1, 2, 3), ids(3, 1, 7))
    assert (stored.ok, stored.bytes) == (True, 3 * PAGE)
    memory.view[:] = 0
    found = scheduler.lookup(1, keys(1, 2, 3, 4))
    assert found.states == [bytes([2, 2, 2, 0])]
    loaded = worker.load(registration, 2, scheduler.lease(1), keys(1, 2, 3), ids(20, 5, 0))
    assert (loaded.ok, loaded.bytes) == (True, 3 * PAGE)
    assert [page(memory, block) for block in (20, 5, 0)] == wanted
    assert not any(page(memory, 3)), "a block that was not asked for was written"


def test_a_lease_ends_by_itself_when_the_last_rank_has_loaded(daemon, worker, scheduler, memory):
    registration = worker.register(memory)
    worker.store(registration, 1, keys(1), ids(0))
    scheduler.lookup(1, keys(1))
    assert stats(daemon.directory).leases == 1
    worker.load(registration, 2, scheduler.lease(1), keys(1), ids(0))
    after = stats(daemon.directory)
    assert (after.leases, after.pinned_blocks, after.pool.pinned_bytes) == (0, 0, 0)


def test_storing_twice_copies_once(worker, memory):
    registration = worker.register(memory)
    assert worker.store(registration, 1, keys(1), ids(0)).bytes == PAGE
    again = worker.store(registration, 2, keys(1, 2), ids(0, 1))
    assert (again.ok, again.bytes) == (True, PAGE)


def test_a_block_is_not_ready_before_every_rank_has_stored_its_shard(daemon, scheduler):
    other = bytes(reversed(NAMESPACE))
    scheduler.open_namespace(other, world_size=2)
    with SharedMemory(BLOCKS * PAGE, "a") as first, SharedMemory(BLOCKS * PAGE, "b") as second:
        with WireClient(daemon.directory) as zero, WireClient(daemon.directory) as one:
            for client in (zero, one):
                client.open_namespace(other, world_size=2)
            fill(first, 1)
            fill(second, 2)
            shards = page(first, 4), page(second, 4)
            registered = (
                zero.register(first, rank=0, fingerprint=other),
                one.register(second, rank=1, fingerprint=other),
            )
            assert zero.store(registered[0], 1, keys(9), ids(4)).ok
            assert scheduler.lookup(1, keys(9), other).states == [bytes([1])]
            assert one.store(registered[1], 1, keys(9), ids(4)).ok
            assert scheduler.lookup(2, keys(9), other).states == [bytes([2])]
            first.view[:] = second.view[:] = 0
            assert zero.load(registered[0], 2, scheduler.lease(2), keys(9), ids(11)).ok
            assert stats(daemon.directory).leases == 1, "one rank of two has loaded"
            assert one.load(registered[1], 2, scheduler.lease(2), keys(9), ids(12)).ok
            assert (page(first, 11), page(second, 12)) == shards
            assert stats(daemon.directory).leases == 0


def test_namespaces_do_not_see_each_other(worker, scheduler, memory):
    registration = worker.register(memory)
    worker.store(registration, 1, keys(1), ids(0))
    other = b"n" * 32
    scheduler.open_namespace(other)
    assert scheduler.lookup(1, keys(1), other).states == [bytes([0])]


def test_a_load_of_keys_outside_its_lease_fails_and_names_them(worker, scheduler, memory):
    registration = worker.register(memory)
    worker.store(registration, 1, keys(1, 2), ids(0, 1))
    scheduler.lookup(1, keys(1))
    before = fill(memory, 5)
    failed = worker.load(registration, 2, scheduler.lease(1), keys(1, 2), ids(0, 1))
    assert (failed.ok, failed.error, failed.bytes) == (False, ErrorCode.NOT_READY, 0)
    assert failed.failed == [m.GroupKeys(0, key(2))]
    assert memory.view.tobytes() == before


def test_a_full_pool_of_pinned_blocks_drops_keys_and_says_which():
    with DaemonProcess("1MiB", leased_share="1") as daemon, SharedMemory(96 * PAGE, "test") as memory:
        with WireClient(daemon.directory) as worker, WireClient(daemon.directory, m.Role.SCHEDULER) as scheduler:
            worker.open_namespace()
            scheduler.open_namespace()
            registration = worker.register(memory)
            first = list(range(64))
            assert worker.store(registration, 1, keys(*first), ids(*first)).ok
            assert scheduler.lookup(1, keys(*first)).pinned == 64
            dropped = worker.store(registration, 2, keys(100), ids(65))
            assert (dropped.ok, dropped.error) == (False, ErrorCode.NO_ROOM)
            assert dropped.failed == [m.GroupKeys(0, key(100))]
            scheduler.release(1)
            assert worker.store(registration, 3, keys(100), ids(65)).ok
            report = stats(daemon.directory)
            assert (report.namespaces[0].evicted_blocks, report.namespaces[0].dropped_keys) == (1, 1)


def test_a_store_that_the_policy_declines_is_no_error_and_says_which_keys():
    with DaemonProcess("1MiB", eviction_policy="gate") as daemon, SharedMemory(96 * PAGE, "test") as memory:
        with WireClient(daemon.directory) as worker, WireClient(daemon.directory, m.Role.SCHEDULER) as scheduler:
            worker.open_namespace()
            scheduler.open_namespace()
            registration = worker.register(memory)
            for number in range(2):
                scheduler.lookup(number, keys(1, 2))
            scheduler.lookup(3, keys(1, 2, 3))
            result = worker.store(registration, 1, keys(1, 2, 3), ids(1, 2, 3))
            assert (result.ok, result.failed, result.bytes) == (True, [], 2 * PAGE)
            assert result.declined == [m.GroupKeys(0, key(3))]
            (space,) = stats(daemon.directory).namespaces
            assert (space.stored_blocks, space.declined_keys, space.dropped_keys) == (2, 1, 0)


def test_completions_are_numbered_and_kept_until_acknowledged(worker, memory):
    registration = worker.register(memory)
    for job in range(5):
        worker.store(registration, job, keys(job), ids(job))
    replay = worker.ask(m.Replay, 0)
    assert [batch.sequence for batch in replay.batches] == list(range(1, len(replay.batches) + 1))
    assert sorted(result.job_id for batch in replay.batches for result in batch.results) == list(range(5))
    last = replay.batches[-1].sequence
    beat = worker.ask(m.Heartbeat, last, [])
    assert beat.sequence == last
    assert worker.ask(m.Replay, last).batches == []


def test_completions_come_over_pub(worker, memory):
    registration = worker.register(memory)
    # Once one message has come the subscription is known to work; from then on each must come exactly once.
    worker.store(registration, 0, keys(0), ids(0))
    worker.send(m.Submit, registration, [store_of(1, keys(1), ids(1))])
    batch = worker.completions()
    while batch.results[0].job_id != 1:
        batch = worker.completions()
    assert batch.credit_bytes > 0
    assert batch.results[0].ok


def test_unregister_ends_the_daemons_hold_on_the_memory(daemon, worker, memory):
    registration = worker.register(memory)

    def mapped() -> int:
        with open(f"/proc/{daemon.pid}/maps") as maps:
            return sum("kvoffd:test" in line or "memfd:test" in line for line in maps)

    assert mapped() == 1
    worker.ask(m.Unregister, registration)
    assert mapped() == 0
    refused = worker.refused(m.Submit, registration, [store_of(1, keys(1), ids(0))])
    assert refused.code is ErrorCode.UNKNOWN_REGISTRATION


def test_leases_end_with_their_time_unless_renewed():
    quick = DaemonProcess(lease_ttl="1s", heartbeat_interval="200ms")
    with quick as daemon, SharedMemory(BLOCKS * PAGE, "test") as memory:
        with WireClient(daemon.directory) as worker, WireClient(daemon.directory, m.Role.SCHEDULER) as scheduler:
            worker.open_namespace()
            scheduler.open_namespace()
            registration = worker.register(memory)
            worker.store(registration, 1, keys(1, 2), ids(0, 1))
            assert scheduler.lookup(1, keys(1)).ttl_ms == 1000
            scheduler.lookup(2, keys(2))
            kept = scheduler.lease(2)

            def first_is_gone() -> bool:
                assert scheduler.ask(m.Heartbeat, 0, [kept]).ended == []
                return stats(daemon.directory).leases == 1

            wait_until(first_is_gone)
            assert worker.load(registration, 2, kept, keys(2), ids(9)).ok
            refused = worker.refused(m.Submit, registration, [], [load_of(3, scheduler.lease(1), keys(1), ids(0))])
            assert refused.code is ErrorCode.UNKNOWN_LEASE


def test_a_lease_that_is_to_be_kept_outlasts_the_loads_of_all_ranks(worker, scheduler, memory):
    fill(memory, 2)
    registration = worker.register(memory)
    assert worker.store(registration, 1, keys(1), ids(0)).ok
    assert scheduler.lookup(5, keys(1)).pinned == 1
    lease, part = scheduler.lease(5), [m.GroupTransfer(0, keys(1), ids(7))]
    for job in (2, 3):
        assert worker.result(m.Submit, registration, [], [m.Load(job, lease, part, keep_lease=True)]).ok
    assert worker.load(registration, 4, lease, keys(1), ids(7)).ok
    refused = worker.refused(m.Submit, registration, [], [m.Load(5, lease, part)])
    assert refused.code is ErrorCode.UNKNOWN_LEASE


def test_half_stored_blocks_time_out(scheduler):
    with DaemonProcess(half_stored_timeout="500ms") as daemon, SharedMemory(BLOCKS * PAGE, "test") as memory:
        with WireClient(daemon.directory) as worker:
            worker.open_namespace(world_size=2)
            registration = worker.register(memory)
            assert worker.store(registration, 1, keys(1), ids(0)).ok
            assert stats(daemon.directory).pool.writing_bytes > 0
            wait_until(lambda: stats(daemon.directory).pool.writing_bytes == 0)
            assert worker.store(registration, 2, keys(2), ids(0)).ok
            wait_until(lambda: stats(daemon.directory).namespaces[0].half_stored_blocks == 2)
            assert daemon.log.count("not all of its 2 ranks stored their shard") == 1


def kill_an_engine_in_mid_store(daemon: DaemonProcess, blob: bytes, page_bytes: int) -> float:
    """Have a child send one large store and kill it; seconds until its session was gone."""
    pages = len(blob) // 32
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:  # the engine: sends its store and waits to be killed
        try:
            os.close(read_end)
            client = WireClient(daemon.directory)
            client.open_namespace()
            memory = SharedMemory(pages * page_bytes, "victim")
            registration = client.register(memory, page_bytes=page_bytes)
            parts = [m.GroupTransfer(0, blob, ids(*range(pages)))]
            client.send(m.Submit, registration, [m.Store(1, parts)])
            os.write(write_end, client.session_id.to_bytes(8, "little"))
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(write_end)
    try:
        session_id = int.from_bytes(os.read(read_end, 8), "little")
        with WireClient(daemon.directory, m.Role.ADMIN) as admin:

            def gone() -> bool:
                reply = admin.ask(m.Sessions)
                return session_id not in [session.session_id for session in reply.sessions]

            killed = time.monotonic()
            os.kill(child, 9)
            wait_until(gone, interval_s=0.001)
            return time.monotonic() - killed
    finally:
        os.close(read_end)
        os.waitpid(child, 0)


@pytest.mark.timing(only=TooSlow)
def test_a_dead_engine_leaves_no_pin_no_job_and_no_half_written_block(daemon, scheduler):
    """Engines die in mid-store: their sessions end at once, their blocks are never served, the books balance."""
    pages = 16
    blobs = [keys(*range(round * 100, round * 100 + pages)) for round in range(3)]
    seconds = [kill_an_engine_in_mid_store(daemon, blob, 2**20) for blob in blobs]
    if min(seconds) >= 0.1:
        raise TooSlow(f"sessions ended after {seconds} s; the least counts, since others' load only adds")
    wait_until(lambda: stats(daemon.directory).pool.writing_bytes == 0)
    after = stats(daemon.directory)
    assert after.pool.free_bytes + after.pool.ready_bytes == after.pool.pool_bytes
    assert (after.pinned_blocks, after.leases) == (0, 0)
    for number, blob in enumerate(blobs):
        # Either the whole store was committed before the kill, or none of it is served.
        assert set(scheduler.lookup(number, blob).states[0]) in ({0}, {2})


def test_invalidated_blocks_are_not_found_any_more(worker, scheduler, memory):
    registration = worker.register(memory)
    worker.store(registration, 1, keys(1, 2), ids(0, 1))
    assert scheduler.ask(m.Invalidate, NAMESPACE, [m.GroupKeys(0, keys(1, 9))]).count == 1
    assert scheduler.lookup(1, keys(1, 2)).states == [bytes([0, 2])]


def test_reset_drops_the_namespace(daemon, worker, scheduler, memory):
    registration = worker.register(memory)
    worker.store(registration, 1, keys(1, 2), ids(0, 1))
    assert scheduler.ask(m.Reset, NAMESPACE).count == 2
    assert stats(daemon.directory).pool.free_bytes == stats(daemon.directory).pool.pool_bytes


def test_a_duplicate_job_is_refused_and_cancel_names_only_jobs_of_the_session(worker, memory):
    registration = worker.register(memory)
    cancelled = worker.ask(m.Cancel, [1, 2, 3])
    assert (cancelled.cancelled, cancelled.running) == ([], [])
    worker.store(registration, 1, keys(1), ids(0))
    assert worker.store(registration, 1, keys(2), ids(1)).ok, "an ended job's id may be used again"


def test_a_block_stored_in_part_is_stored_again_in_full_and_only_what_was_written_is_loaded(worker, scheduler, memory):
    fill(memory, 3)
    of_two_pages = b"2" * 32
    for client in (worker, scheduler):
        client.open_namespace(of_two_pages)
    registration = worker.register(memory, fingerprint=of_two_pages, blocks_per_key=2)
    second_half, whole = page(memory, 9), page(memory, 8) + page(memory, 9)

    def store_from(job: int, first_block: int, block_ids: bytes) -> m.JobResult:
        return worker.store(registration, job, keys(1), block_ids, first_block)

    def load_from(job: int, first_block: int, block_ids: bytes) -> m.JobResult:
        assert scheduler.lookup(job, keys(1), of_two_pages).states == [bytes([2])]
        return worker.load(registration, job, scheduler.lease(job), keys(1), block_ids, first_block)

    assert store_from(1, 1, ids(9)).bytes == PAGE
    assert load_from(2, 0, ids(20, 21)).error is ErrorCode.NOT_READY, "the first half was never written"
    scheduler.release(2)
    assert load_from(3, 1, ids(21)).ok
    assert page(memory, 21) == second_half
    assert store_from(4, 0, ids(8, 9)).bytes == 2 * PAGE
    assert load_from(5, 0, ids(30, 31)).ok
    assert page(memory, 30) + page(memory, 31) == whole
