"""The worker's half of the connector: turns vLLM's transfer jobs into jobs of the daemon."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult

from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.ordered_sender import OrderedSender, StreamMark
from kvoffd_client.vllm.chunk_groups import NO_LEASE, KeyedSpec
from kvoffd_client.vllm.connector_metadata import FailedJob, LoadTime, WorkerNews
from kvoffd_client.vllm.kv_memory import NotShareable
from kvoffd_client.vllm.log import logger
from kvoffd_client.worker_client import Job, WorkerClient
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import GroupKeys, GroupTransfer, blocks_fit

UNREGISTER_TIMEOUT_S = 10.0
"""Time limit of the daemon's confirmation that it has released the KV memory."""
KERNELS_TIMEOUT_S = 300.0
"""Time limit of a fence for running kernels; vLLM's executors consider a longer step hung."""


class LaunchedKernels:
    """The kernels that were launched before this was made. There are none on CPU, nor on a GPU that has failed."""

    def __init__(self, sender: OrderedSender | None) -> None:
        self._began = time.monotonic()
        self._mark: StreamMark | None = None
        if sender is not None:
            with suppress(RuntimeError):  # the GPU has failed
                self._mark = sender.mark()

    @property
    def ended_at(self) -> float | None:
        """Time when they had ended; None while they run, but for KERNELS_TIMEOUT_S at most."""
        if self._mark is None:
            return self._began
        latest = self._began + KERNELS_TIMEOUT_S
        return self._mark.ended_at if time.monotonic() < latest else latest


class KvoffdWorker(OffloadingWorker):
    """vLLM's OffloadingWorker over the daemon. Jobs may fail, but are never refused.

    vLLM asserts that no job fails, so failed jobs are reported to it as successful; ``take_news`` returns the
    failures. Without a namespace (see ``join``) every job fails at once.

    Args:
        connect: returns a client that registers the KV memory in a namespace; raises NotShareable.
        blocks_per_chunk: engine blocks per key.
        key_bytes: length of a block hash.
        fence_timeout_s: time that wait() waits for running stores, once no kernel runs.
        keep_leases: other workers load the same shards under a request's lease.
        hears_of_credit: the daemon tells it the credit of stores: of workers that load the same shards only the one
            that stores.
        sender: sends jobs after earlier kernels have finished; None on CPU.
    """

    def __init__(
        self,
        connect: Callable[[NamespaceSpec], WorkerClient],
        *,
        blocks_per_chunk: int,
        key_bytes: int,
        fence_timeout_s: float,
        keep_leases: bool = False,
        hears_of_credit: bool = True,
        sender: OrderedSender | None = None,
    ) -> None:
        self._connect = connect
        self._client: WorkerClient | None = None
        self._not_shareable = ""
        self._former: list[WorkerClient] = []
        """Clients of former namespaces, with loads that the daemon may still copy, or results."""
        self._namespace: NamespaceSpec | None = None
        self._blocks_per_chunk = blocks_per_chunk
        self._key_bytes = key_bytes
        self._fence_timeout_s = fence_timeout_s
        self._keep_leases, self._hears_of_credit = keep_leases, hears_of_credit
        self._sender = sender
        self._asleep = False
        self._unsent: dict[int, tuple[GPULoadStoreSpec, bool]] = {}
        """Blocks of this step's jobs by id, and whether the job is a store."""
        self._specs: dict[int, KeyedSpec] = {}
        """Specs of unfinished jobs by id."""
        self._news = WorkerNews()
        self._failed_requests: set[str] = set()
        """Requests whose load failed, until they are taken."""
        self._unsent_failures: deque[tuple[int, ErrorCode]] = deque()
        """Jobs that were not sent, with the reason. The sender's thread appends to it too."""

    @property
    def problem(self) -> str:
        """Reason why the worker's memory cannot be registered; empty if it is, or may still be."""
        refusal = self._client.refusal if self._client is not None else None
        return self._not_shareable if refusal is None else str(refusal)

    @property
    def registered(self) -> bytes | None:
        """Fingerprint of the namespace in which the memory is registered; None if it is not."""
        return self._namespace.fingerprint if self._namespace and self._client and self._client.ready else None

    @property
    def daemon(self) -> int | None:
        """Random number of the run of the daemon with which the memory is registered; None if it is not."""
        return self._client.epoch if self._client is not None and self._client.ready else None

    def compare_daemon(self, daemon: int) -> None:
        """Log why the memory is not registered with the scheduler's ``daemon``, unless it is, or that was logged."""
        if self._client is None or self.problem:
            return
        why = self._client.problem
        if why is None:
            if self._client.epoch == daemon:
                return
            why = (
                f"It is registered with another daemon than the scheduler, which it finds in {self._client.directory}."
            )
        logger.warning("kvoffd: this worker stores and loads nothing. %s", why)

    @property
    def credit_bytes(self) -> int | None:
        """Bytes of stores that may be outstanding; None while unknown, or if it does not hear of changes."""
        if not self._hears_of_credit or self._client is None or not self._client.ready:
            return None
        return self._client.credit_bytes

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: KeyedSpec) -> bool:
        """Queue a store for ``flush``. Always True: failures are reported later."""
        self._specs[job_id], self._unsent[job_id] = dst_spec, (src_spec, True)
        return True

    def submit_load(
        self, job_id: int, src_spec: KeyedSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Queue a load for ``flush``. Always True. Ignores ``expedited`` (0.33): loads are not queued behind stores."""
        self._specs[job_id], self._unsent[job_id] = src_spec, (dst_spec, False)
        return True

    def flush(self) -> None:
        """Start the queued jobs, in one message. Repeatable."""
        unsent, self._unsent = self._unsent, {}
        jobs: list[Job] = []
        for job_id, (blocks, is_store) in unsent.items():
            made = self._make_job(job_id, blocks, is_store=is_store)
            if isinstance(made, Job):
                jobs.append(made)
            else:
                self._unsent_failures.append((job_id, made))
        if not jobs:
            return
        if self._client is None:
            self._unsent_failures.extend([(job.job_id, ErrorCode.UNKNOWN_REGISTRATION) for job in jobs])
        elif self._sender is None:
            self._send(self._client, jobs)
        else:
            try:
                self._sender.submit(jobs, partial(self._send, self._client), self._fail_unsent)
            except RuntimeError as error:  # torch's error for a failed GPU
                logger.warning_once("kvoffd: jobs were not sent because the GPU failed: %s", error)  # type: ignore[attr-defined]
                for job in jobs:
                    self._fail_unsent(job, ErrorCode.CANCELLED)

    def _send(self, client: WorkerClient, jobs: list[Job]) -> None:
        """Submit jobs together. If the client refuses them, submit each alone: a wrong one ends no other, nor vLLM."""
        try:
            client.submit(jobs)
        except ValueError:
            for job in jobs:
                try:
                    client.submit([job])
                except ValueError as error:
                    logger.warning_once("kvoffd: a job was not sent because it cannot be one: %s", error)  # type: ignore[attr-defined]
                    self._fail_unsent(job, ErrorCode.BAD_KEYS)

    def _make_job(self, job_id: int, blocks: GPULoadStoreSpec, *, is_store: bool) -> Job | ErrorCode:
        """Return the job of vLLM's blocks and our keys, or an error code if they do not fit.

        For each group vLLM gives the number of blocks and the first one's index in the request, which may lie inside
        its key. A store ends at the end of its last key, a load may end inside it.
        """
        keyed, per_key, start = self._specs[job_id], self._blocks_per_chunk, 0
        if not is_store and keyed.lease_id == NO_LEASE:
            return ErrorCode.UNKNOWN_LEASE
        groups: list[GroupTransfer] = []
        counts = [len(keys) // self._key_bytes for keys in keyed.groups]
        fits = len(blocks.group_sizes) == len(counts)
        of_groups = zip(blocks.group_sizes, blocks.block_indices, keyed.groups, counts, strict=False)
        for index, (size, first_index, keys, count) in enumerate(of_groups):
            ids = blocks.block_ids[start : start + size]
            start += size
            if size == 0 and count == 0:
                continue
            first_block = first_index % per_key
            fits &= blocks_fit(count, size, first_block, per_key, store=is_store)
            parents, tokens = keyed.origins.get(index, (b"", b""))
            before = keyed.before.get(index, b"")
            groups.append(
                GroupTransfer(index, keys, ids.astype("<i4").tobytes(), first_block, parents, tokens, before=before)
            )
        if not fits or not groups:
            logger.warning_once(  # type: ignore[attr-defined]
                "kvoffd: a job was not sent because its blocks do not fit its keys: by group %s blocks, from index %s, "
                "for %s keys of %d blocks.",
                *(str(list(blocks.group_sizes)), str(list(blocks.block_indices)), str(counts), per_key),
            )
            return ErrorCode.BAD_BLOCK_IDS
        return Job(job_id, groups, None if is_store else keyed.lease_id, not is_store and self._keep_leases)

    def _fail_unsent(self, job: Job, error: ErrorCode) -> None:
        self._unsent_failures.append((job.job_id, error))

    def get_finished(self) -> list[TransferResult]:
        self.flush()
        finished = [self._record_failure(*self._unsent_failures.popleft()) for _ in range(len(self._unsent_failures))]
        results = [result for client in self._clients() for result in client.take_results()]
        for client in [client for client in self._former if not client.unfinished]:
            self._former.remove(client)
            client.close()
            results += client.take_results()  # that came since
        for result in results:
            self._news.rejected += result.rejected
            if not result.ok:
                finished.append(self._record_failure(result.job_id, result.error, result.failed))
                continue
            spec = self._specs.pop(result.job_id, None)
            if spec is not None and spec.request_id is not None and result.seconds is not None:
                self._news.load_times[spec.request_id] = LoadTime(spec.load_tokens, result.seconds)
            finished.append(TransferResult(result.job_id, True, result.bytes, result.seconds))
        return finished

    def take_news(self) -> WorkerNews:
        """Return the news since the last call, except ended jobs and the memory's state."""
        news, self._news = self._news, WorkerNews()
        return news

    def take_failed_requests(self) -> set[str]:
        """Return the requests whose load failed since the last call."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def _record_failure(self, job_id: int, error: ErrorCode | None, keys: Sequence[GroupKeys] = ()) -> TransferResult:
        """Record why a job failed, and return a success for vLLM."""
        spec = self._specs.pop(job_id, None)
        if spec is not None:
            self._news.failed_jobs.append(FailedJob(job_id, error, keys or spec.keys, spec.request_id))
            if spec.request_id is not None:
                self._failed_requests.add(spec.request_id)
        return TransferResult(job_id, True)

    def wait(self, job_ids: set[int]) -> None:
        """Wait until the daemon no longer accesses the blocks of these jobs.

        Nothing is cancelled while earlier kernels run, since the GPU cannot begin the next step either. Jobs that wait
        for them are sent when they finish. vLLM's own worker waits for kernels too.
        """
        began = time.monotonic()
        self.flush()
        wanted = sorted(job_ids)
        kernels = LaunchedKernels(self._sender)
        if self._sender is not None:
            self._sender.withdraw(wanted, KERNELS_TIMEOUT_S)  # those fail that are not sent by then
        for client in self._clients():
            client.fence(wanted, self._fence_timeout_s, lambda: kernels.ended_at is None)
        if (ended_at := kernels.ended_at) is not None:
            self._news.waited_s += time.monotonic() - max(began, ended_at)

    def join(self, namespace: NamespaceSpec) -> None:
        """Leave any other namespace and register the KV memory in this one. Repeatable, also after a failure."""
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
        """Have the daemon release the KV memory. Jobs fail until the next ``join``.

        A load that the daemon does not finish fails once the daemon can no longer access its blocks.
        """
        client, self._client, self._namespace, self._not_shareable = self._client, None, None, ""
        if client is None:
            return
        unsent, self._unsent = self._unsent, {}
        self._unsent_failures.extend([(job_id, ErrorCode.CANCELLED) for job_id in unsent])
        if self._sender is not None:
            self._sender.withdraw(self._sender.waiting)
        released = client.unregister(UNREGISTER_TIMEOUT_S)
        if not released:
            logger.warning(
                "kvoffd: the daemon did not confirm that it released the KV cache; the memory may stay allocated until "
                "it does."
            )
        if released or not client.unfinished:
            client.close()  # jobs without a result fail: the daemon no longer accesses their blocks
        self._former.append(client)  # get_finished() takes its last results

    def _clients(self) -> list[WorkerClient]:
        return self._former if self._client is None else [*self._former, self._client]

    def sleep(self) -> None:
        """Leave the namespace before the engine frees the KV memory."""
        self._asleep = True
        namespace = self._namespace
        self.leave()
        self._namespace = namespace

    def wake(self) -> None:
        """Register the new KV memory, which is at the same addresses."""
        if self._asleep:
            self._asleep = False
            if self._namespace is not None:
                self._register(self._namespace)

    def shutdown(self) -> None:
        if self._sender is not None:
            self._sender.close()
        for client in self._clients():
            client.close()
