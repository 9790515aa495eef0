"""A daemon that dies while its GPU copies: bytes may land until its process is gone, and no later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffd.server.daemon import EXIT_GPU_LOST
from kvoffd_client import SchedulerClient
from kvoffd_proto.messages import GroupKeys
from tests.kit.exporter import Exporter
from tests.kit.gpu_machine import Machine
from tests.kit.waiting import wait_until

KEY = bytes(32)
MakeMachine = Callable[..., Machine]


def lease(scheduler: SchedulerClient) -> int:
    future = scheduler.lookup([GroupKeys(0, KEY)])
    assert future.wait(10)
    return future.lease_id


def begin_hanging_load(machine: Machine, worker: Exporter, scheduler: SchedulerClient, watch_s: float) -> None:
    """Load the stored block by a driver that hangs; once the load has failed, the worker watches for so long."""
    load = {"job_id": 2, "lease_id": lease(scheduler), "keys": KEY.hex(), "blocks": [1]}
    worker.send("load_and_watch", **load, pid=machine.daemon.pid, for_s=watch_s)
    wait_until(lambda: "cuEventSynchronize hangs" in machine.driver_log())


def test_a_load_fails_when_the_daemons_process_is_gone_and_not_at_its_eof(stub_machine: MakeMachine) -> None:
    machine = stub_machine({"STUB_HANG": "cuEventSynchronize:2"}, dies_slowly=True)
    with machine.exporter("ordinary") as worker, machine.scheduler() as scheduler:
        worker.wait_ready()
        worker.ask("fill", seed=7)
        assert worker.ask("store", job_id=1, keys=KEY.hex(), blocks=[0])["ok"]
        begin_hanging_load(machine, worker, scheduler, watch_s=1.0)
        machine.daemon.kill()
        failed = worker.answer()
    assert (failed["ok"], failed["error"]) == (False, "SESSION_ENDED")
    assert failed["stays"], "bytes of a failed load landed in a block that was in use again"
    assert failed["gone"]


def test_a_load_that_hangs_while_the_daemon_is_stopped_fails_when_its_process_is_gone(
    stub_machine: MakeMachine,
) -> None:
    machine = stub_machine({"STUB_HANG": "cuEventSynchronize:2"}, shutdown_deadline="200ms")
    with machine.exporter("ordinary") as worker, machine.scheduler() as scheduler:
        worker.wait_ready()
        assert worker.ask("store", job_id=1, keys=KEY.hex(), blocks=[0])["ok"]
        begin_hanging_load(machine, worker, scheduler, watch_s=0.5)
        machine.daemon.stop()
        failed = worker.answer()
    assert (failed["ok"], failed["gone"], failed["stays"]) == (False, True, True), failed


def test_a_client_that_does_not_wait_for_the_process_is_seen(
    stub_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the shape that ``make gpu`` watches, by bytes that land a moment after the lifeline's end."""
    monkeypatch.setenv("EXPORTER_HASTY", "1")
    stub = {"STUB_HANG": "cuEventSynchronize:2", "DYING_CLOSING_US": "60000"}
    machine = stub_machine(stub, dies_slowly=True, pool_size="256MiB")
    with machine.exporter("ordinary", layers=8, blocks=64, page_bytes=256 << 10) as worker:
        worker.wait_ready()
        assert worker.ask("store", job_id=1, keys=KEY.hex(), blocks=[0])["ok"]
        with machine.scheduler() as scheduler:
            load = {"job_id": 2, "lease_id": lease(scheduler), "keys": KEY.hex(), "blocks": [1]}
            worker.send("load_and_watch", **load, pid=machine.daemon.pid, for_s=1.0)
            wait_until(lambda: "cuEventSynchronize hangs" in machine.driver_log())
            machine.daemon.kill()
            failed = worker.answer()
    assert (failed["ok"], failed["gone"], failed["stays"]) == (False, False, False)


def test_a_lost_context_ends_the_daemon_and_the_next_one_has_the_pool(
    stub_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch, pool_file: Path
) -> None:
    """With two GPUs in use, since one of them has the pool pinned in its context."""
    lost_at_the_load = {"STUB_DEVICES": "2", "STUB_FAIL": "cuEventSynchronize:2:700"}
    machine = stub_machine(lost_at_the_load, pool_file=str(pool_file))
    with machine.exporter_on(0) as one, machine.exporter_on(1) as other, machine.scheduler() as scheduler:
        epoch = one.wait_ready()["epoch"]
        other.wait_ready()
        before = one.ask("fill", seed=7)["pages"]
        load = {"job_id": 2, "keys": KEY.hex(), "blocks": [1]}
        assert one.ask("store", job_id=1, keys=KEY.hex(), blocks=[0])["ok"]
        failed = other.ask("load", lease_id=lease(scheduler), **load)
        assert (failed["ok"], failed["error"]) == (False, "COPY_FAILED")
        assert machine.daemon.process.wait(10) == EXIT_GPU_LOST
        assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in machine.daemon.log

        monkeypatch.delenv("STUB_FAIL")
        machine.daemon.start()
        for worker in (one, other):
            wait_until(lambda worker=worker: worker.wait_ready()["epoch"] != epoch)
            assert scheduler.wait_ready(10)
            assert worker.ask("load", lease_id=lease(scheduler), **load)["ok"]
            assert worker.ask("pages")["pages"][1] == before[0]
