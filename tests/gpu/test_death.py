"""A GPU that hangs hurts its own engines only. A daemon dies while its GPU copies: bytes may land until its process is
gone, and no later. Over the stub driver.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffd.server.daemon import EXIT_GPU_LOST
from kvoffd_client import AdminClient
from kvoffd_proto.messages import GroupKeys
from tests.kit.checked import CheckedEngine
from tests.kit.gpu_machine import Machine
from tests.kit.waiting import wait_until

KEY = bytes(32)
MakeMachine = Callable[..., Machine]


def hanging_load(
    machine: Machine, end: Callable[[], object], *, watch_s: float = 1.0, **shape: int
) -> dict[str, object]:
    """Store a block and load it by a driver that hangs; then ``end`` the daemon.

    How the load failed. The worker watches for so long from then on: whether the daemon's process was ``gone``, and
    whether the block ``stays`` as it is.
    """
    with machine.exporter(**shape) as worker, machine.scheduler() as scheduler:
        worker.fill(7)
        assert worker.store(KEY, 0)["ok"]
        worker.begin_load("load_and_watch", scheduler, KEY, 1, pid=machine.daemon.pid, for_s=watch_s)
        wait_until(lambda: "cuEventSynchronize hangs" in machine.driver_log())
        end()
        failed = worker.answer()
        assert not failed["ok"]
        return failed


def test_a_load_fails_when_the_daemons_process_is_gone_and_not_at_its_eof(stub_machine: MakeMachine) -> None:
    machine = stub_machine({"STUB_HANG": "cuEventSynchronize:2"}, dies_slowly=True)
    failed = hanging_load(machine, machine.daemon.kill)
    assert failed["error"] == "SESSION_ENDED"
    assert failed["stays"], "bytes of a failed load landed in a block that was in use again"
    assert failed["gone"]


def test_a_load_that_hangs_while_the_daemon_is_stopped_fails_when_its_process_is_gone(
    stub_machine: MakeMachine,
) -> None:
    machine = stub_machine({"STUB_HANG": "cuEventSynchronize:2"}, shutdown_deadline="200ms")
    failed = hanging_load(machine, machine.daemon.stop, watch_s=0.5)
    assert (failed["gone"], failed["stays"]) == (True, True), failed


def test_a_client_that_does_not_wait_for_the_process_is_seen(
    stub_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the shape that ``make gpu`` watches, by bytes that land a moment after the lifeline's end."""
    monkeypatch.setenv("EXPORTER_HASTY", "1")
    stub = {"STUB_HANG": "cuEventSynchronize:2", "DYING_CLOSING_US": "60000"}
    machine = stub_machine(stub, dies_slowly=True, pool_size="256MiB")
    failed = hanging_load(machine, machine.daemon.kill, layers=8, blocks=64, page_bytes=256 << 10)
    assert (failed["gone"], failed["stays"]) == (False, False)


def test_a_lost_context_ends_the_daemon_and_the_next_one_has_the_pool(
    stub_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch, pool_file: Path
) -> None:
    """With two GPUs in use, since one of them has the pool pinned in its context."""
    lost_at_the_load = {"STUB_DEVICES": "2", "STUB_FAIL": "cuEventSynchronize:2:700"}
    machine = stub_machine(lost_at_the_load, pool_file=str(pool_file))
    with machine.exporter(gpu=0) as one, machine.exporter(gpu=1) as other, machine.scheduler() as scheduler:
        epoch = one.wait_ready()["epoch"]
        before = one.fill(7)
        assert one.store(KEY, 0)["ok"]
        failed = other.load(scheduler, KEY, 1)
        assert (failed["ok"], failed["error"]) == (False, "COPY_FAILED")
        assert machine.daemon.process.wait(10) == EXIT_GPU_LOST
        assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in machine.daemon.log

        monkeypatch.delenv("STUB_FAIL")
        machine.daemon.start()
        for worker in (one, other):
            wait_until(lambda worker=worker: worker.wait_ready()["epoch"] != epoch)
            assert scheduler.wait_ready(10)
            assert worker.load(scheduler, KEY, 1)["ok"]
            assert worker.pages()[1] == before[0]


def test_a_store_that_hangs_fails_at_its_deadline_and_its_slots_stay_taken(stub_machine: MakeMachine) -> None:
    machine = stub_machine({"STUB_HANG": "cuEventSynchronize:1"}, limits={"job_deadline_s": 0.5})
    with machine.exporter() as worker, machine.scheduler() as scheduler:
        stored = worker.store(KEY, 0)
        assert (stored["ok"], stored["error"]) == (False, "DEADLINE")
        future = scheduler.lookup([GroupKeys(0, KEY)])
        assert future.wait(10)
        assert future.states == [b"\0"], "others may store the key"
        with AdminClient(machine.daemon.directory) as admin:
            pool = admin.stats().pool
            assert pool.of("dropped") > 0, "the copy may still write there"
            assert pool.of("free") + pool.of("dropped") == pool.size_bytes
            (problem,) = admin.health().problems
            assert "does not answer" in problem
        # An engine in host memory does not notice.
        with CheckedEngine(machine.daemon, namespace="host") as engine:
            engine.put([3])
            assert engine.has([3])


def test_a_load_that_hangs_has_no_completion_before_the_daemon_is_dead(stub_machine: MakeMachine) -> None:
    """Its bytes may still land, so the engine must keep the blocks."""
    machine = stub_machine({"STUB_HANG": "cuEventSynchronize:2"}, limits={"job_deadline_s": 0.5})

    def kill_after_the_deadline() -> None:
        with AdminClient(machine.daemon.directory) as admin:
            wait_until(lambda: any("does not answer" in problem for problem in admin.health().problems))
        machine.daemon.kill()

    assert hanging_load(machine, kill_after_the_deadline, watch_s=0.0)["error"] == "SESSION_ENDED"


def test_a_registration_that_hangs_leaves_the_daemon_alive(stub_machine: MakeMachine) -> None:
    machine = stub_machine({"STUB_HANG": "cuIpcOpenMemHandle_v2:1"})
    with machine.exporter(ready=False) as worker:
        wait_until(lambda: "cuIpcOpenMemHandle_v2 hangs" in machine.driver_log())
        with AdminClient(machine.daemon.directory) as admin:
            assert admin.health().ready
        assert not worker.ask("ready", timeout_s=0.2)["ready"]
        worker.kill()
    assert machine.daemon.stop() == 0
