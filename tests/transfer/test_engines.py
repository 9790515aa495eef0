"""What every transfer engine must do. An engine joins by adding a harness to ``HARNESSES``."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from kvoffd.transfer.cuda.engine import GpuEngine, PinnedChunks
from kvoffd.transfer.engine import (
    MAX_UNREAD_STORES,
    OVERDUE_GRACE_S,
    CopyEngine,
    HostEngine,
    SlotChecksums,
    Transfer,
    host_copy,
)
from kvoffd.transfer.plan import Direction, Outcome, Plan
from kvoffd_proto.cuda import BATCH_FORMS, argument_types
from tests.kit.copy_buffers import address_of, random_bytes
from tests.kit.stub_cuda import Ranges, fresh_stub
from tests.kit.waiting import wait_until

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


class HostHarness(Harness):
    """A copy is one step."""

    def __init__(self) -> None:
        super().__init__()

        def copy(plan: Plan, slots: Sequence[tuple[int, int]], stop: ctypes.c_uint32) -> list[int]:
            self.step()
            return host_copy(plan, slots, stop)

        self.engine = HostEngine(clock=self.clock, copy=copy)


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
        # The copy loop calls these without the interpreter's lock, which they take.
        single = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        many = ctypes.CFUNCTYPE(ctypes.c_int, *argument_types(BATCH_FORMS[12080]))
        real_copy, real_batch = single(calls["copy"]), many(calls["batch"])

        def gated(*arguments: int) -> int:
            try:
                self.step()
            except RuntimeError:
                return 1
            return int(real_batch(*arguments))

        self.gated = many(gated), single(lambda *arguments: 1 if self.broken else real_copy(*arguments))
        calls["batch"], calls["copy"] = (ctypes.cast(one, ctypes.c_void_p).value for one in self.gated)
        driver.copy_calls = lambda: calls  # type: ignore[method-assign]

        class Engine(GpuEngine):
            def submit(self, transfer: Transfer) -> None:
                plan = transfer.plan
                for kind, column in ((Ranges.HOST, plan.destination), (Ranges.DEVICE, plan.source)):
                    if column.size:
                        begin = int(column[0])
                        stub.adopt(kind, begin, int(column[-1] + plan.size[-1]) - begin)
                super().submit(transfer)

        chunks = PinnedChunks(np.ones(1, dtype=np.bool_), 2**62, 0)
        self.engine = Engine(driver, chunks, clock=self.clock, step_pieces=8)


HARNESSES: list[Callable[[], Harness]] = [HostHarness, CudaHarness]


@pytest.fixture(params=HARNESSES)
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
        return SlotChecksums(self._digests, places, self.expected)

    def _digests(self, slots: Sequence[tuple[int, int]]) -> list[int]:
        self.threads.add(threading.current_thread().name)
        self.at_gate.set()
        assert self.gate.wait(WAIT_S)
        if self.broken:
            raise RuntimeError("the checksum is broken")
        return [offset + 1 for offset, _ in slots]


class Job:
    """A transfer between buffers of its own, and how it ended."""

    def __init__(
        self,
        pieces: int = 8,
        direction: Direction = Direction.STORE,
        deadline: float = FOREVER,
        seed: int = 0,
        sums: Sums | None = None,
    ) -> None:
        self.source = random_bytes(pieces * PIECE, seed)
        self.destination = np.zeros_like(self.source)
        # Sizes that differ from piece to piece, so that the job has many steps.
        offset = np.arange(pieces, dtype=np.uint64) * np.uint64(PIECE)
        size = np.uint64(PIECE) - np.arange(pieces, dtype=np.uint64) % np.uint64(3)
        self.nbytes = int(size.sum())
        plan = Plan(
            offset + np.uint64(address_of(self.destination)),
            offset + np.uint64(address_of(self.source)),
            size,
            self.nbytes,
        )
        self.ends: list[Outcome] = []
        self.done = threading.Event()
        self.checksums = sums.slot_checksums(pieces) if sums else None
        self.transfer = Transfer(direction, plan, deadline, self._on_done, None, self.checksums)

    def _on_done(self, transfer: Transfer, outcome: Outcome) -> None:
        assert transfer is self.transfer
        self.ends.append(outcome)
        self.done.set()

    def outcome(self) -> Outcome:
        assert self.done.wait(WAIT_S), "the transfer did not end"
        return self.ends[0]

    def is_copied(self) -> bool:
        for piece in range(self.source.size // PIECE):
            part = slice(piece * PIECE, (piece + 1) * PIECE - piece % 3)
            if not np.array_equal(self.destination[part], self.source[part]):
                return False
        return True


@pytest.mark.parametrize("direction", list(Direction))
def test_a_transfer_copies_every_byte_and_ends_once(harness: Harness, direction: Direction) -> None:
    job = Job(pieces=100, direction=direction)
    harness.engine.submit(job.transfer)
    assert job.outcome() is Outcome.DONE
    assert job.is_copied()
    assert harness.engine.close(WAIT_S)
    assert len(job.ends) == 1


def test_an_empty_transfer_is_done(harness: Harness) -> None:
    job = Job(pieces=0)
    harness.engine.submit(job.transfer)
    assert job.outcome() is Outcome.DONE


def test_transfers_of_a_direction_start_in_their_order(harness: Harness) -> None:
    order: list[int] = []
    done = threading.Event()

    def note(number: int) -> Callable[[Transfer, Outcome], None]:
        def on_done(transfer: Transfer, outcome: Outcome) -> None:
            order.append(number)
            if len(order) == 50:
                done.set()

        return on_done

    jobs = [Job(pieces=2) for _ in range(50)]
    for number, job in enumerate(jobs):
        harness.engine.submit(Transfer(Direction.LOAD, job.transfer.plan, FOREVER, note(number)))
    assert done.wait(WAIT_S)
    assert order == list(range(50))


def test_submitting_never_waits_and_stats_count_what_is_there(harness: Harness) -> None:
    harness.hold()
    jobs = [Job() for _ in range(5)]
    for job in jobs:
        harness.engine.submit(job.transfer)
    assert harness.at_gate.wait(WAIT_S)
    stats = harness.engine.stats(Direction.STORE)
    assert (stats.queued, stats.running, stats.busy_seconds) == (4, 1, 0.0)
    assert harness.engine.stats(Direction.LOAD)[:2] == (0, 0)
    harness.release()
    for job in jobs:
        assert job.outcome() is Outcome.DONE
    stats = harness.engine.stats(Direction.STORE)
    assert stats[:2] == (0, 0)
    assert stats.busy_seconds > 0.0


def test_a_load_does_not_wait_behind_a_store(harness: Harness) -> None:
    harness.hold("store")
    store, load = Job(), Job(direction=Direction.LOAD)
    harness.engine.submit(store.transfer)
    assert harness.at_gate.wait(WAIT_S)
    harness.engine.submit(load.transfer)
    assert load.outcome() is Outcome.DONE
    assert not store.ends


def test_a_waiting_transfer_can_be_cancelled_and_writes_nothing(harness: Harness) -> None:
    harness.hold()
    first, second, third = Job(), Job(), Job()
    for job in (first, second, third):
        harness.engine.submit(job.transfer)
    assert harness.at_gate.wait(WAIT_S)
    assert harness.engine.cancel(second.transfer)
    assert second.ends == [Outcome.CANCELLED]
    assert not harness.engine.cancel(second.transfer)
    harness.release()
    assert first.outcome() is Outcome.DONE
    assert third.outcome() is Outcome.DONE
    assert not second.destination.any()
    assert len(second.ends) == 1


def test_a_running_or_ended_transfer_cannot_be_cancelled(harness: Harness) -> None:
    harness.hold()
    job = Job()
    harness.engine.submit(job.transfer)
    assert harness.at_gate.wait(WAIT_S)
    assert not harness.engine.cancel(job.transfer)
    harness.release()
    assert job.outcome() is Outcome.DONE
    assert not harness.engine.cancel(job.transfer)
    assert not harness.engine.cancel(Job().transfer)


def test_an_abandoned_transfer_ends_at_its_next_look(harness: Harness) -> None:
    harness.hold()
    job = Job(pieces=100)
    harness.engine.submit(job.transfer)
    assert harness.at_gate.wait(WAIT_S)
    job.transfer.must_end(Outcome.FAILED)
    assert not job.ends
    harness.release()
    assert job.outcome() is Outcome.FAILED
    assert harness.steps == 1
    assert not job.is_copied()


def test_a_transfer_abandoned_while_it_waits_writes_nothing(harness: Harness) -> None:
    harness.hold()
    first, second = Job(), Job()
    harness.engine.submit(first.transfer)
    harness.engine.submit(second.transfer)
    assert harness.at_gate.wait(WAIT_S)
    second.transfer.must_end(Outcome.FAILED)
    harness.release()
    assert second.outcome() is Outcome.FAILED
    assert not second.destination.any()


def test_a_transfer_whose_deadline_passed_while_it_waited_writes_nothing(harness: Harness) -> None:
    job = Job(deadline=harness.now)
    harness.engine.submit(job.transfer)
    assert job.outcome() is Outcome.DEADLINE
    assert not job.destination.any()


def test_a_running_transfer_ends_at_its_next_look_after_its_deadline(harness: Harness) -> None:
    harness.hold()
    job = Job(pieces=100, deadline=harness.now + 5)
    harness.engine.submit(job.transfer)
    assert harness.at_gate.wait(WAIT_S)
    harness.now += 5
    harness.engine.tick()
    harness.release()
    assert job.outcome() is Outcome.DEADLINE
    assert harness.steps == 1
    assert not job.is_copied()


def test_a_failing_copy_fails_its_transfer_and_not_the_engine(harness: Harness) -> None:
    harness.broken = True
    bad = Job()
    harness.engine.submit(bad.transfer)
    assert bad.outcome() is Outcome.FAILED
    harness.broken = False
    good = Job()
    harness.engine.submit(good.transfer)
    assert good.outcome() is Outcome.DONE
    assert len(bad.ends) == 1


def test_an_owner_that_raises_does_not_end_the_engine(harness: Harness) -> None:
    def raises(transfer: Transfer, outcome: Outcome) -> None:
        raise RuntimeError("a bug of the owner's")

    bad = Job()
    harness.engine.submit(Transfer(Direction.STORE, bad.transfer.plan, FOREVER, raises))
    job = Job()
    harness.engine.submit(job.transfer)
    assert job.outcome() is Outcome.DONE
    assert bad.is_copied()


def test_closing_cancels_what_waits_and_abandons_what_runs(harness: Harness) -> None:
    harness.hold()
    running, waiting = Job(pieces=100), Job()
    harness.engine.submit(running.transfer)
    harness.engine.submit(waiting.transfer)
    assert harness.at_gate.wait(WAIT_S)
    assert not harness.engine.close(0.0), "a thread still copies, so the memory must stay"
    assert waiting.outcome() is Outcome.CANCELLED
    harness.release()
    assert harness.engine.close(WAIT_S)
    assert running.outcome() is Outcome.FAILED
    late = Job()
    harness.engine.submit(late.transfer)
    assert late.outcome() is Outcome.CANCELLED
    assert harness.engine.close(WAIT_S)


def test_every_transfer_ends_once_whatever_is_done_to_it(harness: Harness) -> None:
    """Submits, cancels, abandons from several threads at once."""
    jobs = [
        Job(
            pieces=20,
            direction=list(Direction)[i % 2],
            seed=i % 3,
            sums=Sums((0, MIB, 1000)[i // 2 % 3]) if i % 2 == list(Direction).index(Direction.STORE) else None,
        )
        for i in range(200)
    ]

    def meddle(remainder: int) -> None:
        for index in range(remainder, len(jobs), 4):
            transfer = jobs[index].transfer
            harness.engine.submit(transfer)
            if index % 3 == 0:
                harness.engine.cancel(transfer)
            if index % 5 == 0:
                transfer.must_end(Outcome.FAILED)

    threads = [threading.Thread(target=meddle, args=(remainder,)) for remainder in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for index, job in enumerate(jobs):
        outcome = job.outcome()
        if index % 3 and index % 5:
            assert outcome is Outcome.DONE
        if outcome is Outcome.DONE:
            assert job.is_copied()
        if outcome is Outcome.CANCELLED:
            assert not job.destination.any()
    assert harness.engine.close(WAIT_S)
    assert all(len(job.ends) == 1 for job in jobs)


def test_closing_an_idle_engine_takes_no_time(harness: Harness) -> None:
    started = time.monotonic()
    assert harness.engine.close(WAIT_S)
    assert time.monotonic() - started < WAIT_S / 2


@pytest.mark.parametrize("slot_bytes", [PIECE, MIB, 64 * MIB])
def test_a_store_has_all_its_checksums_when_it_ends(harness: Harness, slot_bytes: int) -> None:
    job = Job(pieces=100, sums=Sums(slot_bytes))
    assert job.checksums is not None
    harness.engine.submit(job.transfer)
    assert job.outcome() is Outcome.DONE
    assert job.is_copied()
    assert job.checksums.sums == [number * slot_bytes + 1 for number in range(100)]
    assert harness.engine.stats(Direction.STORE).checksum_seconds > 0


@pytest.mark.parametrize("wrong", [None, 0, 19])
def test_a_load_is_compared_before_its_first_byte_moves(harness: Harness, wrong: int | None) -> None:
    sums = Sums(MIB)
    sums.expected = [number * MIB + 1 for number in range(20)]
    if wrong is not None:
        sums.expected[wrong] ^= 1
    job = Job(pieces=20, direction=Direction.LOAD, sums=sums)
    harness.engine.submit(job.transfer)
    assert job.outcome() is (Outcome.DONE if wrong is None else Outcome.CORRUPT)
    assert job.is_copied() == (wrong is None)
    assert wrong is None or not job.destination.any()


def test_a_load_that_is_abandoned_while_it_is_compared_moves_no_byte(harness: Harness) -> None:
    sums = Sums(MIB)
    sums.expected = [number * MIB + 1 for number in range(20)]
    sums.gate.clear()
    job = Job(pieces=20, direction=Direction.LOAD, sums=sums)
    harness.engine.submit(job.transfer)
    assert sums.at_gate.wait(WAIT_S)
    job.transfer.must_end(Outcome.FAILED)
    sums.gate.set()
    assert job.outcome() is Outcome.FAILED
    assert not job.destination.any()


def test_checksums_are_taken_of_what_was_copied(harness: Harness) -> None:
    job, copied = Job(pieces=100), list[int]()
    job.source[:] = 1

    def digests(slots: Sequence[tuple[int, int]]) -> list[int]:
        copied.extend(np.count_nonzero(job.destination[at : at + PIECE - at // PIECE % 3]) for at, _ in slots)
        return [1] * len(slots)

    job.transfer.checksums = SlotChecksums(digests, [(number * PIECE, 64 * MIB) for number in range(100)])
    harness.engine.submit(job.transfer)
    assert job.outcome() is Outcome.DONE
    assert copied == [PIECE - number % 3 for number in range(100)]


@pytest.mark.parametrize("harness", [CudaHarness], indirect=True)
def test_a_store_waits_for_its_checksums_and_the_copy_thread_does_not(harness: Harness) -> None:
    sums = Sums(64 * MIB)
    sums.gate.clear()
    slow, next_one = Job(pieces=20, sums=sums), Job(pieces=20)
    harness.engine.submit(slow.transfer)
    harness.engine.submit(next_one.transfer)
    assert next_one.outcome() is Outcome.DONE
    assert sums.at_gate.wait(WAIT_S)
    assert not slow.ends
    assert harness.engine.stats(Direction.STORE)[:2] == (0, 1)
    sums.gate.set()
    assert slow.outcome() is Outcome.DONE


@pytest.mark.parametrize("harness", [CudaHarness], indirect=True)
def test_where_checksums_are_behind_stores_wait_and_nothing_ends_without(harness: Harness) -> None:
    """The copy thread takes them itself then, and copies no further store; loads go on."""
    sums = Sums(64 * MIB)
    sums.gate.clear()
    readers = 2
    jobs = [Job(pieces=20, sums=sums) for _ in range(readers + MAX_UNREAD_STORES + 2)]
    for job in jobs:
        harness.engine.submit(job.transfer)
    wait_until(lambda: len(sums.threads) == readers + 1)
    assert not jobs[-1].is_copied()
    load = Job(direction=Direction.LOAD)
    harness.engine.submit(load.transfer)
    assert load.outcome() is Outcome.DONE
    assert not harness.engine.cancel(jobs[0].transfer)
    sums.gate.set()
    for job in jobs:
        assert job.outcome() is Outcome.DONE
        assert job.checksums is not None
        assert all(job.checksums.sums)


@pytest.mark.parametrize("how", ["abandoned", "late", "broken"])
def test_a_store_whose_checksums_do_not_come_fails_once(harness: Harness, how: str) -> None:
    sums = Sums(64 * MIB)
    sums.gate.clear()
    job = Job(pieces=20, deadline=harness.now + 5, sums=sums)
    harness.engine.submit(job.transfer)
    assert sums.at_gate.wait(WAIT_S)
    assert job.is_copied()
    if how == "abandoned":
        job.transfer.must_end(Outcome.FAILED)
    elif how == "late":
        harness.now += 5
        harness.engine.tick()
    sums.broken = how == "broken"
    assert not job.ends
    sums.gate.set()
    assert job.outcome() is (Outcome.DEADLINE if how == "late" else Outcome.FAILED)
    good = Job(sums=Sums(64 * MIB))
    harness.engine.submit(good.transfer)
    assert good.outcome() is Outcome.DONE
    assert len(job.ends) == 1


def test_closing_waits_for_checksums_that_are_being_taken(harness: Harness) -> None:
    sums = Sums(64 * MIB)
    sums.gate.clear()
    job = Job(pieces=20, sums=sums)
    harness.engine.submit(job.transfer)
    assert sums.at_gate.wait(WAIT_S)
    assert not harness.engine.close(0.0), "a slot is still read, so the pool must stay"
    sums.gate.set()
    assert harness.engine.close(WAIT_S)
    assert job.ends == [Outcome.FAILED]


@pytest.mark.parametrize("direction", list(Direction))
def test_an_overdue_copy_is_told_of_once_and_ends_only_when_it_is_done(harness: Harness, direction: Direction) -> None:
    harness.hold()
    told: list[Transfer] = []
    job = Job(direction=direction, deadline=harness.now + 5)
    job.transfer.on_overdue = told.append
    behind = Job(direction=direction, deadline=harness.now + 5)
    for one in (job, behind):
        harness.engine.submit(one.transfer)
    assert harness.at_gate.wait(WAIT_S)
    harness.now += 5
    harness.engine.tick()
    assert behind.ends == [Outcome.DEADLINE], "it never started, so nothing of it can land"
    assert (told, job.ends, harness.engine.hangs_s()) == ([], [], 0)
    for _ in range(4):
        harness.now += OVERDUE_GRACE_S
        harness.engine.tick()
    assert (told, job.ends) == ([job.transfer], [])
    harness.release()
    assert job.outcome() is Outcome.DEADLINE
    wait_until(lambda: harness.engine.stats(direction)[:2] == (0, 0))
    assert harness.engine.hangs_s() == 0
