"""Who is connected, and what is cached."""

from __future__ import annotations

from typing import Annotated

from msgspec import field

from kvoffd_proto.wire import (
    ADMIN,
    ByteCount,
    Count,
    Done,
    Fingerprint,
    GroupSpec,
    Reply,
    Request,
    Role,
    Seconds,
    Section,
    SessionId,
    Wire,
    doc,
    exchange,
)


class SessionInfo(Wire, frozen=True):
    """One open session."""

    session_id: SessionId
    role: Annotated[Role | None, doc("Role; nil before Hello.")]
    name: Annotated[str, doc("Name given in Hello.")]
    software: Annotated[str, doc("Versions given in Hello.")]
    pid: Annotated[int, doc("Peer's pid as the kernel tells the daemon; 0 from another pid namespace.", ge=0)]
    uid: Annotated[int, doc("Peer's uid.", ge=0)]
    age_seconds: Annotated[Seconds, doc("Seconds since the lifeline was opened.")]
    idle_seconds: Annotated[Seconds, doc("Seconds since the last request.")]
    leases: Annotated[Count, doc("Live leases.")]
    jobs: Annotated[Count, doc("Unfinished jobs.")]
    registrations: Annotated[Count, doc("Registrations.")]
    registered_bytes: Annotated[ByteCount, doc("Bytes of memory that the daemon has mapped for the session.")]
    unacknowledged: Annotated[Count, doc("Completions that the session has not acknowledged.")]
    namespaces: Annotated[list[Fingerprint], doc("Namespaces that the session has opened.")] = field(
        default_factory=list
    )
    pinned_bytes: Annotated[ByteCount, doc("Pool bytes of the blocks under the session's leases.")] = 0


class SessionsReply(Reply, frozen=True):
    sessions: Annotated[list[SessionInfo], doc("Open sessions, oldest first.")]


@exchange(Section.ADMINISTRATION, ADMIN)
class Sessions(Request[SessionsReply], frozen=True):
    """Asks for the open sessions."""


class NamespaceInfo(Wire, frozen=True):
    """One open namespace."""

    namespace: Fingerprint
    label: Annotated[str, doc("Name of the namespace for operators.")]
    world_size: Annotated[int, doc("Shards that make a block.", ge=1)]
    key_bytes: Annotated[int, doc("Length of a block hash in bytes.", ge=1)]
    groups: Annotated[list[GroupSpec], doc("KV cache groups.")]
    shard_bytes: Annotated[
        list[list[ByteCount]], doc("Per group and rank, bytes of a shard; 0 where no worker registered.")
    ]
    ready_blocks: Annotated[Count, doc("Blocks that can be read.")]
    ready_bytes: Annotated[ByteCount, doc("Pool bytes of the blocks that can be read.")]
    writing_blocks: Annotated[Count, doc("Blocks that lack a shard.")]
    sessions: Annotated[Count, doc("Sessions that opened the namespace.")]
    description: Annotated[
        str, doc("What the fingerprint was made of, as JSON; empty beyond 1 MiB in one reply, see DescribeNamespace.")
    ]
    quota_bytes: Annotated[ByteCount | None, doc("The most that it may have of the pool; nil for all of it.")] = None


class NamespacesReply(Reply, frozen=True):
    namespaces: Annotated[list[NamespaceInfo], doc("Open namespaces, in the order in which they were opened.")]


@exchange(Section.ADMINISTRATION, ADMIN)
class Namespaces(Request[NamespacesReply], frozen=True):
    """Asks for the open namespaces."""


@exchange(Section.ADMINISTRATION, ADMIN)
class SetQuota(Request[Done], frozen=True):
    """Sets the most that a namespace may have of the pool, from now on and after restarts, open or not. Admin only.

    A namespace that has its quota takes from itself. If the quota holds, but cannot be written for the next daemon, the
    answer is an Error that names the file.
    """

    namespace: Fingerprint
    quota_bytes: Annotated[ByteCount | None, doc("Pool bytes; nil takes the quota away.")]
