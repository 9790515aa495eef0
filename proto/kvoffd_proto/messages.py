# ruff: noqa: F401, F403, F405 - what is of one subject is in a module of its own, and found here under the name everybody imports
"""Requests and replies on ``jobs.sock``, and the completions on ``events.sock``.

Every message is an array: its tag, then its fields in the order given here. A request goes as one frame
from a DEALER; its reply comes back with the same ``request_id``. Store and Load are not replied to when
they are accepted: their answer is a completion. ``PROTOCOL.md`` is generated from this module.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, field

import kvoffd_proto.blocks
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.handles import Handle, PageRef, TensorLayout
from kvoffd_proto.stats import *
from kvoffd_proto.wire import *

# --- parts ---------------------------------------------------------------------------------------


class Limits(Wire, frozen=True):
    """Bounds of one session, told in Welcome. What is beyond them is refused."""

    max_frame_bytes: Annotated[int, Meta(ge=1, description="Largest request frame in bytes.")]
    max_keys_per_request: Annotated[int, Meta(ge=1, description="Keys in one Lookup, Store, Load or Invalidate.")]
    max_jobs_in_flight: Annotated[int, Meta(ge=1, description="Unfinished jobs of the session.")]
    max_leases: Annotated[int, Meta(ge=1, description="Live leases of the session.")]
    max_registrations: Annotated[int, Meta(ge=1, description="Registrations of the session.")]
    max_segments: Annotated[int, Meta(ge=1, description="Attached memory segments of the session.")]


class GroupKeys(Wire, frozen=True):
    """Keys of one group."""

    group: GroupIndex
    keys: Annotated[bytes, Meta(description="Block hashes, end to end, each of the namespace's ``key_bytes``.")]


class GroupTransfer(Wire, frozen=True):
    """The part of a job that concerns one group.

    Key ``i`` covers the engine blocks ``[i * blocks_per_key, (i + 1) * blocks_per_key)`` counted from the start of
    key 0; ``block_ids`` begin ``first_block`` blocks into key 0. A store ends with its last key; a load may end inside
    it.
    """

    group: GroupIndex
    keys: Annotated[bytes, Meta(description="Block hashes, end to end, each of the namespace's ``key_bytes``.")]
    block_ids: Annotated[bytes, Meta(description="Engine block ids, little-endian int32, end to end.")]
    first_block: Annotated[
        int, Meta(ge=0, lt=65536, description="Engine blocks of key 0 that are left out at its start.")
    ] = 0


class JobResult(Wire, frozen=True):
    """How one job ended."""

    job_id: JobId
    ok: Annotated[
        bool, Meta(description="Load: all bytes are in place. Store: every key was stored or was there already.")
    ]
    bytes: Annotated[ByteCount, Meta(description="Bytes that were copied.")]
    seconds: Annotated[Seconds, Meta(description="From the daemon's acceptance of the job to its end, in seconds.")]
    error: Annotated[ErrorCode | None, Meta(description="Why not ok.")] = None
    failed: Annotated[list[GroupKeys], Meta(description="Keys that were not stored, or that the load lacked.")] = field(
        default_factory=list
    )


# --- session -------------------------------------------------------------------------------------


class Welcome(Reply, frozen=True):
    """Answer to Hello: the session is open."""

    session_id: SessionId
    daemon_version: Annotated[str, Meta(description="Release of the daemon.")]
    capabilities: Annotated[list[str], Meta(description="Handle kinds and features, e.g. ``memfd``, ``kv_events``.")]
    limits: Annotated[Limits, Meta(description="Bounds of this session.")]
    credit_bytes: Annotated[ByteCount, Meta(description="Bytes of stores the session may have outstanding.")]
    lease_ttl_ms: Annotated[int, Meta(ge=1, description="Life of a lease without renewal, in milliseconds.")]
    heartbeat_interval_ms: Annotated[
        int, Meta(ge=1, description="How often the client should send Heartbeat, in milliseconds.")
    ]
    job_deadline_ms: Annotated[
        int, Meta(ge=1, description="A job that has not ended by then is failed, in milliseconds.")
    ]


@exchange(Section.SESSION, ANY_ROLE, over_tcp=True)
class Hello(Request[Welcome], frozen=True):
    """First message of a session, with the token from the lifeline."""

    protocol_version: Annotated[int, Meta(ge=0, description="The client's protocol version.")]
    role: Annotated[Role, Meta(description="What the session will do.")]
    name: Annotated[str, Meta(max_length=128, description="Shown to operators, e.g. ``vllm:tiny-llama worker 0``.")]
    software: Annotated[str, Meta(max_length=128, description="Client and engine versions, for display.")]


class HeartbeatReply(Reply, frozen=True):
    """Answer to Heartbeat."""

    sequence: Annotated[
        int, Meta(ge=0, description="Sequence number of the session's last completions; 0 before the first.")
    ]
    credit_bytes: Annotated[ByteCount, Meta(description="Bytes of stores the session may have outstanding.")]
    ended: Annotated[list[LeaseId], Meta(description="Leases among ``renew`` that are not alive.")]


@exchange(Section.SESSION, ANY_ROLE)
class Heartbeat(Request[HeartbeatReply], frozen=True):
    """Acknowledges completions, renews leases, asks what the last completion was."""

    acknowledged: Annotated[
        int, Meta(ge=0, le=2**63 - 1, description="All completions up to this sequence number have arrived.")
    ]
    renew: Annotated[list[LeaseId], Meta(max_length=65536, description="Leases still wanted.")]


class Completions(Message, frozen=True):
    """Jobs of one session that ended; published on the session's topic and kept until acknowledged."""

    epoch: Epoch
    session_id: SessionId
    sequence: Annotated[int, Meta(ge=1, description="Counts from 1 in each session, without gaps.")]
    credit_bytes: Annotated[
        ByteCount, Meta(description="Bytes of stores the session may have outstanding from now on.")
    ]
    results: Annotated[list[JobResult], Meta(description="In the order in which they ended.")]


class ReplayReply(Reply, frozen=True):
    """Answer to Replay."""

    batches: Annotated[list[Completions], Meta(description="Unacknowledged completions, oldest first.")]
    unfinished: Annotated[
        list[JobId], Meta(description="Accepted jobs that have not ended. Any other job is unknown to the daemon.")
    ]


@exchange(Section.SESSION, WORKER)
class Replay(Request[ReplayReply], frozen=True):
    """Asks for completions that PUB may have dropped."""

    after: Annotated[
        int, Meta(ge=0, le=2**63 - 1, description="Last sequence number that arrived; also acknowledges up to it.")
    ]


# --- namespaces and memory -----------------------------------------------------------------------


@exchange(Section.MEMORY, ENGINE)
class OpenNamespace(Request[NamespaceOpened], frozen=True):
    """Opens a namespace, or joins it when its geometry is the same."""

    namespace: Fingerprint
    label: Annotated[str, Meta(max_length=256, description="Name for operators, such as the model's.")]
    world_size: Annotated[int, Meta(ge=1, le=4096, description="Shards that make a block.")]
    key_bytes: Annotated[int, Meta(ge=8, le=64, description="Length of a block hash in bytes.")]
    groups: Annotated[list[GroupSpec], Meta(min_length=1, max_length=1024, description="KV cache groups, by index.")]
    description: Annotated[
        str, Meta(max_length=65536, description="What the fingerprint was made of, as JSON, for display.")
    ]


class Registered(Reply, frozen=True):
    """Answer to Register."""

    registration_id: RegistrationId
    shard_bytes: Annotated[list[ByteCount], Meta(description="Per group, bytes of this rank's shard of a block.")]


@exchange(Section.MEMORY, WORKER)
class Register(Request[Registered], frozen=True):
    """Makes a worker's KV tensors known. The segments' descriptors have come over the lifeline before."""

    namespace: Fingerprint
    registration_id: RegistrationId
    rank: Rank
    blocks_per_key: Annotated[int, Meta(ge=1, lt=65536, description="Engine blocks that one key covers.")]
    segments: Annotated[
        list[Handle], Meta(min_length=1, max_length=65536, description="Memory that holds the tensors.")
    ]
    tensors: Annotated[list[TensorLayout], Meta(min_length=1, max_length=65536, description="KV tensors.")]
    groups: Annotated[
        list[Annotated[list[PageRef], Meta(max_length=65536)]],
        Meta(min_length=1, max_length=1024, description="Per group, its layers' pages in slot order."),
    ]


@exchange(Section.MEMORY, WORKER)
class Unregister(Request[Done], frozen=True):
    """Gives a registration up. After the reply the daemon touches its memory no more."""

    registration_id: RegistrationId


# --- scheduler -----------------------------------------------------------------------------------


class LookupReply(Reply, frozen=True):
    """Answer to Lookup."""

    lease_id: LeaseId
    states: Annotated[
        list[bytes],
        Meta(
            description="Per group of the request, one byte a key: 0 absent, 1 writing, 2 ready, 3 pending. A pending "
            "key is in a tier below and on its way up: ask again."
        ),
    ]
    pinned: Annotated[Count, Meta(description="Blocks pinned; where it is 0 there is no lease.")]
    ttl_ms: Annotated[int, Meta(ge=0, description="Life of the lease without renewal, in milliseconds.")]
    wait_ms: Annotated[
        int,
        Meta(
            ge=0,
            description="By the speed measured so far, how long until all pending keys are up, in milliseconds; "
            "0 where that is not known.",
        ),
    ] = 0


@exchange(Section.SCHEDULER, SCHEDULER)
class Lookup(Request[LookupReply], frozen=True):
    """Asks which keys are ready and pins those under a lease. Asking again with the same lease changes nothing."""

    namespace: Fingerprint
    lease_id: LeaseId
    groups: Annotated[list[GroupKeys], Meta(max_length=1024, description="Keys, root of the prefix first.")]
    again: Annotated[
        bool, Meta(description="It was asked before and something was pending: it is not counted a second time.")
    ] = False


@exchange(Section.SCHEDULER, SCHEDULER + ADMIN)
class Release(Request[Done], frozen=True):
    """Ends leases before their time. Leases that are gone already are no error."""

    lease_ids: Annotated[list[LeaseId], Meta(max_length=65536, description="Leases of this session.")]


@exchange(Section.SCHEDULER, SCHEDULER)
class Invalidate(Request[Done], frozen=True):
    """Drops blocks that proved unusable. Those that another session leased leave the index now, the bytes later."""

    namespace: Fingerprint
    groups: Annotated[list[GroupKeys], Meta(max_length=1024, description="Keys to forget.")]


@exchange(Section.SCHEDULER, SCHEDULER)
class Reset(Request[Done], frozen=True):
    """Drops every block of a namespace, as after a change of the model's weights."""

    namespace: Fingerprint


# --- worker --------------------------------------------------------------------------------------


@exchange(Section.WORKER, WORKER)
class Store(Request[Completions], frozen=True):
    """Copies engine blocks into the pool. Answered by a completion, or by Error if it is refused whole."""

    registration_id: RegistrationId
    job_id: JobId
    groups: Annotated[list[GroupTransfer], Meta(min_length=1, max_length=1024, description="What to copy.")]


@exchange(Section.WORKER, WORKER)
class Load(Request[Completions], frozen=True):
    """Copies leased blocks into engine blocks. Answered by a completion, or by Error if it is refused whole."""

    registration_id: RegistrationId
    job_id: JobId
    lease_id: LeaseId
    groups: Annotated[list[GroupTransfer], Meta(min_length=1, max_length=1024, description="What to copy.")]


class CancelReply(Reply, frozen=True):
    """Answer to Cancel."""

    cancelled: Annotated[list[JobId], Meta(description="Jobs that will not run.")]
    running: Annotated[list[JobId], Meta(description="Jobs whose bytes are moving; wait for their completions.")]


@exchange(Section.WORKER, WORKER)
class Cancel(Request[CancelReply], frozen=True):
    """Fails stores and loads that have not started; they get completions as all jobs do."""

    job_ids: Annotated[list[JobId], Meta(max_length=65536, description="Jobs of this session.")]


# --- administration ------------------------------------------------------------------------------


class HealthReply(Reply, frozen=True):
    """Answer to Health."""

    healthy: Annotated[bool, Meta(description="False when something in ``problems`` needs an operator.")]
    ready: Annotated[bool, Meta(description="True when the daemon takes sessions and jobs.")]
    problems: Annotated[list[str], Meta(description="A sentence each.")]


@exchange(Section.ADMINISTRATION, ANY_ROLE, over_tcp=True)
class Health(Request[HealthReply], frozen=True):
    """Asks whether the daemon works. The answer is a round trip through the loop that serves engines."""


class SessionInfo(Wire, frozen=True):
    """One open session."""

    session_id: SessionId
    role: Annotated[str, Meta(description="Role, or ``new`` before Hello.")]
    name: Annotated[str, Meta(description="Name given in Hello.")]
    software: Annotated[str, Meta(description="Versions given in Hello.")]
    pid: Annotated[
        int, Meta(ge=0, description="Peer's pid as the kernel tells the daemon; 0 from another pid namespace.")
    ]
    uid: Annotated[int, Meta(ge=0, description="Peer's uid.")]
    age_seconds: Annotated[Seconds, Meta(description="Since the lifeline was opened, in seconds.")]
    idle_seconds: Annotated[Seconds, Meta(description="Since the last request, in seconds.")]
    leases: Annotated[Count, Meta(description="Live leases.")]
    jobs: Annotated[Count, Meta(description="Unfinished jobs.")]
    registrations: Annotated[Count, Meta(description="Registrations.")]
    registered_bytes: Annotated[ByteCount, Meta(description="Bytes of memory that the daemon has mapped for it.")]
    unacknowledged: Annotated[Count, Meta(description="Completions kept for it.")]


class SessionsReply(Reply, frozen=True):
    """Answer to Sessions."""

    sessions: Annotated[list[SessionInfo], Meta(description="Oldest first.")]


@exchange(Section.ADMINISTRATION, ADMIN, over_tcp=True)
class Sessions(Request[SessionsReply], frozen=True):
    """Asks for the open sessions."""


class NamespaceInfo(Wire, frozen=True):
    """One open namespace."""

    namespace: Fingerprint
    label: Annotated[str, Meta(description="Name for operators.")]
    world_size: Annotated[int, Meta(ge=1, description="Shards that make a block.")]
    key_bytes: Annotated[int, Meta(ge=1, description="Length of a block hash in bytes.")]
    groups: Annotated[list[GroupSpec], Meta(description="KV cache groups.")]
    shard_bytes: Annotated[
        list[list[ByteCount]], Meta(description="Per group and rank, bytes of a shard; 0 where no worker registered.")
    ]
    ready_blocks: Annotated[Count, Meta(description="Blocks that can be read.")]
    ready_bytes: Annotated[ByteCount, Meta(description="Pool bytes of those blocks.")]
    writing_blocks: Annotated[Count, Meta(description="Blocks that lack a shard.")]
    sessions: Annotated[Count, Meta(description="Sessions that opened it.")]
    description: Annotated[str, Meta(description="What the fingerprint was made of, as JSON.")]


class NamespacesReply(Reply, frozen=True):
    """Answer to Namespaces."""

    namespaces: Annotated[list[NamespaceInfo], Meta(description="In the order in which they were opened.")]


@exchange(Section.ADMINISTRATION, ADMIN, over_tcp=True)
class Namespaces(Request[NamespacesReply], frozen=True):
    """Asks for the open namespaces."""


@exchange(Section.ADMINISTRATION, ADMIN, over_tcp=True)
class Clear(Request[Done], frozen=True):
    """Drops every block of one namespace, or of all. Admin only."""

    namespace: Annotated[Fingerprint | None, Meta(description="The namespace; nil for all.")] = None


class ScrubReply(Reply, frozen=True):
    """Answer to Scrub: the scrub that runs, or the last one. All counts are 0 where there was none."""

    running: Annotated[bool, Meta(description="False once it is done.")]
    slots: Annotated[Count, Meta(description="Slots in use when it began.")]
    done_slots: Annotated[Count, Meta(description="Of these, those that are done with.")]
    checked_slots: Annotated[Count, Meta(description="Of these, those that were compared; the others had been freed.")]
    checked_bytes: Annotated[ByteCount, Meta(description="Bytes that were compared.")]
    mismatches: Annotated[Count, Meta(description="Slots whose bytes were not those that were stored.")]
    seconds: Annotated[Seconds, Meta(description="How long it has been running, or ran, in seconds.")]


@exchange(Section.ADMINISTRATION, ADMIN, over_tcp=True)
class Scrub(Request[ScrubReply], frozen=True):
    """Has every readable block compared with its checksum, in the background, or asks how far that is. Admin only."""

    start: Annotated[bool, Meta(description="Begin, unless it is being done already. False only asks.")]


@exchange(Section.ADMINISTRATION, ADMIN)
class AttachDisk(Request[Done], frozen=True):
    """Begins to use a directory as a disk tier; ``Stats`` tells how that goes. Root and the daemon's own user only."""

    directory: Annotated[str, Meta(min_length=1, max_length=4096, description="An absolute path.")]
    size_bytes: Annotated[ByteCount, Meta(description="The most that may be taken of its device.")]


@exchange(Section.ADMINISTRATION, ADMIN)
class DrainDisk(Request[Done], frozen=True):
    """Writes nothing to a directory any more; what is there is still read. Root and the daemon's own user only."""

    directory: Annotated[str, Meta(min_length=1, max_length=4096, description="As it was attached.")]


@exchange(Section.ADMINISTRATION, ADMIN)
class DetachDisk(Request[Done], frozen=True):
    """Gives a directory up; its blocks stay in its file. Root and the daemon's own user only."""

    directory: Annotated[str, Meta(min_length=1, max_length=4096, description="As it was attached.")]


AnyRequest: TypeAlias = Request[Message]
AnyReply: TypeAlias = Reply

REPLIES: tuple[type[Reply], ...] = (
    *dict.fromkeys(known.answer for known in EXCHANGES.values() if issubclass(known.answer, Reply)),
    Error,
)
"""Every reply of the protocol, those of ``blocks`` included."""
