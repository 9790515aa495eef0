"""A worker on a GPU, over a stub driver and a fake client: what is exported, what goes out when, sleep."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from kvoffd_client import NamespaceSpec
from kvoffd_client.cuda_export import export_segments
from kvoffd_client.jobs import Job
from kvoffd_client.ordered_sender import OrderedSender
from kvoffd_client.vllm import kv_memory
from kvoffd_client.vllm.connector_metadata import KeyedSpec
from kvoffd_client.vllm.kv_memory import NotShareable, RecordedEvent, registration_of
from kvoffd_client.vllm.worker import KvoffdWorker
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import CudaIpcHandle, JobResult, TensorLayout
from tests.kit.ordered_sender import wait_sent
from tests.kit.stub_cuda import StubCuda, fresh_stub
from tests.kit.waiting import wait_until
from tests.vllm.vllm_fakes import KEY_BYTES, FakeWorkerClient, block_hash

BLOCKS = GPULoadStoreSpec([4, 5], group_sizes=[2], block_indices=[0])
KEYED = KeyedSpec((block_hash(1) + block_hash(2),))
LEASED = KeyedSpec(KEYED.groups, lease_id=77)
WAIT_S = 10.0


@dataclass
class GpuTensor:
    """As much of a tensor of int8 pages as an export looks at."""

    address: int
    shape: tuple[int, int]
    stride_bytes: int
    device: SimpleNamespace

    def data_ptr(self) -> int:
        return self.address

    def stride(self, dimension: int) -> int:
        return (self.stride_bytes, 1)[dimension]

    def element_size(self) -> int:
        return 1


def caches_at(*tensors: tuple[int, int, int]) -> CanonicalKVCaches:
    """Tensors of 8 blocks: (address, page bytes, stride)."""
    device = SimpleNamespace(type="cuda")
    return CanonicalKVCaches(
        tensors=[
            CanonicalKVCacheTensor(GpuTensor(address, (8, page), stride, device), page)  # type: ignore[arg-type]
            for address, page, stride in tensors
        ],
        group_data_refs=[[CanonicalKVCacheRef(index, page) for index, (_, page, _) in enumerate(tensors)]],
    )


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubCuda:
    stub = fresh_stub()
    stub.start()
    monkeypatch.setenv("KVOFFD_CUDA_LIBRARY", stub.path)
    return stub


class GpuEvent:
    """Happens when the test says so."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def synchronize(self) -> None:
        assert self.happened.wait(WAIT_S)


class Harness:
    """A worker whose events and clients the test holds."""

    def __init__(self) -> None:
        self.events: list[GpuEvent] = []
        self.clients = [FakeWorkerClient(), FakeWorkerClient()]
        unused = iter(self.clients)
        self.gpu_failed = False
        self.sender = OrderedSender(self.record)
        self.worker = KvoffdWorker(
            lambda _: next(unused),
            blocks_per_chunk=1,
            key_bytes=KEY_BYTES,
            fence_timeout_s=1.5,
            sender=self.sender,
        )
        self.worker.join(NamespaceSpec.named("model"))

    def record(self) -> GpuEvent:
        if self.gpu_failed:
            raise RuntimeError("CUDA error: unspecified launch failure")
        self.events.append(GpuEvent())
        return self.events[-1]

    def failures(self) -> dict[int, ErrorCode | None]:
        ended = [result.job_id for result in self.worker.get_finished()]
        failed = self.worker.take_report().failed_jobs
        assert sorted(failed) == sorted(ended)
        return {job_id: one.error for job_id, one in failed.items()}


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.worker.shutdown()
    for event in harness.events:
        event.happened.set()


def test_a_registration_names_the_drivers_handles(stub: StubCuda) -> None:
    buffer = stub.allocate(1 << 20)
    caches = caches_at((buffer.address + 4096, 512, 512), (buffer.address + 8192, 500, 1024))
    registration = registration_of(caches, [], rank=3, blocks_per_chunk=2)
    assert registration.on_gpu
    assert registration.tensors == (TensorLayout(0, 4096, 512, 8), TensorLayout(0, 8192, 1024, 8))
    assert registration.handles() == ([CudaIpcHandle(buffer.handle, 1 << 20, bytes([0x10] * 16))], [])


def test_tensor_over_two_allocations_is_told_apart(stub: StubCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = stub.allocate(4096)
    exported = export_segments([(buffer.address, 1)], stub.driver())
    monkeypatch.setattr(kv_memory, "export_segments", lambda _: exported)
    with pytest.raises(NotShareable, match="several allocations"):
        registration_of(caches_at((buffer.address, 4096, 4096)), [], rank=0, blocks_per_chunk=1)


def test_stores_and_loads_go_out_after_their_kernels(harness: Harness) -> None:
    client = harness.clients[0]
    assert harness.worker.submit_store(1, BLOCKS, KEYED)
    harness.worker.flush()
    assert harness.worker.submit_store(2, BLOCKS, KEYED)
    assert harness.worker.submit_load(3, LEASED, BLOCKS)
    harness.worker.flush()
    assert len(harness.events) == 2, "one for the jobs of a step"
    assert not wait_sent(harness.sender, [1], 0.05)
    assert client.messages == []
    harness.events[0].happened.set()
    assert wait_sent(harness.sender, [1], WAIT_S)
    assert client.messages == [[1]]
    harness.events[1].happened.set()
    assert wait_sent(harness.sender, [2, 3], WAIT_S)
    assert client.messages == [[1], [2, 3]]
    assert client.loads[3][0] == 77


def test_a_fence_waits_a_moment_for_kernels_and_then_takes_jobs_back(harness: Harness) -> None:
    harness.worker.submit_store(1, BLOCKS, KEYED)
    harness.worker.submit_store(2, BLOCKS, KEYED)
    harness.worker.submit_load(3, LEASED, BLOCKS)
    harness.worker.wait({1, 3})
    assert harness.clients[0].fences == [([1, 3], 1.5, 1)], "a load is no store that was dropped"
    assert harness.failures() == {1: ErrorCode.CANCELLED, 3: ErrorCode.CANCELLED}
    for event in harness.events:
        event.happened.set()
    assert wait_sent(harness.sender, [2], WAIT_S)
    assert list(harness.clients[0].stores) == [2]


def test_a_gpu_that_failed_costs_jobs_and_not_the_engine(harness: Harness) -> None:
    harness.gpu_failed = True
    assert harness.worker.submit_store(1, BLOCKS, KEYED)
    assert harness.worker.submit_load(2, LEASED, BLOCKS)
    harness.worker.flush()
    assert harness.failures() == {1: ErrorCode.COPY_FAILED, 2: ErrorCode.COPY_FAILED}


def test_asleep_the_daemon_holds_nothing_and_awake_all_is_as_before(harness: Harness) -> None:
    first, second = harness.clients
    harness.worker.submit_store(1, BLOCKS, KEYED)
    harness.worker.flush()
    for job_id in (7, 8):
        harness.worker.submit_store(job_id, BLOCKS, KEYED)
    del harness.worker._unsent[7]  # it has been sent
    first.results = [JobResult(7, False, 0, 0.1, ErrorCode.SESSION_ENDED, [])]
    harness.worker.sleep()
    harness.worker.sleep()
    assert (first.unregistered, first.closed) == (1, True)
    assert harness.failures() == {
        1: ErrorCode.CANCELLED, 8: ErrorCode.CANCELLED, 7: ErrorCode.SESSION_ENDED,
    }  # fmt: skip
    assert harness.worker.usable, "the scheduler must not give the daemon up for a nap"
    assert harness.worker.credit_bytes is None
    harness.worker.submit_store(2, BLOCKS, KEYED)
    assert harness.failures() == {2: ErrorCode.UNSUPPORTED}
    harness.worker.wake()
    harness.worker.wake()
    harness.worker.submit_store(3, BLOCKS, KEYED)
    harness.worker.flush()
    harness.events[-1].happened.set()
    harness.events[0].happened.set()
    wait_until(lambda: list(second.stores) == [3])
    assert harness.worker.credit_bytes == second.credit_bytes


def test_the_thread_that_waits_for_an_event_is_on_the_events_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else CUDA's runtime gives it a context on GPU 0, in every worker of the others."""
    here = threading.local()
    waited_on: list[int] = []

    class TorchEvent:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking

        def record(self) -> None: ...

        def synchronize(self) -> None:
            waited_on.append(torch.cuda.current_device())

    monkeypatch.setattr(torch.cuda, "Event", TorchEvent)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(here, "device", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(here, "device", device))
    torch.cuda.set_device(3)
    sender, sent = OrderedSender(RecordedEvent), threading.Event()
    sender.submit([Job(1, ())], lambda _: sent.set(), lambda *_: None)
    assert sent.wait(WAIT_S)
    sender.close()
    assert waited_on == [3]
