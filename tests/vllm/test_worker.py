"""A worker's half over a fake client, and the shared memory under a KV cache."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from kvoffd_client import NamespaceSpec, Registration, SharedMemory
from kvoffd_client.jobs import Job
from kvoffd_client.vllm import spec as spec_module
from kvoffd_client.vllm import worker as worker_module
from kvoffd_client.vllm.config import ConnectorOptions
from kvoffd_client.vllm.connector_metadata import NO_LEASE, FailedJob, KeyedSpec
from kvoffd_client.vllm.kv_memory import SharedKvMemory, registration_of
from kvoffd_client.vllm.spec import KvoffdSpec
from kvoffd_client.vllm.worker import KvoffdWorker
from kvoffd_client.worker_client import WorkerClient
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import JobResult, PageRef, Role, TensorLayout, Unregister
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.waiting import wait_until
from tests.vllm.vllm_fakes import KEY_BYTES, FakeWorkerClient, block_hash

BLOCKS = GPULoadStoreSpec([4, 5], group_sizes=[2], block_indices=[0])
KEYED = KeyedSpec((block_hash(1) + block_hash(2),))
NAMESPACE = NamespaceSpec.named("model")
LEASED = KeyedSpec(KEYED.groups, lease_id=77, request_id="r", load_tokens=64)


def make_worker(client: FakeWorkerClient | None) -> KvoffdWorker:
    worker = KvoffdWorker(
        lambda _: client,
        blocks_per_chunk=1,
        key_bytes=KEY_BYTES,
        fence_timeout_s=1.5,
    )
    worker.join(NAMESPACE)
    return worker


def only_failure(worker: KvoffdWorker) -> FailedJob:
    """The failure of the only job that has ended, of which vLLM is told no more than that."""
    [result] = worker.get_finished()
    assert result.success
    assert (result.transfer_size, result.transfer_time) == (None, None)
    [(job_id, failed)] = worker.take_report().failed_jobs.items()
    assert job_id == result.job_id
    return failed


def test_the_one_allocation_of_the_kv_cache_comes_from_shared_memory() -> None:
    context = SharedKvMemory()
    with context:
        backing = torch.zeros(8192, dtype=torch.int8, device=torch.device("cpu"))
        torch.zeros(16)
        torch.zeros((4, 4), dtype=torch.int8)
        torch.zeros(16, dtype=torch.float32)
    [memory] = context.memories
    assert memory.size_bytes == 8192
    backing[100] = 7
    assert memory.view[100] == 7
    assert torch.zeros(64, dtype=torch.int8).data_ptr() != backing.data_ptr()


def caches_in(backing: torch.Tensor) -> CanonicalKVCaches:
    """Two layers of four blocks of 512 bytes, one after the other; the second group uses half pages of layer 1."""
    layers = [backing[at : at + 2048].view(4, 512) for at in (1024, 4096)]
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(layer, 512) for layer in layers],
        group_data_refs=[[CanonicalKVCacheRef(0, 512), CanonicalKVCacheRef(1, 512)], [CanonicalKVCacheRef(1, 256)]],
    )


def test_a_registration_names_places_in_the_memory_the_cache_lies_in() -> None:
    context = SharedKvMemory()
    with context:
        torch.zeros(4096, dtype=torch.int8)
        backing = torch.zeros(8192, dtype=torch.int8)
    registration = registration_of(caches_in(backing), context.memories, rank=1, blocks_per_chunk=2)
    assert registration.memories == (context.memories[1],)
    assert registration.tensors == (TensorLayout(0, 1024, 512, 4), TensorLayout(0, 4096, 512, 4))
    assert registration.groups == ((PageRef(0, 512), PageRef(1, 512)), (PageRef(1, 256),))
    assert (registration.rank, registration.blocks_per_key) == (1, 2)


def test_an_engine_on_cpu_whose_memory_cannot_be_shared_is_refused_at_its_start() -> None:
    spec: Any = SimpleNamespace(
        namespace=NAMESPACE,
        memory=SharedKvMemory(),
        layers=(),
        config=SimpleNamespace(parallel=SimpleNamespace(rank=0)),
        blocks_per_chunk=1,
        replicated_layout=False,
    )
    spec._registration = partial(KvoffdSpec._registration, spec)
    with pytest.raises(ValueError, match=r"kvoffd cannot serve this engine: .*get_mem_pool_context"):
        KvoffdSpec.get_worker(spec, caches_in(torch.zeros(8192, dtype=torch.int8)))


def test_a_worker_without_shareable_memory_fails_every_job_and_the_engine_goes_on() -> None:
    worker = make_worker(None)
    assert worker.submit_store(1, BLOCKS, KEYED)
    assert worker.submit_load(2, LEASED, BLOCKS)
    worker.wait({1, 2})
    assert [result.job_id for result in worker.get_finished()] == [1, 2]
    assert set(worker.take_report().failed_jobs) == {1, 2}
    assert worker.failed_requests == {"r"}
    assert not worker.usable
    assert worker.credit_bytes is None
    worker.shutdown()


def test_jobs_reach_the_client_and_their_results_come_back() -> None:
    client = FakeWorkerClient()
    worker = make_worker(client)
    assert worker.submit_store(1, BLOCKS, KEYED)
    assert worker.submit_load(2, LEASED, BLOCKS, expedited=True)
    assert client.messages == []
    worker.flush()
    worker.flush()
    assert client.messages == [[1, 2]], "the jobs of a step are one message"
    assert np.frombuffer(client.stores[1][0].block_ids, "<i4").tolist() == [4, 5]
    assert client.loads[2][0] == 77
    client.results = [JobResult(1, True, 1024, 0.5), JobResult(2, True, 2048, 0.25)]
    found = [
        (result.job_id, result.success, result.transfer_size, result.transfer_time) for result in worker.get_finished()
    ]
    assert found == [(1, True, 1024, 0.5), (2, True, 2048, 0.25)]
    report = worker.take_report()
    assert (report.failed_jobs, report.load_times) == ({}, {2: (64, 0.25)})


def test_jobs_that_fail_say_why_and_with_which_keys() -> None:
    keys = ((0, KEYED.groups[0]),)
    too_few = GPULoadStoreSpec([4], group_sizes=[1], block_indices=[0])
    client = FakeWorkerClient()
    worker = make_worker(client)
    worker.submit_store(1, too_few, KEYED)
    assert only_failure(worker) == FailedJob(ErrorCode.BAD_BLOCK_IDS, keys)
    assert KEYED.lease_id == NO_LEASE
    worker.submit_load(2, KEYED, BLOCKS)
    assert only_failure(worker) == FailedJob(ErrorCode.UNKNOWN_LEASE, keys)
    assert (client.stores, client.loads) == ({}, {}), "nothing was sent"
    worker.submit_store(3, BLOCKS, KEYED)
    client.results = [JobResult(3, False, 0, 0.1, ErrorCode.COPY_FAILED, [])]
    assert only_failure(worker) == FailedJob(ErrorCode.COPY_FAILED, keys), "all, where the daemon names none"
    assert worker.failed_requests == set()


def test_a_fence_takes_back_what_the_gpu_holds_before_it_asks_the_daemon() -> None:
    order: list[object] = []
    sender, client = Mock(), Mock()
    sender.submit.side_effect = lambda jobs, *_: order.append([job.job_id for job in jobs])

    def withdraw(job_ids: list[int], patience_s: float) -> None:
        order.append(("withdraw", job_ids, patience_s))
        worker._fail_unsent(Job(2, ()), ErrorCode.CANCELLED)

    sender.withdraw.side_effect = withdraw
    client.fence.side_effect = lambda *arguments: order.append(("fence", *arguments))
    worker = KvoffdWorker(lambda _: client, blocks_per_chunk=1, key_bytes=KEY_BYTES, fence_timeout_s=1.5, sender=sender)
    worker.join(NAMESPACE)
    worker.submit_store(2, BLOCKS, KEYED)
    worker.wait({2, 1})
    assert order == [[2], ("withdraw", [1, 2], 0.05), ("fence", [1, 2], 1.5, 1)]


def test_ranks_that_load_one_shard_leave_the_lease_to_the_scheduler() -> None:
    """As under tensor parallelism with latent attention, where rank 0 alone stores."""
    caches = cast(Any, SimpleNamespace(tensors=[SimpleNamespace(tensor=SimpleNamespace(device=torch.device("cuda")))]))
    for replicated in (False, True):
        config = SimpleNamespace(parallel=SimpleNamespace(rank=1))
        spec: Any = SimpleNamespace(
            namespace=SimpleNamespace(key_bytes=KEY_BYTES),
            options=ConnectorOptions(),
            blocks_per_chunk=1,
            replicated_layout=replicated,
            memory=SharedKvMemory(),
            layers=(),
            config=config,
        )
        client = Mock()
        spec.connect_worker = lambda *_, client=client: client
        worker = KvoffdSpec.get_worker(spec, caches)
        assert isinstance(worker, KvoffdWorker)
        worker._sender.close()  # type: ignore[union-attr]
        worker._sender = None
        worker.join(NAMESPACE)
        worker.submit_load(1, LEASED, BLOCKS)
        worker.flush()
        [[job]] = client.submit.call_args.args
        assert (job.lease_id, job.keep_lease) == (77, replicated)
        with patch.object(spec_module, "registration_of") as registration_of:
            KvoffdSpec._registration(spec, caches)
        assert registration_of.call_args.args[2] == (0 if replicated else 1), "whose shard it is"


def test_a_replicas_sessions_have_its_index_in_their_names() -> None:
    for engine_id, index, replica in (("0123456789_dp1", 1, " replica 1"), ("0123456789", 0, "")):
        config = SimpleNamespace(engine_id=engine_id, parallel=SimpleNamespace(data_parallel_index=index))
        name = KvoffdSpec._name(cast(Any, SimpleNamespace(config=config)), NAMESPACE, "worker 0")
        assert name == f"vllm:01234567 model{replica} worker 0"


def test_a_worker_is_registered_in_one_namespace_at_a_time_and_without_one_fails_every_job() -> None:
    first, second = FakeWorkerClient(), FakeWorkerClient()
    clients = {"one": first, "other": second}
    worker = KvoffdWorker(
        lambda namespace: cast(WorkerClient, clients[namespace.label]),
        blocks_per_chunk=1,
        key_bytes=KEY_BYTES,
        fence_timeout_s=1,
    )
    assert worker.usable
    assert worker.registered is None
    assert worker.submit_store(1, BLOCKS, KEYED)
    assert only_failure(worker).error is ErrorCode.UNSUPPORTED
    one, other = NamespaceSpec.named("one"), NamespaceSpec.named("other")
    worker.join(one)
    worker.join(one)
    assert worker.registered == one.fingerprint
    worker.submit_store(2, BLOCKS, KEYED)
    worker.join(other)
    assert (first.unregistered, first.closed, second.closed) == (1, True, False)
    assert worker.registered == other.fingerprint
    worker.leave()
    assert (second.unregistered, worker.registered) == (1, None)
    assert worker.usable


def test_a_load_of_a_namespace_that_is_left_fails_when_the_daemon_has_let_go_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "UNREGISTER_TIMEOUT_S", 0.1)
    with FakeDaemon() as fake, SharedMemory(4096) as memory:
        fake.hold_jobs, fake.close_on_eof = True, False
        fake.answers[Unregister] = lambda *_: None
        registration = Registration(0, 1, (memory,), (TensorLayout(0, 0, 64, 8),), ((PageRef(0, 64),),))
        spec = NamespaceSpec.named("left", key_bytes=KEY_BYTES)
        worker = KvoffdWorker(
            lambda _: WorkerClient(fake.directory, spec, registration),
            blocks_per_chunk=1,
            key_bytes=KEY_BYTES,
            fence_timeout_s=0.1,
        )
        worker.join(spec)
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
        assert only_failure(worker)
        assert (worker.get_finished(), worker._left) == ([], [])
        worker.shutdown()
