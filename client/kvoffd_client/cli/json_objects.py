"""The objects that commands print with ``--json`` and the wire does not have: each key is a field with its meaning.

``JSON`` in ``reference.py`` says which command prints which.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct, field

from kvoffd_proto.admin import NamespaceInfo, SessionInfo
from kvoffd_proto.messages import ByteCount, Count, Fingerprint, Seconds, doc
from kvoffd_proto.stats import DiskStats, SharedStats, TieringStats

Key = Annotated[bytes, doc("The block's key: the engine's hash of its tokens.")]
File = Annotated[str, doc("The file, as it was named.")]


class Sessions(Struct, frozen=True):
    sessions: Annotated[list[SessionInfo], doc("Open sessions, oldest first.")]


class EngineRow(Struct):
    """The sessions of an engine: those of one namespace whose names differ in the role alone."""

    name: Annotated[str, doc("Name of its sessions without the role.")]
    namespaces: Annotated[list[Fingerprint], doc("Namespaces that its sessions have opened.")]
    schedulers: Annotated[Count, doc("Sessions of schedulers.")] = 0
    workers: Annotated[Count, doc("Sessions of workers.")] = 0
    pids: Annotated[list[int], doc("Processes, as far as they are of the daemon's pid namespace.")] = field(
        default_factory=list
    )
    leases: Annotated[Count, doc("Live leases.")] = 0
    pinned_bytes: Annotated[ByteCount, doc("Pool bytes of the blocks under these leases.")] = 0
    jobs: Annotated[Count, doc("Unfinished jobs.")] = 0
    registered_bytes: Annotated[ByteCount, doc("Bytes of memory that the daemon has mapped for it.")] = 0


class Engines(Struct, frozen=True):
    engines: Annotated[list[EngineRow], doc("Connected engines, oldest first.")]


class Namespaces(Struct, frozen=True):
    namespaces: Annotated[list[NamespaceInfo], doc("Open namespaces, in the order in which they were opened.")]


class Difference(Struct, frozen=True):
    """A field of two fingerprints."""

    field: Annotated[str, doc("Name of the field.")]
    a: Annotated[object, doc("Its value in A; null where A does not have it.")]
    b: Annotated[object, doc("Its value in B; null where B does not have it.")]


class Differences(Struct, frozen=True):
    differences: Annotated[
        list[Difference], doc("Fields that differ. None where A and B are one, or their descriptions do not tell.")
    ]


class Cleared(Struct, frozen=True):
    namespace: Annotated[bytes | None, doc("Fingerprint of the namespace; null for all.")]
    cleared_blocks: Annotated[Count, doc("Blocks that were dropped.")]


class Event(Struct, frozen=True):
    """A KV cache event."""

    type: Annotated[Literal["stored", "removed", "cleared"], doc("What happened: stored, removed or cleared.")]
    group: Annotated[int | None, doc("KV cache group; null where all were cleared.")] = None
    medium: Annotated[str | None, doc("Where the blocks are or were: CPU for the pool, STORAGE for disks.")] = None
    tokens_per_block: Annotated[int | None, doc("Tokens of a block that was stored.")] = None
    block_hashes: Annotated[list[bytes], doc("Keys of the blocks.")] = field(default_factory=list)


class Events(Struct, frozen=True):
    """Of ``events``: one line for each message."""

    sequence: Annotated[Count, doc("Number of the message; the next one has the next, others did not arrive.")]
    time: Annotated[Seconds, doc("Seconds since 1970.")]
    namespace: Annotated[bytes, doc("The namespace's fingerprint.")]
    label: Annotated[str | None, doc("Name of the namespace for operators; null where it is not open any more.")]
    events: Annotated[list[Event], doc("What happened, in order.")]


class Disks(Struct, frozen=True):
    disks: Annotated[list[DiskStats], doc("Directories of the disk tier.")]
    tiers: Annotated[TieringStats | None, doc("Traffic with the disks; null while there is no disk.")]


class SharedTiers(Struct, frozen=True):
    shared: Annotated[list[SharedStats], doc("The tiers that nodes share, in the order in which they are asked.")]


class FleetReset(Struct, frozen=True):
    namespace: Annotated[bytes, doc("Fingerprint of the namespace.")]
    stores: Annotated[Count, doc("Shared stores that were told.")]


class BenchResult(Struct, frozen=True):
    case: Annotated[str, doc("What was measured.")]
    value: Annotated[float, doc("The measured value.")]
    unit: Annotated[str, doc("Unit of value and floor.")]
    floor: Annotated[float, doc("What the machine can do at best, measured in the same run.")]
    ratio: Annotated[float, doc("value / floor.")]
    daemon_cpu_seconds: Annotated[float, doc("CPU time of the daemon for each lookup or GB.")]


class BenchReport(Struct, frozen=True):
    bench: Annotated[str, doc("Name of the bench.")]
    floor: Annotated[str, doc("What the floor is.")]
    results: Annotated[list[BenchResult], doc("The cases, in the order in which they were measured.")]


class TraceRecorded(Struct, frozen=True):
    file: File
    seconds: Annotated[Seconds, doc("How long was recorded.")]
    chains: Annotated[Count, doc("Lines of the file: a request's keys of one KV cache group each.")]
    keys: Annotated[Count, doc("Keys in these.")]
    dropped: Annotated[Count, doc("Chains that are missing, since they came faster than they were fetched.")]
    bytes: Annotated[ByteCount, doc("Size of the file.")]
    ended: Annotated[str, doc("Why it ended: duration, size, interrupt, or daemon, which went away.")]


class SimulatedPolicy(Struct, frozen=True):
    """What a policy made of a trace."""

    policy: Annotated[str, doc("The policy.")]
    size: Annotated[str, doc("Size of the pool, as it was given.")]
    blocks: Annotated[Count, doc("Size of the pool, in blocks of the trace.")]
    hit_percent: Annotated[float, doc("Share of the accesses that were hits, in percent.")]
    written_percent: Annotated[float, doc("Blocks that were stored, in percent of the accesses.")]
    optimum_percent: Annotated[float, doc("The most hits that were possible, in percent.")]


class Simulation(Struct, frozen=True):
    trace: Annotated[str, doc("Name of the trace's file, without its suffix.")]
    accesses: Annotated[Count, doc("Keys of all requests.")]
    results: Annotated[list[SimulatedPolicy], doc("By size of the pool, ascending, and policy.")]
