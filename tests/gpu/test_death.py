"""A daemon that dies while its GPU copies: bytes may land until its process is gone, and no later."""

from __future__ import annotations

from collections.abc import Callable

from support.dying_daemon import DyingDaemon
from support.gpu_machine import Machine
from support.waiting import wait_until

from kvoffd_proto.messages import GroupKeys

KEY = bytes(32)
MakeMachine = Callable[..., Machine]


def test_a_load_fails_when_the_daemons_process_is_gone_and_not_at_its_eof(stub_machine: MakeMachine) -> None:
    machine = stub_machine({"STUB_HANG": "cuEventSynchronize:2"}, DyingDaemon)
    with machine.exporter("ordinary") as worker, machine.scheduler() as scheduler:
        worker.wait_ready()
        worker.ask("fill", seed=7)
        assert worker.ask("store", job_id=1, keys=KEY.hex(), blocks=[0])["ok"]
        future = scheduler.lookup([GroupKeys(0, KEY)])
        assert future.wait(10)
        load = {"job_id": 2, "lease_id": future.lease_id, "keys": KEY.hex(), "blocks": [1]}
        worker.send("load_and_watch", **load, pid=machine.daemon.pid, for_s=1.0)
        wait_until(lambda: "cuEventSynchronize hangs" in machine.driver_log())
        machine.daemon.kill()
        failed = worker.answer()
    assert (failed["ok"], failed["error"]) == (False, "SESSION_ENDED")
    assert failed["stays"], "bytes of a failed load landed in a block that was in use again"
    assert failed["gone"]
