"""Bytes that a kernel is writing are not stored before it is done."""

from __future__ import annotations

import pytest

from kvoffd_client import SchedulerClient
from kvoffd_proto.messages import GroupKeys
from tests.kit.exporter import Exporter
from tests.kit.gpu_machine import Machine

KEY = bytes(32)

pytestmark = pytest.mark.filterwarnings("default")  # as in test_torch_memory.py


def stored_pages(worker: Exporter, scheduler: SchedulerClient, *, wait: bool) -> tuple[str, str]:
    """Digests of block 0 as the kernel left it, and as it was stored while the kernel ran."""
    worker.wait_ready()
    first = worker.ask("fill", seed=1)["pages"][0]
    stored = worker.ask("race", job_id=1, keys=KEY.hex(), blocks=[0], seed=2, wait=wait)
    assert stored["ok"], stored
    written = worker.ask("pages")["pages"][0]
    assert written != first
    future = scheduler.lookup([GroupKeys(0, KEY)])
    assert future.wait(10)
    assert worker.ask("load", job_id=2, lease_id=future.lease_id, keys=KEY.hex(), blocks=[5])["ok"]
    return written, worker.ask("pages")["pages"][5]


def kind_of(machine: Machine) -> str:
    if machine.is_stub:
        return "ordinary"
    torch = pytest.importorskip("torch", exc_type=ImportError)
    if not torch.cuda.is_available():
        pytest.skip("torch here knows no GPU")
    return "torch"


def test_a_store_waits_for_the_kernel_that_writes_its_blocks(machine: Machine) -> None:
    with machine.exporter(kind_of(machine)) as worker, machine.scheduler() as scheduler:
        written, stored = stored_pages(worker, scheduler, wait=True)
        assert stored == written


def test_without_the_wait_this_test_would_see_it(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STUB_SEED", raising=False)  # the stub's kernel is as late as it may be
    with machine.exporter(kind_of(machine)) as worker, machine.scheduler() as scheduler:
        written, stored = stored_pages(worker, scheduler, wait=False)
        assert stored != written
