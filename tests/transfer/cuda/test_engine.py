"""What GpuEngine promises beyond every engine: bounded steps, fallbacks, and what a GPU that hangs may keep."""

from __future__ import annotations

import ctypes
import logging
import random
import threading
from collections import Counter
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from kvoffd.pool.memory import PoolMemory
from kvoffd.transfer.cuda.engine import STEP_BYTES, STEP_PIECES, STEPS_IN_FLIGHT, GpuEngine
from kvoffd.transfer.cuda.pinning import PinnedPool
from kvoffd.transfer.engine import Transfer, new_work
from kvoffd.transfer.plan import CopyEnd, Direction, Plan
from kvoffd_proto.cuda import CudaError
from tests.kit.amount import TIMES
from tests.kit.copy_buffers import Bytes, random_bytes
from tests.kit.stub_cuda import StubCuda
from tests.kit.waiting import wait_until

KIB = 1 << 10
POOL = 5 * STEP_BYTES
UNKNOWN = 999  # an error after which the driver goes on
SIZES = [1, 511, 4 * KIB, 16 * KIB - 8, 64 * KIB, 256 * KIB - 1, 256 * KIB, 300 * KIB, STEP_BYTES + 12345]


@cache
def source() -> Bytes:
    """What is copied. Made once: it takes as long as a test."""
    return random_bytes(POOL, 5)


class Machine:
    """A stub GPU, a pinned pool, and an engine between them."""

    def __init__(self, stub: StubCuda) -> None:
        self.stub = stub
        stub.start()
        self.driver = stub.driver()
        self.memory = PoolMemory.create(POOL, "test")
        self.pool = np.ctypeslib.as_array((ctypes.c_uint8 * POOL).from_address(self.memory.mapping.address))
        self.pins = PinnedPool(self.driver, self.memory.mapping.address, POOL, STEP_BYTES)
        self.first_chunk = -self.memory.mapping.address % STEP_BYTES
        """Where the pool's first whole chunk begins."""
        self.gpu = stub.allocate(POOL)
        self.work = new_work()
        self._engine: GpuEngine | None = None

    def pin(self) -> None:
        self.pins.acquire(0)
        wait_until(lambda: sum(self.pins.progress[:2]) == POOL)

    @property
    def engine(self) -> GpuEngine:
        if self._engine is None:
            self._engine = GpuEngine(self.driver, self.pins.chunks, self.work)
        return self._engine

    def close(self) -> None:
        self.stub.release()
        if self._engine is not None:
            assert self._engine.close(10)
        if self.pins.progress.pinned_bytes:
            self.pins.release()
        assert self.pins.close(10)
        self.memory.close()


@pytest.fixture
def machine(stub: StubCuda) -> Iterator[Machine]:
    machine = Machine(stub)
    yield machine
    machine.close()


class Job:
    """Pieces of the given sizes, 8 bytes from each other in the pool, and ``gap`` behind each on the GPU."""

    def __init__(
        self, machine: Machine, sizes: list[int], direction: Direction = Direction.STORE, gap: int | list[int] = 8
    ) -> None:
        self.outcome: CopyEnd | None = None
        self.done = threading.Event()
        ends = [np.cumsum(np.array(sizes) + one) for one in (8, gap)]
        begin = machine.first_chunk + 24
        offsets = [np.concatenate(([begin], begin + end[:-1])).astype(np.uint64) for end in ends]
        assert int(max(offset[-1] for offset in offsets)) + sizes[-1] <= POOL
        views, bases = [machine.pool, machine.gpu.view], [machine.memory.mapping.address, machine.gpu.address]
        if direction is Direction.LOAD:
            offsets, views, bases = offsets[::-1], views[::-1], bases[::-1]
        columns = [offset + np.uint64(base) for offset, base in zip(offsets, bases, strict=True)]
        self.plan = Plan(columns[0], columns[1], np.array(sizes, dtype=np.uint64))
        self.expected_to = np.zeros(POOL, dtype=np.uint8)
        self.source = source()
        for to, begin, size in zip(offsets[0].tolist(), offsets[1].tolist(), sizes, strict=True):
            self.expected_to[to : to + size] = self.source[begin : begin + size]
        self._to, self._from = views
        self._from[:] = self.source
        self._to[:] = 0
        self.transfer = Transfer(direction, lambda: self.plan, float("inf"), self._on_done)
        machine.engine.queues[self.transfer.direction].submit(self.transfer)

    def _on_done(self, transfer: Transfer, outcome: CopyEnd) -> None:
        self.outcome = outcome
        self.done.set()

    def wait(self) -> CopyEnd | None:
        assert self.done.wait(10), "the transfer did not end"
        return self.outcome

    def is_copied(self) -> bool:
        """Every byte that should be there, and no other."""
        return bool(np.array_equal(self._to, self.expected_to))

    def is_done(self) -> bool:
        return self.wait() is CopyEnd.DONE and self.is_copied()


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize(
    "setting", [("version", 12070), ("version", 12080), ("version", 13000), ("batch_missing", 1), ("translated", 1)]
)
def test_pieces_of_every_size_arrive_whole(machine: Machine, setting: tuple[str, int], pinned: bool) -> None:
    """Without batches where the driver has none, or the GPU has other addresses."""
    machine.stub.set(*setting)
    if pinned:
        machine.pin()
    for direction in Direction:
        assert Job(machine, SIZES, direction).is_done()
    batches = machine.stub.calls("cuMemcpyBatchAsync")
    assert (batches > 0) == (pinned and setting in (("version", 12080), ("version", 13000)))
    assert machine.driver.lost is None


def test_what_the_driver_would_not_pin_is_in_no_batch(machine: Machine) -> None:
    """The double refuses a batch with such memory, and any copy that lies in two registrations."""
    machine.stub.fail("cuMemHostRegister_v2", 2, UNKNOWN)
    machine.pin()
    for direction in Direction:
        before = machine.stub.calls("cuMemcpyAsync")
        assert Job(machine, [4 * KIB] * 8000, direction).is_done()
        assert 1500 < machine.stub.calls("cuMemcpyAsync") - before <= STEP_BYTES // (4 * KIB) + 2
        assert machine.work[direction].refused_batches == 0


@pytest.mark.parametrize("missing", ["cuEventSynchronize", "cuEventRecord"])
@pytest.mark.parametrize("direction", list(Direction))
def test_a_wait_that_is_missing_shows_in_the_bytes(machine: Machine, direction: Direction, missing: str) -> None:
    machine.pin()
    machine.stub.ignore(missing)
    job = Job(machine, SIZES, direction)
    assert job.wait() is CopyEnd.DONE
    assert not job.is_copied()


def test_batches_and_steps_with_the_gpu_are_bounded(machine: Machine) -> None:
    """So that a load behind a store on the same copy engine waits for them, and not for the store."""
    machine.pin()
    machine.stub.hang("cuEventSynchronize")
    job = Job(machine, [16 * KIB] * 600 + [64 * KIB] * 300)
    machine.stub.wait_hanging()

    def batches() -> list[tuple[int, int]]:
        lines = [line.split()[1::2] for line in machine.stub.log() if line.startswith("batch ") and "of" in line]
        return [(int(count), int(nbytes)) for count, nbytes in lines]

    assert len(batches()) == STEPS_IN_FLIGHT
    load = Job(machine, [64 * KIB], Direction.LOAD)
    assert load.wait() is CopyEnd.DONE
    assert not job.done.is_set()
    machine.stub.release()
    assert job.wait() is CopyEnd.DONE
    assert max(count for count, _ in batches()) == STEP_PIECES
    assert max(nbytes for _, nbytes in batches()) <= STEP_BYTES
    assert machine.stub.calls("cuMemcpyAsync") == 0


@pytest.mark.parametrize(("call", "size"), [("cuMemcpyBatchAsync", 64 * KIB), ("cuMemcpy2DAsync_v2", 4 * KIB)])
def test_refused_pieces_are_copied_one_by_one(
    machine: Machine, caplog: pytest.LogCaptureFixture, call: str, size: int
) -> None:
    """Said and counted once; in the other direction such calls go on."""
    machine.pin()
    machine.stub.fail(call, 1, 1)
    with caplog.at_level(logging.WARNING):
        for calls, direction in ((1, Direction.STORE), (1, Direction.STORE), (2, Direction.LOAD)):
            assert Job(machine, [size] * 100, direction).is_done()
            assert machine.stub.calls(call) == calls
    (record,) = caplog.records
    assert f"{call} failed: CUDA_ERROR_INVALID_VALUE (1)" in record.message
    refused = [machine.work[direction].refused_batches for direction in (Direction.STORE, Direction.LOAD)]
    assert refused == [1, 0]


def rows(machine: Machine) -> list[str]:
    """The copies in rows that were made: their number and length in bytes."""
    return [line.removeprefix("rows ") for line in machine.stub.log() if line.startswith("rows ")]


def test_where_rows_are_refused_each_piece_is_two_rows(machine: Machine) -> None:
    """Only where that is refused too, small pieces go to the GPU as all others do."""
    machine.pin()
    machine.stub.fail("cuMemcpy2DAsync_v2", 1, 1)
    for _ in range(2):
        assert Job(machine, [4 * KIB] * 3, Direction.LOAD).is_done()
    assert rows(machine) == ["2 of 2048"] * 3
    machine.stub.fail("cuMemcpy2DAsync_v2", 1, 1)
    for _ in range(2):
        assert Job(machine, [4 * KIB] * 3, Direction.LOAD).is_done()
    assert len(rows(machine)) == 3
    assert machine.work[Direction.LOAD].refused_batches == 2


@pytest.mark.parametrize("gap", [8, 1000, 64 * KIB])
def test_small_pieces_at_equal_distances_are_rows_of_one_copy(machine: Machine, gap: int) -> None:
    """As the layers of a block are. No other small piece goes to a GPU but as two halves: see ROWS_BYTES."""
    machine.pin()
    assert Job(machine, [4 * KIB] * 40 + [64 * KIB] + [8 * KIB] * 3 + [5 * KIB], Direction.LOAD, gap).is_done()
    assert rows(machine) == ["40 of 4096", "3 of 8192", "2 of 2560"]
    assert machine.stub.calls("cuMemcpyBatchAsync") == 1
    assert Job(machine, [4 * KIB] * 40 + [64 * KIB] + [8 * KIB] * 3, Direction.STORE, gap).is_done()
    assert rows(machine)[3:] == ["40 of 4096"], "few rows are slower than a batch"
    assert Job(machine, [32 * KIB] * 3, Direction.LOAD, gap).is_done()
    assert len(rows(machine)) == 4


def test_pieces_of_any_size_at_any_distance_arrive_whole(machine: Machine) -> None:
    """Blocks of some layers each, as plans have them, with one chunk of the pool that the driver does not pin."""
    machine.stub.fail("cuMemHostRegister_v2", 2, UNKNOWN)
    machine.pin()
    made: Counter[str] = Counter()
    for seed in range(4 * TIMES):
        chance, sizes, gaps = random.Random(seed), list[int](), list[int]()
        machine.stub.set("seed", seed)
        while sum(sizes) + sum(gaps) < 3 * POOL // 8:
            layers, size = chance.choice([1, 2, 7, 64]), chance.choice([100, 2 * KIB, 4 * KIB + 1, 24 * KIB, 96 * KIB])
            sizes += [size] * layers
            gaps += [chance.choice([0, 8, 8, 8, 512])] * layers
        for direction in Direction:
            assert Job(machine, sizes, direction, gaps).is_done(), seed
            made.update(line.split()[0] for line in machine.stub.log())
    assert all(made[kind] for kind in ("rows", "batch", "copy")), made


def test_rows_end_where_distances_or_chunks_do(machine: Machine) -> None:
    machine.pin()
    assert Job(machine, [4 * KIB, 4 * KIB, 2 * KIB, 4 * KIB, 4 * KIB], Direction.LOAD).is_done()
    assert rows(machine) == ["2 of 4096", "2 of 1024", "2 of 4096"]
    assert Job(machine, [16 * KIB] * 1000 + [4 * KIB] * 1000, Direction.LOAD).is_done()
    assert all(int(one.split()[0]) <= STEP_PIECES for one in rows(machine))
    assert (machine.stub.calls("cuMemcpyAsync"), machine.stub.calls("cuMemcpyBatchAsync")) == (0, 0)
    assert machine.work[Direction.LOAD].refused_batches == 0, "the double refuses rows in two registrations"


def test_where_single_copies_fail_too_the_batch_is_not_blamed(machine: Machine) -> None:
    machine.pin()
    machine.stub.fail("cuMemcpyBatchAsync", 1, UNKNOWN)
    machine.stub.fail("cuMemcpyAsync", 1, UNKNOWN)
    assert Job(machine, [4 * KIB] * 10).wait() is CopyEnd.FAILED
    assert Job(machine, [4 * KIB] * 10).is_done()
    assert machine.stub.calls("cuMemcpyBatchAsync") == 2


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuEventRecord", "cuEventSynchronize"])
@pytest.mark.parametrize("nth", [1, 2])
def test_an_error_fails_the_transfer_after_its_copies_have_ended(machine: Machine, call: str, nth: int) -> None:
    machine.stub.fail(call, nth, UNKNOWN)
    bad = Job(machine, [2 << 20] * 12)
    assert bad.wait() is CopyEnd.FAILED
    launched = sum(int(line.split()[1]) for line in machine.stub.log() if line.startswith("copy "))
    assert (launched > 0) == ((call, nth) != ("cuMemcpyAsync", 1))
    first = slice(machine.first_chunk + 24, machine.first_chunk + 24 + min(launched, 2 << 20))
    assert np.array_equal(machine.pool[first], bad.expected_to[first]), "a copy was left in the stream"
    assert machine.driver.lost is None
    assert Job(machine, [4 * KIB] * 10, Direction.LOAD).is_done()


def test_a_lost_context_is_told_from_a_copy_that_failed(machine: Machine) -> None:
    machine.stub.fail("cuMemcpyAsync", 1, 1)
    assert Job(machine, [KIB]).wait() is CopyEnd.FAILED
    assert machine.driver.lost is None
    machine.stub.fail("cuMemcpyAsync", 1, 700)
    assert Job(machine, [KIB]).wait() is CopyEnd.FAILED
    assert machine.driver.lost is not None


def test_a_stream_that_cannot_be_waited_for_loses_the_context(machine: Machine) -> None:
    machine.pin()
    machine.stub.fail("cuEventRecord", 1, UNKNOWN)
    machine.stub.fail("cuStreamSynchronize", 1, UNKNOWN)
    assert Job(machine, [4 * KIB] * 8).wait() is CopyEnd.FAILED
    assert machine.driver.lost is not None
    assert machine.driver.lost.call == "cuStreamSynchronize"


@pytest.mark.parametrize("direction", list(Direction))
def test_a_copy_that_is_stopped_waits_for_its_steps_in_flight(machine: Machine, direction: Direction) -> None:
    machine.pin()
    machine.stub.hang("cuEventSynchronize")
    job = Job(machine, [64 * KIB] * 480, direction)
    machine.stub.wait_hanging()
    job.transfer.must_end(CopyEnd.FAILED)
    machine.stub.release()
    assert job.wait() is CopyEnd.FAILED
    records = machine.stub.calls("cuEventRecord")
    assert (records, machine.stub.calls("cuEventSynchronize")) == (STEPS_IN_FLIGHT, STEPS_IN_FLIGHT)
    assert not job.is_copied()


def test_streams_and_events_are_destroyed(machine: Machine) -> None:
    calls = machine.stub.calls
    machine.stub.fail("cuStreamCreateWithPriority", 2, 2)
    with pytest.raises(CudaError, match="cuStreamCreateWithPriority failed: CUDA_ERROR_OUT_OF_MEMORY"):
        GpuEngine(machine.driver, machine.pins.chunks, machine.work)
    assert calls("cuStreamDestroy_v2") == calls("cuStreamCreateWithPriority") - 1 == 1
    assert calls("cuEventDestroy_v2") == calls("cuEventCreate")
    GpuEngine(machine.driver, machine.pins.chunks, machine.work).destroy()
    assert calls("cuStreamDestroy_v2") == calls("cuStreamCreateWithPriority") - 1 == 3
    assert calls("cuEventDestroy_v2") == calls("cuEventCreate") == 3 * STEPS_IN_FLIGHT


def test_the_pool_may_be_pinned_in_the_middle_of_a_transfer(machine: Machine) -> None:
    machine.stub.hang("cuEventSynchronize")
    job = Job(machine, [4 * KIB] * 4000)
    machine.stub.wait_hanging()
    machine.pin()
    machine.stub.release()
    assert job.is_done()
    assert machine.stub.calls("cuMemcpyBatchAsync") > 0
    assert machine.stub.calls("cuMemcpyAsync") > 0
