"""vLLM's own scheduler with the connector's scheduler half; the daemon, the workers and the model are the test's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from unittest.mock import patch

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvoffd_client import NamespaceSpec
from kvoffd_client.vllm.connector import KvoffdConnector
from kvoffd_client.vllm.connector_metadata import FailedJob, WorkerNews
from kvoffd_client.vllm.engine_namespace import MemoryState, Search
from kvoffd_client.vllm.manager import KvoffdManager
from kvoffd_client.vllm.waits import LONG_AGO
from kvoffd_proto.errors import ErrorCode
from tests.kit.clock import Clock
from tests.vllm.vllm_config import make_scheduler
from tests.vllm.vllm_fakes import FakeSchedulerClient, split

TOKEN = 7
CREDIT_BYTES = 1 << 20


class SchedulerHarness:
    """An engine's scheduler, which computes what it schedules at once.

    Attributes:
        there: block hashes that the daemon has.
        answers: whether lookups are answered in the step in which they are sent.
        failing: requests whose next load fails.
        held: requests whose loads do not end; others end in the step in which they begin.
        loading: jobs of loads that have not ended, by request.
        loaded: requests whose load ended well.
        stored: groups and keys that the workers were given to store.
        ran: requests that computed, step after step.
        keeps_stored: whether the daemon has what was stored from the next step on.
        cached: by request, tokens that it did not compute.
    """

    def __init__(self, config: Any, blocks: int, *groups: Any, hash_tokens: int = 32) -> None:
        self.clock = Clock()
        with patch("kvoffd_client.vllm.spec.monotonic", self.clock):
            self.scheduler, self._hasher = make_scheduler(config, blocks, *groups, hash_tokens=hash_tokens)
        above = self.scheduler.connector
        self.connector = next(one for one in getattr(above, "_connectors", [above]) if isinstance(one, KvoffdConnector))
        self.manager: KvoffdManager = self.connector._manager
        self.client = FakeSchedulerClient(self.clock)
        namespace: Any = self.manager.namespace
        namespace.client, namespace.current = self.client, NamespaceSpec.named("model")
        namespace._search, namespace._search_began = Search.FOUND, LONG_AGO
        self.manager.stores.credit_bytes = CREDIT_BYTES
        self.there: set[bytes] = set()
        self.answers = True
        self.failing: set[str] = set()
        self.held: set[str] = set()
        self.loading: dict[str, int] = {}
        self.stored: list[tuple[int, bytes]] = []
        self.ran: list[str] = []
        self.loaded: list[str] = []
        self.keeps_stored = False
        self.cached: dict[str, int] = {}
        self._ended: dict[int, int] = {}

    def close(self) -> None:
        self.scheduler.shutdown()

    def add(self, name: str, tokens: list[int], max_tokens: int = 1, **arguments: Any) -> Any:
        """A new request of this prompt."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        parameters = arguments.pop("parameters", None)
        request = Request(name, tokens, sampling, None, block_hasher=self._hasher, **arguments)
        request.kv_transfer_params = parameters
        self.scheduler.add_request(request)
        return request

    def register(self, *, registered: bool) -> None:
        """Let the worker report whether the daemon has its memory."""
        namespace = self.manager.namespace
        assert namespace.current is not None
        fingerprint = namespace.current.fingerprint if registered else None
        namespace.update({0: MemoryState(namespace.current, "weights", namespace.generation, registered=fingerprint)})

    @property
    def unanswered(self) -> list[int]:
        """Indices of the lookups that wait."""
        return [index for index, (future, _) in enumerate(self.client.asked) if not future.done]

    def answer(self) -> None:
        """Answer the lookups that wait."""
        for index in self.unanswered:
            self.client.answer(self.there, index)

    def answer_coming(self, wait_s: float) -> None:
        """Answer the lookups that wait: all comes up from a disk in this time."""
        for index in self.unanswered:
            coming = [one for group in self.client.asked[index][1] for one in split(group.keys)]
            self.client.answer(set(), index, coming=coming, wait_s=wait_s)

    def abort(self, request: Any) -> None:
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> Any:
        """Make one step; returns what the scheduler chose."""
        if self.answers:
            self.answer()
        output = self.scheduler.schedule()
        meta = output.kv_connector_metadata
        children = [meta] if isinstance(meta, OffloadingConnectorMetadata) else meta.metadata
        (meta,) = [one for one in children if isinstance(one, OffloadingConnectorMetadata)]
        for job in meta.store_jobs.values():
            self.stored += [(group.group, key) for group in job.dst_spec.keys for key in split(group.keys)]
        if self.keeps_stored:
            self.there |= {key for _, key in self.stored}
        self.loading |= {job.req_id: job_id for job_id, job in meta.load_jobs.items()}
        self._ended |= dict.fromkeys(self.work(output, meta), 1)
        ended = {name: job for name, job in self.loading.items() if name not in self.held}
        self.loading = {name: job for name, job in self.loading.items() if name in self.held}
        self.loaded += [name for name in ended if name not in self.failing]
        failing = self.failing & ended.keys()
        failed = [FailedJob(ended[name], ErrorCode.SESSION_ENDED, (), name) for name in failing]
        report = WorkerNews(completed_jobs=self._ended | dict.fromkeys(ended.values(), 1), failed_jobs=failed)
        self._ended = {}
        transfers = KVConnectorOutput(finished_recving=set(ended))
        transfers.kv_connector_worker_meta = report if len(children) == 1 else None
        transfers.failed_recving = set(ended) & self.failing
        self.failing -= transfers.failed_recving
        names = list(output.num_scheduled_tokens)
        self.ran += names
        requests = self.scheduler.requests
        sampled = [[TOKEN] if requests[each].num_computed_tokens >= requests[each].num_tokens else [] for each in names]
        result = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled)
        result.kv_connector_output = transfers
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                if one.prefill_stats is not None:
                    self.cached[one.request_id] = one.prefill_stats.num_cached_tokens
        self.clock.now += 0.01
        return output

    def work(self, output: Any, meta: Any) -> Collection[int]:
        """Do the workers' part of a step; returns the stores that ended."""
        return set(meta.store_jobs)

    def end(self, requests: Collection[Any], steps: int) -> None:
        """Make steps until these requests have ended, no more than so many."""
        for _ in range(steps):
            if all(request.is_finished() for request in requests):
                self.step()  # in which what they have computed is offered for a store
                return
            self.step()
        waiting = [(one.request_id, RequestStatus(one.status).name) for one in requests if not one.is_finished()]
        raise AssertionError(f"after {steps} steps these have not ended: {waiting}")
