"""What stores cost in a worker's calls: kvoffd's worker against vLLM's own CPU offloading worker.

There is no GPU: of vLLM's worker, streams, events and the copy itself are stand-ins that do nothing, so that what they
cost on a GPU is missing from its side. kvoffd's worker talks to a real daemon, and makes one event a step on a GPU.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol
from unittest.mock import patch

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    TransferResult,
)
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvoffd_client import NamespaceSpec, WorkerClient
from kvoffd_client.memory import Registration, SharedMemory
from kvoffd_client.session import Closing
from kvoffd_client.testing import KEY_BYTES
from kvoffd_client.vllm.connector_metadata import KeyedSpec
from kvoffd_client.vllm.worker import KvoffdWorker
from kvoffd_proto.messages import PageRef, TensorLayout
from tests.bench.overhead.steps import KVOFFD, NATIVE, Say

PAGE_BYTES = 4096
STEP_S = 0.02
"""Between a step's calls: the forward, in which nothing else runs here."""
CASES = ((16, 1), (256, 1), (16, 32))
"""Stores of one block in a step, and layers: 256 sequences that fill blocks of 16 tokens in turn, or all at once."""
END_S = 10.0


@dataclass
class WorkerSteps:
    """Seconds of a step, one a round; rounds correspond.

    Attributes:
        calls: by case and worker, in ``submit_store``, ``flush`` and ``get_finished``.
        cpu: CPU time of the process over the whole step, of all its threads.
    """

    calls: dict[tuple[int, int], dict[str, list[float]]] = field(
        default_factory=lambda: {case: {NATIVE: [], KVOFFD: []} for case in CASES}
    )
    cpu: dict[tuple[int, int], dict[str, list[float]]] = field(
        default_factory=lambda: {case: {NATIVE: [], KVOFFD: []} for case in CASES}
    )

    def ratio(self, case: tuple[int, int]) -> float:
        """What kvoffd's worker takes in its calls over what vLLM's does, of the medians."""
        return median(self.calls[case][KVOFFD]) / median(self.calls[case][NATIVE])

    def to_object(self) -> dict[str, object]:
        return {
            f"{stores} stores, {layers} layers": {
                "ratio": self.ratio((stores, layers)),
                "calls_us": {name: median(found) * 1e6 for name, found in self.calls[stores, layers].items()},
                "cpu_us": {name: median(found) * 1e6 for name, found in self.cpu[stores, layers].items()},
            }
            for stores, layers in CASES
        }


def measure_workers(directory: Path, rounds: int, say: Say) -> WorkerSteps:
    """One uncounted round of each case, then ``rounds``, in which both workers take turns."""
    found = WorkerSteps()
    for stores, layers in CASES:
        say(f"a worker's calls, {stores} stores a step, {layers} layers")
        with KvoffdTurn(directory, stores, layers) as own, stand_ins():
            workers: dict[str, Turn] = {NATIVE: NativeTurn(stores, layers), KVOFFD: own}
            for number in range(rounds + 1):
                for name in sorted(workers, reverse=bool(number % 2)):
                    cpu = time.process_time()
                    seconds = workers[name].step()
                    cpu = time.process_time() - cpu
                    if number > 0:
                        found.calls[stores, layers][name].append(seconds)
                        found.cpu[stores, layers][name].append(cpu)
    return found


class Turn(Protocol):
    """One of the two workers."""

    def step(self) -> float:
        """Store some blocks by a job each, and take the results; return the seconds in the worker's calls."""


class NativeTurn:
    """vLLM's worker. Made and used within ``stand_ins``."""

    def __init__(self, stores: int, layers: int) -> None:
        gpu = [torch.zeros((stores, PAGE_BYTES), dtype=torch.int8) for _ in range(layers)]
        caches = CanonicalKVCaches(
            tensors=[CanonicalKVCacheTensor(tensor.as_subclass(_GpuTensor), PAGE_BYTES) for tensor in gpu],
            group_data_refs=[[CanonicalKVCacheRef(layer, PAGE_BYTES) for layer in range(layers)]],
        )
        self._worker = gpu_worker.CPUOffloadingWorker(caches, 1, stores)
        self._worker._store_handler.src_tensors = gpu  # a subclass's calls are slower
        self._stores = stores
        self._ids = itertools.count()

    def step(self) -> float:
        jobs = [(next(self._ids), _blocks(at), CPULoadStoreSpec([at])) for at in range(self._stores)]
        began = time.perf_counter()
        for job_id, source, target in jobs:
            assert self._worker.submit_store(job_id, source, target)
        seconds = time.perf_counter() - began
        time.sleep(STEP_S)
        began = time.perf_counter()
        results: list[TransferResult] = self._worker.get_finished()
        seconds += time.perf_counter() - began
        assert len(results) == self._stores
        return seconds


class KvoffdTurn(Closing):
    """kvoffd's worker."""

    def __init__(self, directory: Path, stores: int, layers: int) -> None:
        self._memory = SharedMemory(stores * layers * PAGE_BYTES, "worker-steps")
        namespace = NamespaceSpec.named(f"worker steps {layers}", layers=layers)
        registration = Registration(
            rank=0,
            blocks_per_key=1,
            memories=(self._memory,),
            tensors=tuple(TensorLayout(0, layer * stores * PAGE_BYTES, PAGE_BYTES, stores) for layer in range(layers)),
            groups=(tuple(PageRef(layer, PAGE_BYTES) for layer in range(layers)),),
        )
        self._client = WorkerClient(directory, namespace, registration, name="worker steps")
        assert self._client.wait_ready(END_S), self._client.problem
        self._worker = KvoffdWorker(
            lambda _: self._client, blocks_per_chunk=1, key_bytes=KEY_BYTES, fence_timeout_s=1.0
        )
        self._worker.join(namespace)
        self._stores = stores
        self._ids = itertools.count()

    def step(self) -> float:
        jobs = [(next(self._ids), _blocks(at), KeyedSpec((os.urandom(KEY_BYTES),))) for at in range(self._stores)]
        began = time.perf_counter()
        for job_id, source, target in jobs:
            assert self._worker.submit_store(job_id, source, target)
        self._worker.flush()
        seconds = time.perf_counter() - began
        time.sleep(STEP_S)
        ended, deadline = 0, time.monotonic() + END_S
        while ended < self._stores:
            assert time.monotonic() < deadline, "the daemon did not end the stores"
            began = time.perf_counter()
            results: list[TransferResult] = self._worker.get_finished()
            seconds += time.perf_counter() - began
            assert not self._worker.take_report().failed_jobs
            ended += len(results)
        return seconds

    def close(self) -> None:
        self._worker.shutdown()
        self._memory.close()


def _blocks(at: int) -> GPULoadStoreSpec:
    return GPULoadStoreSpec([at], group_sizes=[1], block_indices=[0])


class _GpuTensor(torch.Tensor):
    is_cuda = True


class _Event:
    def __init__(self, **_: Any) -> None: ...

    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 0.1


class _Stream:
    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _Platform:
    Stream = _Stream
    _current = _Stream()

    def is_xpu(self) -> bool:
        return False

    def current_stream(self) -> _Stream:
        return self._current

    def stream(self, stream: _Stream) -> _Stream:
        return stream


@contextmanager
def stand_ins() -> Iterator[None]:
    """What vLLM's worker needs of a GPU, doing nothing."""
    with (
        patch.object(gpu_worker, "current_platform", _Platform()),
        patch.object(gpu_worker, "PIN_MEMORY", False),
        patch.object(gpu_worker.torch, "Event", _Event),
        patch.object(gpu_worker.ops, "swap_blocks_batch", lambda *_, **__: None),
    ):
        yield
