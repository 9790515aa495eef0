"""A worker's half over a fake client: what is registered, what goes out when, and how jobs end."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import zmq
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvoffd_client import ClientOptions, NamespaceSpec, Registration, SharedMemory
from kvoffd_client.cuda_export import export_segments
from kvoffd_client.ordered_sender import OrderedSender
from kvoffd_client.vllm import kv_memory
from kvoffd_client.vllm import spec as spec_module
from kvoffd_client.vllm import worker as worker_module
from kvoffd_client.vllm.chunk_groups import KeyedSpec
from kvoffd_client.vllm.config import ConnectorOptions
from kvoffd_client.vllm.connector_metadata import FailedJob, LoadTime, WorkerNews
from kvoffd_client.vllm.engine_namespace import EngineNamespace, MemoryState
from kvoffd_client.vllm.kv_memory import NotShareable, RecordedEvent, SharedKvMemory, registration_of
from kvoffd_client.vllm.spec import KvoffdSpec
from kvoffd_client.vllm.worker import KvoffdWorker
from kvoffd_client.worker_client import FENCE_PATIENCE_S, Job, WorkerClient
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import (
    Cancel,
    CudaIpcHandle,
    Error,
    GroupKeys,
    JobResult,
    PageRef,
    Register,
    Role,
    TensorLayout,
    Unregister,
)
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.stub_cuda import StubCuda, fresh_stub
from tests.kit.waiting import wait_until
from tests.vllm.vllm_config import HEADS, full_attention, kv_cache_configs, make_config
from tests.vllm.vllm_fakes import KEY_BYTES, FakeWorkerClient, block_hash

BLOCKS = GPULoadStoreSpec([4, 5], group_sizes=[2], block_indices=[0])
KEYED = KeyedSpec((block_hash(1) + block_hash(2),))
KEYS = [GroupKeys(0, KEYED.groups[0])]
LEASED = KeyedSpec(KEYED.groups, lease_id=77, request_id="r", load_tokens=64)
ONE, OTHER = NamespaceSpec.named("one", key_bytes=KEY_BYTES), NamespaceSpec.named("other")
RECEIVED: dict[str, Any] = {"finished_recving": {"r"}, "failed_recving": {"r"}}
WAIT_S = 10.0


def make_worker(connect: Callable[[NamespaceSpec], Any], sender: OrderedSender | None = None) -> KvoffdWorker:
    return KvoffdWorker(connect, blocks_per_chunk=1, key_bytes=KEY_BYTES, fence_timeout_s=1.5, sender=sender)


def failures(worker: KvoffdWorker) -> dict[int, FailedJob]:
    """The failures of the jobs that have ended, of which vLLM knows no more than that."""
    ended = worker.get_finished()
    assert all((one.success, one.transfer_size, one.transfer_time) == (True, None, None) for one in ended)
    failed = {one.job_id: one for one in worker.take_news().failed_jobs}
    assert sorted(failed) == sorted(one.job_id for one in ended)
    return failed


def codes(worker: KvoffdWorker) -> dict[int, ErrorCode | None]:
    return {job_id: one.error for job_id, one in failures(worker).items()}


# --- memory ----------------------------------------------------------------------------------------


def test_the_one_allocation_of_the_kv_cache_comes_from_shared_memory() -> None:
    context = SharedKvMemory()
    with context:
        backing = torch.zeros(8192, dtype=torch.int8, device=torch.device("cpu"))
        torch.zeros(16)
        torch.zeros((4, 4), dtype=torch.int8)
        torch.zeros(16, dtype=torch.float32)
    [memory] = context.memories
    backing[100] = 7
    assert (memory.size_bytes, memory.view[100]) == (8192, 7)
    assert torch.zeros(64, dtype=torch.int8).data_ptr() != backing.data_ptr()


def test_an_engine_on_cpu_whose_memory_cannot_be_shared_is_refused_at_its_start() -> None:
    tensor = torch.zeros(8, 512, dtype=torch.int8)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 512)], [[CanonicalKVCacheRef(0, 512)]])
    with pytest.raises(ValueError, match=r"kvoffd cannot serve this engine: .*get_mem_pool_context"):
        KvoffdSpec.get_worker(spec_of(rank=0), caches)


def test_a_pipeline_stage_without_layers_of_a_group_is_refused_at_its_start(model: Path) -> None:
    """vLLM makes groups for the layers of all stages: here of the last layers, which only the second stage has."""
    config = make_config(model, pipeline_parallel_size=2)
    window = SlidingWindowSpec(block_size=32, sliding_window=64, **HEADS)
    stages = [{"0": window, "1": window, "2": window}, {"3": window, "4": full_attention(), "5": full_attention()}]
    for cache, layers in zip(kv_cache_configs(config, stages, [1 << 30] * 2), stages, strict=True):
        tensors = [CanonicalKVCacheTensor(torch.zeros(8, 512, dtype=torch.int8), 512) for _ in layers]
        places = {name: index for index, name in enumerate(layers)}
        groups = [[CanonicalKVCacheRef(places[name], 512) for name in one.layer_names] for one in cache.kv_cache_groups]
        with pytest.raises(ValueError, match=r"kvoffd cannot serve this engine: .*VLLM_PP_LAYER_PARTITION"):
            KvoffdSpec.get_worker(spec_of(rank=0), CanonicalKVCaches(tensors, groups))


def spec_of(rank: int, *, replicated: bool = False) -> Any:
    """As much of a KvoffdSpec as makes a worker."""
    spec: Any = SimpleNamespace(
        namespace=ONE,
        directory="",
        options=ConnectorOptions(),
        memory=SharedKvMemory(),
        config=SimpleNamespace(parallel=SimpleNamespace(rank=rank)),
        blocks_per_chunk=1,
        replicated_layout=replicated,
    )
    spec._registration = lambda caches: KvoffdSpec._registration(spec, caches)
    return spec


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("can't start new thread"), zmq.ZMQError()]
)
def test_an_engine_that_gets_no_descriptors_or_threads_runs_without_the_daemon(
    error: Exception, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    spec = spec_of(rank=1)
    spec._registration, spec._name = Mock(), Mock()
    spec.config.enable_kv_cache_events, spec.config.groups, spec.config.parallel.world_size = False, (), 1
    spec.tokens_per_block, spec.tokens_per_hash = [], 1
    for client in ("SchedulerClient", "WorkerClient"):
        monkeypatch.setattr(spec_module, client, Mock(side_effect=error))
    with pytest.raises(NotShareable, match="ulimit -n and -u"):
        KvoffdSpec._connect_worker(spec, cast(Any, None), ONE)
    namespace = cast(Any, KvoffdSpec.get_manager(spec)).namespace
    namespace.join(ONE)
    assert not namespace.serves
    assert [line.count("ulimit -n and -u") for line in said] == [1]


@pytest.mark.parametrize("replicated", [False, True])
def test_ranks_that_load_one_shard_leave_the_lease_to_the_scheduler(replicated: bool) -> None:
    """As under tensor parallelism with latent attention, where rank 0 alone stores."""
    tensor = SimpleNamespace(tensor=SimpleNamespace(device=torch.device("cuda")))
    caches = cast(Any, SimpleNamespace(tensors=[tensor], group_data_refs=[[tensor]]))
    spec, client = spec_of(rank=1, replicated=replicated), Mock()
    spec._connect_worker = lambda *_: client
    worker = cast(KvoffdWorker, KvoffdSpec.get_worker(spec, caches))
    worker._sender.close()  # type: ignore[union-attr]
    worker._sender = None
    worker.join(ONE)
    worker.submit_load(1, LEASED, BLOCKS)
    worker.flush()
    [[job]] = client.submit.call_args.args
    assert (job.lease_id, job.keep_lease) == (77, replicated)
    assert (worker.credit_bytes is None) == replicated, "it stores nothing"
    with patch.object(spec_module, "registration_of") as registered:
        KvoffdSpec._registration(spec, caches)
    assert registered.call_args.args[2] == (0 if replicated else 1), "whose shard it is"


def test_a_worker_says_why_it_is_not_at_the_schedulers_daemon(said: list[str]) -> None:
    client = FakeWorkerClient()
    worker = make_worker(lambda _: client)
    worker.compare_daemon(client.epoch)
    worker.join(ONE)
    worker.compare_daemon(client.epoch)
    assert said == []
    worker.compare_daemon(client.epoch + 1)
    client.ready, client.problem = False, "No daemon listens in /run/kvoffd."
    worker.compare_daemon(client.epoch)
    nothing = "kvoffd: this worker stores and loads nothing."
    other = "It is registered with another daemon than the scheduler, which it finds in /run/kvoffd."
    assert said == [f"{nothing} {other}", f"{nothing} {client.problem}"]


def test_a_replicas_sessions_have_its_index_in_their_names() -> None:
    for engine_id, index, replica in (("0123456789_dp1", 1, " replica 1"), ("0123456789", 0, "")):
        config = SimpleNamespace(engine_id=engine_id, parallel=SimpleNamespace(data_parallel_index=index))
        name = KvoffdSpec._name(cast(Any, SimpleNamespace(config=config)), ONE, "worker 0")
        assert name == f"vllm:01234567 one{replica} worker 0"


def gpu_caches(*tensors: tuple[int, int, int]) -> CanonicalKVCaches:
    """Tensors of 8 blocks in a GPU's memory: (address, page bytes, stride)."""

    def tensor(address: int, page: int, stride: int) -> Any:
        return SimpleNamespace(
            shape=(8, page),
            device=SimpleNamespace(type="cuda"),
            data_ptr=lambda: address,
            stride=lambda dimension: (stride, 1)[dimension],
            element_size=lambda: 1,
        )

    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor(*one), one[1]) for one in tensors],
        [[CanonicalKVCacheRef(index, page) for index, (_, page, _) in enumerate(tensors)]],
    )


def test_a_registration_names_the_drivers_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    stub: StubCuda = fresh_stub()
    stub.start()
    monkeypatch.setenv("KVOFFD_CUDA_LIBRARY", stub.path)
    buffer = stub.allocate(1 << 20)
    caches = gpu_caches((buffer.address + 4096, 512, 512), (buffer.address + 8192, 500, 1024))
    registration = registration_of(caches, [], shard=3, blocks_per_chunk=2)
    assert registration.on_gpu
    assert registration.tensors == (TensorLayout(0, 4096, 512, 8), TensorLayout(0, 8192, 1024, 8))
    assert registration.handles() == ([CudaIpcHandle(buffer.handle, 1 << 20, bytes([0x10] * 16))], [])
    exported = export_segments([(buffer.address, 1)], stub.driver())
    monkeypatch.setattr(kv_memory, "export_segments", lambda _: exported)
    with pytest.raises(NotShareable, match="several allocations"):
        registration_of(gpu_caches((buffer.address + (1 << 20) - 4096, 4096, 4096)), [], shard=0, blocks_per_chunk=1)


# --- block lists as jobs of the wire ---------------------------------------------------------------


def hashes(*numbers: int) -> bytes:
    return b"".join(block_hash(number) for number in numbers)


def test_blocks_go_to_their_groups_and_places_in_keys() -> None:
    def found(
        ids: list[int],
        sizes: list[int],
        first: list[int],
        groups: tuple[bytes, ...],
        per_chunk: int = 1,
        is_store: bool = True,
    ) -> list[Any]:
        """Group, block ids, first block and keys of each transfer of a job; none where it was not made."""
        blocks = GPULoadStoreSpec(ids, group_sizes=sizes, block_indices=first)
        worker = KvoffdWorker(
            lambda _: FakeWorkerClient(), blocks_per_chunk=per_chunk, key_bytes=KEY_BYTES, fence_timeout_s=1.0
        )
        if is_store:
            worker.submit_store(1, blocks, KeyedSpec(groups))
        else:
            worker.submit_load(1, KeyedSpec(groups, lease_id=77), blocks)
        jobs: list[Job] = []
        worker._client = cast(Any, SimpleNamespace(submit=jobs.extend))
        worker.flush()
        return [
            (one.group, list(np.frombuffer(one.block_ids, "<i4")), one.first_block, one.keys)
            for job in jobs
            for one in job.groups
        ]

    two_groups = found([4, 5, 9], [2, 0, 1], [10, 0, 3], (hashes(1, 2), b"", hashes(3)))
    assert two_groups == [(0, [4, 5], 0, hashes(1, 2)), (2, [9], 0, hashes(3))], "empty groups are left out"
    inside = found([4, 5, 6], [3], [9], (hashes(1),), per_chunk=4)
    assert inside == [(0, [4, 5, 6], 1, hashes(1))], "it begins inside a key"
    ends = found([4, 5, 6], [3], [3], (hashes(1, 2),), per_chunk=4, is_store=False)
    assert ends == [(0, [4, 5, 6], 3, hashes(1, 2))], "a load may end inside a key"
    for size, keys, per_chunk in ((2, 1, 1), (1, 2, 1), (0, 1, 1), (1, 0, 1), (2, 1, 4)):
        assert not found(list(range(size)), [size], [0], (hashes(*range(keys)),), per_chunk=per_chunk)
    for size, keys in ((2, 1), (1, 2), (0, 1), (1, 0)):
        assert not found(list(range(size)), [size], [0], (hashes(*range(keys)),), is_store=False)
    assert not found([4], [1], [0], (hashes(1), hashes(2))), "other groups"


def test_reports_of_ranks_are_merged() -> None:
    first, second = WorkerNews(waited_s=0.1, rejected=KEYS), WorkerNews(rejected=KEYS)
    for meta in (first, second):
        meta.mark_completed(1)
    second.mark_completed(2)
    failed = FailedJob(2, ErrorCode.SESSION_ENDED, KEYS), FailedJob(2, ErrorCode.NOT_READY)
    first.failed_jobs, second.failed_jobs = [failed[0]], [failed[1]]
    first.load_times = {"r": LoadTime(64, 0.5), "s": LoadTime(32, 0.1)}
    second.load_times = {"r": LoadTime(64, 0.2)}
    merged = first.aggregate(second)
    assert merged.completed_jobs == {1: 2, 2: 1}
    assert merged.failed_jobs == [*failed], "each has its own reason"
    assert merged.rejected == [*KEYS, *KEYS]
    assert merged.load_times == {"r": (64, 0.5), "s": (32, 0.1)}, "the slowest rank's"
    assert merged.waited_s == 0.1


@pytest.mark.parametrize("stages", [2, 4])
def test_reports_of_pipeline_stages_that_sample_nothing_arrive(stages: int) -> None:
    """Only the last stage samples. The others' outputs are empty but for what the connector has to say, or wholly."""

    def output_of(report: WorkerNews | None, **transfers: Any) -> ModelRunnerOutput:
        return ModelRunnerOutput.with_kv_conn_output_only(
            KVConnectorOutput(kv_connector_worker_meta=report, **transfers)
        )

    def report_of(rank: int) -> WorkerNews:
        credit_bytes = 100 * (stages - rank)
        memory = MemoryState(ONE, f"weights of {rank}", 0, registered=ONE.fingerprint, credit_bytes=credit_bytes)
        return WorkerNews(completed_jobs={7: 1}, memory={rank: memory})

    aggregator = KVOutputAggregator(stages)
    last = stages - 1
    early = [output_of(report_of(rank) if rank != last else None, **RECEIVED) for rank in range(last)]
    sampled = ModelRunnerOutput(["r"], {"r": 0}, [[1]])
    first = aggregator.aggregate([*early, sampled], last)
    assert first is sampled
    assert first.kv_connector_output is not None
    assert first.kv_connector_output.finished_recving is None, "the last stage is still loading"
    ends = [*[output_of(None) for _ in range(last)], output_of(report_of(last), **RECEIVED)]
    second = aggregator.aggregate(ends, last)
    assert second is not None
    assert second.kv_connector_output is not None
    assert second.kv_connector_output.finished_recving == second.kv_connector_output.failed_recving == {"r"}
    reports = [cast(WorkerNews, one.kv_connector_output.kv_connector_worker_meta) for one in (first, second)]
    assert [one.completed_jobs for one in reports] == [{7: last}, {7: 1}]
    namespace = EngineNamespace(stages, lambda _: None, time.monotonic)
    namespace.update(reports[0].memory)
    assert namespace.current is None, "the last stage has reported nothing"
    namespace.update(reports[1].memory)
    assert namespace.current is not None
    assert namespace.credit_bytes == 100
    namespace.update({0: MemoryState(ONE, "weights of 0", 0, registered=ONE.fingerprint, credit_bytes=900)})
    assert namespace.credit_bytes == 100, "the others have no more than before"


# --- jobs ------------------------------------------------------------------------------------------


def test_jobs_of_a_step_are_one_message_and_their_results_come_back() -> None:
    client = FakeWorkerClient()
    worker = make_worker(lambda _: client)
    worker.join(ONE)
    assert worker.submit_store(1, BLOCKS, KEYED)
    assert worker.submit_load(2, LEASED, BLOCKS, expedited=True)
    assert client.messages == []
    worker.flush()
    worker.flush()
    assert client.messages == [[1, 2]]
    assert client.loads[2][0] == 77
    client.results = [JobResult(1, True, 1024, 0.5), JobResult(2, True, 2048, 0.25)]
    found = [(one.job_id, one.success, one.transfer_size, one.transfer_time) for one in worker.get_finished()]
    assert found == [(1, True, 1024, 0.5), (2, True, 2048, 0.25)]
    report = worker.take_news()
    assert (report.failed_jobs, report.rejected, report.load_times) == ([], [], {"r": (64, 0.25)})


def test_jobs_that_fail_say_why_and_with_which_keys() -> None:
    client = FakeWorkerClient()
    worker = make_worker(lambda _: client)
    worker.join(ONE)
    worker.submit_store(1, GPULoadStoreSpec([4], group_sizes=[1], block_indices=[0]), KEYED)
    worker.submit_load(2, KEYED, BLOCKS)
    bad, unknown = FailedJob(1, ErrorCode.BAD_BLOCK_IDS, KEYS), FailedJob(2, ErrorCode.UNKNOWN_LEASE, KEYS)
    assert failures(worker) == {1: bad, 2: unknown}
    worker.submit_store(4, GPULoadStoreSpec([], group_sizes=[0], block_indices=[0]), KeyedSpec((b"",)))
    assert failures(worker)[4].error is ErrorCode.BAD_BLOCK_IDS, "the client refuses a job without keys"
    assert client.messages == [], "nothing was sent"
    worker.submit_store(3, BLOCKS, KEYED)
    client.results = [JobResult(3, False, 0, 0.1, ErrorCode.COPY_FAILED, [])]
    assert failures(worker) == {3: FailedJob(3, ErrorCode.COPY_FAILED, KEYS)}, "all, where the daemon names none"
    assert worker.take_failed_requests() == set()


def test_a_worker_reports_the_keys_of_its_stores_that_the_policy_rejected() -> None:
    """Of those that end well and of those that fail."""
    client = FakeWorkerClient()
    worker = make_worker(lambda _: client)
    worker.join(ONE)
    first, second, third = ([GroupKeys(0, block_hash(number))] for number in (1, 2, 3))
    for job_id in (1, 2):
        worker.submit_store(job_id, BLOCKS, KEYED)
    client.results = [
        JobResult(1, True, 0, 0.1, rejected=first),
        JobResult(2, False, 0, 0.1, ErrorCode.NO_SPACE, second, third),
    ]
    worker.get_finished()
    news = worker.take_news()
    assert news.rejected == [*first, *third]
    assert news.failed_jobs == [FailedJob(2, ErrorCode.NO_SPACE, second)]
    assert worker.take_news().rejected == []


@pytest.mark.parametrize("is_gpu", [False, True])
def test_a_job_that_the_client_refuses_fails_alone(is_gpu: bool, gpu: Gpu) -> None:
    client = gpu.clients[0]
    worker = gpu.worker if is_gpu else make_worker(lambda _: client)
    worker.join(ONE)
    take = client.submit

    def submit(jobs: list[Job]) -> None:
        if any(job.job_id == 2 for job in jobs):
            raise ValueError("A group comes twice in the job 2.")
        take(jobs)

    client.submit = submit  # type: ignore[method-assign, assignment]
    for job_id in (1, 2, 3):
        worker.submit_store(job_id, BLOCKS, KEYED)
    worker.flush()
    gpu.end_kernels()
    wait_until(lambda: client.messages == [[1], [3]])
    assert codes(worker) == {2: ErrorCode.BAD_KEYS}


def test_a_worker_without_shareable_memory_fails_every_job() -> None:
    connect = Mock(side_effect=NotShareable("The driver gives no handle."))
    worker = make_worker(connect)
    assert worker.problem == ""
    worker.join(ONE)
    assert worker.submit_store(1, BLOCKS, KEYED)
    assert worker.submit_load(2, LEASED, BLOCKS)
    worker.wait({1, 2})
    assert codes(worker) == {1: ErrorCode.UNKNOWN_REGISTRATION, 2: ErrorCode.UNKNOWN_REGISTRATION}
    assert worker.take_failed_requests() == {"r"}
    assert (worker.problem, worker.credit_bytes) == ("The driver gives no handle.", None)
    connect.side_effect, connect.return_value = None, FakeWorkerClient()
    worker.join(ONE)
    assert (worker.problem, worker.registered) == ("", ONE.fingerprint), "it tries again"
    connect.side_effect = NotShareable("There is no descriptor.")
    worker.join(OTHER)
    assert worker.problem == "There is no descriptor."
    worker.leave()
    assert worker.problem == "", "another namespace may be joined with other memory"
    worker.shutdown()


def test_a_worker_that_the_daemon_refuses_says_why() -> None:
    with FakeDaemon() as fake, SharedMemory(4096) as memory:
        fake.answers[Register] = lambda request, _: Error(request.request_id, ErrorCode.UNSUPPORTED, "No CUDA here.")
        registration = Registration(0, 1, (memory,), (TensorLayout(0, 0, 64, 8),), ((PageRef(0, 64),),))
        options = ClientOptions(backoff_max_s=0.05)
        worker = make_worker(lambda namespace: WorkerClient(fake.directory, namespace, registration, options=options))
        worker.join(ONE)
        wait_until(lambda: worker.problem)
        assert worker.problem.endswith("No CUDA here.")
        del fake.answers[Register]
        wait_until(lambda: worker.registered is not None)
        assert worker.problem == ""
        worker.shutdown()


def test_a_worker_is_registered_in_one_namespace_at_a_time() -> None:
    clients = {"one": FakeWorkerClient(), "other": FakeWorkerClient()}
    first, second = clients.values()
    worker = make_worker(lambda namespace: clients[namespace.label])
    for _ in range(2):
        worker.join(ONE)
    assert worker.registered == ONE.fingerprint
    worker.join(OTHER)
    assert (first.unregistered, first.closed, second.closed) == (1, True, False)
    assert worker.registered == OTHER.fingerprint
    worker.leave()
    assert (second.unregistered, worker.registered, worker.problem) == (1, None, "")


def test_a_load_of_a_left_namespace_fails_once_memory_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "UNREGISTER_TIMEOUT_S", 0.1)
    with FakeDaemon() as fake, SharedMemory(4096) as memory:
        fake.hold_jobs, fake.close_on_eof = True, False
        fake.answers[Unregister] = lambda *_: None
        registration = Registration(0, 1, (memory,), (TensorLayout(0, 0, 64, 8),), ((PageRef(0, 64),),))
        worker = make_worker(lambda namespace: WorkerClient(fake.directory, namespace, registration))
        worker.join(ONE)
        wait_until(lambda: worker.registered is not None)
        worker.submit_load(1, KeyedSpec(KEYED.groups, lease_id=2**32), BLOCKS)
        worker.flush()
        wait_until(lambda: fake.seen_jobs(loads=True))
        peer = fake.peer(Role.WORKER)
        worker.leave()
        assert worker.get_finished() == [], "a copy may still land in its blocks"
        fence = threading.Thread(target=worker.wait, args=({1},))
        fence.start()
        fence.join(0.4)
        assert fence.is_alive()
        fake.do(lambda: fake.release(peer))
        fence.join(5)
        assert list(codes(worker)) == [1]
        assert (worker.get_finished(), worker._former) == ([], [])
        worker.shutdown()


# --- behind a GPU's kernels ------------------------------------------------------------------------


class GpuEvent:
    """Happens when the test says so."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def synchronize(self) -> None:
        assert self.happened.wait(WAIT_S)


class Gpu:
    """A worker whose events and clients the test holds."""

    def __init__(self) -> None:
        self.events: list[GpuEvent] = []
        self.clients = [FakeWorkerClient(), FakeWorkerClient()]
        unused = iter(self.clients)
        self.gpu_failed = False
        self.sender = OrderedSender(self.record)
        self.worker = make_worker(lambda _: next(unused), self.sender)
        self.worker.join(ONE)

    def record(self) -> GpuEvent:
        if self.gpu_failed:
            raise RuntimeError("CUDA error: unspecified launch failure")
        self.events.append(GpuEvent())
        return self.events[-1]

    def end_kernels(self) -> None:
        """All that was launched so far is done."""
        for event in self.events:
            event.happened.set()


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    made = Gpu()
    yield made
    made.worker.shutdown()
    made.end_kernels()


def test_a_fence_waits_for_the_kernels_before_it_and_gives_nothing_up(gpu: Gpu) -> None:
    """As vLLM's own worker does: the GPU begins no other step before they are done."""
    gpu.worker.submit_store(1, BLOCKS, KEYED)
    gpu.worker.submit_load(2, LEASED, BLOCKS)
    fence = threading.Thread(target=gpu.worker.wait, args=({1, 2},))
    fence.start()
    fence.join(4 * FENCE_PATIENCE_S)
    assert fence.is_alive(), "the daemon has not begun to read the blocks"
    gpu.end_kernels()
    fence.join(WAIT_S)
    [client, _] = gpu.clients
    assert (list(client.stores), list(client.loads), client.fences) == ([1], [2], [([1, 2], 1.5)])
    report = gpu.worker.take_news()
    assert not report.failed_jobs
    assert report.waited_s < FENCE_PATIENCE_S, "the kernels' time is none that stores cost"


def test_a_fence_gives_a_gpu_up_that_hangs(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "KERNELS_TIMEOUT_S", 0.05)
    gpu.worker.submit_store(1, BLOCKS, KEYED)
    gpu.worker.submit_store(2, BLOCKS, KEYED)
    gpu.worker.submit_load(3, LEASED, BLOCKS)
    gpu.worker.wait({1, 3})
    [client, _] = gpu.clients
    assert (client.fences, client.busy) == ([([1, 3], 1.5)], [False])
    assert codes(gpu.worker) == {1: ErrorCode.CANCELLED, 3: ErrorCode.CANCELLED}
    gpu.end_kernels()
    wait_until(lambda: {2}.isdisjoint(gpu.sender.waiting))
    assert list(client.stores) == [2]


def test_nothing_that_was_sent_is_cancelled_while_kernels_run(gpu: Gpu) -> None:
    """Its blocks were computed by the step before the one that runs."""
    gpu.worker.submit_store(1, BLOCKS, KEYED)
    gpu.worker.flush()
    gpu.end_kernels()
    wait_until(lambda: {1}.isdisjoint(gpu.sender.waiting))
    busy = list[bool]()

    def fence(_: object, __: float, is_busy: Callable[[], bool]) -> None:
        busy.append(is_busy())
        gpu.end_kernels()
        wait_until(lambda: not is_busy())

    with patch.object(gpu.clients[0], "fence", fence):
        gpu.worker.wait({1})
    assert busy == [True]


def test_a_daemon_that_hangs_costs_a_store_and_not_the_engine() -> None:
    """It is waited for while kernels run, and a while longer."""
    kernels: list[GpuEvent] = []

    def record() -> GpuEvent:
        kernels.append(GpuEvent())
        return kernels[-1]

    sender = OrderedSender(record)
    with FakeDaemon() as fake, SharedMemory(4096) as memory:
        fake.hold_jobs = True
        registration = Registration(0, 1, (memory,), (TensorLayout(0, 0, 64, 8),), ((PageRef(0, 64),),))
        client = WorkerClient(fake.directory, ONE, registration)
        worker = KvoffdWorker(
            lambda _: client, blocks_per_chunk=1, key_bytes=KEY_BYTES, fence_timeout_s=0.2, sender=sender
        )
        worker.join(ONE)
        wait_until(lambda: worker.registered is not None)
        worker.submit_store(1, BLOCKS, KEYED)
        worker.flush()
        kernels[0].happened.set()
        wait_until(lambda: fake.seen_jobs(loads=False))
        step = threading.Timer(4 * FENCE_PATIENCE_S, lambda: kernels[1].happened.set())
        step.start()
        worker.wait({1})
        assert kernels[1].happened.is_set()
        assert fake.seen(Cancel)
        assert codes(worker) == {1: ErrorCode.SESSION_ENDED}
        worker.shutdown()
        step.join()


def test_a_gpu_that_failed_costs_jobs_and_not_the_engine(gpu: Gpu) -> None:
    gpu.gpu_failed = True
    gpu.worker.submit_store(1, BLOCKS, KEYED)
    gpu.worker.submit_load(2, LEASED, BLOCKS)
    gpu.worker.wait({1})
    assert gpu.clients[0].busy == [False]
    assert codes(gpu.worker) == {1: ErrorCode.CANCELLED, 2: ErrorCode.CANCELLED}


def test_asleep_the_daemon_holds_nothing_and_awake_all_is_as_before(gpu: Gpu) -> None:
    first, second = gpu.clients
    gpu.worker.submit_store(1, BLOCKS, KEYED)
    gpu.worker.flush()
    for job_id in (7, 8):
        gpu.worker.submit_store(job_id, BLOCKS, KEYED)
    del gpu.worker._unsent[7]  # it has been sent
    first.results = [JobResult(7, False, 0, 0.1, ErrorCode.SESSION_ENDED, [])]
    for _ in range(2):
        gpu.worker.sleep()
    assert (first.unregistered, first.closed) == (1, True)
    assert codes(gpu.worker) == {1: ErrorCode.CANCELLED, 8: ErrorCode.CANCELLED, 7: ErrorCode.SESSION_ENDED}
    assert gpu.worker.problem == "", "the scheduler must not give the daemon up for a nap"
    assert gpu.worker.credit_bytes is None
    gpu.worker.submit_store(2, BLOCKS, KEYED)
    assert codes(gpu.worker) == {2: ErrorCode.UNKNOWN_REGISTRATION}
    for _ in range(2):
        gpu.worker.wake()
    gpu.worker.submit_store(3, BLOCKS, KEYED)
    gpu.worker.flush()
    gpu.end_kernels()
    wait_until(lambda: list(second.stores) == [3])
    assert gpu.worker.credit_bytes == second.credit_bytes


def test_the_thread_that_waits_for_an_event_is_on_the_events_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else CUDA's runtime gives it a context on GPU 0, in every worker of the others."""
    here = threading.local()
    waited_on: list[int] = []
    event = Mock(synchronize=lambda: waited_on.append(torch.cuda.current_device()))
    made = Mock(return_value=event)
    monkeypatch.setattr(torch.cuda, "Event", made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(here, "device", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(here, "device", device))
    torch.cuda.set_device(3)
    sender, sent = OrderedSender(RecordedEvent), threading.Event()
    sender.submit([Job(1, ())], lambda _: sent.set(), lambda *_: None)
    assert sent.wait(WAIT_S)
    sender.close()
    assert (waited_on, made.call_args.kwargs) == ([3], {"blocking": True})
