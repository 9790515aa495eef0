"""What every transfer engine must do, over host memory and over the CUDA double."""

from __future__ import annotations

import ctypes
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from unittest.mock import patch

import numpy as np
import pytest

from kvoffd.system.native import native
from kvoffd.transfer.cuda.engine import GpuEngine, PinnedChunks, checksum_threads
from kvoffd.transfer.engine import (
    MAX_UNREAD_STORES,
    OVERDUE_GRACE_S,
    CopyEngine,
    HostEngine,
    SlotChecksums,
    Transfer,
    host_copy,
    new_work,
)
from kvoffd.transfer.plan import CopyEnd, Direction, Plan
from kvoffd_proto.cuda import BATCH_FORMS, argument_types
from tests.kit.copy_buffers import address_of, random_bytes
from tests.kit.stub_cuda import Ranges, fresh_stub
from tests.kit.waiting import LONGER_THAN_A_TEST_S, wait_until

FOREVER = float("inf")
PIECE = 4096
MIB = 1 << 20
WAIT_S = 10.0


class Harness:
    """An engine whose steps can be held up, made to fail, and whose clock the test moves."""

    now = 100.0

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Event()
        self.held = ""
        self.broken = False
        self.steps = 0
        self.work = new_work()
        self.engine: CopyEngine

    def clock(self) -> float:
        return self.now

    def step(self) -> None:
        """To be called by the engine before every step."""
        self.steps += 1
        if not self.gate.is_set() and self.held in threading.current_thread().name:
            self.at_gate.set()
            assert self.gate.wait(WAIT_S)
        if self.broken:
            raise RuntimeError("the copy is broken")

    def hold(self, threads: str = "") -> None:
        """From here on threads with so a name stop before their next step, until ``release``."""
        self.held = threads
        self.at_gate.clear()
        self.gate.clear()

    def release(self) -> None:
        self.gate.set()

    def queued_and_running(self, direction: Direction) -> tuple[int, int]:
        return self.work[direction].queued_jobs, self.work[direction].running_jobs

    def submit(self, *jobs: Job) -> None:
        for job in jobs:
            self.register(job.transfer.plan())
            self.engine.queues[job.transfer.direction].submit(job.transfer)

    def register(self, plan: Plan) -> None:
        """Make it memory that the engine copies."""

    def run(self, job: Job) -> CopyEnd:
        self.submit(job)
        return job.outcome()

    def hold_running(self, *jobs: Job) -> None:
        """Submit jobs, of which the first runs and is held before its first step."""
        self.hold()
        self.submit(*jobs)
        assert self.at_gate.wait(WAIT_S)


class HostHarness(Harness):
    """A copy is one step."""

    def __init__(self) -> None:
        super().__init__()

        def copy(transfer: Transfer) -> None:
            self.step()
            host_copy(transfer)

        self.engine = HostEngine(self.work, clock=self.clock, copy=copy)


class CudaHarness(Harness):
    """Over a stub driver, with batches of eight pieces, so that jobs have many steps.

    What is submitted is copied between registered memory and a device's.
    """

    def __init__(self) -> None:
        super().__init__()
        stub = fresh_stub()
        stub.start()
        driver = stub.driver()
        calls = driver.copy_calls()
        del calls["at_rows"]
        # The copy loop calls these without the interpreter's lock, which they take.
        single = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        many = ctypes.CFUNCTYPE(ctypes.c_int, *argument_types(BATCH_FORMS[12080]))
        real_copy, real_batch = single(calls["at_copy"]), many(calls["at_batch"])

        def gated(*arguments: int) -> int:
            try:
                self.step()
            except RuntimeError:
                return 1
            return int(real_batch(*arguments))

        self.gated = many(gated), single(lambda *arguments: 1 if self.broken else real_copy(*arguments))
        calls["at_batch"], calls["at_copy"] = (ctypes.cast(one, ctypes.c_void_p).value for one in self.gated)
        driver.copy_calls = lambda: calls  # type: ignore[method-assign]

        def register(plan: Plan) -> None:
            for kind, column in ((Ranges.HOST, plan.destination), (Ranges.DEVICE, plan.source)):
                if column.size:
                    begin = int(column[0])
                    stub.add_range(kind, begin, int(column[-1] + plan.size[-1]) - begin)

        self.register = register
        chunks = PinnedChunks(np.ones(1, dtype=np.bool_), 2**62, 0)
        with patch("kvoffd.transfer.cuda.engine.STEP_PIECES", 8):
            self.engine = GpuEngine(driver, chunks, self.work, clock=self.clock)


@pytest.fixture(params=[HostHarness, CudaHarness])
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    harness: Harness = request.param()
    yield harness
    harness.release()
    assert harness.engine.close(WAIT_S)


class Sums:
    """Checksums that can be held up, and made to fail. There is said to be a slot of so many bytes for each piece."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Event()
        self.broken = False
        self.expected: list[int] | None = None
        self.threads: set[str] = set()

    def slot_checksums(self, slots: int) -> SlotChecksums:
        places = [(number * self.slot_bytes, self.slot_bytes) for number in range(slots)]
        return SlotChecksums(self._digests, places, [0] * slots, self.expected)

    def _digests(self, slots: Sequence[tuple[int, int]]) -> list[int]:
        self.threads.add(threading.current_thread().name)
        self.at_gate.set()
        assert self.gate.wait(WAIT_S)
        if self.broken:
            raise RuntimeError("the checksum is broken")
        return [offset + 1 for offset, _ in slots]


class Job:
    """A transfer between buffers of its own, and how it ended. ``nbytes``: what it is said to copy."""

    def __init__(
        self,
        pieces: int = 8,
        direction: Direction = Direction.STORE,
        deadline: float = FOREVER,
        seed: int = 0,
        sums: Sums | None = None,
        session: int = 0,
        nbytes: int = 0,
    ) -> None:
        self.source = random_bytes(pieces * PIECE, seed)
        self.destination = np.zeros_like(self.source)
        # Sizes that differ from piece to piece, so that the job has many steps.
        offset = np.arange(pieces, dtype=np.uint64) * np.uint64(PIECE)
        size = np.uint64(PIECE) - np.arange(pieces, dtype=np.uint64) % np.uint64(3)
        plan = Plan(
            offset + np.uint64(address_of(self.destination)),
            offset + np.uint64(address_of(self.source)),
            size,
        )
        self.ends: list[CopyEnd] = []
        self.on_end: Callable[[Transfer], None] = lambda _: None
        self.done = threading.Event()
        self.checksums = sums.slot_checksums(pieces) if sums else None
        self.transfer = Transfer(
            direction, lambda: plan, deadline, self._on_done, None, self.checksums, session, nbytes
        )

    def _on_done(self, transfer: Transfer, outcome: CopyEnd) -> None:
        assert transfer is self.transfer
        self.ends.append(outcome)
        self.on_end(transfer)
        self.done.set()

    def outcome(self) -> CopyEnd:
        assert self.done.wait(WAIT_S), "the transfer did not end"
        return self.ends[0]

    def is_copied(self) -> bool:
        for piece in range(self.source.size // PIECE):
            part = slice(piece * PIECE, (piece + 1) * PIECE - piece % 3)
            if not np.array_equal(self.destination[part], self.source[part]):
                return False
        return True


def test_transfers_copy_every_byte_in_their_order_and_end_once(harness: Harness) -> None:
    for direction in Direction:
        ended: list[Transfer] = []
        jobs = [Job(pieces, direction) for pieces in (100, 0, *[2] * 48)]
        for job in jobs:
            job.on_end = ended.append
        harness.submit(*jobs)
        assert {job.outcome() for job in jobs} == {CopyEnd.DONE}
        assert all(job.is_copied() for job in jobs)
        assert ended == [job.transfer for job in jobs]
    assert harness.engine.close(LONGER_THAN_A_TEST_S), "an idle engine closes at once"


def order_of(harness: Harness, direction: Direction, queued: Sequence[tuple[int, int]]) -> str:
    """Queue jobs, given by session and bytes, while the first runs; return the sessions in the order of the ends."""
    ended: list[int] = []
    jobs = [Job(direction=direction, session=session, nbytes=nbytes) for session, nbytes in queued]
    for job in jobs:
        job.on_end = lambda transfer: ended.append(transfer.session)
    harness.hold_running(jobs[0])
    harness.submit(*jobs[1:])
    assert harness.queued_and_running(direction) == (len(jobs) - 1, 1)
    harness.release()
    assert {job.outcome() for job in jobs} == {CopyEnd.DONE}
    return "".join(map(str, ended))


@pytest.mark.parametrize("direction", list(Direction))
def test_sessions_share_a_queue_by_bytes(harness: Harness, direction: Direction) -> None:
    """None waits for all that another one has queued, and none gets ahead by copying in smaller parts."""
    large, small, tiny = 8 * MIB, 2 * MIB, 1000
    assert order_of(harness, direction, [(1, large)] * 10 + [(2, small)]) == "12111111111"
    assert order_of(harness, direction, [(3, large)] * 3 + [(4, small)] * 8) == "34444344443"
    assert order_of(harness, direction, [(5, tiny)] * 6 + [(6, MIB)] * 3) == "565656555", "each takes time"
    assert order_of(harness, direction, [(7, large), (7, large), (8, large), (9, large), (7, large)]) == "78977"


def test_what_a_session_copied_alone_is_not_held_against_it(harness: Harness) -> None:
    assert {harness.run(Job(session=1, nbytes=100 * MIB)) for _ in range(3)} == {CopyEnd.DONE}
    assert order_of(harness, Direction.STORE, [(1, MIB), *[(1, MIB)] * 2, *[(2, MIB)] * 3]) == "121212"
    assert harness.run(Job(session=1, nbytes=100 * MIB)) is CopyEnd.DONE
    assert order_of(harness, Direction.STORE, [(2, MIB), *[(1, MIB)] * 3, *[(2, MIB)] * 3]) == "2112122"


def test_cancelled_jobs_of_a_session_keep_none_of_another_waiting(harness: Harness) -> None:
    first, *own = (Job(session=1, nbytes=MIB) for _ in range(10))
    other, late = Job(session=2), Job(session=3, deadline=harness.now + 5)
    harness.hold_running(first, *own, other, late)
    for job in own:
        assert harness.engine.queues[job.transfer.direction].cancel(job.transfer)
    assert {job.outcome() for job in own} == {CopyEnd.CANCELLED}
    harness.now += 5
    harness.engine.tick()
    assert late.outcome() is CopyEnd.DEADLINE
    assert harness.queued_and_running(Direction.STORE) == (1, 1)
    harness.release()
    assert (first.outcome(), other.outcome()) == (CopyEnd.DONE, CopyEnd.DONE)
    assert harness.queued_and_running(Direction.STORE) == (0, 0)


def test_submitting_never_waits_and_stats_count_what_is_there(harness: Harness) -> None:
    jobs = [Job() for _ in range(5)]
    harness.hold_running(*jobs)
    assert harness.queued_and_running(Direction.STORE) == (4, 1)
    assert harness.work[Direction.STORE].busy_seconds == 0.0
    assert harness.queued_and_running(Direction.LOAD) == (0, 0)
    harness.release()
    assert {job.outcome() for job in jobs} == {CopyEnd.DONE}
    assert harness.queued_and_running(Direction.STORE) == (0, 0)
    assert harness.work[Direction.STORE].busy_seconds > 0.0


def test_a_load_does_not_wait_behind_a_store(harness: Harness) -> None:
    harness.hold("store")
    store = Job()
    harness.submit(store)
    assert harness.at_gate.wait(WAIT_S)
    assert harness.run(Job(direction=Direction.LOAD)) is CopyEnd.DONE
    assert not store.ends


def test_only_a_waiting_transfer_can_be_cancelled(harness: Harness) -> None:
    first, second, third = Job(), Job(), Job()
    harness.hold_running(first, second, third)
    assert harness.engine.queues[second.transfer.direction].cancel(second.transfer)
    assert second.ends == [CopyEnd.CANCELLED]
    for job in (first, second, Job()):
        assert not harness.engine.queues[job.transfer.direction].cancel(job.transfer)
    harness.release()
    assert (first.outcome(), third.outcome()) == (CopyEnd.DONE, CopyEnd.DONE)
    assert not second.destination.any()
    assert second.ends == [CopyEnd.CANCELLED]
    assert not harness.engine.queues[first.transfer.direction].cancel(first.transfer)


@pytest.mark.parametrize("how", [CopyEnd.FAILED, CopyEnd.DEADLINE], ids=["abandoned", "late"])
def test_transfer_that_must_end_writes_no_further_step(harness: Harness, how: CopyEnd) -> None:
    deadline = FOREVER if how is CopyEnd.FAILED else harness.now + 5
    running, waiting = (Job(pieces=100, deadline=deadline) for _ in range(2))
    harness.hold_running(running, waiting)
    if how is CopyEnd.FAILED:
        running.transfer.must_end(how)
        waiting.transfer.must_end(how)
    else:
        harness.now += 5
        harness.engine.tick()
        assert waiting.ends == [how]
    assert not running.ends, "it may still write"
    harness.release()
    assert (running.outcome(), waiting.outcome()) == (how, how)
    assert harness.steps == 1
    assert not running.is_copied()
    assert not waiting.destination.any()
    late = Job(deadline=harness.now)
    assert harness.run(late) is CopyEnd.DEADLINE
    assert not late.destination.any()


def test_what_raises_does_not_end_the_engine(harness: Harness) -> None:
    bad, raises = Job(), Job()
    harness.broken = True
    assert harness.run(bad) is CopyEnd.FAILED
    harness.broken = False

    def raise_it(transfer: Transfer) -> None:
        raise RuntimeError("a bug of the owner's")

    raises.on_end = raise_it
    harness.submit(raises)
    assert harness.run(Job()) is CopyEnd.DONE
    assert raises.is_copied()
    assert len(bad.ends) == 1


def test_closing_cancels_what_waits_and_abandons_what_runs(harness: Harness) -> None:
    running, waiting, late = Job(pieces=100), Job(), Job()
    harness.hold_running(running, waiting)
    assert not harness.engine.close(0.0), "a thread still copies, so the memory must stay"
    assert waiting.outcome() is CopyEnd.CANCELLED
    harness.release()
    assert harness.engine.close(WAIT_S)
    assert running.outcome() is CopyEnd.FAILED
    assert harness.run(late) is CopyEnd.CANCELLED
    assert harness.engine.close(WAIT_S)


def test_every_transfer_ends_once_whatever_is_done_to_it(harness: Harness) -> None:
    """Submits, cancels, abandons from several threads at once."""
    jobs = [
        Job(20, direction, seed=i % 3, sums=Sums((0, MIB, 1000)[i % 3]) if direction is Direction.STORE else None)
        for i in range(100)
        for direction in Direction
    ]

    def meddle(remainder: int) -> None:
        for index in range(remainder, len(jobs), 4):
            transfer = jobs[index].transfer
            harness.submit(jobs[index])
            if index % 3 == 0:
                harness.engine.queues[transfer.direction].cancel(transfer)
            if index % 5 == 0:
                transfer.must_end(CopyEnd.FAILED)

    threads = [threading.Thread(target=meddle, args=(remainder,)) for remainder in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for index, job in enumerate(jobs):
        outcome = job.outcome()
        if index % 3 and index % 5:
            assert outcome is CopyEnd.DONE
        if outcome is CopyEnd.DONE:
            assert job.is_copied()
        if outcome is CopyEnd.CANCELLED:
            assert not job.destination.any()
    assert harness.engine.close(WAIT_S)
    assert all(len(job.ends) == 1 for job in jobs)


def test_a_store_has_the_checksums_of_what_was_copied(harness: Harness) -> None:
    for slot_bytes in (PIECE, MIB, 64 * MIB):
        job, copied = Job(pieces=100), dict[int, int]()
        job.source[:] = 1

        def digests(slots: Sequence[tuple[int, int]], job: Job = job, copied: dict[int, int] = copied) -> list[int]:
            pieces = [at // slot_bytes for at, _ in slots]  # noqa: B023
            for at in pieces:
                copied[at] = np.count_nonzero(job.destination[at * PIECE :][: PIECE - at % 3])
            return [at + 1 for at in pieces]

        job.transfer.checksums = SlotChecksums(
            digests, [(number * slot_bytes, slot_bytes) for number in range(100)], [0] * 100
        )
        assert harness.run(job) is CopyEnd.DONE
        assert job.transfer.checksums.sums == list(range(1, 101))
        assert copied == {number: PIECE - number % 3 for number in range(100)}
    assert harness.work[Direction.STORE].checksum_seconds > 0


def test_a_load_is_compared_before_its_first_byte_moves(harness: Harness) -> None:
    for wrong in (None, 0, 19, "abandoned"):
        sums = Sums(MIB)
        sums.expected = [number * MIB + 1 for number in range(20)]
        if isinstance(wrong, int):
            sums.expected[wrong] ^= 1
        job = Job(20, Direction.LOAD, sums=sums)
        if wrong == "abandoned":
            sums.gate.clear()
            harness.submit(job)
            assert sums.at_gate.wait(WAIT_S)
            job.transfer.must_end(CopyEnd.FAILED)
            sums.gate.set()
            assert job.outcome() is CopyEnd.FAILED
        else:
            assert harness.run(job) is (CopyEnd.DONE if wrong is None else CopyEnd.CORRUPT)
        assert job.is_copied() == (wrong is None)
        assert wrong is None or not job.destination.any()


@pytest.mark.parametrize("harness", [CudaHarness], indirect=True)
def test_copy_threads_read_checksums_where_readers_are_behind(harness: Harness) -> None:
    """It copies no further store then, and nothing ends without; loads go on."""
    sums = Sums(64 * MIB)
    sums.gate.clear()
    slow, other = Job(20, sums=sums), Job(20)
    harness.submit(slow, other)
    assert other.outcome() is CopyEnd.DONE
    assert sums.at_gate.wait(WAIT_S)
    assert not slow.ends
    assert harness.queued_and_running(Direction.STORE) == (0, 1)
    jobs = [Job(20, sums=sums) for _ in range(checksum_threads() - 1 + MAX_UNREAD_STORES + 2)]
    harness.submit(*jobs)
    wait_until(lambda: len(sums.threads) == checksum_threads() + 1)
    assert not jobs[-1].is_copied()
    assert harness.run(Job(direction=Direction.LOAD)) is CopyEnd.DONE
    assert not harness.engine.queues[slow.transfer.direction].cancel(slow.transfer)
    sums.gate.set()
    for job in (slow, *jobs):
        assert job.outcome() is CopyEnd.DONE
        assert job.checksums is not None
        assert all(job.checksums.sums)


@pytest.mark.parametrize("how", ["abandoned", "late", "broken", "closed"])
def test_a_store_whose_checksums_do_not_come_fails_once(harness: Harness, how: str) -> None:
    sums = Sums(64 * MIB)
    sums.gate.clear()
    job = Job(20, deadline=harness.now + 5, sums=sums)
    harness.submit(job)
    assert sums.at_gate.wait(WAIT_S)
    assert job.is_copied()
    if how == "abandoned":
        job.transfer.must_end(CopyEnd.FAILED)
    elif how == "late":
        harness.now += 5
        harness.engine.tick()
    elif how == "closed":
        assert not harness.engine.close(0.0), "a slot is still read, so the pool must stay"
    sums.broken = how == "broken"
    assert not job.ends
    sums.gate.set()
    assert job.outcome() is (CopyEnd.DEADLINE if how == "late" else CopyEnd.FAILED)
    good = Job(sums=Sums(64 * MIB))
    assert harness.run(good) is (CopyEnd.CANCELLED if how == "closed" else CopyEnd.DONE)
    assert len(job.ends) == 1


@pytest.mark.parametrize("direction", list(Direction))
def test_an_overdue_copy_is_reported_once(harness: Harness, direction: Direction) -> None:
    overdue: list[Transfer] = []
    job, behind = (Job(direction=direction, deadline=harness.now + 5) for _ in range(2))
    job.transfer.on_overdue = overdue.append
    harness.hold_running(job, behind)
    harness.now += 5
    harness.engine.tick()
    assert behind.ends == [CopyEnd.DEADLINE], "it never started, so nothing of it can land"
    assert (overdue, job.ends, harness.engine.hangs_s()) == ([], [], 0)
    for _ in range(4):
        harness.now += OVERDUE_GRACE_S
        harness.engine.tick()
    assert (overdue, job.ends) == ([job.transfer], [])
    assert job.transfer.copy_s == 0.0, "a store is answered by now, and of its copy's time nothing is known"
    harness.release()
    assert job.outcome() is CopyEnd.DEADLINE
    wait_until(lambda: harness.queued_and_running(direction) == (0, 0))
    assert harness.engine.hangs_s() == 0


# --- host memory ----------------------------------------------------------------------------------


def test_several_threads_of_a_direction_copy_at_once() -> None:
    both = threading.Barrier(2, timeout=WAIT_S)

    def copy(transfer: Transfer) -> None:
        both.wait()
        host_copy(transfer)

    engine = HostEngine(new_work(), threads_per_direction=2, copy=copy)
    jobs = [Job(), Job()]
    for job in jobs:
        engine.queues[job.transfer.direction].submit(job.transfer)
    assert [job.outcome() for job in jobs] == [CopyEnd.DONE, CopyEnd.DONE]
    assert engine.close(WAIT_S)


@pytest.mark.parametrize("hangs", [True, False], ids=["waits", "wants a CPU"])
def test_an_overdue_copy_hangs_only_when_its_thread_waits(hangs: bool) -> None:
    now = [0.0]
    begun, ended = threading.Event(), threading.Event()
    much = random_bytes(32 * MIB)

    def copy(transfer: Transfer) -> None:
        begun.set()
        while not ended.wait(60 if hangs else 0):
            zlib.crc32(much)  # without the GIL, as a copy
        host_copy(transfer)

    engine, job = HostEngine(new_work(), lambda: now[0], copy=copy), Job(direction=Direction.LOAD, deadline=1.0)
    engine.queues[job.transfer.direction].submit(job.transfer)
    assert begun.wait(WAIT_S)
    for now[0] in range(10, 60):
        engine.tick()
        time.sleep(0.002)
    # At some look its thread may be waiting for the GIL, but not at all of them.
    assert (engine.hangs_s() > 45) is hangs
    ended.set()
    assert job.outcome() is CopyEnd.DEADLINE
    assert engine.close(WAIT_S)
    assert engine.hangs_s() == 0


def test_a_host_copy_stops_in_the_middle_of_a_piece() -> None:
    """16 GiB would take seconds."""
    source, destination = random_bytes(4 * MIB), np.zeros(4 * MIB, np.uint8)
    stop, copied = ctypes.c_uint32(), list[int]()
    columns = [np.full(4096, one, np.uint64) for one in (address_of(destination), address_of(source), source.size)]
    plan = Plan(*columns)

    def copy() -> None:
        pieces = [column.ctypes.data for column in (plan.destination, plan.source, plan.size)]
        copied.append(native().host_copy(*pieces, len(plan.size), 0, 0, 0, 0, ctypes.byref(stop)))

    thread = threading.Thread(target=copy)
    thread.start()
    wait_until(destination.any)
    stop.value = 1
    thread.join(WAIT_S)
    assert 0 < copied[0] < 4096 * source.size
    assert copied[0] % MIB == 0
