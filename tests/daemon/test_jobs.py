"""Stores, lookups and loads: bytes, leases, ranks, results, cancels, and engines that die in the middle."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from kvoffd_client import ClientOptions, ErrorCode, GroupKeys, GroupTransfer, Job, JobResult, SharedMemory
from kvoffd_client.testing import FakeEngine
from tests.kit.checked import CheckedEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import (
    NAMESPACE,
    PAGE_BYTES,
    Load,
    Page,
    Part,
    Segment,
    Store,
    Tensor,
    WireClient,
    answer,
    books,
    keys,
    load_of,
    refused,
    store_of,
)

OTHER = bytes(reversed(NAMESPACE))
FOR_EVER = "slow 100000"
EXIT_STUCK = 70
"""Of sysexits.h. A service manager starts the daemon again."""


@pytest.fixture(scope="module")
def faulty() -> Iterator[DaemonProcess]:
    """A daemon whose copies can be made to take long."""
    with DaemonProcess("128MiB", faults=True) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def impatient() -> Iterator[DaemonProcess]:
    """A daemon of short times."""
    with DaemonProcess(limits={"lease_ttl_s": 3, "partial_timeout_s": 0.5}) as daemon:
        yield daemon


@pytest.fixture
def hanging(pool_file: Path) -> Iterator[DaemonProcess]:
    """A daemon that takes a copy for one that hangs after a second and a half."""
    with DaemonProcess("16MiB", faults=True, pool_file=str(pool_file), limits={"job_deadline_s": 1.5}) as running:
        yield running


def page(memory: SharedMemory, block: int) -> bytes:
    return memory.view[block * PAGE_BYTES : (block + 1) * PAGE_BYTES].tobytes()


@contextmanager
def engine(daemon: DaemonProcess, namespace: bytes = NAMESPACE) -> Iterator[tuple[WireClient, WireClient]]:
    """A worker and a scheduler of one engine."""
    with WireClient(daemon.directory) as worker, WireClient(daemon.directory, "scheduler") as scheduler:
        worker.open_namespace(namespace)
        scheduler.open_namespace(namespace)
        yield worker, scheduler


# --- nothing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["learned", "lru", "arc"])
def test_requests_of_no_keys_are_answered_by_a_daemon_that_has_seen_no_others(
    policy: str, pool_file: Path, memory: SharedMemory
) -> None:
    """Nothing that it allocates with the first key is there yet; after a restart with blocks either."""
    with DaemonProcess("32MiB", pool_file=str(pool_file), eviction_policy=policy) as daemon:
        for state in "-R":
            with engine(daemon) as (worker, scheduler):
                cache = worker.register(memory)
                assert scheduler.lookup(1, []).states == ""
                assert books(daemon.directory).namespaces[NAMESPACE].lookups == 1
                assert (scheduler.invalidate([]), scheduler.release()) == (0, 0)
                for step in ([store_of(7, [], [])], []), ([], [load_of(8, 1, [], [])]), ([], []):
                    answer(worker.step, cache, *step)
                assert scheduler.lookup(2, keys(1)).states == state
                worker.store(cache, keys(1), [0])
            daemon.kill()
            daemon.start()


# --- bytes -----------------------------------------------------------------------------------------


def test_stored_bytes_come_back_into_other_blocks(
    worker: WireClient, scheduler: WireClient, memory: SharedMemory, cache: bytes
) -> None:
    wanted = [page(memory, block) for block in (3, 1, 7)]
    stored = worker.store(cache, keys(1, 2, 3), [3, 1, 7])
    assert (stored.ok, stored.nbytes, stored.failed) == (True, 3 * PAGE_BYTES, [])
    memory.view[:] = 0
    assert scheduler.lookup(1, keys(1, 2, 3, 4)).states == "RRR-"
    loaded = worker.load(cache, scheduler.lease(1), keys(1, 2, 3), [20, 5, 0])
    assert (loaded.ok, loaded.nbytes) == (True, 3 * PAGE_BYTES)
    assert [page(memory, block) for block in (20, 5, 0)] == wanted
    touched = {20, 5, 0}
    assert not any(any(page(memory, block)) for block in range(32) if block not in touched), "a block was not asked for"


def test_a_block_stored_in_part_is_stored_again_in_full(
    worker: WireClient, scheduler: WireClient, memory: SharedMemory
) -> None:
    """A load gets only what was written: the part that is missing fails it."""
    for client in (worker, scheduler):
        client.open_namespace(b"2" * 32)
    cache = worker.register(memory, namespace=b"2" * 32, blocks_per_key=2)
    half, whole = page(memory, 9), page(memory, 8) + page(memory, 9)
    assert worker.store(cache, keys(1), [9], first_block=1).nbytes == PAGE_BYTES
    assert scheduler.lookup(1, keys(1), b"2" * 32).states == "R"
    lease = scheduler.lease(1)
    assert worker.load(cache, lease, keys(1), [20, 21]).error == "not_ready"
    assert worker.load(cache, lease, keys(1), [21], first_block=1).ok
    assert page(memory, 21) == half
    assert worker.store(cache, keys(1), [8, 9]).nbytes == 2 * PAGE_BYTES
    assert scheduler.lookup(2, keys(1), b"2" * 32).states == "R"
    assert worker.load(cache, scheduler.lease(2), keys(1), [30, 31]).ok
    assert page(memory, 30) + page(memory, 31) == whole


def test_invalidated_blocks_are_not_found_again(worker: WireClient, scheduler: WireClient, cache: bytes) -> None:
    worker.store(cache, keys(1, 2), [0, 1])
    assert scheduler.invalidate(keys(1, 9)) == 1
    assert scheduler.lookup(1, keys(1, 2)).states == "-R"


def test_groups_of_many_shapes_keep_every_byte(shared_daemon: DaemonProcess) -> None:
    """Stores of two groups, of several keys, from the middle of a key on, then loaded back, some of them in part."""
    rng, blocks, size = random.Random(5), 64, 4096
    # One page a block in the first group, two in the second, and two blocks a key in both.
    tensors = [Tensor(0, 0, size, blocks), Tensor(0, blocks * size, size, blocks), Tensor(0, 128 * size, size, blocks)]
    with SharedMemory(3 * blocks * size, "test") as memory, engine(shared_daemon, OTHER) as (worker, scheduler):
        for client in (worker, scheduler):
            client.open_namespace(b"groups".ljust(32), groups=2)
        cache = worker.register_layout(
            [Segment(worker.attach(memory.fd), memory.size_bytes)],
            tensors,
            [[Page(0, size)], [Page(1, size), Page(2, size)]],
            blocks_per_key=2,
            namespace=b"groups".ljust(32),
        )

        def block_bytes(group: int, block: int) -> bytes:
            pages = memory.view.reshape(3, blocks, size)
            return (pages[0, block] if group == 0 else pages[1:, block]).tobytes()

        stored: dict[tuple[int, int], tuple[int, list[bytes]]] = {}
        for number in range(60):
            memory.view[:] = np.random.default_rng(number).integers(0, 256, memory.size_bytes, dtype=np.uint8)
            parts = []
            for group in rng.choice(((0,), (1,), (0, 1), (1, 0))):
                names, first = [10 * number + at for at in range(rng.randrange(1, 4))], rng.randrange(2)
                ids = rng.sample(range(blocks), 2 * len(names) - first)
                parts.append(Part(keys(*names), ids, group, first))
                data = [block_bytes(group, block) for block in ids]
                for at, name in enumerate(names):
                    begin = max(0, 2 * at - first)
                    stored[group, name] = (first if at == 0 else 0, data[begin : 2 * at + 2 - first])
            result = worker.step(cache, [Store(number + 1, parts)])[number + 1]
            assert (result.ok, result.nbytes) == (True, sum(len(p.blocks) * (p.group + 1) * size for p in parts))
        for lease, ((group, name), (first, data)) in enumerate(sorted(stored.items()), 1):
            memory.view[:] = 0
            ids = rng.sample(range(blocks), len(data))
            assert scheduler.lookup(lease, keys(name), b"groups".ljust(32), group=group).states == "R"
            assert worker.load(cache, scheduler.lease(lease), keys(name), ids, group=group, first_block=first).ok
            assert [block_bytes(group, block) for block in ids] == data, (group, name)


# --- ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pages", [1, 2])
def test_a_block_is_ready_when_every_rank_has_stored(
    pages: int, shared_daemon: DaemonProcess, scheduler: WireClient
) -> None:
    """And its lease ends by itself when every rank has loaded. A pipeline stage may have more layers: larger pages."""
    directory, size, large, namespace = shared_daemon.directory, 32 * PAGE_BYTES, pages * PAGE_BYTES, OTHER
    if pages == 2:
        namespace = b"stages".ljust(32)
    scheduler.open_namespace(namespace, world_size=2)
    with SharedMemory(size, "a") as first, SharedMemory(pages * size, "b") as second:
        with WireClient(directory) as zero, WireClient(directory) as one:
            for number, (client, memory) in enumerate(((zero, first), (one, second))):
                client.open_namespace(namespace, world_size=2)
                memory.view[:] = number + 1
            caches = zero.register(first, namespace=namespace), one.register(second, large, rank=1, namespace=namespace)
            assert zero.store(caches[0], keys(9), [4]).ok
            found = scheduler.lookup(1, keys(9), namespace)
            assert (found.states, found.pinned) == ("W", 0)
            assert one.store(caches[1], keys(9), [5]).ok
            assert scheduler.lookup(2, keys(9), namespace).states == "R"
            first.view[:] = second.view[:] = 0
            assert zero.load(caches[0], scheduler.lease(2), keys(9), [11]).ok
            assert books(directory).leases == 1, "one rank of two has loaded"
            assert one.load(caches[1], scheduler.lease(2), keys(9), [12]).ok
            assert page(first, 11) == b"\1" * PAGE_BYTES
            assert second.view.tobytes() == bytes(12 * large) + b"\2" * large + bytes(19 * large)
            after = books(directory)
            assert (after.leases, after.pinned_blocks, after.pool.pinned_bytes) == (0, 0, 0)


def test_a_block_that_lacks_a_shard_for_too_long_is_dropped(impatient: DaemonProcess, memory: SharedMemory) -> None:
    def dropped() -> int:
        return books(impatient.directory).namespaces[OTHER].partial_blocks

    with WireClient(impatient.directory) as worker:
        worker.open_namespace(OTHER, world_size=2)
        cache = worker.register(memory, namespace=OTHER)
        assert worker.store(cache, keys(9), [0]).error == "no_space", "rank 1 has not said how large its shards are"
        worker.register(memory, rank=1, namespace=OTHER)
        for number in (1, 2):
            assert worker.store(cache, keys(number), [0]).ok
            wait_until(lambda number=number: dropped() == number, interval_s=0.05)
            assert books(impatient.directory).writing_bytes == 0
        assert impatient.log.count("not all of its 2 ranks stored their shard") == 1


# --- leases ----------------------------------------------------------------------------------------


def test_a_load_of_keys_that_are_not_there_fails_and_names_them(
    worker: WireClient, scheduler: WireClient, memory: SharedMemory, cache: bytes
) -> None:
    worker.store(cache, keys(1, 2), [0, 1])
    scheduler.lookup(1, keys(1))
    before = memory.view.tobytes()
    failed = worker.load(cache, scheduler.lease(1), keys(1, 3), [8, 9])
    assert (failed.ok, failed.error, failed.nbytes, failed.failed) == (False, "not_ready", 0, keys(3))
    assert memory.view.tobytes() == before


def test_a_wrong_block_id_fails_its_job_and_no_other_of_the_step(shared_daemon: DaemonProcess) -> None:
    with FakeEngine(shared_daemon.directory, "step", blocks=8) as fake_engine:
        worker, results = fake_engine.workers[0], dict[int, JobResult]()
        blocks_of = {1: [0], 2: [8], 3: [1]}
        worker.submit([Job(number, [GroupTransfer.of(keys(number), of)]) for number, of in blocks_of.items()])
        wait_until(lambda: results.update((one.job_id, one) for one in worker.take_results()) or len(results) == 3)
        assert {number: one.error for number, one in results.items()} == {1: None, 2: ErrorCode.BAD_BLOCK_IDS, 3: None}
        assert [fake_engine.lookup(keys(number)) for number in blocks_of] == [1, 0, 1]


def test_a_lease_that_is_released_is_unknown(
    shared_daemon: DaemonProcess, worker: WireClient, scheduler: WireClient, cache: bytes
) -> None:
    worker.store(cache, keys(1, 2, 3), [0, 1, 2])
    for number in (1, 2, 3):
        assert scheduler.lookup(number, keys(number)).pinned == 1
    assert scheduler.release(3, 9, 1, 1) == 2
    assert scheduler.release(1) == 0, "to release twice is no error"
    assert (books(shared_daemon.directory).leases, scheduler.release(2)) == (1, 1)
    assert worker.load(cache, scheduler.lease(1), keys(1), [9]).error == "unknown_lease"


def test_a_lease_outlasts_loads_that_keep_it_or_fail(faulty: DaemonProcess, memory: SharedMemory) -> None:
    """After one that failed the engine may try again."""
    with engine(faulty) as (worker, scheduler):
        cache = worker.register(memory)
        worker.store(cache, keys(600), [0])
        scheduler.lookup(5, keys(600))
        lease = scheduler.lease(5)
        for _ in range(2):
            assert worker.load(cache, lease, keys(600), [7], keep_lease=True).ok
        with faulty.fault("load fails"):
            assert worker.load(cache, lease, keys(600), [7]).error == "copy_failed"
        assert worker.load(cache, lease, keys(600), [7]).ok
        assert worker.load(cache, lease, keys(600), [7]).error == "unknown_lease"


def test_a_lease_is_extended_by_another_lookup(
    shared_daemon: DaemonProcess, worker: WireClient, scheduler: WireClient, cache: bytes
) -> None:
    worker.store(cache, keys(1, 2, 3), [0, 1, 2])
    assert scheduler.lookup(1, keys(1)).pinned == 1
    assert scheduler.lookup(1, keys(2, 3, 4)).states == "RR-"
    assert worker.load(cache, scheduler.lease(1), keys(1, 2, 3), [4, 5, 6]).ok
    assert books(shared_daemon.directory).leases == 0


def test_leases_end_with_their_time(impatient: DaemonProcess, memory: SharedMemory) -> None:
    with engine(impatient) as (worker, scheduler):
        cache = worker.register(memory)
        worker.store(cache, keys(1, 2), [0, 1])
        asked_at = time.monotonic()
        ttl_s = scheduler.lookup(1, keys(1)).ttl_s
        assert 3.0 - (time.monotonic() - asked_at) - 0.0005 <= ttl_s <= 3.0, "never more than there is"
        wait_until(lambda: scheduler.lookup(1, keys(1)).ttl_s < 2.9)  # what is left
        wait_until(lambda: not books(impatient.directory).leases, interval_s=0.05)
        assert worker.load(cache, scheduler.lease(1), keys(1), [9]).error == "unknown_lease"
        assert scheduler.release(1) == 0


def test_leases_end_with_their_session(shared_daemon: DaemonProcess, worker: WireClient, cache: bytes) -> None:
    worker.store(cache, keys(1, 2), [0, 1])
    with WireClient(shared_daemon.directory, "scheduler") as scheduler:
        scheduler.open_namespace()
        assert scheduler.lookup(1, keys(1, 2)).pinned == 2
        assert books(shared_daemon.directory).pinned_blocks == 2
    wait_until(lambda: books(shared_daemon.directory).leases == 0)
    after = books(shared_daemon.directory)
    assert (after.pinned_blocks, after.pool.pinned_bytes, after.ready_blocks) == (0, 0, 2)


def test_leases_that_are_released_while_the_daemon_stands_still_end_when_it_continues(
    shared_daemon: DaemonProcess,
) -> None:
    """It would pin their blocks for ten minutes."""
    options = ClientOptions(request_timeout_s=0.5, unresponsive_after_s=1.0)
    with FakeEngine(shared_daemon.directory, options=options) as fake:
        wait_until(lambda: fake.store(keys(1), [0]).ok)
        wait_until(lambda: fake.lookup(keys(1)) == 1)
        os.kill(shared_daemon.pid, signal.SIGSTOP)
        try:
            fake.scheduler.lookup([GroupKeys(0, keys(2)[0])])
            wait_until(lambda: not fake.scheduler.ready)
            fake.release()
        finally:
            os.kill(shared_daemon.pid, signal.SIGCONT)
        wait_until(lambda: not books(shared_daemon.directory).leases)


def test_a_pool_of_pinned_blocks_has_no_room_and_says_so() -> None:
    """What is under a lease is never evicted. Every store says which of its keys found no room."""
    with DaemonProcess("1MiB", limits={"leased_share": 1}) as daemon, SharedMemory(96 * PAGE_BYTES, "test") as memory:
        with engine(daemon) as (worker, scheduler):
            cache = worker.register(memory)
            memory.view[:] = np.random.default_rng(2).integers(0, 256, memory.size_bytes, dtype=np.uint8)
            first = list(range(62))
            wanted = memory.view[: 62 * PAGE_BYTES].tobytes()
            assert worker.store(cache, keys(*first), first).ok
            assert scheduler.lookup(1, keys(*first)).pinned == 62
            stores = [
                store_of(2, keys(100), [70]),
                store_of(3, keys(5, 101, 102), [5, 71, 72]),
                store_of(4, keys(100, 103), [70, 73]),
                store_of(5, keys(6), [6]),
            ]
            results = worker.step(cache, stores)
            assert {job: (result.error, result.failed) for job, result in results.items()} == {
                2: (None, []),
                3: ("no_space", keys(102)),
                4: ("no_space", keys(103)),
                5: (None, []),
            }
            assert worker.load(cache, scheduler.lease(1), keys(*first), first).ok
            assert memory.view[: 62 * PAGE_BYTES].tobytes() == wanted
            assert worker.store(cache, keys(200), [90]).ok, "the lease has ended: one makes room"
            space = books(daemon.directory).namespaces[NAMESPACE]
            assert (space.evicted_blocks, space.no_space_keys) == (1, 2)


def test_nobody_can_lease_the_whole_pool() -> None:
    with DaemonProcess("4MiB") as daemon, SharedMemory(32 * PAGE_BYTES, "test") as memory:
        with engine(daemon) as (worker, scheduler), engine(daemon) as (_, other):
            cache = worker.register(memory)
            for begin in range(0, 256, 32):
                assert worker.store(cache, keys(*range(begin, begin + 32)), range(32)).ok
            found = scheduler.lookup(1, keys(*range(256)))
            assert (found.pinned, found.states) == (224, "R" * 224 + "-" * 32)
            assert scheduler.lookup(2, keys(*range(20))).pinned == 20, "they are pinned already"
            assert other.lookup(1, keys(*range(236, 256))).pinned == 0
            assert books(daemon.directory).pinned_blocks == 224, "together too"
            assert worker.store(cache, keys(1000), [0]).ok
            scheduler.release(1, 2)
            assert scheduler.lookup(3, keys(*range(256))).pinned == 112, "half of it, as another was refused some"
            assert other.lookup(2, keys(*range(130, 230))).pinned == 100


# --- results ---------------------------------------------------------------------------------------


def test_results_are_numbered_and_there_until_acknowledged(worker: WireClient, cache: bytes) -> None:
    for job in range(5):
        worker.submit(cache, [store_of(job, keys(job), [job])])
    worker.wait_ended(*range(5))
    batches = worker.unacknowledged().batches
    assert [batch.number for batch in batches] == list(range(1, len(batches) + 1))
    assert sorted(job for batch in batches for job in batch.jobs) == list(range(5))
    last = batches[-1].number
    assert worker.acknowledge(last) == last
    assert worker.unacknowledged().batches == []
    for job in (5, 6):  # as each step may
        worker.submit(cache, [store_of(job, keys(job), [job])], acknowledged=last)
        worker.wait_ended(job)
        assert worker.unacknowledged().batches[0].number == last + 1
        last += 1


def test_each_result_is_published_once(worker: WireClient, cache: bytes) -> None:
    job = _publications_arrive(worker, cache)
    jobs = range(job + 1, job + 51)
    for job in jobs:
        worker.submit(cache, [store_of(job, keys(job), [job % 32])])
    seen: list[int] = []
    while len(seen) < len(jobs):
        batch = worker.published()
        assert batch is not None, "no result came"
        assert batch.store_window_bytes > 0
        seen += [found for found in batch.jobs if found in jobs]
    assert sorted(seen) == list(jobs)
    assert worker.published(0.1) is None


def _publications_arrive(worker: WireClient, cache: bytes) -> int:
    """Submit jobs until one is published, as a new subscription misses what comes before it; the last job."""
    for job in range(1000, 2000):
        worker.submit(cache, [store_of(job, keys(job), [0])])
        while batch := worker.published(0.1):
            if job in batch.jobs:
                return job
    raise AssertionError("nothing is published")


# --- copies that take long ---------------------------------------------------------------------------


def test_a_store_that_has_not_begun_is_cancelled(faulty: DaemonProcess, memory: SharedMemory) -> None:
    """One that runs is not, and both have one result."""
    before = books(faulty.directory)
    with engine(faulty) as (worker, scheduler), faulty.fault("store slow 1"):
        cache = worker.register(memory)
        worker.submit(cache, [store_of(1, keys(1), [0])])
        wait_until(lambda: books(faulty.directory).store.running_jobs == 1)
        worker.submit(cache, [store_of(2, keys(2), [1])])
        assert refused(worker.store, cache, keys(9), [2], job=2) == "duplicate_job"
        assert worker.unacknowledged().unfinished == [1, 2]
        assert worker.cancel(1, 2, 3) == 1
        ended = worker.wait_ended(1, 2)
        assert (ended[1].ok, ended[2].ok, ended[2].error, ended[2].nbytes) == (True, False, "cancelled", 0)
        assert worker.cancel(1, 2, 3) == 0
        assert scheduler.lookup(1, keys(1, 2)).states == "R-"
        assert sorted(result.job for result in worker.unacknowledged().results) == [1, 2]
    after = books(faulty.directory)
    assert after.cancelled_stores - before.cancelled_stores == 1
    assert after.balanced


@pytest.mark.parametrize("direction", ["store", "load"])
def test_an_engines_job_does_not_wait_for_all_that_another_one_queued(faulty: DaemonProcess, direction: str) -> None:
    """Else the first tokens of an engine's prompts would wait for gigabytes of another one's."""
    many, made, blocks = 40, 10, range(32)

    def unended() -> int:
        copies = getattr(books(faulty.directory), direction)
        return int(copies.queued_jobs + copies.running_jobs)

    def submit(client: WireClient, cache: bytes, job: int, numbers: range) -> None:
        wanted, its_blocks = keys(*numbers), range(len(numbers))
        if direction == "store":
            client.submit(cache, [store_of(job, wanted, its_blocks)])
        else:
            client.submit(cache, [], [Load(job, scheduler.lease(1), [Part(wanted, its_blocks)], keep_lease=True)])

    with (
        SharedMemory(len(blocks) * PAGE_BYTES, "many") as of_busy,
        SharedMemory(PAGE_BYTES, "one") as of_other,
        engine(faulty) as (busy, scheduler),
        engine(faulty) as (other, _),
        faulty.fault(f"{direction} waits"),
    ):
        busy_cache, other_cache = busy.register(of_busy), other.register(of_other)
        first = 1000
        if direction == "load":
            assert busy.store(busy_cache, keys(*range(first, first + len(blocks))), blocks).ok
            assert scheduler.lookup(1, keys(*range(first, first + len(blocks)))).pinned == len(blocks)
        for job in range(1, many + 1):
            submit(busy, busy_cache, job, range(first, first + len(blocks)))
            first += len(blocks) if direction == "store" else 0
        wait_until(lambda: unended() == many)
        submit(other, other_cache, 1, range(first, first + 1))
        wait_until(lambda: unended() == many + 1)
        with faulty.fault(f"{direction} first {made}"):
            assert other.wait_ended(1)[1].ok
            assert len(busy.unacknowledged().unfinished) > many - made
        busy.close()
        wait_until(lambda: unended() == 0)


@contextmanager
def storing_slowly(daemon: DaemonProcess, name: str) -> Iterator[tuple[WireClient, bytes]]:
    """A worker whose store runs for a second, and its registration."""
    with SharedMemory(32 * PAGE_BYTES, name) as memory, engine(daemon) as (worker, _):
        cache = worker.register(memory)
        with daemon.fault("store slow 1"):
            worker.submit(cache, [store_of(1, keys(7), [0])])
            wait_until(lambda: books(daemon.directory).store.running_jobs == 1)
            yield worker, cache


def test_unregister_ends_the_hold_on_the_memory(faulty: DaemonProcess) -> None:
    """Its answer comes after the last byte of a copy that runs."""
    with storing_slowly(faulty, "unregistered") as (worker, cache):
        worker.unregister(cache)
        assert books(faulty.directory).store.running_jobs == 0
        assert "memfd:unregistered" not in Path(f"/proc/{faulty.pid}/maps").read_text()
        assert "registrations" not in books(faulty.directory).held
        assert refused(worker.store, cache, keys(8), [0]) == "unknown_registration"


def test_the_last_word_to_a_client_that_leaves_is_that_its_memory_is_free(faulty: DaemonProcess) -> None:
    """After the last byte of a copy that runs. Without it the client would have to wait for the daemon's process."""
    with storing_slowly(faulty, "left") as (worker, _):
        worker.stream.shutdown(socket.SHUT_WR)
        assert worker.is_released()
        assert books(faulty.directory).store.running_jobs == 0


def test_a_store_whose_end_fails_inside_has_a_result(faulty: DaemonProcess, memory: SharedMemory) -> None:
    with engine(faulty, bytes(32)) as (worker, _):
        cache = worker.register(memory, namespace=bytes(32))
        with faulty.fault("commit fails"):
            stores = [store_of(number, keys(100 + number), [number]) for number in (1, 2)]
            results = worker.step(cache, stores)
        assert [(results[number].ok, results[number].error) for number in (1, 2)] == [(False, "internal")] * 2
        assert worker.store(cache, keys(103), [3]).ok
        worker.unregister(cache)  # nothing touches its memory any more
    wait_until(lambda: not books(faulty.directory).sessions)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_an_engine_killed_in_mid_copy_leaves_nothing(faulty: DaemonProcess, direction: str) -> None:
    """No pin, no job, no mapping, and no block of a store that was not complete."""
    wanted = keys(*range(500, 516))

    def victim() -> None:
        with engine(faulty) as (worker, scheduler), SharedMemory(16 * PAGE_BYTES, "victim") as memory:
            cache = worker.register(memory)
            if direction == "store":
                worker.submit(cache, [store_of(1, wanted, range(16))])
            else:
                assert scheduler.lookup(1, wanted).pinned == 16
                worker.submit(cache, [], [load_of(1, scheduler.lease(1), wanted, range(16))])
            time.sleep(300)

    with SharedMemory(16 * PAGE_BYTES, "test") as memory, engine(faulty) as (worker, scheduler):
        if direction == "load":
            memory.view[:] = 7
            assert worker.store(worker.register(memory), wanted, range(16)).ok
        here = books(faulty.directory)
        with faulty.fault(f"{direction} slow 1"):
            process = multiprocessing.get_context("fork").Process(target=victim)
            process.start()
            try:
                wait_until(lambda: (b := books(faulty.directory)).store.running_jobs + b.load.running_jobs == 1)
            finally:
                process.kill()
                process.join()
        wait_until(lambda: books(faulty.directory).held == here.held, explain=lambda: books(faulty.directory).held)
        assert books(faulty.directory).balanced
        assert "memfd:victim" not in Path(f"/proc/{faulty.pid}/maps").read_text()
        assert scheduler.lookup(9, wanted).states == ("-" if direction == "store" else "R") * 16
        scheduler.reset()


# --- copies in host memory that never come back --------------------------------------------------------


def test_hang_of_a_load_ends_the_daemon_and_the_next_serves(hanging: DaemonProcess) -> None:
    with CheckedEngine(hanging) as engine:
        engine.put(range(8))
        with hanging.fault(f"load {FOR_EVER}"):
            assert engine.lookup(keys(*range(8))) == 8
            # Not before the process is gone: bytes may land in the blocks until then.
            assert engine.load(keys(*range(8)), range(8, 16), timeout_s=60).error is ErrorCode.SESSION_ENDED
        assert hanging.process.wait(30) == EXIT_STUCK
        assert "A copy in host memory hangs" in hanging.log
        hanging.start()
        assert engine.wait_ready(30)
        assert engine.has(range(8))


def test_hang_of_a_store_is_answered_and_holds_its_memory(hanging: DaemonProcess) -> None:
    """Its engine learns at the deadline that it failed, others are served; the memory is not released to anybody."""
    with CheckedEngine(hanging) as engine, CheckedEngine(hanging, engine.truth) as other:
        engine.put(range(4))
        with hanging.fault(f"store {FOR_EVER}"):
            assert engine.store(keys(*range(4, 8)), range(4, 8), timeout_s=60).error is ErrorCode.DEADLINE
            with suppress(OSError):  # it ends soon
                wait_until(lambda: not any(client.jobs for client in books(hanging.directory).clients))
            assert hanging.running, "it ends for that only after it has answered"
            assert other.get(range(8)) == [*range(4)]
            confirmed = engine.workers[0].unregister(1.0)
            assert not (confirmed and hanging.running)
            assert hanging.process.wait(60) == EXIT_STUCK
