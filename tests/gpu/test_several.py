"""Two GPUs: engines on each, one daemon, blocks that go from one to the other."""

from __future__ import annotations

import pytest

from kvoffd_proto.messages import GroupKeys
from tests.kit.gpu_machine import Machine, real_gpus

KEY = bytes(32)


def test_blocks_go_from_one_gpu_to_the_other(machine: Machine) -> None:
    if not machine.is_stub and real_gpus() < 2:
        pytest.skip("one GPU here")
    with machine.exporter_on(0) as one, machine.exporter_on(1) as other, machine.scheduler() as scheduler:
        one.wait_ready()
        other.wait_ready()
        before = one.ask("fill", seed=1)["pages"]
        assert one.ask("store", job_id=1, keys=KEY.hex(), blocks=[4])["ok"]
        future = scheduler.lookup([GroupKeys(0, KEY)])
        assert future.wait(10)
        assert other.ask("load", job_id=1, lease_id=future.lease_id, keys=KEY.hex(), blocks=[2])["ok"]
        assert other.ask("pages")["pages"][2] == before[4]
        if machine.is_stub:
            assert {"context of 0 made", "context of 1 made"} <= set(machine.driver_log())
