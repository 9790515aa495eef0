"""The connector as vLLM builds it, in both roles, over fake clients."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from prometheus_client import Counter, Gauge, Histogram
from vllm.config import KVEventsConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.outputs import KVConnectorOutput

from kvoffd_client import NamespaceSpec
from kvoffd_client.vllm import config as connector_config
from kvoffd_client.vllm.connector import STORE_LOGGER, KvoffdConnector
from kvoffd_client.vllm.connector_metadata import (
    ConnectorMetadata,
    FailedJob,
    KeyedSpec,
)
from kvoffd_client.vllm.live_weights import LiveWeights
from kvoffd_client.vllm.log import StoreRefusalFilter
from kvoffd_client.vllm.metrics import CONNECTED, LOAD_RATE
from kvoffd_client.vllm.worker import KvoffdWorker
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import GroupKeys, JobResult
from tests.kit.models import make_tiny_llama
from tests.vllm.vllm_config import cache_config, make_config
from tests.vllm.vllm_fakes import FakeWorkerClient, block_hash


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
        lambda _: client, blocks_per_chunk=1, key_bytes=32, fence_timeout_s=1
    )
    connector.connector_worker.worker.join(NamespaceSpec.named("model"))
    return connector, client


def test_of_several_api_servers_the_latest_value_of_a_gauge_is_shown(config: Any) -> None:
    gauge = Mock()
    KvoffdConnector.build_prom_metrics(config, {Gauge: gauge, Counter: Mock(), Histogram: Mock()}, ["engine"], {0: [0]})
    assert {CONNECTED, LOAD_RATE} <= {call.kwargs["name"] for call in gauge.call_args_list}
    assert {call.kwargs["multiprocess_mode"] for call in gauge.call_args_list} == {"mostrecent"}


@pytest.mark.parametrize("setting", ["enable_sleep_mode", "enable_cumem_allocator"])
def test_sleep_mode_is_refused_where_vllm_does_not_tell_of_it(
    config: Any, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    assert KvoffdConnector.supports_sleep_mode(config.kv_transfer_config)
    setattr(config.model_config, setting, True)
    monkeypatch.setattr(connector_config, "HAS_SLEEP_HOOKS", False)
    with pytest.raises(ValueError, match="sleep mode"):
        KvoffdConnector(config, KVConnectorRole.SCHEDULER, cache_config())
    monkeypatch.setattr(connector_config, "HAS_SLEEP_HOOKS", True)
    KvoffdConnector(config, KVConnectorRole.SCHEDULER, cache_config()).shutdown()


def step(scheduler: KvoffdConnector, workers: list[KvoffdConnector], tokens: int = 0) -> ConnectorMetadata | None:
    """One step of an engine, as far as the namespace goes; what the scheduler had to tell its workers."""
    meta = scheduler.build_connector_meta(empty_step(tokens))
    reports = None
    for worker in workers:
        worker.handle_preemptions(pickle.loads(pickle.dumps(meta)))  # noqa: S301 - our own bytes
        report = worker.build_connector_worker_meta()
        reports = report if reports is None or report is None else reports.aggregate(report)
    scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=reports))
    return meta if isinstance(meta, ConnectorMetadata) else None


def empty_step(tokens: int) -> Any:
    output = SchedulerOutput.make_empty()
    output.total_num_scheduled_tokens = tokens
    return output


def make_worker(config: Any, rank: int = 0) -> tuple[KvoffdConnector, list[NamespaceSpec]]:
    """A worker's connector with memory, and the namespaces that it registered in."""
    connector = KvoffdConnector(config, KVConnectorRole.WORKER, cache_config())
    half = connector.connector_worker
    half.spec.config = dataclasses.replace(
        half.spec.config, parallel=dataclasses.replace(half.spec.config.parallel, rank=rank)
    )
    joined: list[NamespaceSpec] = []

    def connect(namespace: NamespaceSpec) -> Any:
        joined.append(namespace)
        return FakeWorkerClient()

    half.worker = KvoffdWorker(connect, blocks_per_chunk=1, key_bytes=32, fence_timeout_s=1)
    connector._weights = LiveWeights(lambda: [config.test_model])
    connector._digest = connector._weights.digest()
    return connector, joined


def test_workers_report_what_is_in_memory_and_register_in_the_namespace_that_the_scheduler_makes_of_it(
    config: Any, scheduler: KvoffdConnector, said: list[str]
) -> None:
    config.test_model = torch.nn.Linear(4, 4)
    worker, joined = make_worker(config)
    assert scheduler.has_pending_push_work(), "an engine that has started makes empty steps until this is done"
    first = step(scheduler, [worker])
    assert first is not None
    assert (first.generation, first.namespace) == (0, None)
    second = step(scheduler, [worker])
    assert second is not None
    assert joined == [second.namespace] == [scheduler._manager.namespace.current]
    assert step(scheduler, [worker]) is None, "all is said"
    assert any(joined[0].fingerprint.hex()[:12] in line for line in said)
    # A reset, as of a pause: nobody is asked before something is computed.
    scheduler.reset_cache()
    assert step(scheduler, [worker]) is None
    before = config.test_model.weight.detach().clone()
    with torch.no_grad():
        config.test_model.weight.add_(1)
    third = step(scheduler, [worker], tokens=1)
    assert third is not None
    assert third.generation == 1
    step(scheduler, [worker])
    assert [namespace.fingerprint != joined[0].fingerprint for namespace in joined] == [False, True]
    with torch.no_grad():
        config.test_model.weight.copy_(before)
    scheduler.reset_cache()
    step(scheduler, [worker], tokens=1)
    step(scheduler, [worker])
    assert joined[2] == joined[0]


def test_a_worker_whose_weights_were_changed_stores_nothing_until_they_are_named(
    config: Any, scheduler: KvoffdConnector
) -> None:
    config.test_model = torch.nn.Linear(4, 4)
    worker, joined = make_worker(config)
    step(scheduler, [worker])
    step(scheduler, [worker])
    half = worker.connector_worker
    weights = worker._weights
    assert weights is not None
    weights.changed = True
    step(scheduler, [worker], tokens=1)
    assert half.worker.registered is None
    keyed = KeyedSpec((block_hash(1),))
    assert half.worker.submit_store(9, GPULoadStoreSpec([4], group_sizes=[1], block_indices=[0]), keyed)
    assert [result.job_id for result in half.worker.get_finished()] == [9]
    assert half.worker.take_report().failed_jobs[9].error is ErrorCode.UNSUPPORTED
    for _ in range(2):
        step(scheduler, [worker], tokens=1)
    assert joined == [joined[0]] * 2, "the weights were the same after all"


def test_a_failed_load_is_received_and_failed_and_no_assertion_ends_the_worker(
    worker: tuple[KvoffdConnector, FakeWorkerClient],
) -> None:
    connector, client = worker
    blocks = GPULoadStoreSpec([4], group_sizes=[1], block_indices=[0])
    keyed = {number: KeyedSpec((block_hash(number),)) for number in (2, 3)}
    load = TransferJob("request", KeyedSpec((block_hash(1),), 7, "request"), blocks)
    stores = {number + 4: TransferJob("request", blocks, keyed[number]) for number in (2, 3)}
    for metadata in (
        ConnectorMetadata(load_jobs={5: load}, store_jobs=stores),
        ConnectorMetadata(load_jobs={}, store_jobs={}),
    ):
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        connector.start_load_kv(None)
    client.results = [
        JobResult(5, False, 0, 0.1, ErrorCode.NOT_READY, [GroupKeys(0, block_hash(1))]),
        JobResult(6, False, 0, 0.1, ErrorCode.NO_ROOM, [GroupKeys(0, block_hash(2))]),
        JobResult(7, True, 100, 0.1),
    ]
    results = connector.get_transfer_results(set())
    assert results.finished_recving == {"request"}
    assert results.failed_recving == {"request"}
    assert connector.get_transfer_results(set()).failed_recving == set()
    meta = connector.build_connector_worker_meta()
    assert meta is not None
    assert set(meta.completed_jobs) == {5, 6, 7}
    assert meta.failed_jobs == {
        5: FailedJob(ErrorCode.NOT_READY, ((0, block_hash(1)),), "request"),
        6: FailedJob(ErrorCode.NO_ROOM, ((0, block_hash(2)),)),
    }


def test_a_step_s_loads_and_the_last_one_s_stores_begin_in_one_message_before_the_model_runs(
    worker: tuple[KvoffdConnector, FakeWorkerClient],
) -> None:
    connector, client = worker
    blocks = GPULoadStoreSpec([4], group_sizes=[1], block_indices=[0])
    store = TransferJob("r", blocks, KeyedSpec((block_hash(1),)))
    load = TransferJob("r", KeyedSpec((block_hash(2),), 7, "r"), blocks)
    first = ConnectorMetadata(load_jobs={}, store_jobs={3: store})
    connector.handle_preemptions(first)
    connector.bind_connector_metadata(first)
    connector.start_load_kv(None)  # behind the first step's forward pass
    connector.handle_preemptions(ConnectorMetadata(load_jobs={4: load}, store_jobs={}))
    assert client.messages == [[3, 4]]


def test_stores_are_noted_by_start_load_kv_which_vllm_calls_in_every_stage(
    worker: tuple[KvoffdConnector, FakeWorkerClient],
) -> None:
    """With pipeline stages and speculation its first runner calls wait_for_save() in the last stage alone."""
    connector, client = worker
    blocks = GPULoadStoreSpec([4], group_sizes=[1], block_indices=[0])
    store = TransferJob("r", blocks, KeyedSpec((block_hash(1),)))
    for job_id in (0, 1):
        connector.bind_connector_metadata(ConnectorMetadata(load_jobs={}, store_jobs={job_id: store}))
        connector.start_load_kv(None)
        if job_id:
            connector.wait_for_save()
        connector.handle_preemptions(ConnectorMetadata(load_jobs={}, store_jobs={}))
    assert client.messages == [[0], [1]]


def test_a_runner_that_writes_into_blocks_in_an_unknown_place_is_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[object] = []
    monkeypatch.setattr(OffloadingConnector, "register_kv_caches", lambda _, caches: registered.append(caches))
    for second_runner, zeroes, refused in ((True, True, True), (True, False, False), (False, True, False)):
        monkeypatch.setattr(type(config), "use_v2_model_runner", second_runner)
        monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", zeroes)
        connector = KvoffdConnector(config, KVConnectorRole.WORKER, cache_config())
        registered.clear()
        with pytest.raises(ValueError, match="its model runner writes") if refused else nullcontext():
            connector.register_kv_caches({})
        assert len(registered) == (not refused)


def test_vllm_says_nothing_of_stores_that_are_put_off(scheduler: KvoffdConnector) -> None:
    target = logging.getLogger(STORE_LOGGER)
    assert '"Request %s: cannot store chunks"' in inspect.getsource(importlib.import_module(STORE_LOGGER))
    for message, is_said in (("Request %s: cannot store chunks", False), ("Request %s: is gone", True)):
        record = target.makeRecord(STORE_LOGGER, logging.WARNING, "", 0, message, ("r",), None)
        assert bool(target.filter(record)) is is_said
    StoreRefusalFilter.install(STORE_LOGGER)
    assert sum(isinstance(one, StoreRefusalFilter) for one in target.filters) == 1


@pytest.mark.parametrize(("events", "steps"), [(False, [True, False]), (True, [True, True])])
def test_an_engine_makes_no_empty_steps_for_stores_that_run_unless_routers_wait_for_them(
    config: Any, events: bool, steps: list[bool]
) -> None:
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=events)
    connector = KvoffdConnector(config, KVConnectorRole.SCHEDULER, cache_config())
    scheduler: Any = connector.connector_scheduler
    connector._manager.namespace.join(NamespaceSpec.named("model"))
    scheduler._jobs[3] = None  # it runs until a worker reports its end
    job = TransferJob("r", GPULoadStoreSpec([4], group_sizes=[1], block_indices=[0]), KeyedSpec((block_hash(1),)))
    found = []
    for jobs in ({3: job}, {}):
        with patch.object(scheduler, "_build_store_jobs", lambda _, jobs=jobs: jobs):
            connector.build_connector_meta(empty_step(0))
        found.append(connector.has_pending_push_work())
    assert found == steps, "a step hands them to the workers"
    scheduler._jobs.clear()
    assert not connector.has_pending_push_work()
    connector.shutdown()
