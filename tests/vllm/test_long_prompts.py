"""A prompt of a million tokens, of one KV cache group and of seven, in vLLM's scheduler half over a real daemon."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_offload.base import GPULoadStoreSpec, TransferResult
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvoffd_client import AdminClient, NamespaceSpec
from kvoffd_client.memory import Registration, SharedMemory
from kvoffd_client.vllm.connector import KvoffdConnector
from kvoffd_client.vllm.connector_metadata import KeyedSpec, WorkerReport
from kvoffd_client.vllm.worker import KvoffdWorker
from kvoffd_client.worker_client import WorkerClient
from kvoffd_proto.messages import GroupSpec, PageRef, TensorLayout
from tests.kit.daemon import DaemonProcess
from tests.kit.models import make_tiny_llama
from tests.kit.vllm_config import cache_config, full_attention, make_config
from tests.kit.vllm_fakes import block_hash
from tests.kit.waiting import wait_until

BLOCKS = 62_500
BLOCK_TOKENS = 16
PAGE_BYTES = 64
POOL = "4200MiB"
"""Seven times BLOCKS in slots of 8192 bytes, the smallest, are as much of it as leases may hold."""

pytestmark = [pytest.mark.shapes, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(POOL) as process:
        yield process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


class LongPrompts:
    """An engine's scheduler half, and a worker whose groups share one page a block; no model."""

    def __init__(self, model: Path, daemon: DaemonProcess, groups: int) -> None:
        self.groups = groups
        config = make_config(
            model,
            {"directory": str(daemon.directory), "lookup_deadline_ms": 5000, "do_no_harm": False},
            block_size=BLOCK_TOKENS,
            max_model_len=BLOCKS * BLOCK_TOKENS + 64,
            hf_overrides={"max_position_embeddings": BLOCKS * BLOCK_TOKENS + 64},
        )
        specs = [
            KVCacheGroupSpec([f"layer.{index}"], full_attention(block_size=BLOCK_TOKENS)) for index in range(groups)
        ]
        self.scheduler = KvoffdConnector(config, KVConnectorRole.SCHEDULER, cache_config(*specs))
        namespace = NamespaceSpec.named(f"{groups} groups", groups=[GroupSpec("full_attention", BLOCK_TOKENS)] * groups)
        self.memory = SharedMemory(BLOCKS * PAGE_BYTES)
        registration = Registration(
            rank=0,
            blocks_per_key=1,
            memories=(self.memory,),
            tensors=(TensorLayout(0, 0, PAGE_BYTES, BLOCKS),),
            groups=((PageRef(0, PAGE_BYTES),),) * groups,
        )
        self.client = WorkerClient(daemon.directory, namespace, registration)
        assert self.client.wait_ready(10)
        self.worker = KvoffdWorker(lambda _: self.client, blocks_per_chunk=1, key_bytes=32, fence_timeout_s=10)
        self.worker.join(namespace)
        manager = self.scheduler._manager
        manager.namespace.join(namespace)
        wait_until(lambda: manager.namespace.client.ready, 10)

    def request(self, name: str) -> Any:
        """A request whose prompt is all of BLOCKS and one token more."""
        request = Request(name, [0] * (BLOCKS * BLOCK_TOKENS + 1), SamplingParams(max_tokens=1), None)
        request.block_hashes = [block_hash(number) for number in range(BLOCKS)]
        return request

    def blocks(self) -> GPULoadStoreSpec:
        return GPULoadStoreSpec(
            list(range(BLOCKS)) * self.groups, group_sizes=[BLOCKS] * self.groups, block_indices=[0] * self.groups
        )

    def finished(self) -> TransferResult:
        found = list[Any]()
        wait_until(lambda: found.extend(self.worker.get_finished()) or found, 60)
        [result] = found
        return result

    def store(self) -> None:
        """Store all blocks in one job."""
        keys = b"".join(block_hash(number) for number in range(BLOCKS))
        self.memory.view.reshape(BLOCKS, PAGE_BYTES)[:] = (
            np.arange(BLOCKS, dtype="<u4").view(np.uint8).reshape(-1, 4)[:, np.arange(PAGE_BYTES) % 4]
        )
        self.worker.submit_store(1, self.blocks(), KeyedSpec((keys,) * self.groups))
        result = self.finished()
        assert result.success
        assert result.transfer_size == self.groups * BLOCKS * PAGE_BYTES
        self.memory.view[:] = 0

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()
        self.memory.close()


@pytest.mark.parametrize("groups", [1, 7])
def test_a_million_tokens_are_found_and_loaded(model: Path, daemon: DaemonProcess, groups: int) -> None:
    engine = LongPrompts(model, daemon, groups)
    try:
        engine.store()
        scheduler = engine.scheduler
        request = engine.request("long")
        steps: list[float] = []
        began = time.perf_counter()
        scheduler.on_new_request(request)
        arrival_s = time.perf_counter() - began
        found: tuple[int | None, bool] = (None, False)
        while found[0] is None:
            at = time.perf_counter()
            found = scheduler.get_num_new_matched_tokens(request, 0)
            steps.append(time.perf_counter() - at)
            time.sleep(0.001)
        lookup_s = time.perf_counter() - began
        assert found == (BLOCKS * BLOCK_TOKENS, True)
        at = time.perf_counter()
        blocks = [KVCacheBlock(number) for number in range(BLOCKS)]
        allocated = KVCacheBlocks(tuple([blocks] * groups))
        scheduler.update_state_after_alloc(request, allocated, BLOCKS * BLOCK_TOKENS)
        meta = scheduler.build_connector_meta(SchedulerOutput.make_empty())
        alloc_s = time.perf_counter() - at
        [(job_id, job)] = meta.load_jobs.items()
        at = time.perf_counter()
        engine.worker.submit_load(job_id, job.src_spec, job.dst_spec)
        engine.worker.flush()
        result = engine.finished()
        load_s = time.perf_counter() - at
        assert result.success
        assert result.transfer_size == groups * BLOCKS * PAGE_BYTES
        loaded = engine.memory.view.reshape(BLOCKS, PAGE_BYTES)[:, :4].copy().view("<u4")[:, 0]
        assert (loaded == np.arange(BLOCKS)).all()
        report = WorkerReport(completed_jobs={job_id: 1})
        scheduler.update_connector_output(KVConnectorOutput(finished_recving={"long"}, kv_connector_worker_meta=report))
        scheduler.request_finished_all_groups(request, tuple([[0]] * groups))
        with AdminClient(daemon.directory) as admin:
            wait_until(lambda: admin.stats().pool.pinned_bytes == 0, 10)
        print(
            f"{groups} groups: arrival {arrival_s * 1e3:.0f} ms, answer after {lookup_s * 1e3:.0f} ms in {len(steps)} "
            f"scans of at most {max(steps) * 1e3:.0f} ms, allocation {alloc_s * 1e3:.0f} ms, load {load_s * 1e3:.0f} ms"
        )
    finally:
        engine.close()
