"""A worker process's half: registers its KV memory, turns vLLM's jobs into the daemon's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult

from kvoffd_client.cuda.export import GpuSegment
from kvoffd_client.cuda.order import OrderedSender
from kvoffd_client.shared_memory import Registration, SharedMemory
from kvoffd_client.vllm.gpu import NotShareable, export_tensors
from kvoffd_client.vllm.log import logger
from kvoffd_client.vllm.specs import NO_LEASE, FailedJob, KeyedSpec, TransferMismatch, group_transfers
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.handles import LayerSpec, PageRef, TensorLayout
from kvoffd_proto.messages import GroupTransfer, JobResult


class Client(Protocol):
    """The part of WorkerClient that the worker uses."""

    @property
    def ready(self) -> bool: ...

    @property
    def credit_bytes(self) -> int: ...

    def store(self, job_id: int, groups: Sequence[GroupTransfer]) -> None: ...

    def load(self, job_id: int, lease_id: int, groups: Sequence[GroupTransfer]) -> None: ...

    def take_results(self) -> list[JobResult]: ...

    def fence(self, job_ids: Sequence[int], timeout_s: float) -> None: ...

    def unregister(self, timeout_s: float) -> bool: ...

    def close(self) -> None: ...


UNREGISTER_TIMEOUT_S = 10.0


@dataclass
class KvoffdTransferResult(TransferResult):
    """How a job ended, with the reason where it failed."""

    failed: FailedJob | None = None


def registration_of(
    kv_caches: CanonicalKVCaches,
    memories: Sequence[SharedMemory],
    rank: int,
    blocks_per_chunk: int,
    layers: Sequence[Sequence[LayerSpec]] = (),
) -> Registration:
    """Describe a worker's KV tensors to the daemon, by their places in the shared memory they lie in.

    ``layers`` says by group what the pages are; where it does not fit the tensors, nothing is said of them.

    Raises:
        NotShareable: a tensor lies in no memory that can be shared.
    """
    kinds = {cache.tensor.device.type for cache in kv_caches.tensors}
    found: tuple[Sequence[SharedMemory | GpuSegment], list[TensorLayout]]
    if kinds == {"cuda"}:
        found = export_tensors(kv_caches)
    elif kinds == {"cpu"}:
        found = _shared_tensors(kv_caches, memories)
    else:
        raise NotShareable(
            f"The KV cache is in {' and '.join(sorted(kinds))} memory; kvoffd serves NVIDIA GPUs and CPUs."
        )
    groups = []
    for index, refs in enumerate(kv_caches.group_data_refs):
        told = layers[index] if index < len(layers) and len(layers[index]) == len(refs) else [None] * len(refs)
        pages = zip(refs, told, strict=True)
        groups.append(tuple(PageRef(ref.tensor_idx, ref.page_size_bytes, layer) for ref, layer in pages))
    return Registration(
        rank=rank,
        blocks_per_key=blocks_per_chunk,
        memories=tuple(found[0]),
        tensors=tuple(found[1]),
        groups=tuple(groups),
    )


def _shared_tensors(
    kv_caches: CanonicalKVCaches, memories: Sequence[SharedMemory]
) -> tuple[list[SharedMemory], list[TensorLayout]]:
    tensors = []
    used: list[SharedMemory] = []
    for cache in kv_caches.tensors:
        tensor = cache.tensor
        address = int(tensor.data_ptr())
        memory = next((item for item in memories if 0 <= address - _address(item) < item.size_bytes), None)
        if memory is None:
            raise NotShareable(
                "vLLM did not allocate its KV cache in the memory that kvoffd offered (get_mem_pool_context was not "
                "called, or another connector's was)."
            )
        if memory not in used:
            used.append(memory)
        tensors.append(
            TensorLayout(
                segment=used.index(memory),
                offset_bytes=address - _address(memory),
                stride_bytes=int(tensor.stride(0)) * int(tensor.element_size()),
                num_blocks=int(tensor.shape[0]),
            )
        )
    return used, tensors


class KvoffdWorker(OffloadingWorker):
    """vLLM's OffloadingWorker over the daemon. A job that cannot be done ends as failed; none is ever refused.

    Args:
        client: connection to the daemon; None when this worker's memory cannot be shared, then every job fails at once.
        blocks_per_chunk: engine blocks under one key.
        key_bytes: length of a block hash.
        fence_timeout_s: how long wait() waits for running stores.
        sender: sends jobs once the kernels before them are done; None where there are none, as on CPU.
        reconnect: makes a new client after the engine's sleep has ended the old one.
    """

    def __init__(
        self,
        client: Client | None,
        *,
        blocks_per_chunk: int,
        key_bytes: int,
        fence_timeout_s: float,
        sender: OrderedSender | None = None,
        reconnect: Callable[[], Client | None] = lambda: None,
    ) -> None:
        self._client = client
        self._blocks_per_chunk = blocks_per_chunk
        self._key_bytes = key_bytes
        self._fence_timeout_s = fence_timeout_s
        self._sender = sender
        self._reconnect = reconnect
        self._asleep = False
        # Filled by the sender's thread too.
        self._local: deque[KvoffdTransferResult] = deque()

    @property
    def usable(self) -> bool:
        """This worker's memory can be shared with the daemon, now or after the engine's sleep."""
        return self._client is not None or self._asleep

    @property
    def credit_bytes(self) -> int | None:
        """Bytes of stores that may be outstanding; None while there is no telling."""
        return self._client.credit_bytes if self._client is not None and self._client.ready else None

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: KeyedSpec) -> bool:
        """Start a store. Always True: what cannot be stored is reported as failed."""
        self._submit(
            job_id, src_spec, dst_spec, is_store=True, send=lambda client, groups: client.store(job_id, groups)
        )
        return True

    def submit_load(
        self, job_id: int, src_spec: KeyedSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Start a load. Always True. ``expedited`` (0.33) makes no difference: loads never queue behind stores."""
        if src_spec.lease_id == NO_LEASE:
            self._fail(job_id, src_spec, ErrorCode.UNKNOWN_LEASE)
            return True
        lease_id = src_spec.lease_id
        self._submit(
            job_id,
            dst_spec,
            src_spec,
            is_store=False,
            send=lambda client, groups: client.load(job_id, lease_id, groups),
        )
        return True

    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended since the last call."""
        finished: list[TransferResult] = []
        while self._local:
            finished.append(self._local.popleft())
        if self._client is not None:
            finished.extend(_transfer_result(result) for result in self._client.take_results())
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return when the daemon touches the blocks of these jobs no more. What was not sent yet fails at once."""
        if self._sender is not None:
            self._sender.withdraw(sorted(job_ids))
        if self._client is not None:
            self._client.fence(sorted(job_ids), self._fence_timeout_s)

    def unregister(self) -> None:
        """Have the daemon let go of the KV memory, which the engine is about to give up. Jobs fail from now on."""
        client, self._client = self._client, None
        if client is None:
            return
        self._asleep = True
        if self._sender is not None:
            self._sender.withdraw(self._sender.waiting)
        if not client.unregister(UNREGISTER_TIMEOUT_S):
            logger.warning(
                "kvoffd: the daemon did not confirm within %.0f s that it has let go of the KV cache; the memory may "
                "stay allocated until it does.",
                UNREGISTER_TIMEOUT_S,
            )
        client.close()
        self._local.extend(_transfer_result(result) for result in client.take_results())

    def restore(self) -> None:
        """Register the KV memory again, which may be another one at the same addresses."""
        if self._asleep:
            self._asleep = False
            self._client = self._reconnect()

    def shutdown(self) -> None:
        """End the connection. Repeatable."""
        if self._sender is not None:
            self._sender.close()
        if self._client is not None:
            self._client.close()

    def _submit(
        self,
        job_id: int,
        blocks: GPULoadStoreSpec,
        keyed: KeyedSpec,
        *,
        is_store: bool,
        send: Callable[[Client, Sequence[GroupTransfer]], None],
    ) -> None:
        if self._client is None:
            self._fail(job_id, keyed, ErrorCode.UNSUPPORTED)
            return
        try:
            groups = group_transfers(blocks, keyed, self._blocks_per_chunk, self._key_bytes, is_store=is_store)
        except TransferMismatch as error:
            logger.warning_once("kvoffd: a job was not sent, since its blocks do not fit its keys. %s", error)  # type: ignore[attr-defined]
            self._fail(job_id, keyed, ErrorCode.BAD_BLOCK_IDS)
            return
        client = self._client
        if self._sender is None:
            send(client, groups)
            return
        try:
            self._sender.submit(job_id, lambda: send(client, groups), lambda error: self._fail(job_id, keyed, error))
        except RuntimeError as error:  # what torch raises for a GPU that has failed
            logger.warning_once("kvoffd: a job was not sent, since the GPU failed: %s", error)  # type: ignore[attr-defined]
            self._fail(job_id, keyed, ErrorCode.COPY_FAILED)

    def _fail(self, job_id: int, keyed: KeyedSpec, error: ErrorCode) -> None:
        keys = tuple((index, hashes) for index, hashes in enumerate(keyed.groups) if hashes)
        self._local.append(KvoffdTransferResult(job_id, False, failed=FailedJob(error, keys)))


def _address(memory: SharedMemory) -> int:
    return int(memory.view.ctypes.data)


def _transfer_result(result: JobResult) -> KvoffdTransferResult:
    failed = None
    if not result.ok:
        failed = FailedJob(result.error, tuple((group.group, group.keys) for group in result.failed))
    return KvoffdTransferResult(result.job_id, result.ok, result.bytes, result.seconds, failed)


def connect_worker(
    kv_caches: CanonicalKVCaches,
    memories: Sequence[SharedMemory],
    rank: int,
    blocks_per_chunk: int,
    make_client: Callable[[Registration], Any],
    layers: Sequence[Sequence[LayerSpec]] = (),
) -> Any:
    """Return a client with the memory registered, or None, with one warning, when it cannot be shared."""
    try:
        return make_client(registration_of(kv_caches, memories, rank, blocks_per_chunk, layers))
    except NotShareable as reason:
        logger.warning("kvoffd: worker %d stores and loads nothing. %s", rank, reason)
        return None
