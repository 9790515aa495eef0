# ruff: noqa: F401, F403, F405 - what is of one subject is in a module of its own, and found here under the name everybody imports
"""Requests and replies on ``jobs.sock``, and the completions on ``events.sock``.

Every message is an array: its tag, then its fields in the order given here. A request goes as one frame
from a DEALER; its reply comes back with the same ``request_id``. Submit is not replied to when it is
accepted: the answers of its jobs are completions. ``PROTOCOL.md`` is generated from this module.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, TypeAlias

from msgspec import field

import kvoffd_proto.blocks
from kvoffd_proto.engine_report import *
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.handles import Handle, PageRef, TensorLayout
from kvoffd_proto.health import *
from kvoffd_proto.limits import MAX_JOBS
from kvoffd_proto.listings import *
from kvoffd_proto.policy import *
from kvoffd_proto.recording import *
from kvoffd_proto.stats import *
from kvoffd_proto.tier_stats import *
from kvoffd_proto.wire import *

# --- parts ---------------------------------------------------------------------------------------


class Limits(Wire, frozen=True):
    """Limits of one session, given in Welcome. Requests beyond them are refused."""

    max_frame_bytes: Annotated[int, doc("Largest request frame in bytes.", ge=1)]
    max_keys_per_request: Annotated[int, doc("Keys in one request, those of all jobs of a Submit together.", ge=1)]
    max_jobs_per_message: Annotated[int, doc("Stores and loads in one Submit.", ge=1)]
    max_keys_per_job: Annotated[int, doc("Keys in one Store or Load.", ge=1)]
    max_pieces_per_job: Annotated[
        int, doc("Pieces of all stores, or of all loads, of a Submit: block ids times pages of their group.", ge=1)
    ]
    max_pieces_in_flight: Annotated[
        int, doc("Pieces of all unfinished jobs; a job counts as eight for each of its keys at least.", ge=1)
    ]
    max_jobs_in_flight: Annotated[int, doc("Unfinished jobs of the session.", ge=1)]
    max_leases: Annotated[int, doc("Live leases of the session.", ge=1)]
    max_leased_keys: Annotated[int, doc("Keys under all leases of the session; lookups tell no more ready.", ge=1)]
    max_registrations: Annotated[int, doc("Registrations of the session.", ge=1)]
    max_segments: Annotated[int, doc("Attached memory segments of the session.", ge=1)]


PIECES_PER_KEY = 8
"""What a job's key counts as at least: about what its slot, block and checksum cost beside the addresses of pieces."""


class GroupTransfer(Wire, frozen=True):
    """The part of a job that concerns one group.

    Key ``i`` covers the engine blocks ``[i * blocks_per_key, (i + 1) * blocks_per_key)`` counted from the start of
    key 0; ``block_ids`` begin ``first_block`` blocks into key 0. A store ends with its last key; a load may end inside
    it.
    """

    group: GroupIndex
    keys: Keys
    block_ids: Annotated[bytes, doc("Engine block ids, little-endian int32, end to end.")]
    first_block: Annotated[int, doc("Engine blocks of key 0 that are left out at its start.", ge=0, lt=65536)] = 0
    parents: Annotated[
        bytes,
        doc(
            "Of a store, for its KV events: for each key the block hash before it in its prompt, end to end; zeros "
            "for the first of a prompt. Empty where they are not told."
        ),
    ] = b""
    tokens: Annotated[
        bytes,
        doc(
            "With ``parents``: the token ids of the keys' blocks, little-endian uint32, end to end. Empty where they "
            "are not told, as for prompts whose hashes do not follow from their tokens alone."
        ),
    ] = b""

    @classmethod
    def of(cls, keys: Sequence[bytes], block_ids: Sequence[int], group: int = 0, first_block: int = 0) -> GroupTransfer:
        """The transfer of a list of keys and the engine blocks that they cover. Raises ValueError for odd block ids."""
        try:
            ids = struct.pack(f"<{len(block_ids)}i", *block_ids)
        except struct.error as error:
            raise ValueError(f"Block ids are whole numbers below 2^31: {error}.") from error
        return cls(group, b"".join(keys), ids, first_block)


class JobResult(Wire, frozen=True):
    """How one job ended."""

    job_id: JobId
    ok: Annotated[
        bool, doc("Load: all bytes are in place. Store: every key was stored, was there already, or was declined.")
    ]
    bytes: Annotated[ByteCount, doc("Bytes that were copied.")]
    seconds: Annotated[Seconds, doc("From the daemon's acceptance of the job to its end, in seconds.")]
    error: Annotated[ErrorCode | None, doc("Why the job is not ok.")] = None
    failed: Annotated[list[GroupKeys], doc("Keys that were not stored, or that the load lacked.")] = field(
        default_factory=list
    )
    declined: Annotated[
        list[GroupKeys], doc("Keys of a store that the policy did not want: others in the pool are worth more.")
    ] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        """How it ended, for people."""
        if self.ok:
            return f"Job {self.job_id} copied {self.bytes} bytes."
        return f"Job {self.job_id} failed: {(self.error or ErrorCode.INTERNAL).sentence}"


class Welcome(Reply, frozen=True):
    """Answer to Hello: the session is open."""

    session_id: SessionId
    daemon_version: Annotated[str, doc("Release of the daemon.")]
    capabilities: Annotated[
        list[str],
        doc("Handle kinds and features, e.g. ``memfd``, ``kv_events``."),
    ]
    limits: Annotated[Limits, doc("Limits of this session.")]
    credit_bytes: Annotated[ByteCount, doc("Bytes of stores the session may have outstanding.")]
    lease_ttl_ms: Annotated[int, doc("Lifetime of a lease, in milliseconds.", ge=1)]
    job_deadline_ms: Annotated[int, doc("Time after which an unfinished job is failed, in milliseconds.", ge=1)]


@exchange(Section.SESSION, ANY_ROLE)
class Hello(Request[Welcome], frozen=True):
    """First message of a session, with the token from the lifeline."""

    protocol_version: Annotated[int, doc("The client's protocol version.", ge=0)]
    role: Annotated[Role, doc("Role of the session.")]
    name: Annotated[str, doc("Shown to operators, e.g. ``vllm:3fa85f64 tiny-llama worker 0``.", max_length=128)]
    software: Annotated[str, doc("Client and engine versions, for display.", max_length=128)]


class Completions(Message, frozen=True):
    """Jobs of one session that ended; published on the session's topic and kept until acknowledged."""

    epoch: Epoch
    session_id: SessionId
    sequence: Annotated[int, doc("Counts from 1 in each session, without gaps.", ge=1)]
    credit_bytes: Annotated[ByteCount, doc("Bytes of stores the session may have outstanding from now on.")]
    results: Annotated[list[JobResult], doc("Results, in the order in which the jobs ended.")]


class ResultsReply(Reply, frozen=True):
    batches: Annotated[list[Completions], doc("Unacknowledged completions, oldest first.")]
    unfinished: Annotated[
        list[JobId], doc("Accepted jobs that have not ended. Any other job is unknown to the daemon.")
    ]


@exchange(Section.WORKER, WORKER)
class Results(Request[ResultsReply], frozen=True):
    """Asks for completions that PUB may have dropped: when a number is missing, or a job takes longer than a second."""

    acknowledged: Acknowledged


@exchange(Section.MEMORY, ENGINE)
class OpenNamespace(NamespaceRequest, frozen=True):
    """Opens a namespace, or joins it when its geometry is the same."""


class Registered(Reply, frozen=True):
    registration_id: RegistrationId
    shard_bytes: Annotated[list[ByteCount], doc("Per group, bytes of this rank's shard of a block.")]


@exchange(Section.MEMORY, WORKER)
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


@exchange(Section.MEMORY, WORKER)
class Unregister(Request[Done], frozen=True):
    """Ends a registration. After the reply the daemon does not access its memory any more."""

    registration_id: RegistrationId


class LookupReply(Reply, frozen=True):
    lease_id: LeaseId
    states: Annotated[
        list[bytes],
        doc(
            "Per group of the request, one byte per key: 0 absent, 1 writing, 2 ready, 3 pending, 4 shared. A "
            "pending key is on a disk and being promoted, a shared one in a store that nodes share, or that is "
            "being asked: ask again."
        ),
    ]
    pinned: Annotated[Count, doc("Number of blocks pinned; with 0 there is no lease.")]
    ttl_ms: Annotated[int, doc("Lifetime of the lease, in milliseconds. Look up again after half of it.", ge=0)]
    wait_ms: Annotated[
        int,
        doc(
            "Time until all pending keys are ready, expected by the speed measured so far, in "
            "milliseconds; 0 where it is not known.",
            ge=0,
        ),
    ] = 0


@exchange(Section.SCHEDULER, SCHEDULER)
class Lookup(Request[LookupReply], frozen=True):
    """Asks which keys are ready and pins those under a lease. Asking again with the same lease changes nothing.

    More keys than one request may hold are asked for by several with one lease, the later ones with ``extend``.
    """

    namespace: Fingerprint
    lease_id: LeaseId
    groups: Annotated[list[GroupKeys], doc("Keys, root of the prefix first.", max_length=MAX_GROUPS)]
    again: Annotated[
        bool, doc("The request was looked up before, and is not counted a second time, nor is what it asks for.")
    ] = False
    extend: Annotated[bool, doc("The keys are others than those under the lease, and are added to it.")] = False


@exchange(Section.SCHEDULER, SCHEDULER)
class Release(Request[Done], frozen=True):
    """Ends leases. A lease that has ended already is no error."""

    lease_ids: Annotated[list[LeaseId], doc("Leases of this session.", max_length=65536)]


@exchange(Section.SCHEDULER, SCHEDULER)
class Invalidate(Request[Done], frozen=True):
    """Drops blocks that proved unusable. A block under another session's lease leaves the index now, the pool later."""

    namespace: Fingerprint
    groups: Annotated[list[GroupKeys], doc("Keys of the blocks to drop.", max_length=MAX_GROUPS)]


@exchange(Section.SCHEDULER, SCHEDULER)
class Reset(Request[Done], frozen=True):
    """Drops every block of a namespace, as after a change of the model's weights."""

    namespace: Fingerprint


class Store(Wire, frozen=True):
    """A store as clients make it: copies engine blocks into the pool. ``Submit.of`` makes a message of several."""

    job_id: JobId
    groups: list[GroupTransfer]


class Load(Wire, frozen=True):
    """A load as clients make it: copies leased blocks into engine blocks."""

    job_id: JobId
    lease_id: LeaseId
    groups: list[GroupTransfer]
    keep_lease: bool = False


class GroupBlocks(Wire, frozen=True):
    """The blocks of one group in all stores, or in all loads, of a message: end to end, in the order of the jobs."""

    group: GroupIndex
    key_counts: Annotated[bytes, doc("Keys of each job, little-endian uint32; 0 for one that has none in the group.")]
    block_counts: Annotated[bytes, doc("Engine blocks of each job, little-endian uint32.")]
    first_blocks: Annotated[
        bytes,
        doc("Engine blocks of each job's key 0 that are left out at its start, little-endian uint32. Empty for none."),
    ]
    keys: Keys
    block_ids: Annotated[bytes, doc("Engine block ids, little-endian int32, end to end.")]
    parents: Annotated[
        bytes,
        doc(
            "Of stores, for their KV events: for each key the block hash before it in its prompt, end to end; zeros "
            "for the first of a prompt. Empty where they are not told."
        ),
    ] = b""
    tokens: Annotated[
        bytes,
        doc(
            "With ``parents``: the token ids of the keys' blocks, little-endian uint32, end to end. Empty where they "
            "are not told, as for prompts whose hashes do not follow from their tokens alone."
        ),
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
        doc("Whether other workers load the same shards; the scheduler ends the lease.", max_length=MAX_JOBS),
    ]
    groups: Annotated[list[GroupBlocks], doc("Blocks to copy; each group once.", max_length=MAX_GROUPS)]


@exchange(Section.WORKER, WORKER)
class Submit(Request[Completions], frozen=True):
    """Submits the stores and loads of one step.

    A message in which anything is wrong is refused whole, and changes nothing. Else each job has one result, in
    completions.
    """

    registration_id: RegistrationId
    stores: Annotated[Stores, doc("Stores.")]
    loads: Annotated[Loads, doc("Loads.")]
    acknowledged: Acknowledged = 0

    @classmethod
    def of(
        cls,
        request_id: int,
        registration_id: bytes,
        key_bytes: int,
        stores: Sequence[Store],
        loads: Sequence[Load] = (),
        acknowledged: int = 0,
    ) -> Submit:
        """The message with these jobs. Parents and tokens of a group go with it where all its jobs tell them."""
        return cls(
            request_id,
            registration_id,
            Stores([store.job_id for store in stores], _blocks_of(stores, key_bytes)),
            Loads(
                [load.job_id for load in loads],
                [load.lease_id for load in loads],
                [load.keep_lease for load in loads],
                _blocks_of(loads, key_bytes),
            ),
            acknowledged,
        )


def _blocks_of(jobs: Sequence[Store | Load], key_bytes: int) -> list[GroupBlocks]:
    by_group: dict[tuple[int, int], dict[int, GroupTransfer]] = {}
    for number, job in enumerate(jobs):
        for part in job.groups:
            again = 0  # a group may come once in a job, and the daemon refuses another one
            while number in by_group.setdefault((part.group, again), {}):
                again += 1
            by_group[part.group, again][number] = part
    found: list[GroupBlocks] = []
    for (group, _), parts in by_group.items():
        some = [parts.get(number) for number in range(len(jobs))]
        there = list(parts.values())
        told_parents, told_tokens = all(part.parents for part in there), all(part.tokens for part in there)
        found.append(
            GroupBlocks(
                group,
                _counts([len(part.keys) // key_bytes if part else 0 for part in some]),
                _counts([len(part.block_ids) // BLOCK_ID_BYTES if part else 0 for part in some]),
                _counts([part.first_block if part else 0 for part in some])
                if any(part.first_block for part in there)
                else b"",
                b"".join([part.keys for part in there]),
                b"".join([part.block_ids for part in there]),
                b"".join([part.parents for part in there]) if told_parents else b"",
                b"".join([part.tokens for part in there]) if told_tokens else b"",
            )
        )
    return found


def _counts(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


class CancelReply(Reply, frozen=True):
    cancelled: Annotated[list[JobId], doc("Jobs that will not run, stores of the same message among them.")]
    running: Annotated[list[JobId], doc("Jobs whose bytes are moving; wait for their completions.")]


@exchange(Section.WORKER, WORKER)
class Cancel(Request[CancelReply], frozen=True):
    """Fails stores and loads that have not started; they get completions as all jobs do."""

    job_ids: Annotated[list[JobId], doc("Jobs of this session.", max_length=65536)]
    unsent: Annotated[
        int, doc("Stores that the client dropped before it sent them, to be counted.", ge=0, le=MAX_REPORTED)
    ] = 0
    acknowledged: Acknowledged = 0


@exchange(Section.ADMINISTRATION, ADMIN)
class Clear(Request[Done], frozen=True):
    """Drops every block of one namespace, or of all. Admin only."""

    namespace: Annotated[Fingerprint | None, doc("The namespace; nil for all.")] = None


@exchange(Section.ADMINISTRATION, ADMIN)
class ResetFleet(Request[Done], frozen=True):
    """Makes every block of a namespace void for all nodes that share a store with this one, as after a change of the
    weights: each drops its own too, within seconds. ``count`` in the answer is how many stores were told. Admin only.
    """

    namespace: Fingerprint


class ScrubReply(Reply, frozen=True):
    """Answer to Scrub: the running scrub, or the last one. All counts are 0 where there was none."""

    running: Annotated[bool, doc("Whether the scrub is still running.")]
    slots: Annotated[Count, doc("Slots in use when the scrub began.")]
    done_slots: Annotated[Count, doc("Slots that the scrub has dealt with.")]
    checked_slots: Annotated[Count, doc("Slots that were compared with their checksums; the others had been freed.")]
    checked_bytes: Annotated[ByteCount, doc("Bytes of the slots that were compared.")]
    mismatches: Annotated[Count, doc("Slots whose bytes did not match their checksum.")]
    seconds: Annotated[Seconds, doc("How long the scrub has been running, or took, in seconds.")]


@exchange(Section.ADMINISTRATION, ADMIN)
class Scrub(Request[ScrubReply], frozen=True):
    """Compares every readable block with its checksum in the background, or asks for the progress. Admin only."""

    start: Annotated[bool, doc("Start a scrub unless one is running; false only asks for the progress.")]


AnyRequest: TypeAlias = Request[Message]
AnyReply: TypeAlias = Reply

REPLIES: tuple[type[Reply], ...] = (
    *dict.fromkeys(known.answer for known in EXCHANGES.values() if issubclass(known.answer, Reply)),
    Error,
)
"""Every reply of the protocol, those of ``blocks`` included."""
