"""Messages of administrators: health, listings, traces, and changes of the cache."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import field

from kvoffd_proto.messages import (
    ADMIN,
    ANY_ROLE,
    ByteCount,
    Count,
    Done,
    Fingerprint,
    GroupIndex,
    GroupSpec,
    HintAction,
    PromptReport,
    Reply,
    Request,
    Role,
    Seconds,
    SessionId,
    Wire,
    doc,
    exchange,
)

# --- health ----------------------------------------------------------------------------------------


class HealthLevel(StrEnum):
    """Health of the daemon."""

    OK = "ok"
    DEGRADED = "degraded"
    DOWN = "down"


class HealthProblem(Wire, frozen=True):
    """A problem for an operator to solve."""

    reason: Annotated[str, doc("Kind of problem, one word for scripts; label of `kvoffd_health_problems`.")]
    sentence: Annotated[str, doc("The problem and what to do about it, a sentence or a few.")]


class HealthReply(Reply, frozen=True):
    level: Annotated[
        HealthLevel,
        doc("``ok``; ``degraded``: it serves, but not at its best; ``down``: it accepts no sessions and jobs."),
    ]
    causes: Annotated[list[HealthProblem], doc("Why the level is not ``ok``, worst first.")]

    @property
    def healthy(self) -> bool:
        """Whether there is no problem for an operator to solve."""
        return self.level is HealthLevel.OK

    @property
    def ready(self) -> bool:
        """Whether the daemon accepts sessions and jobs."""
        return self.level is not HealthLevel.DOWN

    @property
    def problems(self) -> list[str]:
        """Sentences that say why it is not healthy."""
        return [cause.sentence for cause in self.causes]


@exchange(ANY_ROLE)
class Health(Request[HealthReply], frozen=True):
    """Asks for the daemon's health. The answer comes from the event loop that serves engines."""


# --- who is connected, and what is cached ----------------------------------------------------------


class SessionInfo(Wire, frozen=True):
    """One open session."""

    session_id: SessionId
    role: Annotated[Role | None, doc("Role; nil before Hello.")]
    name: Annotated[str, doc("Name given in Hello.")]
    software: Annotated[str, doc("Versions given in Hello.")]
    pid: Annotated[int, doc("Peer's pid as the daemon sees it; 0 if the peer is in another pid namespace.", ge=0)]
    uid: Annotated[int, doc("Peer's uid.", ge=0)]
    age_seconds: Annotated[Seconds, doc("Seconds since the lifeline was opened.")]
    idle_seconds: Annotated[Seconds, doc("Seconds since the last request.")]
    leases: Annotated[Count, doc("Live leases.")]
    jobs: Annotated[Count, doc("Unfinished jobs.")]
    registrations: Annotated[Count, doc("Registrations.")]
    registered_bytes: Annotated[ByteCount, doc("Bytes of memory that the daemon has mapped for the session.")]
    unacknowledged: Annotated[Count, doc("Completions that the session has not acknowledged.")]
    namespaces: Annotated[list[Fingerprint], doc("Namespaces that the session opened.")] = field(default_factory=list)
    pinned_bytes: Annotated[ByteCount, doc("Pool bytes that the session's leases were the first to pin.")] = 0
    stored_bytes: Annotated[ByteCount, doc("Bytes copied from the session's memory to the pool.")] = 0
    loaded_bytes: Annotated[ByteCount, doc("Bytes copied from the pool to the session's memory.")] = 0
    problem: Annotated[str, doc("The engine's report of why it stores and loads nothing; empty if it does.")] = ""


class SessionsReply(Reply, frozen=True):
    sessions: Annotated[list[SessionInfo], doc("Open sessions, oldest first.")]


@exchange(ADMIN)
class Sessions(Request[SessionsReply], frozen=True):
    """Asks for the open sessions."""


class LoggedPrompt(Wire, frozen=True):
    """One prompt, as its engine reported it."""

    session_id: SessionId
    namespace: Fingerprint
    report: Annotated[PromptReport, doc("Outcome of the prompt.")]


class PromptsListed(Reply, frozen=True):
    prompts: Annotated[list[LoggedPrompt], doc("Newest last.")]


@exchange(ADMIN)
class ListPrompts(Request[PromptsListed], frozen=True):
    """Asks for the outcomes of the latest prompts."""

    name: Annotated[str, doc("Part of the engine's request id; empty for all.", max_length=128)] = ""
    limit: Annotated[int, doc("Most prompts in the reply: the newest.", ge=1, le=1000)] = 1000


class NamespaceInfo(Wire, frozen=True):
    """One open namespace."""

    namespace: Fingerprint
    label: Annotated[str, doc("Name of the namespace for operators.")]
    world_size: Annotated[int, doc("Shards that make a block.", ge=1)]
    key_bytes: Annotated[int, doc("Length of a block hash in bytes.", ge=1)]
    groups: Annotated[list[GroupSpec], doc("KV cache groups.")]
    shard_bytes: Annotated[list[list[ByteCount]], doc("Bytes of a shard by group and rank; 0 if unknown.")]
    ready_blocks: Annotated[Count, doc("Blocks that can be read.")]
    ready_bytes: Annotated[ByteCount, doc("Pool bytes of the blocks that can be read.")]
    writing_blocks: Annotated[Count, doc("Blocks that lack a shard.")]
    sessions: Annotated[Count, doc("Sessions that opened the namespace.")]
    description: Annotated[str, doc("Input of the fingerprint as JSON; empty beyond 1 MiB in all.")]
    quota_bytes: Annotated[ByteCount | None, doc("Pool bytes that it may use at most; nil for no limit.")] = None


class NamespacesReply(Reply, frozen=True):
    namespaces: Annotated[list[NamespaceInfo], doc("Open namespaces, in the order in which they were opened.")]


@exchange(ADMIN)
class Namespaces(Request[NamespacesReply], frozen=True):
    """Asks for the open namespaces."""


@exchange(ADMIN)
class SetQuota(Request[Done], frozen=True):
    """Sets how much of the pool a namespace, open or not, may use. The quota survives restarts. Admin only.

    A namespace at its quota evicts its own blocks. If the quota is set but cannot be made durable, the answer is an
    Error that names the file.
    """

    namespace: Fingerprint
    quota_bytes: Annotated[ByteCount | None, doc("Pool bytes; nil removes the quota.")]


@exchange(ADMIN)
class FindBlock(Request[Done], frozen=True):
    """Asks whether the pool has a block: ``count`` in the answer is 1 if it does. No statistics change."""

    namespace: Fingerprint
    group: GroupIndex
    key: Annotated[bytes, doc("Hash of the block.", max_length=64)]


# --- traces ----------------------------------------------------------------------------------------


class TraceChain(Wire, frozen=True):
    """A prompt's keys of one group, recorded once even if it was looked up several times, or a hint's."""

    milliseconds: Annotated[Count, doc("Time since the trace began.")]
    namespace: Fingerprint
    group: GroupIndex
    tokens_per_block: Annotated[Count, doc("Tokens that a key covers; 0 if unknown.")]
    block_bytes: Annotated[ByteCount, doc("Pool bytes of a block of all ranks; 0 before a worker registered.")]
    key_bytes: Annotated[Count, doc("Bytes of a key.")]
    keys: Annotated[bytes, doc("Keys, end to end, root of the prefix first.")]
    hint: Annotated[HintAction | None, doc("A hint about these keys, not a lookup.")] = None
    priority: Annotated[Count, doc("The hint's.")] = 0
    ttl_s: Annotated[Seconds, doc("The hint's.")] = 0.0


class TraceReply(Reply, frozen=True):
    chains: Annotated[list[TraceChain], doc("Chains in the order of the lookups, about 1 MiB at most.")]
    dropped: Annotated[Count, doc("Chains lost after these because the buffer was full.")]


@exchange(ADMIN)
class Trace(Request[TraceReply], frozen=True):
    """Fetches the lookups since the previous Trace; the first Trace starts recording. Admin only.

    There is one trace at a time; it ends with its session. Benches are not recorded.
    """


# --- changes of the cache --------------------------------------------------------------------------


@exchange(ADMIN)
class Clear(Request[Done], frozen=True):
    """Drops every block of one namespace, or of all. Admin only.

    After the answer no block returns from pool or disks, even if the daemon is killed; shared stores keep theirs. If
    that cannot be made durable, the answer is an Error.
    """

    namespace: Annotated[Fingerprint | None, doc("The namespace; nil for all.")] = None


@exchange(ADMIN)
class ResetFleet(Request[Done], frozen=True):
    """Invalidates a namespace on all nodes that share a store with this one or are peers, as after a change of weights.

    Each node drops its blocks within seconds. ``count`` in the answer is the number of stores and peers. Admin only.
    """

    namespace: Fingerprint


class ScrubReply(Reply, frozen=True):
    """Answer to Scrub: the running scrub, or else the last one. All counts are 0 if there was none."""

    running: Annotated[bool, doc("Whether the scrub is still running.")]
    slots: Annotated[Count, doc("Slots in use when the scrub began.")]
    done_slots: Annotated[Count, doc("Slots that the scrub has finished.")]
    checked_slots: Annotated[Count, doc("Slots compared with their checksums; the others had been freed.")]
    checked_bytes: Annotated[ByteCount, doc("Bytes of the slots compared.")]
    mismatches: Annotated[Count, doc("Slots whose bytes did not match their checksum.")]
    seconds: Annotated[Seconds, doc("Duration of the scrub so far, in seconds.")]


@exchange(ADMIN)
class Scrub(Request[ScrubReply], frozen=True):
    """Compares every readable block with its checksum in the background, or asks for the progress. Admin only."""

    start: Annotated[bool, doc("Start a scrub unless one is running; false only asks for the progress.")]
