"""Messages of engines on ``jobs.sock``, completions on ``events.sock``, and the parts that all messages share.

Every message is an array: its tag, then its fields in the order given here. A DEALER sends a request as one frame; the
reply has the same ``request_id``. An accepted Submit has no reply: its jobs are answered by completions.
``PROTOCOL.md`` is generated from these modules.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum, StrEnum
from typing import Annotated, Generic, NamedTuple, TypeAlias, TypeVar, cast, get_args, get_type_hints

from msgspec import Meta, Struct, structs

from kvoffd_proto.errors import ErrorCode

PROTOCOL_VERSION = 26
"""Version that both ends must have. Raise it when a message, a field or its meaning changes."""

FINGERPRINT_BYTES = 32
TOKEN_BYTES = 16
MAX_JOBS = 2048
"""Upper bound of ``max_jobs_per_message``."""
MAX_GROUPS = 64
MAX_PAGES = 8192
"""Most pages, and most tensors, of a registration. Each costs the daemon's loop a few microseconds."""
BLOCK_ID_BYTES = TOKEN_ID_BYTES = COUNT_BYTES = 4


def doc(description: str | None = None, **bounds: float) -> Meta:
    """Describe a field or a type of fields for the reference page, with the bounds that msgspec checks."""
    return Meta(description=description, **bounds)  # type: ignore[call-overload, no-any-return]


Count = Annotated[int, doc(ge=0, le=2**63 - 1)]
ByteCount = Annotated[int, doc(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, doc(ge=0)]
PerSecond = Annotated[float, doc(ge=0)]
NO_REPLY = 0
"""Id of a request whose only possible reply is a refusal."""
RequestId = Annotated[Count, doc("Chosen by the client, returned in the reply; with 0 only a refusal is sent.")]
END_OF_SESSION_IDS = 2**31
SessionId = Annotated[int, doc("Id of the session.", ge=1, lt=END_OF_SESSION_IDS)]
Keys = Annotated[bytes, doc("Block hashes, end to end, each of the namespace's ``key_bytes``.")]
Fingerprint = Annotated[
    bytes, doc("The namespace's fingerprint, 32 bytes.", min_length=FINGERPRINT_BYTES, max_length=FINGERPRINT_BYTES)
]
MIN_LEASE_ID, MAX_LEASE_ID = 2**32, 2**63 - 1
LeaseId = Annotated[
    int, doc("Random, made by the scheduler. A worker that knows it may load.", ge=MIN_LEASE_ID, le=MAX_LEASE_ID)
]
JobId = Annotated[Count, doc("Unique among the session's unfinished jobs.")]
Acknowledged = Annotated[Count, doc("Completions up to this number came: the daemon forgets them, even on a refusal.")]
MAX_WORLD_SIZE = 64
RegistrationId = Annotated[bytes, doc("Random id, made by the worker.", min_length=16, max_length=16)]
Rank = Annotated[int, doc("Rank of the worker in its engine, below ``world_size``.", ge=0, lt=MAX_WORLD_SIZE)]
GroupIndex = Annotated[int, doc("Index of the KV cache group.", ge=0, lt=65536)]


class Role(StrEnum):
    """Role of a session, which determines what it may do."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    ADMIN = "admin"


SCHEDULER = (Role.SCHEDULER,)
WORKER = (Role.WORKER,)
ADMIN = (Role.ADMIN,)
ENGINE = SCHEDULER + WORKER
ANY_ROLE = ENGINE + ADMIN


class KeyState(IntEnum):
    """State of a key in the answer to a lookup, one byte each."""

    ABSENT = 0
    """The daemon does not have it."""
    WRITING = 1
    """It is being stored: at least one shard is missing."""
    READY = 2
    """It can be loaded."""
    PENDING = 3
    """It is on a disk and being promoted: ask again."""
    SHARED = 4
    """It is promoted from a store that nodes share, or that store has not said yet whether it has it: ask again."""


ABSENT, WRITING, READY, PENDING, SHARED = KeyState
COMING = frozenset((PENDING, SHARED))
"""States of keys that are, or may be, on their way to the pool: ask again."""


class Wire(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of parts of messages: arrays without unknown fields."""


class Message(Wire, frozen=True, tag=lambda name: name.lower()):
    """Base of messages: arrays that begin with the lower-case name."""


AnswerT_co = TypeVar("AnswerT_co", bound=Message, covariant=True)


class Request(Message, Generic[AnswerT_co], frozen=True):
    """Base of requests. The parameter is the type of the answer: a Reply, or Completions for jobs."""

    request_id: RequestId


class Reply(Message, frozen=True):
    """Base of replies."""

    request_id: RequestId


class Exchange(NamedTuple):
    """Roles and answer of a request, as ``exchange`` and the base class declare them."""

    roles: tuple[Role, ...]
    """Roles that may send it."""
    answer: type[Message]


EXCHANGES: dict[type[Request[Message]], Exchange] = {}
"""All requests of the protocol. The codec, the reference page and the daemon's handlers are built from it."""

RequestT = TypeVar("RequestT", bound=Request[Message])


def exchange(roles: tuple[Role, ...]) -> Callable[[type[RequestT]], type[RequestT]]:
    """Make the decorated class a request of the protocol, which ``roles`` may send."""

    def declare(kind: type[RequestT]) -> type[RequestT]:
        (base,) = kind.__orig_bases__  # type: ignore[attr-defined]
        (answer,) = base.__args__
        EXCHANGES[kind] = Exchange(roles, answer)
        return kind

    return declare


def answer_type(kind: type[Request[AnswerT_co]]) -> type[AnswerT_co]:
    return cast("type[AnswerT_co]", EXCHANGES[kind].answer)


def metas_of(hint: object) -> list[Meta]:
    """Return the Metas that annotate a type."""
    return [meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, Meta)]


def fields_of(struct: type[Struct]) -> list[tuple[structs.FieldInfo, object, str]]:
    """Return the fields of ``struct`` in wire order: field, type with its Metas, description (empty for none)."""
    hints = get_type_hints(struct, include_extras=True)
    found = []
    for item in structs.fields(struct):
        hint = hints[item.name]
        descriptions = [meta.description for meta in metas_of(hint) if meta.description]
        found.append((item, hint, descriptions[-1] if descriptions else ""))
    return found


def struct_in(hint: object) -> type[Struct] | None:
    """Return the Struct that a field of this type holds: alone, optional or in a list. None if there is none."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return hint
    return next((found for argument in get_args(hint) if (found := struct_in(argument)) is not None), None)


# --- parts of several messages -------------------------------------------------------------------


BENCH_LABEL, EVICTING_LABEL = "bench ", "bench that evicts "
"""Prefixes of the labels of a bench's namespaces. No sum includes them, no tier gets their blocks, and once no session
has one open it is dropped. Only those of the second prefix evict blocks of others."""


class GroupSpec(Wire, frozen=True):
    """One KV cache group of a namespace."""

    kind: Annotated[str, doc("Attention kind as the engine names it, for display.", max_length=64)]
    tokens_per_block: Annotated[int, doc("Tokens that one key covers; 0 if unknown.", ge=0, lt=2**31)]
    window_tokens: Annotated[int, doc("Sliding window in tokens; 0 for none.", ge=0, lt=2**31)] = 0


class GroupKeys(Wire, frozen=True):
    """Keys of one group."""

    group: GroupIndex
    keys: Keys


class Done(Reply, frozen=True):
    """Answer to requests that return nothing but a count."""

    count: Annotated[Count, doc("Number of blocks, leases or other objects that the request affected.")] = 0


class Error(Reply, frozen=True):
    """A refusal. The request changed nothing unless the code says so. ``request_id`` is 0 if the frame had none."""

    code: Annotated[ErrorCode, doc("Why the request was refused.")]
    message: Annotated[str, doc("The reason, and what to do about it.")]


# --- memory: segments, tensors in them, groups over tensors ----------------------------------------


SegmentId = Annotated[Count, doc("Chosen by the client, unique in its session.")]
GpuUuid = Annotated[bytes, doc("UUID of the GPU (or MIG instance), never an ordinal.", min_length=16, max_length=16)]


class MemfdHandle(Wire, frozen=True, tag="memfd"):
    """Host memory: a memfd sent over the lifeline, sealed against shrinking."""

    segment_id: Annotated[Count, doc("Id under which the descriptor was attached on the lifeline.")]
    size_bytes: Annotated[int, doc("Bytes to map; the file must be at least as large.", ge=1, le=2**63 - 1)]


class CudaIpcHandle(Wire, frozen=True, tag="cuda_ipc"):
    """Ordinary GPU memory: the driver's IPC handle of the base allocation."""

    handle: Annotated[bytes, doc("CUipcMemHandle of the base of the allocation.", min_length=64, max_length=64)]
    size_bytes: Annotated[int, doc("Size of the allocation in bytes.", ge=1, le=2**63 - 1)]
    gpu_uuid: GpuUuid


class CudaVmmHandle(Wire, frozen=True, tag="cuda_vmm"):
    """GPU memory of the virtual memory API: one descriptor per chunk, sent over the lifeline."""

    segment_ids: Annotated[list[SegmentId], doc("A descriptor per chunk, by address.", min_length=1, max_length=65536)]
    chunk_bytes: Annotated[list[ByteCount], doc("Size of each chunk in bytes.", min_length=1, max_length=65536)]
    gpu_uuid: GpuUuid


Handle = MemfdHandle | CudaIpcHandle | CudaVmmHandle


class TensorLayout(Wire, frozen=True):
    """One KV tensor: ``num_blocks`` pages at a constant stride inside a segment."""

    segment: Annotated[int, doc("Index into the registration's segments.", ge=0, lt=65536)]
    offset_bytes: Annotated[Count, doc("Offset of block 0 in the segment, in bytes.")]
    stride_bytes: Annotated[int, doc("Distance between neighbouring blocks, in bytes.", ge=1, le=2**63 - 1)]
    num_blocks: Annotated[int, doc("Number of engine blocks in the tensor.", ge=1, lt=2**31)]


class PageRef(Wire, frozen=True):
    """One layer's part of a group's block: the first ``page_bytes`` of a page of a tensor."""

    tensor: Annotated[int, doc("Index into the registration's tensors.", ge=0, lt=65536)]
    page_bytes: Annotated[int, doc("Bytes of the page that belong to the layer.", ge=1, lt=2**31)]


MAX_REPORTED = 1_000_000
"""Largest count in one message, so that sums of clients' claims stay finite."""
MAX_PROBLEM_CHARACTERS = 512
"""Characters of the sentence that says why an engine stores and loads nothing."""
MIN_PER_SECOND, MAX_PER_SECOND = 1e-6, 1e12
"""Bounds of a speed that is not 0, so that results computed from it stay finite."""
MAX_TIME_S = 1e11
"""Latest time, in seconds since 1970."""
Speed = Annotated[float, doc(ge=0, le=MAX_PER_SECOND)]


# --- sessions, lookups and jobs ------------------------------------------------------------------


class Limits(Wire, frozen=True):
    """Limits of one session, sent in Welcome. Requests beyond them are refused."""

    max_frame_bytes: Annotated[int, doc("Largest request frame in bytes.", ge=1)]
    max_keys_per_request: Annotated[int, doc("Keys in one request.", ge=1)]
    max_jobs_per_message: Annotated[int, doc("Stores and loads in one Submit.", ge=1)]
    max_jobs_in_flight: Annotated[int, doc("Unfinished jobs of the session.", ge=1)]
    max_leases: Annotated[int, doc("Live leases of the session.", ge=1)]
    max_leased_keys: Annotated[int, doc("Keys under all leases of the session; lookups report no more as ready.", ge=1)]
    max_registrations: Annotated[int, doc("Registrations of the session.", ge=1)]
    max_segments: Annotated[int, doc("Attached memory segments of the session.", ge=1)]
    max_keys_per_submit: Annotated[int, doc("Keys of all jobs of a Submit together.", ge=1)] = 1024


class JobResult(Wire, frozen=True):
    """Result of one job."""

    job_id: JobId
    ok: Annotated[bool, doc("Load: all bytes arrived. Store: every key is stored, was there, or was rejected.")]
    bytes: Annotated[ByteCount, doc("Bytes that were copied.")]
    seconds: Annotated[Seconds, doc("Duration of the copy in seconds, without the time it waited for other copies.")]
    error: Annotated[ErrorCode | None, doc("Why the job is not ok.")] = None
    failed: Annotated[list[GroupKeys], doc("Keys that were not stored, or that the load lacked.")] = []
    rejected: Annotated[list[GroupKeys], doc("Keys of a store that the policy rejected.")] = []

    @property
    def sentence(self) -> str:
        """The result as a sentence."""
        if self.ok:
            return f"Job {self.job_id} copied {self.bytes} bytes."
        return f"Job {self.job_id} failed: {(self.error or ErrorCode.INTERNAL).sentence}"


class Welcome(Reply, frozen=True):
    """Answer to Hello: the session is open."""

    session_id: SessionId
    limits: Annotated[Limits, doc("Limits of this session.")]
    credit_bytes: Annotated[ByteCount, doc("Bytes of stores the session may have outstanding.")]


@exchange(ANY_ROLE)
class Hello(Request[Welcome], frozen=True):
    """First message of a session. The DEALER's routing id, made of the lifeline's token, names the session."""

    protocol_version: Annotated[int, doc("The client's protocol version.", ge=0)]
    role: Annotated[Role, doc("Role of the session.")]
    name: Annotated[str, doc("Shown to operators, e.g. ``vllm:3fa85f64 tiny-llama worker 0``.", max_length=128)]
    software: Annotated[str, doc("Client and engine versions, for display.", max_length=128)]


class Completions(Message, frozen=True):
    """Jobs of one session that ended; published on the session's topic and kept until acknowledged."""

    sequence: Annotated[int, doc("Counts from 1 in each session, without gaps.", ge=1)]
    credit_bytes: Annotated[ByteCount, doc("Bytes of stores the session may have outstanding from now on.")]
    results: Annotated[list[JobResult], doc("Results, in the order in which the jobs ended.")]


class ResultsReply(Reply, frozen=True):
    batches: Annotated[list[Completions], doc("Unacknowledged completions, oldest first.")]
    unfinished: Annotated[list[JobId], doc("Accepted jobs that have not ended. The daemon does not know any others.")]


@exchange(WORKER)
class Results(Request[ResultsReply], frozen=True):
    """Asks for completions that PUB may have dropped: send it after a gap, or when a job takes more than a second."""

    acknowledged: Acknowledged


class NamespaceOpened(Reply, frozen=True):
    created: Annotated[bool, doc("False when the namespace was open already.")]
    prefill_tokens_per_second: Annotated[PerSecond, doc("Prefill rate that an engine reported last; 0 if none.")] = 0.0


@exchange(ENGINE)
class OpenNamespace(Request[NamespaceOpened], frozen=True):
    """Opens a namespace, or joins it if its geometry is the same."""

    namespace: Fingerprint
    label: Annotated[str, doc("Name for operators, such as the model's.", max_length=256)]
    world_size: Annotated[int, doc("Shards of a block.", ge=1, le=MAX_WORLD_SIZE)]
    key_bytes: Annotated[int, doc("Length of a block hash in bytes.", ge=8, le=64)]
    groups: Annotated[list[GroupSpec], doc("KV cache groups, by index.", min_length=1, max_length=MAX_GROUPS)]
    description: Annotated[str, doc("Input of the fingerprint as JSON, for display.", max_length=65536)]


class Registered(Reply, frozen=True):
    registration_id: RegistrationId
    shard_bytes: Annotated[list[ByteCount], doc("Per group, bytes of this rank's shard of a block.")]


@exchange(WORKER)
class Register(Request[Registered], frozen=True):
    """Registers a worker's KV tensors. Send the segments' descriptors over the lifeline first."""

    namespace: Fingerprint
    registration_id: RegistrationId
    rank: Rank
    blocks_per_key: Annotated[int, doc("Engine blocks that one key covers.", ge=1, lt=65536)]
    segments: Annotated[list[Handle], doc("Memory that holds the tensors.", min_length=1, max_length=65536)]
    tensors: Annotated[list[TensorLayout], doc("KV tensors.", min_length=1, max_length=MAX_PAGES)]
    groups: Annotated[
        list[Annotated[list[PageRef], doc(max_length=MAX_PAGES)]],
        doc("Per group, its layers' pages in slot order.", min_length=1, max_length=MAX_GROUPS),
    ]


@exchange(WORKER)
class Unregister(Request[Done], frozen=True):
    """Ends a registration. After the reply the daemon no longer accesses its memory."""

    registration_id: RegistrationId


class LookupReply(Reply, frozen=True):
    lease_id: LeaseId
    states: Annotated[list[bytes], doc("Per group of the request, a ``KeyState`` byte for each key.")]
    pinned: Annotated[Count, doc("Blocks pinned under the lease. Pending blocks are pinned once they are ready.")]
    ttl_ms: Annotated[int, doc("Lifetime of the lease in ms; 0: there is none. Look up again after half of it.", ge=0)]
    wait_ms: Annotated[int, doc("Estimated milliseconds until all pending keys are ready; 0 if unknown.", ge=0)] = 0
    asking: Annotated[Count, doc("Number of shared keys for which the store has not answered yet.")] = 0


MAX_HOST_CHARACTERS = 253
"""Characters of a host's name."""
MAX_GIVER = 2**32 - 2
"""Largest number of an owner of hints."""
Giver = Annotated[int, doc("Number of the owner of this prompt's hints; 0 for none.", ge=0, le=MAX_GIVER)]


@exchange(SCHEDULER)
class Lookup(Request[LookupReply], frozen=True):
    """Asks which keys are ready, and pins those under a lease. A repeat under the same lease pins nothing twice.

    Split more keys than one request may hold over several requests with one lease.
    """

    namespace: Fingerprint
    lease_id: LeaseId
    groups: Annotated[list[GroupKeys], doc("Keys, root of the prefix first.", max_length=MAX_GROUPS)]
    again: Annotated[bool, doc("The prompt was looked up before: do not count it again.")] = False
    reported: Annotated[bool, doc("ReportPrompts follows for the prompt: count its keys then, not now.")] = False
    peer: Annotated[
        str, doc("The only peer to ask for missing keys, by its host, if known.", max_length=MAX_HOST_CHARACTERS)
    ] = ""
    giver: Giver = 0


@exchange(SCHEDULER)
class Release(Request[Done], frozen=True):
    """Ends leases. A lease that has already ended is not an error."""

    lease_ids: Annotated[list[LeaseId], doc("Leases of this session.", max_length=65536)]


class HintAction(StrEnum):
    """A client's wish for blocks. Nothing is promised."""

    RETAIN = "retain"
    """Evict them after others, for a time and within a limit. It also applies to those stored in the next minute."""
    RELEASE = "release"
    """End what the same giver retained. Evict blocks first that no other giver's prompts asked for, unless a lookup
    finds them before."""
    PREFETCH = "prefetch"
    """Promote them from disks and stores."""


MAX_PRIORITY, MAX_TTL_S = 100, 86400.0
MAX_HINT_KEYS = 1024
"""Keys of one Hint."""


@exchange(SCHEDULER)
class Hint(Request[Done], frozen=True):
    """Passes on a client's hint about the blocks of a prompt. ``giver`` is the same as in the prompt's ``Lookup``.

    It has 1,024 keys at most. Send more in several, the root of the prefix first.
    """

    namespace: Fingerprint
    action: Annotated[HintAction, doc("``retain``, ``release`` or ``prefetch``.")]
    groups: Annotated[list[GroupKeys], doc("Keys, root of the prefix first.", max_length=MAX_GROUPS)]
    priority: Annotated[int, doc("Retained blocks of a lower one are evicted first.", ge=0, le=MAX_PRIORITY)] = 0
    ttl_s: Annotated[float, doc("Seconds for which to retain them.", ge=0, le=MAX_TTL_S)] = 0.0
    giver: Giver = 0


@exchange(SCHEDULER)
class Invalidate(Request[Done], frozen=True):
    """Drops unusable blocks. A block under another session's lease leaves the index now and the pool later.

    If the daemon is killed, a disk may still have them. As always, loads from a disk compare checksums.
    """

    namespace: Fingerprint
    groups: Annotated[list[GroupKeys], doc("Keys of the blocks to drop.", max_length=MAX_GROUPS)]


@exchange(SCHEDULER)
class Reset(Request[Done], frozen=True):
    """Drops every block of a namespace, as after a change of the model's weights. It is not shared any more.

    After the answer no block returns, even if the daemon is killed. If that cannot be made durable, the answer is an
    Error.

    Wait for the results of all stores first: requests of two sessions have no order, and a store that the daemon reads
    after the reset stays.
    """

    namespace: Fingerprint


PAUSED_STORES = "Stores skipped while stores paused because vLLM had waited for them for too much of its time."
"""Meaning of a count of an engine, and of all engines together."""


@exchange(SCHEDULER)
class ReportEngine(Request[Done], frozen=True):
    """Reports an engine's prefill rate, and what it skipped since its last report."""

    namespace: Fingerprint
    prefill_tokens_per_second: Annotated[Speed, doc("Prefill rate in tokens per second, at least 1e-6; 0 if unknown.")]
    skipped_loads: Annotated[int, doc("Loads skipped because computing is faster.", ge=0, le=MAX_REPORTED)] = 0
    paused_stores: Annotated[int, doc(PAUSED_STORES, ge=0, le=MAX_REPORTED)] = 0
    late_lookups: Annotated[int, doc("Lookups that it stopped waiting for.", ge=0, le=MAX_REPORTED)] = 0
    problem: Annotated[
        str, doc("Why it stores and loads nothing; empty if it does.", max_length=MAX_PROBLEM_CHARACTERS)
    ] = ""
    unknown_hints: Annotated[
        int, doc("Hints that it did not know, could not read or did not send.", ge=0, le=MAX_REPORTED)
    ] = 0
    late_age_s: Annotated[float, doc("Mean seconds since these late lookups.", ge=0, le=MAX_TIME_S)] = 0.0


MAX_PROMPT_REPORTS = 256
MAX_REQUEST_CHARACTERS = 128
"""Characters of a request's id in its report; a longer one is cut."""
MAX_MARKS = 8
MAX_HINTS_CHARACTERS = 256
"""Characters of what a report says about hints."""
MAX_PROMPT = 2**32
"""Limit of a prompt's tokens, keys and the like in a report: sums of these must stay numbers of 64 bits."""
PromptCount: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_PROMPT)]


class PromptReport(Wire, frozen=True):
    """Outcome of one prompt: why it hit or missed."""

    request: Annotated[str, doc("The engine's id of the request.", max_length=MAX_REQUEST_CHARACTERS)]
    decided_at: Annotated[float, doc("Time of the decision, in seconds since 1970.", ge=0, le=MAX_TIME_S)]
    tokens: Annotated[PromptCount, doc("Tokens of its prompt.")]
    keys: Annotated[PromptCount, doc("Keys looked up; 0 without an answer, and for a prompt shorter than a block.")]
    found_pool: Annotated[PromptCount, doc("Keys found in the pool.")]
    found_disk: Annotated[PromptCount, doc("Keys found on a disk.")]
    found_shared: Annotated[PromptCount, doc("Keys that a store that nodes share, or a peer, answered that it has.")]
    outcome: Annotated[str, doc("What the engine did, one word: ``Outcome``.", max_length=32)]
    loaded_tokens: Annotated[PromptCount, doc("Tokens loaded.")] = 0
    missing_group: GroupIndex = 0
    missing_key: Annotated[bytes, doc("The first key that was missing; empty for none.", max_length=64)] = b""
    reason: Annotated[str, doc("Why it was missing, or nothing loaded; empty: the daemon says.", max_length=32)] = ""
    missing_number: Annotated[PromptCount, doc("Position of that key among those looked up, from 1; 0 for none.")] = 0
    own_tokens: Annotated[PromptCount, doc("Leading tokens that the engine had in its own prefix cache.")] = 0
    lease_id: Annotated[int, doc("Lease of its counted lookup; 0 to count none.", ge=0, le=2**63 - 1)] = 0
    own_keys: Annotated[list[Count], doc("By group, leading keys in the engine's cache.", max_length=MAX_GROUPS)] = []
    covered_keys: Annotated[list[Count], doc("By group, leading keys not computed.", max_length=MAX_GROUPS)] = []
    after_gap: Annotated[PromptCount, doc("Keys found, but not loaded because an earlier block was missing.")] = 0
    load_lease_id: Annotated[int, doc("Lease under which it was loaded; 0 for none.", ge=0, le=2**63 - 1)] = 0
    other_tokens: Annotated[PromptCount, doc("Tokens that another connector of the engine loaded.")] = 0
    again: Annotated[bool, doc("Count no tokens: it was reported before, or is an earlier daemon's.")] = False
    asked_shared: Annotated[PromptCount, doc("Keys that stores were asked for.")] = 0
    unanswered: Annotated[PromptCount, doc("Keys of these for which no store had answered.")] = 0
    marks: Annotated[
        list[Annotated[str, doc(max_length=32)]],
        doc("Properties of the request that limit sharing: ``Mark``.", max_length=MAX_MARKS),
    ] = []
    hints: Annotated[str, doc("Hints that it carried, and what became of them.", max_length=MAX_HINTS_CHARACTERS)] = ""
    coming_keys: Annotated[
        list[Count], doc("By group, keys ready or coming behind the covered ones, up to a gap.", max_length=MAX_GROUPS)
    ] = []


class Outcome(StrEnum):
    """Outcome of a prompt."""

    LOADED = "loaded"
    MISSED = "missed"
    NOT_NEEDED = "not_needed"
    """Its own cache had all that it can use."""
    DROPPED = "dropped"
    """The request ended before it was scheduled."""
    TOO_SHORT = "too_short"
    """The prompt is shorter than a block."""
    SKIPPED = "skipped"
    """Blocks were found, and computing was faster than loading them."""
    NO_SPACE = "no_space"
    """Blocks were found, and the engine's KV cache had no space for them."""
    LATE = "late"
    """It stopped waiting for the answer."""
    FAILED = "failed"
    """A load failed, and it recomputed."""
    UNUSED = "unused"
    """The prompt may not use the cache, or the daemon was unavailable."""


class Mark(StrEnum):
    """Property of a request that limits which blocks it shares, or uses."""

    CACHE_SALT = "cache_salt"
    """Its keys contain a salt."""
    LORA = "lora"
    """Its keys contain a LoRA adapter."""
    MULTIMODAL = "multimodal"
    """Its keys contain images, audio or video."""
    EMBEDDINGS = "embeddings"
    """Its prompt is embeddings, which its keys contain."""
    KV_LOAD_TIERS = "kv_load_tiers"
    """It excludes disks or stores, where keys of it were."""


@exchange(SCHEDULER)
class ReportPrompts(Request[Done], frozen=True):
    """Reports the outcomes of prompts for operators. The daemon keeps the last 1,000 of a session."""

    namespace: Fingerprint
    prompts: Annotated[list[PromptReport], doc("In their order.", max_length=MAX_PROMPT_REPORTS)]


class BadColumns(ValueError):
    """The columns of a ``GroupBlocks`` are inconsistent. ``code`` is the refusal."""

    def __init__(self, code: ErrorCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class GroupTransfer(NamedTuple):
    """One group's part of a job. Its fields are those of ``GroupBlocks`` for one job.

    ``block_ids`` begin ``first_block`` engine blocks into key 0. ``before`` is the key before key 0 of a store in its
    prompt; empty if there is none, or if it is unknown.
    """

    group: int
    keys: bytes
    block_ids: bytes
    first_block: int = 0
    parents: bytes = b""
    tokens: bytes = b""
    before: bytes = b""

    @classmethod
    def of(cls, keys: Sequence[bytes], block_ids: Sequence[int], group: int = 0, first_block: int = 0) -> GroupTransfer:
        """Return a transfer of keys and the engine blocks that they cover. Raises ValueError for invalid ids."""
        if bool in map(type, block_ids):
            raise ValueError("Block ids are whole numbers below 2^31, not True or False.")
        try:
            ids = struct.pack(f"<{len(block_ids)}i", *block_ids)
        except struct.error as error:
            raise ValueError(f"Block ids are whole numbers below 2^31: {error}.") from error
        return cls(group, b"".join(keys), ids, first_block)


class JobSpan(NamedTuple):
    """Positions of one job's keys and engine blocks in a ``GroupBlocks``."""

    job: int
    """Number of the job among the stores, or the loads, of the message."""
    keys_begin: int
    keys_end: int
    blocks_begin: int
    blocks_end: int
    first_block: int
    """Engine blocks skipped at the start of its first key."""
    before: bytes = b""
    """Key before its first in the prompt; empty if there is none, or if it is unknown."""


def blocks_fit(keys: int, blocks: int, first_block: int, blocks_per_key: int, *, store: bool) -> bool:
    """Return whether these numbers of keys and engine blocks fit each other, as ``GroupBlocks`` requires."""
    end, most = first_block + blocks, keys * blocks_per_key
    least = most if store else most - blocks_per_key + 1  # a load has one block of its last key at least
    return keys > 0 and blocks > 0 and 0 <= first_block < blocks_per_key and least <= end <= most


class GroupBlocks(Wire, frozen=True):
    """One group's blocks of all stores, or of all loads, in a message: end to end, in the order of the jobs.

    Key ``i`` of a job covers the engine blocks ``[i * blocks_per_key, (i + 1) * blocks_per_key)`` counted from the
    start of its key 0. A store ends at the end of its last key; a load may end inside it.

    Either all stores of a group have parents and tokens, or none has: send the others in a separate message.
    """

    group: GroupIndex
    key_counts: Annotated[bytes, doc("Keys of each job, little-endian uint32; 0 if the job has no key in the group.")]
    block_counts: Annotated[bytes, doc("Engine blocks of each job, little-endian uint32.")]
    first_blocks: Annotated[bytes, doc("Engine blocks skipped in key 0 of each job, little-endian uint32; or empty.")]
    keys: Keys
    block_ids: Annotated[bytes, doc("Engine block ids, little-endian int32, end to end.")]
    parents: Annotated[bytes, doc("For KV events: the hash before each key in its prompt, or zeros; or empty.")] = b""
    tokens: Annotated[bytes, doc("With ``parents``: token ids, little-endian uint32; empty if keys hash more.")] = b""
    before: Annotated[
        bytes, doc("Of stores: the key before key 0 of each job in its prompt, or zeros if it is the first; or empty.")
    ] = b""

    @classmethod
    def of(cls, group: int, jobs: int, key_bytes: int, parts: Iterable[tuple[int, GroupTransfer]]) -> GroupBlocks:
        """Return the blocks of ``parts``, (number of the job, its transfer), in the order of the ``jobs`` jobs."""
        key_counts, block_counts, first_blocks = [0] * jobs, [0] * jobs, [0] * jobs
        before = [bytes(key_bytes)] * jobs
        transfers = []
        for number, one in parts:
            key_counts[number] = len(one.keys) // key_bytes
            block_counts[number] = len(one.block_ids) // BLOCK_ID_BYTES
            first_blocks[number] = one.first_block
            before[number] = one.before or before[number]
            transfers.append(one)
        column = struct.Struct(f"<{jobs}I")
        return cls(
            group,
            column.pack(*key_counts),
            column.pack(*block_counts),
            column.pack(*first_blocks) if any(first_blocks) else b"",
            b"".join([one.keys for one in transfers]),
            b"".join([one.block_ids for one in transfers]),
            b"".join([one.parents for one in transfers]),
            b"".join([one.tokens for one in transfers]),
            b"".join(before) if any(one.before for one in transfers) else b"",
        )

    def spans(self, jobs: int, key_bytes: int, blocks_per_key: int, *, store: bool) -> list[JobSpan]:
        """Return the positions of the jobs that have keys or blocks in the group.

        Raises:
            BadColumns: the columns do not fit ``jobs`` jobs, the keys, the block ids, or each other.
        """
        if len(self.block_ids) % BLOCK_ID_BYTES:
            why = f"{len(self.block_ids)} bytes are not a whole number of block ids; send 4 bytes for each."
            raise BadColumns(ErrorCode.BAD_BLOCK_IDS, why)
        columns = []
        first_blocks = self.first_blocks or bytes(jobs * COUNT_BYTES)
        for data, what in ((self.key_counts, "keys"), (self.block_counts, "blocks"), (first_blocks, "first blocks")):
            if len(data) != jobs * COUNT_BYTES:
                why = f"{len(data)} bytes are not the uint32 numbers of {what} of {jobs} jobs; send one for each."
                raise BadColumns(ErrorCode.BAD_KEYS, why)
            columns.append(struct.unpack(f"<{jobs}I", data))
        counted = sum(columns[0]), sum(columns[1])
        sent = len(self.keys) // key_bytes, len(self.block_ids) // BLOCK_ID_BYTES
        if counted != sent:
            why = (
                f"The jobs have {counted[0]} keys and {counted[1]} blocks of group {self.group}, but {sent[0]} keys "
                f"and {sent[1]} block ids were sent."
            )
            raise BadColumns(ErrorCode.BAD_KEYS, why)
        if self.before and len(self.before) != jobs * key_bytes:
            why = f"{len(self.before)} bytes are not the keys before those of {jobs} jobs; send one for each, or none."
            raise BadColumns(ErrorCode.BAD_KEYS, why)
        spans, keys_at, blocks_at, no_key = list[JobSpan](), 0, 0, bytes(key_bytes)
        for job, (keys, blocks, first) in enumerate(zip(*columns, strict=True)):
            if not keys and not blocks:
                continue
            if not blocks_fit(keys, blocks, first, blocks_per_key, store=store):
                why = (
                    f"{blocks} block ids from block {first} on do not fit {keys} keys of {blocks_per_key} blocks each; "
                    f"{'a store' if store else 'a load, except for its last key,'} has all blocks of each key."
                )
                raise BadColumns(ErrorCode.BAD_BLOCK_IDS, why)
            before = self.before[job * key_bytes : (job + 1) * key_bytes]
            before = b"" if before == no_key else before
            spans.append(JobSpan(job, keys_at, keys_at + keys, blocks_at, blocks_at + blocks, first, before))
            keys_at, blocks_at = keys_at + keys, blocks_at + blocks
        return spans


class Stores(Wire, frozen=True):
    """Stores: each copies engine blocks into the pool."""

    job_ids: Annotated[list[JobId], doc("One for each store.", max_length=MAX_JOBS)]
    groups: Annotated[list[GroupBlocks], doc("Blocks to copy; each group once.", max_length=MAX_GROUPS)]


class Loads(Wire, frozen=True):
    """Loads: each copies leased blocks into engine blocks.

    A lease ends once every rank of the namespace has loaded under it successfully, unless a load keeps it.
    """

    job_ids: Annotated[list[JobId], doc("One for each load.", max_length=MAX_JOBS)]
    lease_ids: Annotated[list[LeaseId], doc("The lease of each load.", max_length=MAX_JOBS)]
    keep_lease: Annotated[list[bool], doc("Keep the lease: other workers load the same shards.", max_length=MAX_JOBS)]
    groups: Annotated[list[GroupBlocks], doc("Blocks to copy; each group once.", max_length=MAX_GROUPS)]


MAX_SOLE = 2**62 - 1
"""Largest number in ``Submit.sole``."""


@exchange(WORKER)
class Submit(Request[Completions], frozen=True):
    """Submits the stores and loads of one step.

    The message is refused as a whole if anything in it is wrong, and then changes nothing. Otherwise each job gets
    exactly one result, in completions.
    """

    registration_id: RegistrationId
    stores: Annotated[Stores, doc("Stores.")]
    loads: Annotated[Loads, doc("Loads.")]
    acknowledged: Acknowledged = 0
    sole: Annotated[
        int,
        doc("If not 0: these stores and no others add shards to the blocks that they begin.", ge=0, le=MAX_SOLE),
    ] = 0


@exchange(WORKER)
class Cancel(Request[Done], frozen=True):
    """Fails stores and loads that have not started; they get completions like all jobs. Done counts them."""

    job_ids: Annotated[list[JobId], doc("Jobs of this session.", max_length=65536)]
    acknowledged: Acknowledged = 0


AnyRequest: TypeAlias = Request[Message]
AnyReply: TypeAlias = Reply
