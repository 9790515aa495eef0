"""A worker process's half: turns vLLM's transfer jobs into jobs of the daemon."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult

from kvoffd_client.cuda.order import OrderedSender
from kvoffd_client.namespace_spec import NamespaceSpec
from kvoffd_client.vllm.connector_metadata import NO_LEASE, FailedJob, KeyedSpec, TransferMismatch, group_transfers
from kvoffd_client.vllm.log import logger
from kvoffd_client.worker_client import WorkerClient
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import GroupTransfer, JobResult

UNREGISTER_TIMEOUT_S = 10.0


@dataclass
class KvoffdTransferResult(TransferResult):
    """vLLM's TransferResult, with the reason where the job failed."""

    failed: FailedJob | None = None


class KvoffdWorker(OffloadingWorker):
    """vLLM's OffloadingWorker over the daemon. A job that cannot be done ends as failed; none is ever refused.

    Without a namespace (see ``join``) every job fails at once.

    Args:
        connect: makes a client with the KV memory registered in a namespace; None when the memory cannot be shared.
        blocks_per_chunk: engine blocks under one key.
        key_bytes: length of a block hash.
        fence_timeout_s: how long wait() waits for running stores.
        keep_leases: other workers load the same shards under a request's lease.
        sender: sends jobs once the kernels before them are done; None where there are none, as on CPU.
    """

    def __init__(
        self,
        connect: Callable[[NamespaceSpec], WorkerClient | None],
        *,
        blocks_per_chunk: int,
        key_bytes: int,
        fence_timeout_s: float,
        keep_leases: bool = False,
        sender: OrderedSender | None = None,
    ) -> None:
        self._connect = connect
        self._client: WorkerClient | None = None
        self._namespace: NamespaceSpec | None = None
        self._blocks_per_chunk = blocks_per_chunk
        self._key_bytes = key_bytes
        self._fence_timeout_s = fence_timeout_s
        self._keep_leases = keep_leases
        self._sender = sender
        self._asleep = False
        # Results of jobs that the daemon did not get or did not finish. The sender's thread appends to it too.
        self._local_results: deque[KvoffdTransferResult] = deque()

    @property
    def usable(self) -> bool:
        """Whether this worker's memory can be shared with the daemon, as far as is known."""
        return self._client is not None or self._namespace is None or self._asleep

    @property
    def registered(self) -> bytes | None:
        """Fingerprint of the namespace in which the daemon has the memory now; None for none."""
        return self._namespace.fingerprint if self._namespace and self._client and self._client.ready else None

    @property
    def credit_bytes(self) -> int | None:
        """Bytes of stores that may be outstanding; None while that is not known."""
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

        def send(client: WorkerClient, groups: Sequence[GroupTransfer]) -> None:
            client.load(job_id, src_spec.lease_id, groups, self._keep_leases)

        self._submit(job_id, dst_spec, src_spec, is_store=False, send=send)
        return True

    def get_finished(self) -> list[TransferResult]:
        finished: list[TransferResult] = [self._local_results.popleft() for _ in range(len(self._local_results))]
        if self._client is not None:
            finished.extend(_transfer_result(result) for result in self._client.take_results())
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Wait until the daemon touches the blocks of these jobs no more. What was not sent yet fails at once."""
        if self._sender is not None:
            self._sender.withdraw(sorted(job_ids))
        if self._client is not None:
            self._client.fence(sorted(job_ids), self._fence_timeout_s)

    def join(self, namespace: NamespaceSpec) -> None:
        """Register the KV memory in this namespace, leaving another one. Repeatable."""
        if self._namespace is not None and self._namespace.fingerprint == namespace.fingerprint:
            return
        self.leave()
        self._namespace = namespace
        if not self._asleep:
            self._client = self._connect(namespace)

    def leave(self) -> None:
        """Have the daemon let go of the KV memory. Jobs fail from now on, until another ``join``."""
        client, self._client, self._namespace = self._client, None, None
        if client is None:
            return
        if self._sender is not None:
            self._sender.withdraw(self._sender.waiting)
        if not client.unregister(UNREGISTER_TIMEOUT_S):
            logger.warning(
                "kvoffd: the daemon did not confirm within %.0f s that it has released the KV cache; the memory may "
                "stay allocated until it does.",
                UNREGISTER_TIMEOUT_S,
            )
        client.close()
        self._local_results.extend(_transfer_result(result) for result in client.take_results())

    def sleep(self) -> None:
        """The engine is about to give up the KV memory."""
        self._asleep = True
        namespace = self._namespace
        self.leave()
        self._namespace = namespace

    def wake(self) -> None:
        """There is KV memory again, other memory at the same addresses."""
        if self._asleep:
            self._asleep = False
            self._client = self._connect(self._namespace) if self._namespace is not None else None

    def shutdown(self) -> None:
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
        send: Callable[[WorkerClient, Sequence[GroupTransfer]], None],
    ) -> None:
        client = self._client
        if client is None:
            self._fail(job_id, keyed, ErrorCode.UNSUPPORTED)
            return
        try:
            groups = group_transfers(blocks, keyed, self._blocks_per_chunk, self._key_bytes, is_store=is_store)
        except TransferMismatch as error:
            logger.warning_once("kvoffd: a job was not sent, since its blocks do not fit its keys. %s", error)  # type: ignore[attr-defined]
            self._fail(job_id, keyed, ErrorCode.BAD_BLOCK_IDS)
            return
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
        self._local_results.append(KvoffdTransferResult(job_id, False, failed=FailedJob(error, keys)))


def _transfer_result(result: JobResult) -> KvoffdTransferResult:
    keys = tuple((group.group, group.keys) for group in result.failed)
    failed = None if result.ok else FailedJob(result.error, keys)
    return KvoffdTransferResult(result.job_id, result.ok, result.bytes, result.seconds, failed)
