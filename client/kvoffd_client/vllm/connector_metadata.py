"""What the connector's scheduler half and its workers send each other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.lora.request import LoRARequest
from vllm.v1.kv_offload.base import LoadStoreSpec

from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.vllm.engine_namespace import MemoryReport
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import GroupKeys

NO_LEASE = 0
GROUP_ID_BYTES = 4
"""The end of an OffloadKey: the group's id, behind the block hash."""


@dataclass(frozen=True)
class ChunkGroup:
    """One offloaded KV cache group.

    Attributes:
        hashes_per_chunk: block hashes of a request that one key stands for, the last of which is in the key.
        tokens_per_chunk: tokens that one key stands for.
    """

    group_id: int
    hashes_per_chunk: int
    tokens_per_chunk: int

    @cached_property
    def suffix(self) -> bytes:
        """The end of vLLM's keys of the group."""
        return self.group_id.to_bytes(GROUP_ID_BYTES, "big")

    def hashes(self, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """The hashes of a request's whole chunks."""
        return block_hashes[self.hashes_per_chunk - 1 :: self.hashes_per_chunk]

    def keys(self, block_hashes: Sequence[bytes]) -> list[bytes]:
        """vLLM's keys of a request's whole chunks."""
        return [one + self.suffix for one in self.hashes(block_hashes)]


@dataclass(eq=False)
class KeyedSpec(LoadStoreSpec):
    """The daemon's end of a transfer: blocks named by key.

    Attributes:
        groups: per group on the wire its block hashes, concatenated.
        lease_id: the lease a load reads under; NO_LEASE for stores.
        request_id: the request that a load is for; None for stores.
        load_tokens: what a load brings, in tokens.
        origins: by group on the wire, what a store tells of its blocks: ``GroupBlocks.parents`` and ``tokens``.
    """

    groups: tuple[bytes, ...] = field(repr=False)
    lease_id: int = NO_LEASE
    request_id: str | None = None
    load_tokens: int = 0
    origins: Mapping[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)

    @property
    def keys(self) -> list[GroupKeys]:
        return [GroupKeys(index, hashes) for index, hashes in enumerate(self.groups) if hashes]


def of_adapter(hashes: Iterable[bytes], content: bytes) -> list[bytes]:
    """Return a request's block hashes with the content of its LoRA adapter mixed in.

    vLLM's hash has the adapter's name and path alone.
    """
    return [hashlib.shake_256(one + content).digest(len(one)) for one in hashes]


@dataclass(frozen=True)
class FailedJob:
    """A job that failed, in whole or in part.

    Attributes:
        error: why; None when the daemon gave no reason.
        keys: those that failed; all of the job's where the daemon named none.
        request_id: the request of a load; None for a store.
    """

    error: ErrorCode | None
    keys: Sequence[GroupKeys] = ()
    request_id: str | None = None


@dataclass
class ConnectorMetadata(OffloadingConnectorMetadata):
    """Scheduler to workers. The last fields are set only where they say something new.

    They travel here, and not in vLLM's handshake, since MultiConnector passes each child its own metadata, but gives
    the first child's handshake to all of them.

    Attributes:
        generation: raised after each reset or change of weights; a worker whose digest has a smaller number takes it
            anew before it computes anything in this step.
        namespace: what the workers of this generation are to register their memory in.
        adapters: those that the workers must have read, before the loads of this step.
    """

    generation: int | None = None
    namespace: NamespaceSpec | None = None
    adapters: Sequence[LoRARequest] = ()


@dataclass
class WorkerReport(OffloadingWorkerMetadata):
    """Worker to scheduler: what ended, what failed, how much more may be stored, and what is in memory.

    Attributes:
        failed_jobs: by job id; the first rank's report stands.
        load_times: of loads that ended well, by job id, their tokens and seconds; the slowest rank's.
        credit_bytes: bytes of stores each worker may have outstanding, the least of all ranks; None: no news.
        memory: by rank; only ranks with news.
        waited_s: how long vLLM waited for stores; the longest of all ranks.
    """

    failed_jobs: dict[int, FailedJob] = field(default_factory=dict)
    load_times: dict[int, tuple[int, float]] = field(default_factory=dict)
    credit_bytes: int | None = None
    memory: dict[int, MemoryReport] = field(default_factory=dict)
    waited_s: float = 0.0

    def aggregate(self, other: Any) -> WorkerReport:
        merged = super().aggregate(other)
        if not isinstance(other, WorkerReport):
            other = WorkerReport()
        credits_bytes = [one.credit_bytes for one in (self, other) if one.credit_bytes is not None]
        # Of one job all ranks have the same tokens.
        slowest = {
            job_id: max(self.load_times.get(job_id, (0, 0.0)), other.load_times.get(job_id, (0, 0.0)))
            for job_id in self.load_times.keys() | other.load_times.keys()
        }
        return WorkerReport(
            merged.completed_jobs,
            merged.transfer_stats,
            {**other.failed_jobs, **self.failed_jobs},
            slowest,
            min(credits_bytes, default=None),
            self.memory | other.memory,
            max(self.waited_s, other.waited_s),
        )
