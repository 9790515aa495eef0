"""Requests of administrators: statistics, health, sessions, namespaces, disks, and what clears or scrubs the cache."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from kvoffd_proto.blocks import BlockAccessStats
from kvoffd_proto.wire import (
    ADMIN,
    ANY_ROLE,
    ByteCount,
    Count,
    Done,
    Fingerprint,
    GroupSpec,
    Reply,
    Request,
    Seconds,
    Section,
    SessionId,
    Wire,
    exchange,
)


class NamespaceStats(Wire, frozen=True):
    """Counters of one namespace since the daemon's start."""

    namespace: Fingerprint
    label: Annotated[str, Meta(description="Name for operators.")]
    ready_blocks: Annotated[Count, Meta(description="Blocks that can be read.")]
    ready_bytes: Annotated[ByteCount, Meta(description="Pool bytes of those blocks.")]
    writing_blocks: Annotated[Count, Meta(description="Blocks that lack a shard.")]
    lookups: Annotated[Count, Meta(description="Lookup messages.")]
    keys_asked: Annotated[Count, Meta(description="Keys in them.")]
    keys_ready: Annotated[Count, Meta(description="Keys that were ready.")]
    prefix_keys_ready: Annotated[
        Count, Meta(description="Keys in the unbroken run of ready keys at each group's start.")
    ]
    stored_blocks: Annotated[Count, Meta(description="Blocks that became ready.")]
    stored_bytes: Annotated[ByteCount, Meta(description="Bytes copied from engines.")]
    loaded_bytes: Annotated[ByteCount, Meta(description="Bytes copied to engines.")]
    evicted_blocks: Annotated[Count, Meta(description="Blocks evicted to make room.")]
    invalidated_blocks: Annotated[
        Count, Meta(description="Blocks dropped by Invalidate, Reset, Clear, a timeout or a wrong checksum.")
    ]
    dropped_keys: Annotated[Count, Meta(description="Keys of stores that found no room.")]
    keys_pending: Annotated[
        Count, Meta(description="Keys in lookups that were on their way up from disk; when asked first.")
    ] = 0


class DirectionStats(Wire, frozen=True):
    """Counters of one direction of copying."""

    jobs: Annotated[Count, Meta(description="Jobs that ended.")]
    failed_jobs: Annotated[Count, Meta(description="Of these, jobs that failed or were cancelled.")]
    bytes: Annotated[ByteCount, Meta(description="Bytes copied.")]
    busy_seconds: Annotated[
        Seconds,
        Meta(description="Time that copy threads spent copying, and comparing the checksums of loads, in seconds."),
    ]
    queued_jobs: Annotated[Count, Meta(description="Jobs that wait now.")]
    running_jobs: Annotated[Count, Meta(description="Jobs that run now.")]
    bytes_per_second: Annotated[float, Meta(ge=0, description="Bytes copied per second over the last ten seconds.")]
    checksum_seconds: Annotated[
        Seconds,
        Meta(
            description="CPU time of all threads that went into the checksums of jobs, in seconds; without those that "
            "a copy takes along the way."
        ),
    ] = 0.0
    checksum_bytes: Annotated[ByteCount, Meta(description="Bytes of which a job had checksums taken or compared.")] = 0


class PoolStats(Wire, frozen=True):
    """State of the pool, in bytes. free + writing + ready + leaving + quarantined = pool."""

    pool_bytes: Annotated[ByteCount, Meta(description="Size of the pool.")]
    usable_bytes: Annotated[ByteCount, Meta(description="Bytes that are touched and ready for use.")]
    table_bytes: Annotated[ByteCount, Meta(description="Size of the slot table.")]
    free_bytes: Annotated[ByteCount, Meta(description="Bytes in no slot, or in a free one.")]
    writing_bytes: Annotated[ByteCount, Meta(description="Bytes in slots of blocks that are being written.")]
    ready_bytes: Annotated[ByteCount, Meta(description="Bytes in slots of readable blocks.")]
    leaving_bytes: Annotated[ByteCount, Meta(description="Bytes of dropped blocks that a lease or a copy still holds.")]
    pinned_bytes: Annotated[
        ByteCount, Meta(description="Of the ready and leaving bytes, those under a lease, a copy or an operator's pin.")
    ]
    quarantined_bytes: Annotated[
        ByteCount, Meta(description="Bytes in slots that lost what was stored in them; not used until a restart.")
    ]
    spilled_slots: Annotated[
        Count, Meta(description="Slots since the start that had to be taken on another NUMA node than their GPU's.")
    ]
    page_locked_bytes: Annotated[
        ByteCount,
        Meta(
            description="Bytes that GPUs copy at full speed, since the CUDA driver has locked their pages: from the "
            "first engine on a GPU, in steps, until the last one has gone and all is unlocked."
        ),
    ] = 0
    unlockable_bytes: Annotated[
        ByteCount, Meta(description="Bytes whose pages the CUDA driver would not lock: GPUs copy them slowly.")
    ] = 0


class IntegrityStats(Wire, frozen=True):
    """Checksums that were compared since the daemon's start."""

    checked_slots: Annotated[Count, Meta(description="Slots whose bytes were compared with their checksum.")]
    checked_bytes: Annotated[ByteCount, Meta(description="Bytes of these slots.")]
    mismatches: Annotated[Count, Meta(description="Of these, slots whose bytes were not those that were stored.")]
    quarantined_slots: Annotated[Count, Meta(description="Slots that are not used any more for that reason.")]
    unverified_slots: Annotated[
        Count, Meta(description="Slots of an earlier daemon that nobody has looked at yet; a load of one does first.")
    ]


class DiskStats(Wire, frozen=True):
    """One directory of the disk tier. Counters count since it was opened."""

    directory: Annotated[str, Meta(description="Where its file is.")]
    state: Annotated[
        str,
        Meta(description="``opening``, ``serving``, ``draining``, ``hanging``, ``closing`` or ``failed``."),
    ]
    problem: Annotated[str, Meta(description="Why it failed, a sentence; empty otherwise.")]
    size_bytes: Annotated[ByteCount, Meta(description="The most it may take of its device.")]
    physical_bytes: Annotated[ByteCount, Meta(description="What its file takes of the device.")]
    used_bytes: Annotated[ByteCount, Meta(description="Bytes of the slots that hold blocks.")]
    blocks: Annotated[Count, Meta(description="Blocks that can be brought up.")]
    oldest_seconds: Annotated[Seconds, Meta(description="Since the oldest block was written, in seconds, to the hour.")]
    read_blocks: Annotated[Count, Meta(description="Blocks read.")]
    read_bytes: Annotated[ByteCount, Meta(description="Bytes of these.")]
    written_blocks: Annotated[Count, Meta(description="Blocks written.")]
    written_bytes: Annotated[ByteCount, Meta(description="Bytes of these.")]
    lifetime_written_bytes: Annotated[
        ByteCount, Meta(description="Bytes written since the file was made, by all daemons: the drive's wear.")
    ]
    evicted_blocks: Annotated[Count, Meta(description="Blocks that made room for others.")]
    refused_writes: Annotated[Count, Meta(description="Writes not taken, for want of room or too many under way.")]
    queued_reads: Annotated[Count, Meta(description="Reads that wait now.")]
    queued_writes: Annotated[Count, Meta(description="Writes that wait now.")]
    running_reads: Annotated[Count, Meta(description="Reads that run now.")]
    running_writes: Annotated[Count, Meta(description="Writes that run now.")]
    busy_seconds: Annotated[Seconds, Meta(description="Time that threads spent reading and writing, in seconds.")]
    direct: Annotated[bool, Meta(description="Whether it goes past the page cache (O_DIRECT).")]
    errors: Annotated[dict[str, Count], Meta(description="What was wrong, by kind; the log has the sentences.")]


class BelowStats(Wire, frozen=True):
    """What moved between the pool and the disks below it since the daemon's start."""

    promoted_blocks: Annotated[Count, Meta(description="Blocks that came up.")]
    promoted_bytes: Annotated[ByteCount, Meta(description="Bytes of these.")]
    pending_blocks: Annotated[Count, Meta(description="Blocks that are on their way up, or wait for it.")]
    failed_promotions: Annotated[
        dict[str, Count],
        Meta(description="Blocks that were asked for and did not come, by reason; ``overdue``: not in time."),
    ]
    read_bytes_per_second: Annotated[float, Meta(ge=0, description="Speed at which blocks came up lately.")]
    written_blocks: Annotated[Count, Meta(description="Blocks written to disk.")]
    written_bytes: Annotated[ByteCount, Meta(description="Bytes of these.")]
    waiting_writes: Annotated[Count, Meta(description="Blocks that wait for being written.")]
    over_budget: Annotated[Count, Meta(description="Times that a write had to wait, or to be left, for the budget.")]
    write_mode: Annotated[str, Meta(description="What is written: the setting ``disk_write``.")]
    budget_left_bytes: Annotated[
        ByteCount | None, Meta(description="What ``disk_write_per_day`` allows to write now; nil without a bound.")
    ]


class LatencyStats(Wire, frozen=True):
    """Distribution of a duration, in seconds, over the last minutes."""

    count: Annotated[Count, Meta(description="Observations since the daemon's start.")]
    p50: Annotated[Seconds, Meta(description="Median of the recent ones.")]
    p99: Annotated[Seconds, Meta(description="99th percentile of the recent ones.")]
    maximum: Annotated[Seconds, Meta(description="Largest of the recent ones.")]


class StatsReply(Reply, frozen=True):
    """Answer to Stats."""

    daemon_version: Annotated[str, Meta(description="Release of the daemon.")]
    pid: Annotated[int, Meta(ge=0, description="Process id, in the daemon's own pid namespace.")]
    uptime_seconds: Annotated[Seconds, Meta(description="Since the daemon's start, in seconds.")]
    policy: Annotated[str, Meta(description="Eviction policy.")]
    pool: Annotated[PoolStats, Meta(description="The pool.")]
    store: Annotated[DirectionStats, Meta(description="Engine to pool.")]
    load: Annotated[DirectionStats, Meta(description="Pool to engine.")]
    lookup_latency: Annotated[LatencyStats, Meta(description="Time spent on a Lookup inside the daemon.")]
    leases: Annotated[Count, Meta(description="Live leases.")]
    pinned_blocks: Annotated[Count, Meta(description="Blocks under a lease, a copy or an operator's pin.")]
    sessions: Annotated[Count, Meta(description="Open sessions.")]
    lookups_per_second: Annotated[float, Meta(ge=0, description="Lookups over the last ten seconds.")]
    requests: Annotated[Count, Meta(description="Requests answered, errors included.")]
    errors: Annotated[dict[str, Count], Meta(description="Error replies by code name, and refusals at the lifeline.")]
    events_published: Annotated[Count, Meta(description="KV event messages published.")]
    cpu_seconds: Annotated[Seconds, Meta(description="CPU time of the daemon, in seconds.")]
    resident_bytes: Annotated[ByteCount, Meta(description="Resident memory without the pool and its table.")]
    namespaces: Annotated[list[NamespaceStats], Meta(description="Open namespaces.")]
    integrity: Annotated[IntegrityStats, Meta(description="Checksums of the slots.")]
    blocks: Annotated[BlockAccessStats, Meta(description="What operators did with single blocks.")]
    below: Annotated[BelowStats | None, Meta(description="Traffic with the disks; nil while there is none.")] = None
    disks: Annotated[list[DiskStats], Meta(description="Directories of the disk tier.")] = field(default_factory=list)
    replies_dropped: Annotated[
        Count, Meta(description="Replies that could not be sent, since their client was gone or did not read.")
    ] = 0


@exchange(Section.ADMINISTRATION, ANY_ROLE, over_tcp=True)
class Stats(Request[StatsReply], frozen=True):
    """Asks for all counters."""


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
