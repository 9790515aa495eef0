"""Steps: stores and loads of one message, each judged by itself, planned and copied together."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvoffd.cache.cache import CLEARED_AT_ONCE
from kvoffd_client import SharedMemory
from kvoffd_proto import codec, events, zmtp
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.handles import MemfdHandle, PageRef, TensorLayout
from kvoffd_proto.lifeline import Attached
from tests.kit.daemon import DaemonProcess
from tests.kit.router_daemon import replay
from tests.kit.struct_wire import NAMESPACE, WireClient, ids, key, keys, load_of, stats, store_of
from tests.kit.waiting import wait_until

PAGE = 4096
SLOT = 8192
"""The smallest slot."""
BLOCKS = 512
HALVES = 256
"""Engine blocks of each of two groups, where there are two."""


@pytest.fixture
def daemon(shared_daemon: DaemonProcess) -> DaemonProcess:
    return shared_daemon


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    with SharedMemory(BLOCKS * PAGE, "test") as shared:
        data = np.random.default_rng(7).integers(0, 256, shared.size_bytes, dtype=np.uint8)
        shared.view[:] = data
        yield shared


def page(memory: SharedMemory, block: int) -> bytes:
    return memory.view[block * PAGE : (block + 1) * PAGE].tobytes()


def step(
    client: WireClient, registration: bytes, stores: Sequence[m.Store], loads: Sequence[m.Load] = ()
) -> tuple[dict[int, m.JobResult], dict[int, ErrorCode]]:
    """Send one message; return the results of the jobs and the codes of those that were refused, by job id."""
    jobs = len(stores) + len(loads)
    after = client.ask(m.Heartbeat, 0, []).sequence
    message = client.send(m.Submit, registration, list(stores), list(loads))
    refused: list[m.Refusal] = []
    results: list[m.JobResult] = []

    def answered() -> bool:
        replay = client.send(m.Replay, after)
        while (reply := client.reply()).request_id != replay.request_id:
            assert isinstance(reply, m.JobsRefused), reply
            assert (reply.request_id, refused) == (message.request_id, []), "one reply a message"
            refused.extend(reply.refused)
        assert isinstance(reply, m.ReplayReply)
        results[:] = [result for batch in reply.batches for result in batch.results]
        return len(results) + len(refused) >= jobs

    wait_until(answered, interval_s=0.001)
    found = {result.job_id: result for result in results}
    codes = {refusal.job_id: refusal.code for refusal in refused}
    assert len(results) == len(found), "one result a job"
    return found, codes


def test_the_jobs_of_a_step_are_judged_one_by_one(daemon, worker, scheduler, memory):
    registration = worker.register(memory, PAGE)
    assert step(worker, registration, [store_of(1, keys(1, 2), ids(1, 2))])[0][1].ok
    scheduler.lookup(1, keys(1, 2))
    wanted = [page(memory, block) for block in (1, 2, 3, 4)]
    before = stats(daemon.directory)
    lease = scheduler.lease(1)
    results, refused = step(
        worker,
        registration,
        [
            store_of(10, keys(3), ids(3)),
            store_of(11, keys(30), ids(BLOCKS)),
            store_of(12, keys(31, 32, 31), ids(3, 4, 5)),
            store_of(13, keys(33), ids(-1)),
            store_of(14, keys(34)[:-1], ids(3)),
            store_of(15, keys(35), ids(3)[:-1]),
            store_of(16, keys(36), ids(3, 4)),
            store_of(17, keys(37), ids(3), group=1),
            store_of(18, b"", b""),
            m.Store(19, [m.GroupTransfer(0, keys(38), ids(3)), m.GroupTransfer(0, keys(39), ids(4))]),
            store_of(10, keys(40), ids(4)),
            store_of(20, keys(4), ids(4)),
            store_of(21, keys(1), ids(1)),
        ],
        [
            load_of(50, lease, keys(1), ids(100)),
            load_of(51, lease + 1, keys(1), ids(101)),
            load_of(52, lease, keys(1, 2), ids(102, 102)),
            load_of(53, lease, keys(9), ids(103)),
        ],
    )
    assert {job: (result.ok, result.bytes) for job, result in results.items()} == {
        10: (True, PAGE), 20: (True, PAGE), 21: (True, 0), 50: (True, PAGE), 53: (False, 0),
    }  # fmt: skip
    assert (results[53].error, results[53].failed) == (ErrorCode.NOT_READY, [m.GroupKeys(0, key(9))])
    assert refused == {
        10: ErrorCode.DUPLICATE_JOB,
        11: ErrorCode.BAD_BLOCK_IDS,
        12: ErrorCode.BAD_KEYS,
        13: ErrorCode.BAD_BLOCK_IDS,
        14: ErrorCode.BAD_KEYS,
        15: ErrorCode.BAD_BLOCK_IDS,
        16: ErrorCode.BAD_BLOCK_IDS,
        17: ErrorCode.BAD_GEOMETRY,
        18: ErrorCode.BAD_BLOCK_IDS,
        19: ErrorCode.BAD_KEYS,
        51: ErrorCode.UNKNOWN_LEASE,
        52: ErrorCode.BAD_BLOCK_IDS,
    }
    assert page(memory, 100) == wanted[0]
    after = stats(daemon.directory)
    assert after.pool.ready_bytes - before.pool.ready_bytes == 2 * SLOT
    assert sum(after.errors.values()) - sum(before.errors.values()) == len(refused)
    assert scheduler.lookup(2, keys(1, 2, 3, 4, *range(30, 41))).states == [bytes([2] * 4 + [0] * 11)]
    memory.view[:] = 0
    assert worker.load(registration, 60, scheduler.lease(2), keys(1, 2, 3, 4), ids(9, 8, 7, 6)).ok
    assert [page(memory, block) for block in (9, 8, 7, 6)] == wanted


def test_a_step_of_bad_jobs_alone_changes_nothing(daemon, worker, memory):
    registration = worker.register(memory, PAGE)
    step(worker, registration, [store_of(1, keys(1), ids(1))])
    before = stats(daemon.directory)
    results, refused = step(
        worker,
        registration,
        [store_of(job, keys(job, job), ids(1, 2)) for job in range(100)] + [store_of(200, keys(5), ids(-5))],
    )
    assert (results, len(refused)) == ({}, 101)
    after = stats(daemon.directory)
    assert (after.pool, after.store.jobs, after.store.failed_jobs) == (
        before.pool, before.store.jobs, before.store.failed_jobs,
    )  # fmt: skip
    assert [space.dropped_keys for space in after.namespaces] == [space.dropped_keys for space in before.namespaces]


def test_a_step_is_of_one_registration_and_bounded(daemon, worker, memory):
    registration = worker.register(memory, PAGE)
    before = stats(daemon.directory).pool
    unknown = m.Submit(worker.next_id(), worker.token, os.urandom(16), [store_of(1, keys(1), ids(1))])
    assert worker.refused(unknown).code is ErrorCode.UNKNOWN_REGISTRATION
    many = [store_of(job, keys(job), ids(job % BLOCKS)) for job in range(1025)]
    too_many = m.Submit(worker.next_id(), worker.token, registration, many[:1000], [m.Load(2000, 0, [])] * 25)
    assert worker.refused(too_many).code is ErrorCode.MALFORMED, "a load has groups"
    too_many = m.Submit(worker.next_id(), worker.token, registration, many)
    assert worker.refused(too_many).code is ErrorCode.TOO_MANY
    assert stats(daemon.directory).pool == before
    results, refused = step(worker, registration, many[:1024])
    assert (len(results), refused) == (1024, {})
    assert all(result.ok and result.bytes == PAGE for result in results.values())


def test_a_step_without_a_job_has_no_answer_and_does_no_harm(worker, memory):
    registration = worker.register(memory, PAGE)
    assert step(worker, registration, []) == ({}, {})
    assert step(worker, registration, [store_of(1, keys(1), ids(1))])[0][1].ok


def test_what_a_session_may_have_under_way_is_counted_within_a_step():
    flags = {"max_jobs_in_flight": "16", "max_pieces_in_flight": "1024"}
    with DaemonProcess(**flags) as daemon, SharedMemory(BLOCKS * PAGE, "test") as memory:
        with WireClient(daemon.directory) as worker:
            worker.open_namespace()
            registration = worker.register(memory, PAGE)
            results, refused = step(worker, registration, [store_of(job, keys(job), ids(job)) for job in range(40)])
            assert (sorted(results), set(refused.values())) == ([*range(16)], {ErrorCode.TOO_MANY})
            # A key counts as 8 pieces: the first has 800 of the 1,024, the second would be too many, the third is not.
            large = [
                store_of(job, keys(*range(first, first + 100)), ids(*range(100))) for job, first in ((1, 50), (2, 200))
            ]
            results, refused = step(worker, registration, [*large, store_of(3, keys(400), ids(1))])
            assert (sorted(results), refused) == ([1, 3], {2: ErrorCode.TOO_MANY})
            assert step(worker, registration, large[1:])[0][2].ok, "there is room again"


def test_a_step_that_is_too_long_to_be_kept_is_dealt_with_as_far_as_it_goes_at_once():
    with DaemonProcess(sessions_size="16MiB") as daemon, SharedMemory(BLOCKS * PAGE, "test") as memory:
        with WireClient(daemon.directory) as worker:
            worker.open_namespace()
            registration = worker.register(memory, PAGE)
            block_ids = ids(*range(128))
            stores = [store_of(job, keys(*range(128 * job, 128 * job + 128)), block_ids) for job in range(1000)]
            results, refused = step(worker, registration, stores)
            assert sorted(results) == [0, 1, 2, 3], "until they have 4,096 pieces, of which a key counts as eight"
            assert all(result.ok for result in results.values())
            assert set(refused.values()) == {ErrorCode.TOO_MANY}
            results, refused = step(worker, registration, stores[4:400])
            assert (len(results), refused) == (396, {}), "a shorter one is kept"


def test_a_key_that_two_stores_of_a_step_have_is_copied_once(daemon, worker, scheduler, memory):
    registration = worker.register(memory, PAGE)
    results, refused = step(
        worker,
        registration,
        [store_of(1, keys(1, 2), ids(1, 2)), store_of(2, keys(2, 3), ids(2, 3)), store_of(3, keys(1), ids(1))],
    )
    assert [(results[job].ok, results[job].bytes) for job in (1, 2, 3)] == [(True, 2 * PAGE), (True, PAGE), (True, 0)]
    assert refused == {}
    assert scheduler.lookup(1, keys(1, 2, 3)).states == [bytes([2, 2, 2])]
    assert stats(daemon.directory).pool.ready_bytes == 3 * SLOT


def test_each_store_of_a_step_says_which_of_its_keys_found_no_room():
    with DaemonProcess("1MiB", leased_share="1") as daemon, SharedMemory(96 * 16384, "test") as memory:
        with WireClient(daemon.directory) as worker, WireClient(daemon.directory, m.Role.SCHEDULER) as scheduler:
            worker.open_namespace()
            scheduler.open_namespace()
            registration = worker.register(memory)
            first = [*range(62)]
            step(worker, registration, [store_of(1, keys(*first), ids(*first))])
            assert scheduler.lookup(1, keys(*first)).pinned == 62
            results, _ = step(
                worker,
                registration,
                [
                    store_of(2, keys(100), ids(70)),
                    store_of(3, keys(5, 101, 102), ids(5, 71, 72)),
                    store_of(4, keys(100, 103), ids(70, 73)),
                    store_of(5, keys(102), ids(72)),
                    store_of(6, keys(6), ids(6)),
                ],
            )
            told = {job: (result.error, [part.keys for part in result.failed]) for job, result in results.items()}
            lost = {job: (ErrorCode.NO_ROOM, [key(lacking)]) for job, lacking in ((3, 102), (4, 103), (5, 102))}
            assert told == {2: (None, []), **lost, 6: (None, [])}
            assert [results[job].bytes for job in (2, 3, 4, 5, 6)] == [16384, 16384, 0, 0, 0]
            assert stats(daemon.directory).namespaces[0].dropped_keys == 2


def register_groups(worker: WireClient, memory: SharedMemory) -> bytes:
    """Two groups, each of half of the memory: one page a block, and two; two blocks a key in both."""
    segment_id = worker.next_id()
    assert isinstance(worker.attach(memory.fd, segment_id), Attached)
    registration_id = os.urandom(16)
    half = HALVES * PAGE
    tensors = [
        TensorLayout(0, 0, PAGE, HALVES),
        TensorLayout(0, half, PAGE, HALVES // 2),
        TensorLayout(0, half + half // 2, PAGE, HALVES // 2),
    ]
    groups = [[PageRef(0, PAGE)], [PageRef(1, PAGE), PageRef(2, PAGE)]]
    handles = [MemfdHandle(segment_id, memory.size_bytes)]
    worker.ask(m.Register, NAMESPACE, registration_id, 0, 2, handles, tensors, groups)
    return registration_id


def bytes_of(memory: SharedMemory, group: int, block: int) -> bytes:
    if group == 0:
        return page(memory, block)
    return page(memory, HALVES + block) + page(memory, HALVES + HALVES // 2 + block)


def test_steps_of_many_shapes_store_every_byte_where_it_belongs(daemon):
    """Stores of both groups, of several keys, from the middle of a key on, mixed with bad ones, then loaded back."""
    rng = random.Random(5)
    with SharedMemory(BLOCKS * PAGE, "test") as memory, WireClient(daemon.directory) as worker:
        with WireClient(daemon.directory, m.Role.SCHEDULER) as scheduler:
            for client in (worker, scheduler):
                client.open_namespace(groups=2)
            registration = register_groups(worker, memory)
            stored: dict[tuple[int, int], tuple[bytes, int]] = {}  # by group and key: its bytes, and the first block
            next_key = 0
            for round_number in range(12):
                memory.view[:] = np.random.default_rng(round_number).integers(0, 256, memory.size_bytes, dtype=np.uint8)
                stores: list[m.Store] = []
                bad: set[int] = set()
                for job in range(rng.randrange(1, 40)):
                    parts: list[m.GroupTransfer] = []
                    expected: dict[tuple[int, int], tuple[bytes, int]] = {}
                    for group in rng.choice(((0,), (1,), (0, 1), (1, 0))):
                        count, first = rng.randrange(1, 4), rng.randrange(2)
                        numbers = [*range(next_key, next_key + count)]
                        next_key += count
                        chosen = rng.sample(range(HALVES // 2), 2 * count - first)
                        parts.append(m.GroupTransfer(group, keys(*numbers), ids(*chosen), first))
                        pages = [b""] * first + [bytes_of(memory, group, block) for block in chosen]
                        for at, number in enumerate(numbers):
                            whole = b"".join(pages[2 * at : 2 * at + 2])
                            expected[group, number] = whole, first if at == 0 else 0
                    if rng.random() < 0.2:
                        last = parts[-1]
                        parts[-1] = m.GroupTransfer(
                            last.group, last.keys, last.block_ids[:-4] + ids(HALVES), last.first_block
                        )
                        bad.add(job)
                    else:
                        stored |= expected
                    stores.append(m.Store(job, parts))
                results, refused = step(worker, registration, stores)
                assert set(refused) == bad
                assert all(result.ok for result in results.values())
                assert sum(result.bytes for result in results.values()) == sum(
                    len(part.block_ids) // 4 * (part.group + 1) * PAGE
                    for store in stores if store.job_id not in bad for part in store.groups
                )  # fmt: skip
            numbers = rng.sample(sorted(stored), min(len(stored), 100))
            for lease, (group, number) in enumerate(numbers, 1):
                assert scheduler.lookup(lease, keys(number), group=group).states[-1] == bytes([2]), (group, number)
            for begin in range(0, len(numbers), 20):
                loads: list[m.Load] = []
                wanted: list[tuple[int, list[int], bytes]] = []
                for job, (group, number) in enumerate(numbers[begin : begin + 20], begin + 1):
                    data, first = stored[group, number]
                    blocks = [2 * (job - begin) + at for at in range(first, 2)]
                    part = m.GroupTransfer(group, keys(number), ids(*blocks), first)
                    loads.append(m.Load(job, scheduler.lease(job), [part]))
                    wanted.append((group, blocks, data))
                memory.view[:] = 0
                results, refused = step(worker, registration, [], loads)
                assert (refused, all(result.ok for result in results.values())) == ({}, True)
                for group, blocks, data in wanted:
                    assert b"".join(bytes_of(memory, group, block) for block in blocks) == data


def test_completions_of_a_step_come_in_one_message(worker, memory):
    registration = worker.register(memory, PAGE)
    step(worker, registration, [store_of(0, keys(0), ids(0))])  # from now on the subscription is known to work
    first = worker.completions() if worker.events.poll(200) else None
    assert first is None or first.results[0].job_id == 0
    stores = [store_of(job, keys(job), ids(job)) for job in range(1, 257)]
    worker.send(m.Submit, registration, stores)
    batch = worker.completions()
    assert sorted(result.job_id for result in batch.results) == [*range(1, 257)]


def test_a_fence_tells_how_many_stores_were_never_sent(daemon, worker):
    before = stats(daemon.directory)
    worker.ask(m.Cancel, [], 3)
    assert stats(daemon.directory).unsent_stores == before.unsent_stores + 3
    assert worker.refused(m.Cancel, [], -1).code is ErrorCode.MALFORMED


def test_a_reset_whose_sender_went_away_is_done_all_the_same():
    count = 8 * CLEARED_AT_ONCE
    blob = keys(*range(count))
    with DaemonProcess(f"{count * SLOT // 2**20 + 8}MiB") as daemon, SharedMemory(PAGE, "test") as memory:
        with WireClient(daemon.directory) as worker, WireClient(daemon.directory, m.Role.SCHEDULER) as scheduler:
            worker.open_namespace()
            scheduler.open_namespace()
            registration = worker.register(memory, PAGE)
            part = 2 * CLEARED_AT_ONCE
            for begin in range(0, count, part):
                store = store_of(begin, keys(*range(begin, begin + part)), ids(*[0] * part))
                assert step(worker, registration, [store])[0][begin].ok
            assert sum(one.ready_blocks for one in stats(daemon.directory).namespaces) == count
            with socket.socket(socket.AF_UNIX) as gone:
                gone.connect(str(daemon.directory / "jobs.sock"))
                frame = codec.encode(m.Reset(1, scheduler.token, NAMESPACE))
                gone.sendall(zmtp.opening(b"DEALER"))
                assert gone.recv(4096)  # what is unread at the end takes along what was sent
                gone.sendall(zmtp.encode([frame]))
            wait_until(lambda: sum(one.ready_blocks for one in stats(daemon.directory).namespaces) < count)
            wait_until(lambda: sum(one.ready_blocks for one in stats(daemon.directory).namespaces) == 0, 2.0)
            assert not any(scheduler.lookup(1, blob[: 32 * 1000]).states[0])
            there: set[bytes] = set()
            for _, _, payload in replay(f"ipc://{daemon.directory}/jobs.sock", 0):
                for event in events.decode_event_batch(payload).events:
                    if isinstance(event, events.AllBlocksCleared):
                        there.clear()
                    elif isinstance(event, events.BlockStored):
                        there.update(event.block_hashes)
                    else:
                        there.difference_update(event.block_hashes)
            assert not there
