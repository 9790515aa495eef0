"""Messages of engines on ``jobs.sock``, the completions on ``events.sock``, and what all messages are made of.

Every message is an array: its tag, then its fields in the order given here. A request goes as one frame
from a DEALER; its reply comes back with the same ``request_id``. Submit is not replied to when all its jobs
are accepted: their answers are completions. ``PROTOCOL.md`` is generated from these modules.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, StrEnum
from typing import Annotated, Generic, NamedTuple, TypeAlias, TypeVar, cast, get_args, get_type_hints

from msgspec import Meta, Struct, structs

from kvoffd_proto.errors import ErrorCode

PROTOCOL_VERSION = 17
"""Raised whenever a message, a field or its meaning changes. Both ends must speak the same one; none is negotiated."""

FINGERPRINT_BYTES = 32
TOKEN_BYTES = 16
MAX_JOBS = 2048
"""``max_jobs_per_message`` is never more."""
MAX_GROUPS = 64
MAX_PAGES = 8192
"""Of a registration in all groups together, and its tensors: each costs the daemon's loop some microseconds."""
BLOCK_ID_BYTES = TOKEN_ID_BYTES = COUNT_BYTES = 4


def doc(description: str | None = None, **bounds: float) -> Meta:
    """Describe a field or a type of fields for the reference page, with the bounds that msgspec checks."""
    return Meta(description=description, **bounds)  # type: ignore[call-overload, no-any-return]


Count = Annotated[int, doc(ge=0, le=2**63 - 1)]
ByteCount = Annotated[int, doc(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, doc(ge=0)]
PerSecond = Annotated[float, doc(ge=0)]
NO_REPLY = 0
"""The id of a request that is only replied to where it is refused."""
RequestId = Annotated[Count, doc("Chosen by the client, echoed in the reply; with 0 only a refusal is sent.")]
SessionId = Annotated[int, doc("Id of the session.", ge=1, lt=2**31)]
Keys = Annotated[bytes, doc("Block hashes, end to end, each of the namespace's ``key_bytes``.")]
Fingerprint = Annotated[
    bytes, doc("The namespace's fingerprint, 32 bytes.", min_length=FINGERPRINT_BYTES, max_length=FINGERPRINT_BYTES)
]
LeaseId = Annotated[
    int, doc("Random, chosen by the scheduler's client: who knows it may load.", ge=2**32, le=2**63 - 1)
]
JobId = Annotated[Count, doc("Unique among the session's unfinished jobs.")]
Acknowledged = Annotated[
    Count, doc("All completions up to this number have arrived, and are forgotten, also where the rest is refused.")
]
MAX_WORLD_SIZE = 64
RegistrationId = Annotated[
    bytes, doc("Random id made by the worker for this registration.", min_length=16, max_length=16)
]
Rank = Annotated[int, doc("Rank of the worker in its engine, below ``world_size``.", ge=0, lt=MAX_WORLD_SIZE)]
GroupIndex = Annotated[int, doc("Index of the KV cache group.", ge=0, lt=65536)]


class Role(StrEnum):
    """What a session may do."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    ADMIN = "admin"


SCHEDULER = (Role.SCHEDULER,)
WORKER = (Role.WORKER,)
ADMIN = (Role.ADMIN,)
ENGINE = SCHEDULER + WORKER
ANY_ROLE = ENGINE + ADMIN


class KeyState(IntEnum):
    """What a lookup tells of a key, one byte each."""

    ABSENT = 0
    """The daemon does not have it."""
    WRITING = 1
    """It is being stored: a shard of it is missing."""
    READY = 2
    """It can be loaded."""
    PENDING = 3
    """A disk has it, and it comes up: ask again."""
    SHARED = 4
    """A store that nodes share is asked for it, or has it and it comes up: ask again."""


ABSENT, WRITING, READY, PENDING, SHARED = KeyState
COMING = frozenset((PENDING, SHARED))
"""States of keys that come up from below the pool, or may: ask again."""


class Wire(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of parts of messages: encoded as arrays, unknown trailing fields refused."""


class Message(Wire, frozen=True, tag=lambda name: name.lower()):
    """Base of messages: arrays that begin with the lower-case name."""


AnswerT_co = TypeVar("AnswerT_co", bound=Message, covariant=True)


class Request(Message, Generic[AnswerT_co], frozen=True):
    """Base of requests. The parameter is what answers the request: a Reply, or Completions where it is a job."""

    request_id: RequestId


class Reply(Message, frozen=True):
    """Base of replies."""

    request_id: RequestId


class Exchange(NamedTuple):
    """What ``exchange`` and the base class declare of a request."""

    roles: tuple[Role, ...]
    """Who may send it."""
    answer: type[Message]


EXCHANGES: dict[type[Request[Message]], Exchange] = {}
"""Every request of the protocol. The codec, the reference page and the daemon's table of handlers are made from it."""

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
    """What answers requests of this kind."""
    return cast("type[AnswerT_co]", EXCHANGES[kind].answer)


def metas_of(hint: object) -> list[Meta]:
    """What annotates a type."""
    return [meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, Meta)]


def fields_of(struct: type[Struct]) -> list[tuple[structs.FieldInfo, object, str]]:
    """The fields of ``struct`` in wire order: field, type with its Metas, description (empty where there is none)."""
    hints = get_type_hints(struct, include_extras=True)
    found = []
    for item in structs.fields(struct):
        hint = hints[item.name]
        descriptions = [meta.description for meta in metas_of(hint) if meta.description]
        found.append((item, hint, descriptions[-1] if descriptions else ""))
    return found


def struct_in(hint: object) -> type[Struct] | None:
    """Return the Struct that a field of this type holds, by itself, optionally or in a list; else None."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return hint
    return next((found for argument in get_args(hint) if (found := struct_in(argument)) is not None), None)


# --- parts of several messages -------------------------------------------------------------------


BENCH_LABEL = "bench "
"""A namespace whose label begins so is a bench's: no sum has it, and it is forgotten once it is empty and closed."""


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

    count: Annotated[Count, doc("How many blocks, leases or other things the request concerned.")] = 0


class Error(Reply, frozen=True):
    """The request was refused and changed nothing. ``request_id`` is 0 where the frame had none."""

    code: Annotated[ErrorCode, doc("Why the request was refused.")]
    message: Annotated[str, doc("A sentence that says what to do.")]


# --- memory: segments, tensors in them, groups over tensors ----------------------------------------


SegmentId = Annotated[Count, doc("Chosen by the client, unique in its session.")]
GpuUuid = Annotated[bytes, doc("UUID of the GPU (or MIG instance), never an ordinal.", min_length=16, max_length=16)]


class MemfdHandle(Wire, frozen=True, tag="memfd"):
    """Host memory: a memfd that came over the lifeline, sealed against shrinking."""

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


class LayerSpec(Wire, frozen=True):
    """Describes a page of one layer for programs that open blocks. The daemon checks nothing by it."""

    name: Annotated[str, doc("The engine's name of the layer; empty if unknown.", max_length=256)] = ""
    dtype: Annotated[str, doc("torch's name of the dtype, such as ``bfloat16``; empty for bytes.", max_length=32)] = ""
    shape: Annotated[
        list[Annotated[int, doc(ge=1, lt=2**31)]],
        doc("Shape of one page, in the order of memory; empty if unknown.", max_length=16),
    ] = []
    layout: Annotated[str, doc("Names of the dimensions, separated by blanks; empty if unknown.", max_length=256)] = ""


class PageRef(Wire, frozen=True):
    """One layer's part of a group's block: the first ``page_bytes`` of a page of a tensor."""

    tensor: Annotated[int, doc("Index into the registration's tensors.", ge=0, lt=65536)]
    page_bytes: Annotated[int, doc("Bytes of the page that belong to the layer.", ge=1, lt=2**31)]
    layer: Annotated[LayerSpec | None, doc("What these bytes are; nil if unknown.")] = None


MAX_REPORTED = 1_000_000
"""In one message: sums of what anybody may claim must stay numbers."""
MAX_PROBLEM = 512
"""Characters of a sentence that says why an engine is not served."""
LEAST_PER_SECOND, MOST_PER_SECOND = 1e-6, 1e12
"""Of a speed that is not 0: what is reckoned with it must stay a number."""
MOST_TIME_S = 1e11
"""In seconds since 1970."""
Speed = Annotated[float, doc(ge=0, le=MOST_PER_SECOND)]


# --- sessions, lookups and jobs ------------------------------------------------------------------


class Limits(Wire, frozen=True):
    """Limits of one session, given in Welcome. Requests beyond them are refused."""

    max_frame_bytes: Annotated[int, doc("Largest request frame in bytes.", ge=1)]
    max_keys_per_request: Annotated[int, doc("Keys in one request, those of all jobs of a Submit together.", ge=1)]
    max_jobs_per_message: Annotated[int, doc("Stores and loads in one Submit.", ge=1)]
    max_jobs_in_flight: Annotated[int, doc("Unfinished jobs of the session.", ge=1)]
    max_leases: Annotated[int, doc("Live leases of the session.", ge=1)]
    max_leased_keys: Annotated[int, doc("Keys under all leases of the session; lookups tell no more ready.", ge=1)]
    max_registrations: Annotated[int, doc("Registrations of the session.", ge=1)]
    max_segments: Annotated[int, doc("Attached memory segments of the session.", ge=1)]


class JobResult(Wire, frozen=True):
    """How one job ended."""

    job_id: JobId
    ok: Annotated[bool, doc("Load: all bytes are there. Store: every key is stored, was there, or is declined.")]
    bytes: Annotated[ByteCount, doc("Bytes that were copied.")]
    seconds: Annotated[
        Seconds,
        doc("From the beginning of the job's copy to its end, in seconds; not what it waited for other copies."),
    ]
    error: Annotated[ErrorCode | None, doc("Why the job is not ok.")] = None
    failed: Annotated[list[GroupKeys], doc("Keys that were not stored, or that the load lacked.")] = []
    declined: Annotated[list[GroupKeys], doc("Keys of a store that the policy rejected.")] = []

    @property
    def sentence(self) -> str:
        """How it ended, for people."""
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
    """First message of a session, with the token from the lifeline."""

    protocol_version: Annotated[int, doc("The client's protocol version.", ge=0)]
    role: Annotated[Role, doc("Role of the session.")]
    name: Annotated[str, doc("Shown to operators, e.g. ``vllm:3fa85f64 tiny-llama worker 0``.", max_length=128)]
    software: Annotated[str, doc("Client and engine versions, for display.", max_length=128)]
    operator: Annotated[
        bool,
        doc(
            "An operator's program: no count of traffic has it; the policy learns nothing of it, and takes all stores."
        ),
    ] = False


class Completions(Message, frozen=True):
    """Jobs of one session that ended; published on the session's topic and kept until acknowledged."""

    sequence: Annotated[int, doc("Counts from 1 in each session, without gaps.", ge=1)]
    credit_bytes: Annotated[ByteCount, doc("Bytes of stores the session may have outstanding from now on.")]
    results: Annotated[list[JobResult], doc("Results, in the order in which the jobs ended.")]


class ResultsReply(Reply, frozen=True):
    batches: Annotated[list[Completions], doc("Unacknowledged completions, oldest first.")]
    unfinished: Annotated[list[JobId], doc("Accepted jobs that have not ended. Any other is unknown here.")]


@exchange(WORKER)
class Results(Request[ResultsReply], frozen=True):
    """Asks for completions that PUB may have dropped: when a number is missing, or a job takes longer than a second."""

    acknowledged: Acknowledged


class NamespaceOpened(Reply, frozen=True):
    created: Annotated[bool, doc("False when the namespace was open already.")]
    prefill_tokens_per_second: Annotated[
        PerSecond, doc("Prompt tokens that an engine of the namespace computes a second, as reported last; 0 if not.")
    ] = 0.0


@exchange(ENGINE)
class OpenNamespace(Request[NamespaceOpened], frozen=True):
    """Opens a namespace, or joins it when its geometry is the same."""

    namespace: Fingerprint
    label: Annotated[str, doc("Name for operators, such as the model's.", max_length=256)]
    world_size: Annotated[int, doc("Shards that make a block.", ge=1, le=MAX_WORLD_SIZE)]
    key_bytes: Annotated[int, doc("Length of a block hash in bytes.", ge=8, le=64)]
    groups: Annotated[list[GroupSpec], doc("KV cache groups, by index.", min_length=1, max_length=MAX_GROUPS)]
    description: Annotated[str, doc("What the fingerprint was made of, as JSON, for display.", max_length=65536)]


class Registered(Reply, frozen=True):
    registration_id: RegistrationId
    shard_bytes: Annotated[list[ByteCount], doc("Per group, bytes of this rank's shard of a block.")]


@exchange(WORKER)
class Register(Request[Registered], frozen=True):
    """Registers a worker's KV tensors. The segments' descriptors must have come over the lifeline before."""

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
    """Ends a registration. After the reply the daemon does not access its memory any more."""

    registration_id: RegistrationId


class LookupReply(Reply, frozen=True):
    lease_id: LeaseId
    states: Annotated[
        list[bytes],
        doc(
            "Per group of the request, one byte per key, a ``KeyState``: 0 absent, 1 writing, 2 ready, 3 pending, 4 "
            "shared. Ask again for keys that are pending or shared."
        ),
    ]
    pinned: Annotated[
        Count, doc("Number of blocks pinned under the lease. What is pending is pinned too once it is ready.")
    ]
    ttl_ms: Annotated[
        int, doc("Lifetime of the lease, in milliseconds; with 0 there is none. Look up again after half of it.", ge=0)
    ]
    wait_ms: Annotated[
        int, doc("Milliseconds until all pending keys are ready, by the speed so far; 0 if not known.", ge=0)
    ] = 0
    asking: Annotated[Count, doc("Number of shared keys of which the store has not said yet whether it has them.")] = 0


@exchange(SCHEDULER)
class Lookup(Request[LookupReply], frozen=True):
    """Asks which keys are ready and pins those under a lease. Asking again with the same lease pins nothing twice.

    More keys than one request may hold are asked for by several with one lease.
    """

    namespace: Fingerprint
    lease_id: LeaseId
    groups: Annotated[list[GroupKeys], doc("Keys, root of the prefix first.", max_length=MAX_GROUPS)]
    again: Annotated[bool, doc("The request was looked up before, and is not counted again.")] = False


@exchange(SCHEDULER)
class Release(Request[Done], frozen=True):
    """Ends leases. A lease that has ended already is no error."""

    lease_ids: Annotated[list[LeaseId], doc("Leases of this session.", max_length=65536)]
    unused: Annotated[
        str,
        doc(
            "Why what was found was not loaded, counted as misses: ``late``, the answer was not waited for; "
            "``skipped``, computing was faster; ``coming``, only what comes from a tier was not waited for, "
            "which counts as ``late``. Empty where it was loaded or not needed.",
            max_length=32,
        ),
    ] = ""


@exchange(SCHEDULER)
class Invalidate(Request[Done], frozen=True):
    """Drops blocks that proved unusable. A block under another session's lease leaves the index now, the pool later.

    After a kill of the daemon a disk may have them still; their bytes are compared with their checksum as any.
    """

    namespace: Fingerprint
    groups: Annotated[list[GroupKeys], doc("Keys of the blocks to drop.", max_length=MAX_GROUPS)]


@exchange(SCHEDULER)
class Reset(Request[Done], frozen=True):
    """Drops every block of a namespace, as after a change of the model's weights. From then on it is not shared.

    The answer says that none comes back, also after a kill. If that cannot be written down, it is an Error.

    Wait for the results of all stores first: requests of two sessions have no order, and a store that the daemon reads
    after the reset stays.
    """

    namespace: Fingerprint


@exchange(SCHEDULER)
class ReportEngine(Request[Done], frozen=True):
    """Tells how fast an engine computes, and what it left out since its last report."""

    namespace: Fingerprint
    prefill_tokens_per_second: Annotated[
        Speed, doc("Prompt tokens that it computes a second, 1e-6 at least; 0 if not known.")
    ]
    skipped_loads: Annotated[int, doc("Loads left out, as computing is faster.", ge=0, le=MAX_REPORTED)] = 0
    paused_stores: Annotated[int, doc("Stores left out, as it had waited too often.", ge=0, le=MAX_REPORTED)] = 0
    late_lookups: Annotated[int, doc("Lookups that it did not wait for.", ge=0, le=MAX_REPORTED)] = 0
    problem: Annotated[str, doc("Why it stores and loads nothing; empty if it does.", max_length=MAX_PROBLEM)] = ""


MAX_REQUEST_REPORTS = 256


class RequestReport(Wire, frozen=True):
    """What became of one request of an engine: why it hit or missed."""

    request: Annotated[str, doc("The engine's id of the request.", max_length=128)]
    decided_at: Annotated[float, doc("When it was known, in seconds since 1970.", ge=0, le=MOST_TIME_S)]
    tokens: Annotated[Count, doc("Tokens of its prompt.")]
    keys: Annotated[Count, doc("Keys asked for; 0 without an answer, and for less than a block.")]
    found_pool: Annotated[Count, doc("Of these, keys that the pool had.")]
    found_disk: Annotated[Count, doc("Keys that a disk had.")]
    found_shared: Annotated[Count, doc("Keys that a store had which nodes share.")]
    outcome: Annotated[str, doc("What the engine did, one word: ``Outcome``.", max_length=32)]
    loaded_tokens: Annotated[Count, doc("Tokens that it loaded.")] = 0
    missing_group: GroupIndex = 0
    missing_key: Annotated[bytes, doc("The first key that was missing; empty for none.", max_length=64)] = b""
    reason: Annotated[str, doc("Why it was missing; empty where the daemon knows better.", max_length=32)] = ""
    missing_number: Annotated[Count, doc("Which of the keys that it asked for this was, from 1 on; 0 for none.")] = 0


class Outcome(StrEnum):
    """What an engine did with a request."""

    LOADED = "loaded"
    MISSED = "missed"
    HELD = "held"
    """What was found it had itself."""
    SHORT = "short"
    """The prompt is shorter than a block."""
    SKIPPED = "skipped"
    """Blocks were there, and computing was faster than loading."""
    NO_SPACE = "no_space"
    """Blocks were there, and the engine's KV cache had no space to load them."""
    LATE = "late"
    """It did not wait for the answer any longer."""
    FAILED = "failed"
    """A load failed, and it computed."""
    UNUSED = "unused"
    """Nothing may be looked up for it, or the daemon could not be asked."""


@exchange(SCHEDULER)
class ReportRequests(Request[Done], frozen=True):
    """Tells what became of requests, for operators: the daemon keeps the last 1,000 of a session."""

    namespace: Fingerprint
    requests: Annotated[list[RequestReport], doc("In their order.", max_length=MAX_REQUEST_REPORTS)]


class GroupBlocks(Wire, frozen=True):
    """The blocks of one group in all stores, or in all loads, of a message: end to end, in the order of the jobs.

    Key ``i`` of a job covers the engine blocks ``[i * blocks_per_key, (i + 1) * blocks_per_key)`` counted from the
    start of its key 0. A store ends with its last key; a load may end inside it.

    All stores of a group tell parents and tokens, or none: send the others in a message of their own.
    """

    group: GroupIndex
    key_counts: Annotated[bytes, doc("Keys of each job, little-endian uint32; 0 for one that has none in the group.")]
    block_counts: Annotated[bytes, doc("Engine blocks of each job, little-endian uint32.")]
    first_blocks: Annotated[
        bytes, doc("Engine blocks left out at the start of each job's key 0, little-endian uint32; empty for none.")
    ]
    keys: Keys
    block_ids: Annotated[bytes, doc("Engine block ids, little-endian int32, end to end.")]
    parents: Annotated[
        bytes,
        doc("Of stores, for KV events: for each key the hash before it in its prompt, or zeros; empty if not sent."),
    ] = b""
    tokens: Annotated[
        bytes,
        doc("With ``parents``: token ids of the blocks, little-endian uint32; empty if hashes have more in them."),
    ] = b""


class Stores(Wire, frozen=True):
    """Stores: each copies engine blocks into the pool."""

    job_ids: Annotated[list[JobId], doc("One for each store.", max_length=MAX_JOBS)]
    groups: Annotated[list[GroupBlocks], doc("Blocks to copy; each group once.", max_length=MAX_GROUPS)]


class Loads(Wire, frozen=True):
    """Loads: each copies leased blocks into engine blocks.

    A lease ends with a good load of every rank of the namespace, unless that load keeps it.
    """

    job_ids: Annotated[list[JobId], doc("One for each load.", max_length=MAX_JOBS)]
    lease_ids: Annotated[list[LeaseId], doc("The lease of each load.", max_length=MAX_JOBS)]
    keep_lease: Annotated[
        list[bool],
        doc("Keep the lease until the scheduler releases it: others load the same shards.", max_length=MAX_JOBS),
    ]
    groups: Annotated[list[GroupBlocks], doc("Blocks to copy; each group once.", max_length=MAX_GROUPS)]


@exchange(WORKER)
class Submit(Request[Completions], frozen=True):
    """Submits the stores and loads of one step.

    A message in which anything is wrong is refused whole, and changes nothing. Else each job has one result, in
    completions.
    """

    registration_id: RegistrationId
    stores: Annotated[Stores, doc("Stores.")]
    loads: Annotated[Loads, doc("Loads.")]
    acknowledged: Acknowledged = 0


class CancelReply(Reply, frozen=True):
    cancelled: Annotated[list[JobId], doc("Jobs that will not run, stores of the same message among them.")]
    running: Annotated[list[JobId], doc("Jobs whose bytes are moving; wait for their completions.")]


@exchange(WORKER)
class Cancel(Request[CancelReply], frozen=True):
    """Fails stores and loads that have not started; they get completions as all jobs do."""

    job_ids: Annotated[list[JobId], doc("Jobs of this session.", max_length=65536)]
    acknowledged: Acknowledged = 0


AnyRequest: TypeAlias = Request[Message]
AnyReply: TypeAlias = Reply
