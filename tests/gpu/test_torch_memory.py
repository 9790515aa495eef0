"""Memory of torch's own allocator, in both its ways; a store waits for the kernel that writes its blocks."""

from __future__ import annotations

import pytest

from tests.kit.gpu_machine import Machine

KEY = bytes(32)

pytestmark = pytest.mark.filterwarnings("default")  # torch's own, as of a driver or a pynvml that it does not like


def need_torch() -> None:
    torch = pytest.importorskip("torch", exc_type=ImportError)
    if not torch.cuda.is_available():
        pytest.skip("torch here knows no GPU")


@pytest.mark.parametrize("setting", ["expandable_segments:False", "expandable_segments:True"])
def test_blocks_in_torchs_memory_come_back(machine: Machine, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need_torch()
    if machine.is_stub:
        pytest.skip("torch knows no stub")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, setting)
    # More than one chunk of an expandable segment, which has 20 MiB.
    shape = {"layers": 4, "blocks": 32, "page_bytes": 512 << 10}
    with machine.exporter("torch", **shape) as worker, machine.scheduler() as scheduler:
        before = worker.fill(1)
        assert worker.store(KEY, 31)["ok"]
        assert worker.load(scheduler, KEY, 0)["ok"]
        assert worker.pages()[0] == before[31]


@pytest.mark.parametrize("wait", [True, False])
def test_a_store_waits_for_the_kernel_that_writes_its_blocks(
    machine: Machine, wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait other bytes are stored than the kernel leaves."""
    if not machine.is_stub:
        need_torch()
    if not wait:
        monkeypatch.delenv("STUB_SEED", raising=False)  # the stub's kernel is as late as it may be
    with machine.exporter("ordinary" if machine.is_stub else "torch") as worker, machine.scheduler() as scheduler:
        first = worker.fill(1)[0]
        stored = worker.ask("race", job_id=1000, keys=KEY.hex(), blocks=[0], seed=2, wait=wait)
        assert stored["ok"], stored
        written = worker.pages()[0]
        assert written != first
        assert worker.load(scheduler, KEY, 5)["ok"]
        assert (worker.pages()[5] == written) is wait
