"""Memory of torch's own allocator, in both its ways. Needs a GPU."""

from __future__ import annotations

import os

import pytest

from kvoffd_proto.messages import GroupKeys
from tests.kit.exporter import Exporter
from tests.kit.gpu_machine import Machine

KEY = bytes(32)


@pytest.mark.filterwarnings("default")  # torch's own, as of a driver or a pynvml that it does not like
@pytest.mark.parametrize("setting", ["expandable_segments:False", "expandable_segments:True"])
def test_blocks_in_torchs_memory_come_back(machine: Machine, setting: str) -> None:
    torch = pytest.importorskip("torch", exc_type=ImportError)
    if machine.is_stub or not torch.cuda.is_available():
        pytest.skip("torch here knows no GPU")
    environ = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
    # More than one chunk of an expandable segment, which has 20 MiB.
    shape = {"layers": 4, "blocks": 32, "page_bytes": 512 << 10}
    with (
        Exporter(machine.daemon.directory, machine.library, "torch", environ=environ, **shape) as worker,
        machine.scheduler() as scheduler,
    ):
        worker.wait_ready()
        before = worker.ask("fill", seed=1)["pages"]
        assert worker.ask("store", job_id=1, keys=KEY.hex(), blocks=[31])["ok"]
        future = scheduler.lookup([GroupKeys(0, KEY)])
        assert future.wait(10)
        assert worker.ask("load", job_id=2, lease_id=future.lease_id, keys=KEY.hex(), blocks=[0])["ok"]
        assert worker.ask("pages")["pages"][0] == before[31]
