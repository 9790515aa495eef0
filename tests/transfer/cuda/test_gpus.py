"""GPUs come into use with their first registration and out of it with their last, and hang alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvoffd.errors import KvoffdError, NoMoreThreads
from kvoffd.pool.memory import PoolMemory
from kvoffd.transfer.cuda.gpus import HANGING_S, MAX_WAITING_TASKS, Gpus, NoSuchGpu
from kvoffd.transfer.cuda.mappings import IpcExport, UnmappableHandle
from kvoffd.transfer.engine import EngineMemory, Transfer, new_work
from kvoffd.transfer.plan import CopyEnd, Direction, Plan
from kvoffd_proto.errors import ErrorCode
from tests.kit.stub_cuda import Ranges, fresh_stub
from tests.kit.waiting import wait_until

POOL = 16 << 20
SIZE = 1 << 20
FIRST, SECOND = bytes([0x10] * 16), bytes([0x11] * 16)


class Engines:
    """The engines' side: a stub in whose memory they are, and what the daemon made of it."""

    def __init__(self) -> None:
        self.stub = fresh_stub()
        self.stub.set("devices", 2)
        self.stub.set("same_pid_allowed", 1)
        self.exporter = fresh_stub()  # another process would have its own driver too
        self.exporter.start()
        self.now = 0.0
        self.pool = PoolMemory.create(POOL, "test")
        self.work = new_work()
        self.gpus = Gpus(self.pool.mapping.address, POOL, self.work, lambda: self.now, self.stub.path)

    def export(self) -> IpcExport:
        return IpcExport(self.exporter.allocate(SIZE).handle, SIZE)

    def map(self, uuid: bytes = FIRST, *exports: IpcExport) -> Answer:
        answer = Answer()
        self.gpus.map(uuid, exports or [self.export()], answer)
        return answer


class Answer:
    """What came of a mapping."""

    def __init__(self) -> None:
        self._came = threading.Event()
        self._what: EngineMemory | KvoffdError | None = None
        self.calls = 0

    def __call__(self, what: EngineMemory | KvoffdError) -> None:
        self._what = what
        self.calls += 1
        self._came.set()

    @property
    def came(self) -> bool:
        return self._came.is_set()

    def memory(self) -> EngineMemory:
        assert self._came.wait(10)
        if isinstance(self._what, KvoffdError):
            raise self._what
        assert self._what is not None
        return self._what


@pytest.fixture
def engines() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    engines.stub.release()
    assert engines.gpus.stop(10)
    assert engines.gpus.close(10)
    engines.pool.close()


def unmap(memory: EngineMemory) -> None:
    closed = threading.Event()
    memory.close(closed.set)
    assert closed.wait(10)


def store(memory: EngineMemory, engines: Engines, deadline: float = float("inf")) -> tuple[list[CopyEnd], list[int]]:
    """Copies the first page of the memory to the pool; the outcomes, and how often it was overdue."""
    outcomes: list[CopyEnd] = []
    overdue: list[int] = []
    columns = [np.array([value], dtype=np.uint64) for value in (engines.pool.mapping.address, memory.spans[0][0], 4096)]
    memory.engine.queues[Direction.STORE].submit(
        Transfer(
            Direction.STORE,
            lambda: Plan(*columns),
            deadline,
            lambda _, outcome: outcomes.append(outcome),
            lambda _: overdue.append(1),
        )
    )
    return outcomes, overdue


def test_a_machine_without_a_driver_says_so_and_serves_on() -> None:
    gpus = Gpus(0, POOL, new_work(), library="/nowhere/libcuda.so")
    assert not gpus.available
    with pytest.raises(KvoffdError, match="cannot be used"):
        gpus.map(FIRST, [], Answer())
    assert gpus.problems == []
    gpus.tick()
    assert gpus.stop(0)
    assert gpus.close(0)


@pytest.mark.parametrize("integrated", [0, 1])
def test_a_gpu_without_memory_of_its_own_is_told(
    engines: Engines, integrated: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As soon as the pool is pinned, before any engine: the pool is what vLLM lacks at its start."""
    engines.stub.set("integrated", integrated)
    engines.gpus.pin_pool()
    wait_until(lambda: engines.gpus.pinning.pinned_bytes == POOL)
    assert engines.gpus.integrated == 2 * integrated
    told = [one.getMessage() for one in caplog.records if "host's memory" in one.getMessage()]
    assert len(told) == 2 * integrated
    assert all("16.0 MiB" in one and "--gpu-memory-utilization" in one for one in told)


def test_a_gpu_is_in_use_from_its_first_registration_to_its_last(engines: Engines) -> None:
    assert engines.gpus.available
    assert (engines.stub.log(), engines.stub.calls("cuInit")) == ([], 0)
    before = 0.0
    for _ in range(2):
        first, second = engines.map().memory(), engines.map().memory()
        assert first.engine is second.engine
        outcomes, _ = store(first, engines)
        wait_until(lambda: outcomes == [CopyEnd.DONE])  # noqa: B023
        unmap(first)
        assert engines.stub.contexts(0) >= 1
        assert engines.stub.ranges(Ranges.IPC) == 1
        unmap(second)
        wait_until(lambda: engines.stub.contexts(0) == 0)
        assert engines.stub.ranges(Ranges.IPC) + engines.stub.ranges(Ranges.HOST) == 0
        busy = engines.work[Direction.STORE].busy_seconds
        assert busy > before
        before = busy


def test_a_refused_registration_leaves_no_context(engines: Engines) -> None:
    with pytest.raises(NoSuchGpu):
        engines.map(bytes(16)).memory()
    assert engines.stub.made_contexts() == 0
    with pytest.raises(UnmappableHandle):
        engines.map(FIRST, IpcExport(bytes(64), SIZE)).memory()
    wait_until(lambda: engines.stub.contexts(0) == 0)
    unmap(engines.map().memory())


@pytest.mark.parametrize("call", ["cuInit", "cuDevicePrimaryCtxRetain", "cuStreamCreateWithPriority", "cuEventCreate"])
def test_a_gpu_that_cannot_be_used_is_tried_again(engines: Engines, call: str) -> None:
    engines.stub.fail(call, 1, 2)
    with pytest.raises(KvoffdError, match=call):
        engines.map().memory()
    assert engines.stub.contexts(0) == 0
    unmap(engines.map().memory())
    wait_until(lambda: engines.stub.contexts(0) == 0)


def test_a_gpu_without_a_thread_that_pins_is_tried_again(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not in use, so that its context and the pool's pins do not stay after the last registration."""
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == "kvoffd-pin":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)
    with pytest.raises(NoMoreThreads):
        engines.map().memory()
    assert engines.stub.contexts(0) == 0
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvoffd-gpu-store")]
    monkeypatch.undo()
    memory = engines.map().memory()
    wait_until(lambda: engines.gpus.pinning.pinned_bytes == POOL)
    unmap(memory)
    wait_until(lambda: engines.stub.contexts(0) == 0)
    assert engines.stub.ranges(Ranges.HOST) == 0


@pytest.mark.parametrize("call", ["list_devices", "locality_of", "GpuEngine"])
def test_a_registration_is_always_answered(engines: Engines, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*arguments: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(f"kvoffd.transfer.cuda.gpus.{call}", breaks)
    answer = engines.map()
    with pytest.raises(KvoffdError, match="The daemon failed") as caught:
        answer.memory()
    assert caught.value.code is ErrorCode.INTERNAL
    assert answer.calls == 1
    monkeypatch.undo()
    unmap(engines.map().memory())


def test_a_bug_behind_an_answer_leaves_the_gpu_to_others(engines: Engines) -> None:
    kept: list[EngineMemory] = []

    def breaks(memory: Any) -> None:
        kept.append(memory)
        raise RuntimeError("a bug")

    engines.gpus.map(FIRST, [engines.export()], breaks)
    for memory in (engines.map().memory(), *kept):
        unmap(memory)


@pytest.mark.parametrize("call", ["cuEventDestroy_v2", "cuStreamDestroy_v2"])
def test_copy_threads_that_hang_at_their_end_are_a_problem(engines: Engines, call: str) -> None:
    memory = engines.map().memory()
    wait_until(lambda: engines.gpus.pinning.pinned_bytes == POOL)
    engines.stub.hang(call)
    memory.close(lambda: None)
    engines.stub.wait_hanging()
    engines.now += HANGING_S
    assert len(engines.gpus.problems) == 1
    assert engines.gpus.pinning.pinned_bytes == POOL
    engines.stub.release()
    wait_until(lambda: engines.stub.contexts(0) == 0)
    assert engines.stub.ranges(Ranges.HOST) == 0
    wait_until(lambda: engines.gpus.problems == [])
    unmap(engines.map().memory())


def test_a_gpu_that_hangs_hurts_no_other(engines: Engines) -> None:
    sick, well = engines.map(FIRST).memory(), engines.map(SECOND).memory()
    wait_until(lambda: engines.stub.ranges(Ranges.HOST) > 0)
    engines.stub.hang("cuEventSynchronize")
    outcomes, overdue = store(sick, engines, deadline=5)
    engines.stub.wait_hanging()
    for engines.now in (7, 8):
        engines.gpus.tick()
    assert (outcomes, overdue) == ([], [1])
    (problem,) = engines.gpus.problems
    assert "Stub 0 1010" in problem
    assert "does not answer" in problem
    good, _ = store(well, engines)
    wait_until(lambda: good == [CopyEnd.DONE])
    third = engines.map(SECOND).memory()
    unmap(third)
    unmap(well)
    engines.stub.release()
    wait_until(lambda: len(outcomes) == 1)
    assert engines.gpus.problems == []
    unmap(sick)


def test_a_registration_that_hangs_hurts_no_other_gpu(engines: Engines) -> None:
    well = engines.map(SECOND).memory()
    engines.stub.hang("cuIpcOpenMemHandle_v2")
    sick = engines.map(FIRST)
    engines.stub.wait_hanging()
    export = engines.export()
    waiting = [engines.map(FIRST, export) for _ in range(MAX_WAITING_TASKS)]
    with pytest.raises(KvoffdError, match="has not answered"):
        engines.map(FIRST, export)
    engines.now = 60
    assert [problem for problem in engines.gpus.problems if "Stub 0" in problem]
    good, _ = store(well, engines)
    wait_until(lambda: good == [CopyEnd.DONE])
    unmap(well)
    assert not sick.came
    engines.stub.release()
    mapped = [sick.memory(), waiting[0].memory()]
    for answer in waiting[1:]:
        with pytest.raises(KvoffdError, match="is mapped already"):
            answer.memory()
    for memory in mapped:
        unmap(memory)


def test_stopping_ends_copies_and_closing_unpins_the_pool(engines: Engines) -> None:
    memory = engines.map().memory()
    engines.stub.hang("cuMemcpyAsync", 0)
    engines.stub.hang("cuMemcpyBatchAsync", 0)
    outcomes, _ = store(memory, engines)
    engines.stub.wait_hanging()
    assert not engines.gpus.stop(0)
    engines.stub.release()
    assert engines.gpus.stop(10)
    assert len(outcomes) == 1
    late, _ = store(memory, engines)
    assert late == [CopyEnd.CANCELLED]
    unmap(memory)
    assert engines.gpus.close(10)
    assert engines.stub.ranges(Ranges.HOST) == 0
    assert engines.stub.contexts(0) == 0
