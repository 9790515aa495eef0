"""Messages of administrators: health, listings, traces, and changes of the cache."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import field

from kvoffd_proto import messages as m

# --- health ----------------------------------------------------------------------------------------


class HealthLevel(StrEnum):
    """Health of the daemon."""

    OK = "ok"
    DEGRADED = "degraded"
    DOWN = "down"


class HealthProblem(m.Wire, frozen=True):
    """A problem for an operator to solve."""

    reason: Annotated[str, m.doc("Kind of problem, one word for scripts; label of `kvoffd_health_problems`.")]
    sentence: Annotated[str, m.doc("The problem and what to do about it, a sentence or a few.")]


class HealthReply(m.Reply, frozen=True):
    level: Annotated[HealthLevel, m.doc("``ok``, ``degraded`` (it serves) or ``down`` (it accepts no sessions).")]
    causes: Annotated[list[HealthProblem], m.doc("Why the level is not ``ok``, worst first.")]

    @property
    def ready(self) -> bool:
        """Whether the daemon accepts sessions and jobs."""
        return self.level is not HealthLevel.DOWN

    @property
    def problems(self) -> list[str]:
        """Sentences that say why it is not healthy."""
        return [cause.sentence for cause in self.causes]


@m.exchange(m.ANY_ROLE)
class Health(m.Request[HealthReply], frozen=True):
    """Asks for the daemon's health. The answer comes from the event loop that serves engines."""


# --- who is connected, and what is cached ----------------------------------------------------------


class SessionInfo(m.Wire, frozen=True):
    """One open session."""

    session_id: m.SessionId
    role: Annotated[m.Role | None, m.doc("Role; nil before Hello.")]
    name: Annotated[str, m.doc("Name given in Hello.")]
    software: Annotated[str, m.doc("Versions given in Hello.")]
    pid: Annotated[int, m.doc("Peer's pid as the daemon sees it; 0 if the peer is in another pid namespace.", ge=0)]
    uid: Annotated[int, m.doc("Peer's uid.", ge=0)]
    age_seconds: Annotated[m.Seconds, m.doc("Seconds since the lifeline was opened.")]
    idle_seconds: Annotated[m.Seconds, m.doc("Seconds since the last request.")]
    leases: Annotated[m.Count, m.doc("Live leases.")]
    jobs: Annotated[m.Count, m.doc("Unfinished jobs.")]
    registrations: Annotated[m.Count, m.doc("Registrations.")]
    registered_bytes: Annotated[m.ByteCount, m.doc("Bytes of memory that the daemon has mapped for the session.")]
    unacknowledged: Annotated[m.Count, m.doc("Completions that the session has not acknowledged.")]
    namespaces: Annotated[list[m.Fingerprint], m.doc("Namespaces that it opened.")] = field(default_factory=list)
    pinned_bytes: Annotated[m.ByteCount, m.doc("Pool bytes that the session's leases were the first to pin.")] = 0
    stored_bytes: Annotated[m.ByteCount, m.doc("Bytes copied from the session's memory to the pool.")] = 0
    loaded_bytes: Annotated[m.ByteCount, m.doc("Bytes copied from the pool to the session's memory.")] = 0
    problem: Annotated[str, m.doc("The engine's report of why it stores and loads nothing; empty if it does.")] = ""


class SessionsReply(m.Reply, frozen=True):
    sessions: Annotated[list[SessionInfo], m.doc("Open sessions, oldest first.")]


@m.exchange(m.ADMIN)
class Sessions(m.Request[SessionsReply], frozen=True):
    """Asks for the open sessions."""


class LoggedPrompt(m.Wire, frozen=True):
    """One prompt, as its engine reported it."""

    session_id: m.SessionId
    namespace: m.Fingerprint
    report: Annotated[m.PromptReport, m.doc("Outcome of the prompt.")]
    tokens: Annotated[
        dict[str, m.Count],
        m.doc("Tokens by source: ``PROMPT_SOURCES``, or the name of a store or a peer. Empty if they do not count."),
    ] = field(default_factory=dict)
    tiers: Annotated[
        list[str],
        m.doc("Disks and stores that the reason is about: that were slow, or failed, or were paused after failures."),
    ] = field(default_factory=list)


class PromptsListed(m.Reply, frozen=True):
    prompts: Annotated[list[LoggedPrompt], m.doc("Newest last.")]


@m.exchange(m.ADMIN)
class ListPrompts(m.Request[PromptsListed], frozen=True):
    """Asks for the outcomes of the latest prompts."""

    name: Annotated[
        str, m.doc("Part of the engine's request id; empty for all.", max_length=m.MAX_REQUEST_CHARACTERS)
    ] = ""
    limit: Annotated[int, m.doc("Most prompts in the reply: the newest.", ge=1, le=1000)] = 1000


class NamespaceInfo(m.Wire, frozen=True):
    """One open namespace."""

    namespace: m.Fingerprint
    label: Annotated[str, m.doc("Name of the namespace for operators.")]
    world_size: Annotated[int, m.doc("Shards that make a block.", ge=1)]
    key_bytes: Annotated[int, m.doc("Length of a block hash in bytes.", ge=1)]
    groups: Annotated[list[m.GroupSpec], m.doc("KV cache groups.")]
    shard_bytes: Annotated[list[list[m.ByteCount]], m.doc("Bytes of a shard by group and rank; 0 if unknown.")]
    ready_blocks: Annotated[m.Count, m.doc("Blocks that can be read.")]
    ready_bytes: Annotated[m.ByteCount, m.doc("Pool bytes of the blocks that can be read.")]
    sessions: Annotated[m.Count, m.doc("Sessions that opened the namespace.")]
    description: Annotated[str, m.doc("Input of the fingerprint as JSON.")]
    quota_bytes: Annotated[m.ByteCount | None, m.doc("Pool bytes that it may use at most; nil for no limit.")] = None


class NamespacesReply(m.Reply, frozen=True):
    namespaces: Annotated[list[NamespaceInfo], m.doc("Open namespaces, in the order in which they were opened.")]
    unshared: Annotated[
        list[m.Fingerprint],
        m.doc("Namespaces, open or not, of which nothing is shared with other nodes until a ResetFleet."),
    ] = field(default_factory=list)


@m.exchange(m.ADMIN)
class Namespaces(m.Request[NamespacesReply], frozen=True):
    """Asks for the open namespaces."""


@m.exchange(m.ADMIN)
class SetQuota(m.Request[m.Done], frozen=True):
    """Sets how much of the pool a namespace, open or not, may use. The quota survives restarts. Admin only.

    A namespace at its quota evicts its own blocks. If the quota is set but cannot be made durable, the answer is an
    Error that names the file.
    """

    namespace: m.Fingerprint
    quota_bytes: Annotated[m.ByteCount | None, m.doc("Pool bytes; nil removes the quota.")]


class BlockFound(m.Reply, frozen=True):
    state: Annotated[m.KeyState, m.doc("State in the pool: 0 absent, 1 while a shard is missing, or 2 ready.")]
    reason: Annotated[str, m.doc("Why the key was last missing, one of `MISS_REASONS`; empty if it is ready.")]
    first_block: Annotated[m.Count, m.doc("Engine blocks at the start of each layer that were not stored.")]
    checksums: Annotated[
        bytes, m.doc("XXH3 of each rank's shard: 64 bits, big-endian, 0 replaced by 1; empty if it is not ready.")
    ]


@m.exchange(m.ADMIN)
class FindBlock(m.Request[BlockFound], frozen=True):
    """Asks whether the pool has a block. No statistics change."""

    namespace: m.Fingerprint
    group: m.GroupIndex
    key: Annotated[bytes, m.doc("Hash of the block.", max_length=64)]


class ShardSpec(m.Wire, frozen=True):
    """One rank's shard of a group's block: layer after layer, of each ``blocks_per_key`` pages."""

    blocks_per_key: Annotated[m.Count, m.doc("Engine blocks that one key covers.")]
    page_bytes: Annotated[list[m.ByteCount], m.doc("Bytes of one engine block, by layer.")]


class NamespaceDescribed(m.Reply, frozen=True):
    label: Annotated[str, m.doc("Name of the namespace for operators.")]
    world_size: Annotated[int, m.doc("Shards that make a block.", ge=1)]
    key_bytes: Annotated[int, m.doc("Length of a block hash in bytes.", ge=1)]
    groups: Annotated[list[m.GroupSpec], m.doc("KV cache groups.")]
    description: Annotated[str, m.doc("Input of the fingerprint as JSON.")]
    shards: Annotated[list[list[ShardSpec] | None], m.doc("Shards by rank and group; nil if unknown.")]


@m.exchange(m.ADMIN)
class DescribeNamespace(m.Request[NamespaceDescribed], frozen=True):
    """Asks for the layout of a namespace's blocks, as the first worker of each rank registered it."""

    namespace: m.Fingerprint


class BlocksListed(m.Reply, frozen=True):
    keys: Annotated[bytes, m.doc("Keys of the page's blocks, end to end.")]
    next_position: Annotated[m.Count, m.doc("Position of the next page; 0 if this is the last.")]


@m.exchange(m.ADMIN)
class ListBlocks(m.Request[BlocksListed], frozen=True):
    """Lists the blocks of one group in the pool that are ready, a page at a time, in no order.

    A block that stays in the pool while all pages are read is on exactly one of them. A page may be short or empty even
    if others follow.
    """

    namespace: m.Fingerprint
    group: m.GroupIndex
    position: Annotated[m.Count, m.doc("0 for the first page, else ``next_position`` of the previous page.")] = 0
    limit: Annotated[int, m.doc("Most blocks on the page.", ge=1, le=4096)] = 1024


# --- traces ----------------------------------------------------------------------------------------


CHAIN_BYTES = 400
"""Memory of a ``TraceChain`` besides its keys."""


class TraceChain(m.Wire, frozen=True):
    """A prompt's keys of one group, recorded once even if it was looked up several times, or a hint's."""

    milliseconds: Annotated[m.Count, m.doc("Time since the trace began.")]
    namespace: m.Fingerprint
    group: m.GroupIndex
    tokens_per_block: Annotated[m.Count, m.doc("Tokens that a key covers; 0 if unknown.")]
    block_bytes: Annotated[m.ByteCount, m.doc("Pool bytes of a block of all ranks; 0 before a worker registered.")]
    key_bytes: Annotated[m.Count, m.doc("Bytes of a key.")]
    keys: Annotated[bytes, m.doc("Keys, end to end, root of the prefix first.")]
    hint: Annotated[m.HintAction | None, m.doc("A hint about these keys, not a lookup.")] = None
    priority: Annotated[m.Count, m.doc("The hint's.")] = 0
    ttl_s: Annotated[m.Seconds, m.doc("The hint's.")] = 0.0


class TraceReply(m.Reply, frozen=True):
    chains: Annotated[list[TraceChain], m.doc("Chains in the order of the lookups, about 1 MiB at most.")]
    dropped: Annotated[m.Count, m.doc("Chains lost after these because the buffer was full.")]


@m.exchange(m.ADMIN)
class Trace(m.Request[TraceReply], frozen=True):
    """Fetches the lookups since the previous Trace; the first Trace starts recording. Admin only.

    There is one trace at a time; it ends with its session. Benches are not recorded.
    """


# --- changes of the cache --------------------------------------------------------------------------


@m.exchange(m.ADMIN)
class Clear(m.Request[m.Done], frozen=True):
    """Drops every block of one namespace, or of all. Admin only.

    After the answer no block returns from pool or disks, even if the daemon is killed; shared stores keep theirs. If
    that cannot be made durable, the answer is an Error.
    """

    namespace: Annotated[m.Fingerprint | None, m.doc("The namespace; nil for all.")] = None


@m.exchange(m.ADMIN)
class ResetFleet(m.Request[m.Done], frozen=True):
    """Invalidates a namespace on all nodes that share a store with this one or are peers, as after a change of weights.

    Other nodes drop its blocks within seconds, this one before the answer, as with Clear; ``count`` in the answer is
    their number. If a store or peer was not reached the answer is an Error, and this node's are dropped all the same.
    Admin only.
    """

    namespace: m.Fingerprint


class LogLevel(StrEnum):
    """Least severe records that the daemon logs."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@m.exchange(m.ADMIN)
class SetLogLevel(m.Request[m.Done], frozen=True):
    """Sets what the daemon logs until it ends; the next one has its setting ``log_level``. Admin only."""

    level: Annotated[LogLevel, m.doc("``debug``, ``info``, ``warning`` or ``error``.")]


class ScrubReply(m.Reply, frozen=True):
    """Answer to Scrub: the running scrub, or else the last one. All counts are 0 if there was none."""

    running: Annotated[bool, m.doc("Whether the scrub is still running.")]
    slots: Annotated[m.Count, m.doc("Slots in use when the scrub began.")]
    done_slots: Annotated[m.Count, m.doc("Slots that the scrub has finished.")]
    checked_slots: Annotated[m.Count, m.doc("Slots compared with their checksums; the others had been freed.")]
    checked_bytes: Annotated[m.ByteCount, m.doc("Bytes of the slots compared.")]
    mismatches: Annotated[m.Count, m.doc("Slots whose bytes did not match their checksum.")]
    seconds: Annotated[m.Seconds, m.doc("Duration of the scrub so far, in seconds.")]


@m.exchange(m.ADMIN)
class Scrub(m.Request[ScrubReply], frozen=True):
    """Compares every readable block with its checksum in the background, or asks for the progress. Admin only."""

    start: Annotated[bool, m.doc("Start a scrub unless one is running; false only asks for the progress.")]
