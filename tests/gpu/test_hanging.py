"""A GPU that hangs hurts its own engines only, and no byte lands where it must not. Over the stub driver."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvoffd_client import AdminClient
from kvoffd_proto.messages import GroupKeys
from tests.kit.checked import CheckedEngine
from tests.kit.gpu_machine import Machine
from tests.kit.waiting import wait_until

KEY = bytes(32)
MakeMachine = Callable[..., Machine]


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
    with machine.exporter() as worker, machine.scheduler() as scheduler:
        assert worker.store(KEY, 0)["ok"]
        worker.begin_load("load", scheduler, KEY, 1)
        with AdminClient(machine.daemon.directory) as admin:
            wait_until(lambda: any("does not answer" in problem for problem in admin.health().problems))
        assert worker.process.poll() is None
        killed_at = time.monotonic()
        machine.daemon.kill()
        loaded = worker.answer()
        assert (loaded["ok"], loaded["error"]) == (False, "SESSION_ENDED")
        assert time.monotonic() - killed_at < 10


def test_a_registration_that_hangs_leaves_the_daemon_alive(stub_machine: MakeMachine) -> None:
    machine = stub_machine({"STUB_HANG": "cuIpcOpenMemHandle_v2:1"})
    with machine.exporter(ready=False) as worker:
        wait_until(lambda: "cuIpcOpenMemHandle_v2 hangs" in machine.driver_log())
        with AdminClient(machine.daemon.directory) as admin:
            assert admin.health().ready
        assert not worker.ask("ready", timeout_s=0.2)["ready"]
        worker.kill()
    assert machine.daemon.stop() == 0
