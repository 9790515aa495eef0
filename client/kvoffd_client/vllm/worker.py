"""A worker process's half: turns vLLM's transfer jobs into jobs of the daemon."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult

from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.ordered_sender import OrderedSender
from kvoffd_client.vllm.connector_metadata import (
    NO_LEASE,
    FailedJob,
    KeyedSpec,
    WorkerReport,
)
from kvoffd_client.vllm.kv_memory import NotShareable
from kvoffd_client.vllm.log import logger
from kvoffd_client.worker_client import GroupTransfer, Job, WorkerClient
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import GroupKeys

UNREGISTER_TIMEOUT_S = 10.0
KERNELS_TIMEOUT_S = 300.0
"""A fence gives up kernels that run longer, with what they hold back; vLLM's executors take such a step for hanging."""


class KvoffdWorker(OffloadingWorker):
    """vLLM's OffloadingWorker over the daemon. A job that cannot be done ends as failed; none is ever refused.

    Failed jobs are reported to vLLM as ended, since it asserts that none fails. ``take_report`` has those that did.

    Without a namespace (see ``join``) every job fails at once.

    Args:
        connect: makes a client with the KV memory registered in a namespace; raises NotShareable.
        blocks_per_chunk: engine blocks under one key.
        key_bytes: length of a block hash.
        fence_timeout_s: how long wait() waits for running stores, once no kernel runs.
        keep_leases: other workers load the same shards under a request's lease.
        sender: sends jobs once the kernels before them are done; None where there are none, as on CPU.
    """

    def __init__(
        self,
        connect: Callable[[NamespaceSpec], WorkerClient],
        *,
        blocks_per_chunk: int,
        key_bytes: int,
        fence_timeout_s: float,
        keep_leases: bool = False,
        sender: OrderedSender | None = None,
    ) -> None:
        self._connect = connect
        self._client: WorkerClient | None = None
        self._not_shareable = ""
        self._left: list[WorkerClient] = []
        """Clients of namespaces that were left, with loads that the daemon may still copy, or results."""
        self._namespace: NamespaceSpec | None = None
        self._blocks_per_chunk = blocks_per_chunk
        self._key_bytes = key_bytes
        self._fence_timeout_s = fence_timeout_s
        self._keep_leases = keep_leases
        self._sender = sender
        self._asleep = False
        self._unsent: dict[int, tuple[GPULoadStoreSpec, bool]] = {}
        """Of this step's jobs, by id, their blocks, and whether it is a store."""
        self._specs: dict[int, KeyedSpec] = {}
        """Of jobs that have not ended, by id."""
        self._report = WorkerReport()
        self.failed_requests: set[str] = set()
        """Whose load failed, until somebody takes them."""
        self._reported_credit: int | None = None
        # Jobs that the daemon did not get or did not finish, and why. The sender's thread appends to it too.
        self._failed: deque[tuple[int, ErrorCode]] = deque()

    @property
    def problem(self) -> str:
        """Why the daemon does not get this worker's memory; empty where it has it, or may still get it."""
        refusal = self._client.refusal if self._client is not None else None
        return self._not_shareable if refusal is None else str(refusal)

    @property
    def registered(self) -> bytes | None:
        """Fingerprint of the namespace in which the daemon has the memory now; None for none."""
        return self._namespace.fingerprint if self._namespace and self._client and self._client.ready else None

    @property
    def credit_bytes(self) -> int | None:
        """Bytes of stores that may be outstanding; None while that is not known."""
        return self._client.credit_bytes if self._client is not None and self._client.ready else None

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: KeyedSpec) -> bool:
        """Have ``flush`` start a store. Always True: what cannot be stored is reported as failed."""
        self._specs[job_id], self._unsent[job_id] = dst_spec, (src_spec, True)
        return True

    def submit_load(
        self, job_id: int, src_spec: KeyedSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Have ``flush`` start a load. Always True. ``expedited`` (0.33) makes no difference: loads never wait."""
        self._specs[job_id], self._unsent[job_id] = src_spec, (dst_spec, False)
        return True

    def flush(self) -> None:
        """Start the jobs of this step, in one message. Repeatable."""
        unsent, self._unsent = self._unsent, {}
        jobs: list[Job] = []
        for job_id, (blocks, is_store) in unsent.items():
            made = self._make_job(job_id, blocks, is_store=is_store)
            if isinstance(made, Job):
                jobs.append(made)
            else:
                self._failed.append((job_id, made))
        if not jobs:
            return
        if self._client is None:
            self._failed.extend([(job.job_id, ErrorCode.UNSUPPORTED) for job in jobs])
        elif self._sender is None:
            self._client.submit(jobs)
        else:
            try:
                self._sender.submit(jobs, self._client.submit, self._fail_unsent)
            except RuntimeError as error:  # what torch raises for a GPU that has failed
                logger.warning_once("kvoffd: jobs were not sent, since the GPU failed: %s", error)  # type: ignore[attr-defined]
                for job in jobs:
                    self._fail_unsent(job, ErrorCode.COPY_FAILED)

    def _make_job(self, job_id: int, blocks: GPULoadStoreSpec, *, is_store: bool) -> Job | ErrorCode:
        """A job of vLLM's block list and our keys; why it fails where they do not fit.

        vLLM gives per group the number of blocks and the index, in the request, of the first of them; blocks of a key
        before that one are left out. Those of a store end where its keys end, those of a load inside the last key.
        """
        keyed, per_key, start = self._specs[job_id], self._blocks_per_chunk, 0
        if not is_store and keyed.lease_id == NO_LEASE:
            return ErrorCode.UNKNOWN_LEASE
        groups: list[GroupTransfer] = []
        counts = [len(keys) // self._key_bytes for keys in keyed.groups]
        fits = len(blocks.group_sizes) == len(counts)
        places = zip(blocks.group_sizes, blocks.block_indices, keyed.groups, counts, strict=False)
        for index, (size, first_index, keys, count) in enumerate(places):
            ids = blocks.block_ids[start : start + size]
            start += size
            if size == 0 and count == 0:
                continue
            first_block = first_index % per_key
            covered = first_block + size
            fits &= size > 0 and (covered == count * per_key if is_store else -(-covered // per_key) == count)
            origins = keyed.origins.get(index, (b"", b""))
            groups.append(GroupTransfer(index, keys, ids.astype("<i4").tobytes(), first_block, *origins))
        if not fits:
            logger.warning_once(  # type: ignore[attr-defined]
                "kvoffd: a job was not sent, since its blocks do not fit its keys: by group %s blocks, from %s on, "
                "for %s keys of %d blocks.",
                *(str(list(blocks.group_sizes)), str(list(blocks.block_indices)), str(counts), per_key),
            )
            return ErrorCode.BAD_BLOCK_IDS
        return Job(job_id, groups, None if is_store else keyed.lease_id, not is_store and self._keep_leases)

    def _fail_unsent(self, job: Job, error: ErrorCode) -> None:
        self._failed.append((job.job_id, error))

    def get_finished(self) -> list[TransferResult]:
        self.flush()
        finished = [self._ended(*self._failed.popleft()) for _ in range(len(self._failed))]
        results = [result for client in self._clients() for result in client.take_results()]
        for client in [client for client in self._left if not client.unfinished]:
            self._left.remove(client)
            client.close()
            results += client.take_results()
        for result in results:
            if not result.ok:
                finished.append(self._ended(result.job_id, result.error, result.failed))
                continue
            spec = self._specs.pop(result.job_id, None)
            if spec is not None and spec.load_tokens and result.seconds is not None:
                self._report.load_times[result.job_id] = spec.load_tokens, result.seconds
            finished.append(TransferResult(result.job_id, True, result.bytes, result.seconds))
        return finished

    def take_report(self) -> WorkerReport:
        """Return what is new since the last call, without the jobs that ended and what is in memory."""
        credit_bytes = self.credit_bytes
        if credit_bytes != self._reported_credit:
            self._reported_credit = self._report.credit_bytes = credit_bytes
        report, self._report = self._report, WorkerReport()
        return report

    def _ended(self, job_id: int, error: ErrorCode | None, keys: Sequence[GroupKeys] = ()) -> TransferResult:
        """Note why a job failed; return for vLLM that it ended."""
        spec = self._specs.pop(job_id, None)
        if spec is not None:
            self._report.failed_jobs[job_id] = FailedJob(error, keys or spec.keys, spec.request_id)
            if spec.request_id is not None:
                self.failed_requests.add(spec.request_id)
        return TransferResult(job_id, True)

    def wait(self, job_ids: set[int]) -> None:
        """Wait until the daemon touches the blocks of these jobs no more.

        Nothing is cancelled while kernels run that were launched before: the GPU would not begin the next step either.
        What they hold back is sent when they are done. vLLM's own worker waits for them too.
        """
        began = time.monotonic()
        self.flush()
        wanted = sorted(job_ids)
        kernels_done_at = self._note_kernels()
        if self._sender is not None:
            self._sender.withdraw(wanted, KERNELS_TIMEOUT_S)
        for client in self._clients():
            client.fence(wanted, self._fence_timeout_s, lambda: kernels_done_at() == math.inf)
        now = time.monotonic()
        self._report.waited_s += now - min(now, max(began, kernels_done_at()))

    def _note_kernels(self) -> Callable[[], float]:
        """Return what says when the kernels launched so far were done; infinity until then."""
        if self._sender is None:
            return lambda: -math.inf
        try:
            done_at = self._sender.mark()
        except RuntimeError:  # the GPU has failed
            return lambda: -math.inf
        until = time.monotonic() + KERNELS_TIMEOUT_S
        return lambda: done_at() if time.monotonic() < until else until

    def join(self, namespace: NamespaceSpec) -> None:
        """Register the KV memory in this namespace, leaving another one. Repeatable; also where it failed."""
        is_same = self._namespace is not None and self._namespace.fingerprint == namespace.fingerprint
        if is_same and (self._client is not None or self._asleep):
            return
        self.leave()
        self._namespace = namespace
        if not self._asleep:
            self._register(namespace)

    def _register(self, namespace: NamespaceSpec) -> None:
        try:
            self._client = self._connect(namespace)
        except NotShareable as reason:
            self._not_shareable = str(reason)
            logger.warning("kvoffd: this worker stores and loads nothing. %s", reason)

    def leave(self) -> None:
        """Have the daemon release the KV memory. Jobs fail from now on, until another ``join``.

        A load that the daemon does not end fails when nothing of the daemon can touch its blocks any more.
        """
        client, self._client, self._namespace, self._not_shareable = self._client, None, None, ""
        if client is None:
            return
        unsent, self._unsent = self._unsent, {}
        self._failed.extend([(job_id, ErrorCode.CANCELLED) for job_id in unsent])
        if self._sender is not None:
            self._sender.withdraw(self._sender.waiting)
        released = client.unregister(UNREGISTER_TIMEOUT_S)
        if not released:
            logger.warning(
                "kvoffd: the daemon did not confirm within %.0f s that it has released the KV cache; the memory may "
                "stay allocated until it does.",
                UNREGISTER_TIMEOUT_S,
            )
        if released or not client.unfinished:
            client.close()
        self._left.append(client)

    def _clients(self) -> list[WorkerClient]:
        return self._left if self._client is None else [*self._left, self._client]

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
            if self._namespace is not None:
                self._register(self._namespace)

    def shutdown(self) -> None:
        if self._sender is not None:
            self._sender.close()
        for client in self._clients():
            client.close()
