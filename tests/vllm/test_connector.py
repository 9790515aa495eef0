"""The connector as vLLM builds it, in both roles, over fake clients."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import make_tiny_llama
from support.vllm_config import cache_config, make_config
from support.vllm_fakes import FakeWorkerClient, block_hash, key
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.outputs import KVConnectorOutput

import kvoffd_client.vllm
import kvoffd_client.vllm.connector as connector_module
from kvoffd_client.vllm.connector import KvoffdConnector
from kvoffd_client.vllm.connector_metadata import FailedJob, KeyedSpec, KvoffdHandshake, KvoffdWorkerMetadata
from kvoffd_client.vllm.log import StoreRefusalFilter
from kvoffd_client.vllm.offloading_worker import KvoffdWorker
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import GroupKeys, JobResult


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Any:
    return make_config(model, {"directory": str(tmp_path)})


@pytest.fixture
def scheduler(config: Any) -> Iterator[KvoffdConnector]:
    connector = KvoffdConnector(config, KVConnectorRole.SCHEDULER, cache_config())
    yield connector
    connector.shutdown()


@pytest.fixture
def worker(config: Any) -> tuple[KvoffdConnector, FakeWorkerClient]:
    """A worker's connector whose memory is registered with a fake client."""
    connector = KvoffdConnector(config, KVConnectorRole.WORKER, cache_config())
    client = FakeWorkerClient()
    connector.connector_worker.worker = KvoffdWorker(
        lambda: client, blocks_per_chunk=1, key_bytes=32, fence_timeout_s=1
    )
    return connector, client


def test_vllms_factory_builds_it_from_the_two_words_a_user_writes(config: Any) -> None:
    kvoffd_client.vllm.register()
    connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache_config())
    assert isinstance(connector, KvoffdConnector)
    connector.shutdown()


def test_failed_loads_are_recomputed_whatever_the_engines_policy_and_the_user_is_told(
    config: Any, said: list[str]
) -> None:
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"
    KvoffdConnector(config, KVConnectorRole.SCHEDULER, cache_config()).shutdown()
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert any("'recompute'" in line and "respect_load_failure_policy" in line for line in said)


def test_the_engines_policy_is_kept_when_the_user_insists_and_the_cost_is_told(
    model: Path, tmp_path: Path, said: list[str]
) -> None:
    config = make_config(model, {"directory": str(tmp_path), "respect_load_failure_policy": True})
    KvoffdConnector(config, KVConnectorRole.SCHEDULER, cache_config()).shutdown()
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"
    assert any("will end with an error" in line for line in said)


def test_a_wrong_option_stops_the_engine_at_its_start(model: Path) -> None:
    config = make_config(model, {"dirctory": "/run"})
    with pytest.raises(ValueError, match="did you mean 'directory'"):
        KvoffdConnector(config, KVConnectorRole.WORKER, cache_config())


def test_a_key_nobody_reads_is_told(model: Path, tmp_path: Path, said: list[str]) -> None:
    config = make_config(model, {"directory": str(tmp_path), "zeta": 1})
    KvoffdConnector(config, KVConnectorRole.SCHEDULER, cache_config()).shutdown()
    assert any("zeta" in line for line in said)


def test_sleep_mode_is_refused_where_vllm_does_not_tell_of_it(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert KvoffdConnector.supports_sleep_mode(config.kv_transfer_config)
    config.model_config.enable_sleep_mode = True
    monkeypatch.setattr(connector_module, "HAS_SLEEP_HOOKS", False)
    with pytest.raises(ValueError, match="sleep mode"):
        KvoffdConnector(config, KVConnectorRole.SCHEDULER, cache_config())
    monkeypatch.setattr(connector_module, "HAS_SLEEP_HOOKS", True)
    KvoffdConnector(config, KVConnectorRole.SCHEDULER, cache_config()).shutdown()


def test_before_its_memory_is_registered_a_worker_sleeps_and_wakes_without_the_daemon(config: Any) -> None:
    connector = KvoffdConnector(config, KVConnectorRole.WORKER, cache_config())
    connector.unregister_kv_caches()
    connector.restore_kv_caches()


def test_the_kv_cache_is_allocated_where_the_daemon_can_reach_it(config: Any) -> None:
    connector = KvoffdConnector(config, KVConnectorRole.WORKER, cache_config())
    context = connector.get_mem_pool_context()
    assert context is not None
    with context:
        torch.zeros(4096, dtype=torch.int8)
    assert [memory.size_bytes for memory in connector.connector_worker.spec.setup.memory.memories] == [4096]


def told(connector: KvoffdConnector) -> KvoffdHandshake:
    handshake = connector.get_handshake_metadata()
    assert handshake is not None
    received = pickle.loads(pickle.dumps(handshake))  # noqa: S301 - our own bytes
    assert isinstance(received, KvoffdHandshake)
    return received


def test_the_scheduler_joins_the_namespace_its_workers_tell_it(
    config: Any, scheduler: KvoffdConnector, said: list[str]
) -> None:
    workers = [KvoffdConnector(config, KVConnectorRole.WORKER, cache_config()) for _ in range(2)]
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, rank): told(item) for rank, item in enumerate(workers)})
    assert any(told(workers[0]).namespace.fingerprint.hex()[:16] in line for line in said)
    assert scheduler.get_handshake_metadata() is None


def test_workers_that_disagree_turn_kvoffd_off_and_say_on_what(
    config: Any, scheduler: KvoffdConnector, said: list[str]
) -> None:
    agreed = KvoffdConnector(config, KVConnectorRole.WORKER, cache_config())
    config.model_config.dtype = torch.bfloat16
    other = KvoffdConnector(config, KVConnectorRole.WORKER, cache_config())
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): told(agreed), (0, 1): told(other)})
    assert any("disagree on" in line and "weights_dtype" in line for line in said)
    assert not scheduler._manager.client.ready


def test_a_failed_load_is_received_and_failed_and_no_assertion_ends_the_worker(
    worker: tuple[KvoffdConnector, FakeWorkerClient],
) -> None:
    connector, client = worker
    half = connector.connector_worker
    half._load_jobs = {5: "request"}
    client.results = [
        JobResult(5, False, 0, 0.1, ErrorCode.NOT_READY, [GroupKeys(0, block_hash(1))]),
        JobResult(6, False, 0, 0.1, ErrorCode.NO_ROOM, [GroupKeys(0, block_hash(2))]),
        JobResult(7, True, 100, 0.1),
    ]
    results = connector.get_transfer_results(set())
    assert results.finished_recving == {"request"}
    assert results.failed_recving == {"request"}
    assert connector.get_transfer_results(set()).failed_recving == set()
    meta = half.build_connector_worker_meta()
    assert meta is not None
    assert set(meta.completed_jobs) == {5, 6, 7}
    assert meta.failed_jobs == {
        5: FailedJob(ErrorCode.NOT_READY, ((0, block_hash(1)),)),
        6: FailedJob(ErrorCode.NO_ROOM, ((0, block_hash(2)),)),
    }


def test_credit_is_reported_when_it_changes_and_not_otherwise(
    worker: tuple[KvoffdConnector, FakeWorkerClient],
) -> None:
    connector, client = worker
    first = connector.build_connector_worker_meta()
    assert first is not None
    assert first.credit_bytes == client.credit_bytes
    assert connector.build_connector_worker_meta() is None
    client.credit_bytes = 5
    again = connector.build_connector_worker_meta()
    assert again is not None
    assert again.credit_bytes == 5


def test_a_local_failure_of_a_store_reaches_the_scheduler(worker: tuple[KvoffdConnector, FakeWorkerClient]) -> None:
    connector, _ = worker
    keyed = KeyedSpec.of([key(1), key(2)], {(0).to_bytes(4, "big"): 0})
    broken = GPULoadStoreSpec([4], group_sizes=[1], block_indices=[0])
    assert connector.connector_worker.worker.submit_store(9, broken, keyed)
    connector.get_transfer_results(set())
    meta = connector.build_connector_worker_meta()
    assert meta is not None
    assert meta.failed_jobs[9].error is ErrorCode.BAD_BLOCK_IDS


def test_a_report_about_jobs_from_before_a_reset_is_passed_over(scheduler: KvoffdConnector) -> None:
    scheduler.connector_scheduler._stale_job_threshold = 10
    meta = KvoffdWorkerMetadata(completed_jobs={3: 1}, failed_jobs={3: FailedJob(ErrorCode.NOT_READY)})
    scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))


def test_a_reset_waits_for_the_reports_of_all_workers_about_running_jobs(scheduler: KvoffdConnector) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import TransferJobStatus

    half = scheduler.connector_scheduler
    half._job_counter = 4
    half._jobs[3] = TransferJobStatus(req_id="gone", pending_count=2, keys={key(1)}, is_store=True)
    assert scheduler.reset_cache()
    assert scheduler.has_pending_push_work()
    for _ in range(2):
        assert scheduler.has_pending_push_work()
        meta = KvoffdWorkerMetadata(completed_jobs={3: 1})
        scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))
    assert not scheduler.has_pending_push_work()


def test_vllms_warning_about_stores_put_off_is_dropped_and_others_are_not(scheduler: KvoffdConnector) -> None:
    kept = StoreRefusalFilter()
    record = logging.LogRecord("x", logging.WARNING, "f", 1, "Request %s: cannot store chunks", ("r",), None)
    other = logging.LogRecord("x", logging.WARNING, "f", 1, "Request %s: something else", ("r",), None)
    assert not kept.filter(record)
    assert kept.filter(other)
    target = logging.getLogger("vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler")
    assert sum(isinstance(item, StoreRefusalFilter) for item in target.filters) == 1
