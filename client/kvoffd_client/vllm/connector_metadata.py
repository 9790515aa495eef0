"""Messages between the connector's scheduler half and its workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.lora.request import LoRARequest

from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.vllm.engine_namespace import MemoryState
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import GroupKeys


@dataclass(frozen=True)
class FailedJob:
    """A job that failed in a worker, in whole or in part.

    Attributes:
        job_id: vLLM's number of the job, which may fail in other workers too.
        error: the reason; None if the daemon gave none.
        keys: failed keys; all keys of the job if the daemon named none.
        request_id: the request of a load; None for a store.
    """

    job_id: int
    error: ErrorCode | None
    keys: Sequence[GroupKeys] = ()
    request_id: str | None = None


class LoadTime(NamedTuple):
    """Tokens of a load, the same on all ranks, and the seconds that it took on one."""

    tokens: int
    seconds: float

    def slower(self, other: LoadTime | None) -> LoadTime:
        return other if other is not None and other.seconds > self.seconds else self


@dataclass
class ConnectorMetadata(OffloadingConnectorMetadata):
    """Scheduler to workers. ``generation``, ``namespace``, ``adapters`` and ``daemon`` are set only when they change.

    vLLM's handshake is no alternative: MultiConnector gives the first child's handshake to all children, but each child
    its own metadata.

    Attributes:
        generation: raised after each reset or change of weights; a worker whose digest is older takes a new one before
            it computes anything in this step.
        namespace: where workers of this generation must register their memory.
        adapters: adapters that the workers must have read before the loads of this step.
        starts_stores: the step computes nothing, so its stores start in it, not in the next one.
        directory: where the scheduler half looks for the daemon, with ``namespace``. Workers may have another
            environment: Ray copies only some variables.
        daemon: run of the scheduler's daemon, if workers are not registered with it.
    """

    generation: int | None = None
    namespace: NamespaceSpec | None = None
    adapters: Sequence[LoRARequest] = ()
    starts_stores: bool = False
    directory: str = ""
    daemon: int | None = None


@dataclass
class WorkerNews(OffloadingWorkerMetadata):
    """Worker to scheduler: ended and failed jobs, and the state of memory.

    Attributes:
        failed_jobs: failures of all ranks: each has its own reason and keys.
        rejected: keys of ended stores that the daemon's policy did not take, of all ranks.
        load_times: times of successful loads by request, of the slowest rank that reports its end now.
        memory: changed states by rank.
        waited_s: time that vLLM waited for stores, the longest of all ranks.
    """

    failed_jobs: list[FailedJob] = field(default_factory=list)
    rejected: list[GroupKeys] = field(default_factory=list)
    load_times: dict[str, LoadTime] = field(default_factory=dict)
    memory: dict[int, MemoryState] = field(default_factory=dict)
    waited_s: float = 0.0

    def aggregate(self, other: Any) -> WorkerNews:
        merged = super().aggregate(other)
        slower = {name: load.slower(self.load_times.get(name)) for name, load in other.load_times.items()}
        return WorkerNews(
            merged.completed_jobs,
            merged.transfer_stats,
            self.failed_jobs + other.failed_jobs,
            self.rejected + other.rejected,
            self.load_times | slower,
            self.memory | other.memory,
            max(self.waited_s, other.waited_s),
        )
