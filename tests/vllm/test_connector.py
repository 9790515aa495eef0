"""The connector as vLLM builds it, in both roles, over fake clients."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from prometheus_client import Counter, Gauge, Histogram
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import KVEventsConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import GPULoadStoreSpec

import kvoffd_client.vllm
from kvoffd_client import NamespaceSpec
from kvoffd_client.vllm.chunk_groups import KeyedSpec
from kvoffd_client.vllm.connector import STORE_LOGGER, KvoffdConnector
from kvoffd_client.vllm.connector_metadata import ConnectorMetadata
from kvoffd_client.vllm.log import is_no_refusal
from kvoffd_client.vllm.math_kernels import FUNCTIONS
from kvoffd_client.vllm.metrics import CONNECTED, LOAD_RATE
from kvoffd_client.vllm.worker import KvoffdWorker
from tests.vllm.vllm_config import cache_config, make_config
from tests.vllm.vllm_fakes import FakeWorkerClient, block_hash


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


def empty_step(tokens: int) -> Any:
    output = SchedulerOutput.make_empty()
    output.total_num_scheduled_tokens = tokens
    return output


def test_loads_and_stores_begin_in_one_message(worker: tuple[KvoffdConnector, FakeWorkerClient]) -> None:
    """Stores are noted by start_load_kv(), which vLLM's first runner calls in every pipeline stage."""
    connector, client = worker
    blocks = GPULoadStoreSpec([4], group_sizes=[1], block_indices=[0])
    load = TransferJob("r", KeyedSpec((block_hash(2),), 7, "r"), blocks)
    for job_id in (3, 4):
        stores = {job_id: TransferJob("r", blocks, KeyedSpec((block_hash(1),)))}
        connector.bind_connector_metadata(ConnectorMetadata(load_jobs={}, store_jobs=stores))
        connector.start_load_kv(None)  # behind the step's forward pass
        connector.wait_for_save()
        connector.handle_preemptions(ConnectorMetadata(load_jobs={job_id + 2: load}, store_jobs={}))
    assert client.messages == [[3, 5], [4, 6]]


def test_a_runner_that_zeroes_blocks_elsewhere_is_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


class SecondRunner:
    """What the connector uses of vLLM's second model runner."""

    def get_model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def update_requests(self, scheduler_output: Any) -> None: ...

    def begin(self, connector: KvoffdConnector) -> None:
        connector.register_kv_caches({})


@pytest.mark.parametrize("changed", [False, True])
def test_stores_that_end_before_blocks_are_zeroed_are_of_one_content(
    worker: tuple[KvoffdConnector, FakeWorkerClient], monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    """vLLM reads an adapter within the step that computes with it. Its files may be others than those of its digest."""
    monkeypatch.setattr(OffloadingConnector, "register_kv_caches", lambda *_: None)
    (connector, client), runner = worker, SecondRunner()
    runner.begin(connector)
    blocks = GPULoadStoreSpec([4], group_sizes=[1], block_indices=[0])
    stores = {3: TransferJob("r", blocks, KeyedSpec((block_hash(1),)))}
    connector.bind_connector_metadata(ConnectorMetadata(load_jobs={}, store_jobs=stores))
    connector.start_load_kv(None)
    if changed:
        connector._contents.weights.mark_changed()
    flush = ConnectorMetadata(load_jobs={}, store_jobs={}, jobs_to_flush={3})
    runner.update_requests(SimpleNamespace(kv_connector_metadata=flush))
    assert client.messages == ([] if changed else [[3]])


def test_vllm_says_nothing_of_stores_that_are_put_off(scheduler: KvoffdConnector) -> None:
    target = logging.getLogger(STORE_LOGGER)
    assert '"Request %s: cannot store chunks"' in inspect.getsource(importlib.import_module(STORE_LOGGER))
    for message, is_said in (("Request %s: cannot store chunks", False), ("Request %s: is gone", True)):
        record = target.makeRecord(STORE_LOGGER, logging.WARNING, "", 0, message, ("r",), None)
        assert bool(target.filter(record)) is is_said
    assert target.filters.count(is_no_refusal) == 1


def test_a_step_that_computes_nothing_starts_its_stores(worker: tuple[KvoffdConnector, FakeWorkerClient]) -> None:
    """A new prompt would wait for the next one, which is made for them alone."""
    connector, client = worker
    blocks = GPULoadStoreSpec([4], group_sizes=[1], block_indices=[0])
    load = TransferJob("r", KeyedSpec((block_hash(2),), 7, "r"), blocks)
    stores = {3: TransferJob("r", blocks, KeyedSpec((block_hash(1),)))}
    metadata = ConnectorMetadata(load_jobs={5: load}, store_jobs=stores, starts_stores=True)
    connector.handle_preemptions(metadata)
    connector.bind_connector_metadata(metadata)
    connector.start_load_kv(None)
    connector.wait_for_save()
    connector.get_transfer_results(set())
    connector.handle_preemptions(ConnectorMetadata(load_jobs={}, store_jobs={}))
    assert client.messages == [[5], [3]]


@pytest.mark.parametrize(
    ("tokens", "events", "steps"),
    [(1, False, [True, False]), (1, True, [True, True]), (0, False, [False, False]), (0, True, [True, True])],
)
def test_stores_cause_empty_steps_only_for_routers(config: Any, tokens: int, events: bool, steps: list[bool]) -> None:
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=events)
    connector = KvoffdConnector(config, KVConnectorRole.SCHEDULER, cache_config())
    scheduler: Any = connector.connector_scheduler
    connector._manager.namespace.join(NamespaceSpec.named("model"))
    scheduler._jobs[3] = None  # it runs until a worker reports its end
    job = TransferJob("r", GPULoadStoreSpec([4], group_sizes=[1], block_indices=[0]), KeyedSpec((block_hash(1),)))
    found = []
    for jobs in ({3: job}, {}):
        with patch.object(scheduler, "_build_store_jobs", lambda _, jobs=jobs: jobs):
            connector.build_connector_meta(empty_step(tokens))
        found.append(connector.has_pending_push_work())
    assert found == steps, "the next step hands them to the workers, or one without tokens at once"
    scheduler._jobs.clear()
    assert not connector.has_pending_push_work()
    connector.shutdown()


def test_after_a_reset_steps_are_made_until_workers_have_reported(config: Any) -> None:
    """0.33 waits for the jobs that a reset ended, and warns after a minute."""
    connector = KvoffdConnector(config, KVConnectorRole.SCHEDULER, cache_config())
    scheduler: Any = connector.connector_scheduler
    connector._manager.namespace.join(NamespaceSpec.named("model"))
    scheduler._jobs[3] = None
    assert not connector.has_pending_push_work()
    scheduler._reset_fence = {3: 1}
    assert connector.has_pending_push_work()
    scheduler._reset_fence.clear()
    assert not connector.has_pending_push_work()
    connector.shutdown()


def test_a_hook_that_fails_breaks_no_engine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("another vLLM")

    monkeypatch.setattr(KVConnectorFactory, "register_connector", refuse)
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    # The connector's other tests have the client's log go through vLLM's logger.
    monkeypatch.setattr(logging.getLogger("kvoffd_client"), "parent", logging.getLogger())
    kvoffd_client.vllm.register()
    [warning] = [record for record in caplog.records if "KvoffdConnector" in record.getMessage()]
    assert warning.levelno == logging.WARNING
    assert "another vLLM" in warning.getMessage()


class Calls(TorchDispatchMode):
    """Notes each function of PyTorch's that is called: its name, and its input's device, type and size."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, str, torch.dtype, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            first = args[0]
            self.seen.add((func.overloadpacket.__name__, first.device.type, first.dtype, first.numel()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_math_kernels_are_chosen_by_the_hook(device: str) -> None:
    """vLLM calls the hook in each process before it builds a model: later, several threads may make the first call."""
    with Calls() as calls, torch.device(device):
        kvoffd_client.vllm.register()
    wanted = {(name, "cpu", dtype, 1) for name in FUNCTIONS for dtype in (torch.float32, torch.float64)}
    assert wanted <= calls.seen


@pytest.mark.parametrize(
    ("changed", "generation", "calls"),
    [
        (False, None, []),
        (True, None, ["leave"]),
        (False, 1, ["digest", "forget_absent", "join"]),
        (True, 1, ["leave", "digest", "forget_absent"]),
    ],
)
def test_of_changed_weights_nothing_is_stored_until_their_namespace_is_joined(
    worker: tuple[KvoffdConnector, FakeWorkerClient], changed: bool, generation: int | None, calls: list[str]
) -> None:
    """Blocks of the old and of the new weights would have one key. A new digest forgets adapters that are not there."""
    connector, _ = worker
    every, inner = Mock(), connector.connector_worker.worker
    every.digest.return_value = "digest"
    contents: Any = connector._contents
    contents.weights, contents.adapters = SimpleNamespace(changed=changed, digest=every.digest), Mock()
    contents.adapters.forget_absent = every.forget_absent
    with patch.multiple(inner, leave=every.leave, join=every.join):
        namespace = NamespaceSpec.named("model")
        step = ConnectorMetadata(load_jobs={}, store_jobs={}, generation=generation, namespace=namespace)
        connector.handle_preemptions(step)
    assert [name for name, *_ in every.method_calls] == calls
