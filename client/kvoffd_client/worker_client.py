"""The worker's client: registration, stores, loads and fences; jobs and their messages."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvoffd_client.cuda_export import GpuSegment
from kvoffd_client.errors import KvoffdClientError, RequestRefused
from kvoffd_client.lifeline_stream import NEVER
from kvoffd_client.memory import Registration
from kvoffd_client.namespace import NamespaceSpec, is_int
from kvoffd_client.session import (
    CONNECTED,
    DEFAULT_OPTIONS,
    GPU_REGISTER_S,
    ClientOptions,
    Phase,
    ReplyOrError,
    Session,
    Transport,
)
from kvoffd_proto import messages as m
from kvoffd_proto.codec import CODEC_ERRORS, decode_completions
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.events import session_topic
from kvoffd_proto.lifeline import Attach, Attached
from kvoffd_proto.messages import GroupTransfer

log = logging.getLogger("kvoffd_client")

FENCE_PATIENCE_S = 0.05
"""Time that a fence waits for jobs to end before it cancels those that have not started."""
FENCE_SILENCE_S = 0.5
"""Time after which fence() no longer waits, but for loads, if the daemon gives no sign of life. It answers in
milliseconds; a busy host may keep it from a CPU for 0.3 s."""
RELEASE_SILENCE_S = 2.0
"""The same for unregister(): while an engine sleeps others need its memory."""
UNRELEASED = "The daemon did not confirm that it released the worker's memory."
BUSY_CHECK_S = 0.005
"""Interval at which a fence calls ``busy``."""
LOAD_WAIT_S = 10.0
"""Interval at which a fence logs that it still waits for loads."""
JOB_PATIENCE_S = 1.0
"""Age of a job after which the client asks for its result, and the interval of further requests."""
DARK_PATIENCE_S = 0.02
"""The same while results come only when asked for, as the events socket delivers none: every load would take
JOB_PATIENCE_S."""
FIRST_PART_ID = 2**62
"""First id of parts of large jobs; other jobs have ids below."""


SUBMIT_BYTES, JOB_BYTES, TRANSFER_BYTES = 96, 19, 48
"""Most bytes of a Submit, a job and a transfer in a frame, without keys, block ids, parents, tokens and the columns of
``_empty_job_bytes``."""


class Size(NamedTuple):
    """Number of keys of a job or message, and the most bytes that it has in a frame."""

    keys: int
    nbytes: int

    def fits(self, most: Size) -> bool:
        """Return whether neither number is above that of ``most``."""
        return self.keys <= most.keys and self.nbytes <= most.nbytes

    @classmethod
    def of_jobs(cls, limits: m.Limits) -> Size:
        """Return the size of the jobs that one message may have."""
        return cls(limits.max_keys_per_submit, limits.max_frame_bytes - SUBMIT_BYTES)


@dataclass(frozen=True, slots=True)
class Job:
    """A store of engine blocks into the pool, or a load of leased blocks into engine blocks.

    Attributes:
        job_id: unique among the client's unfinished jobs.
        groups: transfers, one for each group.
        lease_id: the lease of a load, from a scheduler's lookup; None makes it a store.
        keep_lease: keep the lease after a successful load: other workers load the same shards.
    """

    job_id: int
    groups: Sequence[GroupTransfer]
    lease_id: int | None = None
    keep_lease: bool = False

    @property
    def is_store(self) -> bool:
        return self.lease_id is None

    @property
    def keys(self) -> list[m.GroupKeys]:
        """The keys of each group, as results have them."""
        return [m.GroupKeys(one.group, one.keys) for one in self.groups]

    def check(self, namespace: NamespaceSpec, blocks_per_key: int) -> None:
        """Raise ValueError if it cannot be a job of a worker of this namespace."""
        if not is_int(self.job_id) or not 0 <= self.job_id < FIRST_PART_ID:
            raise ValueError(f"Job ids are numbers from 0 to {FIRST_PART_ID - 1}; {self.job_id!r} is not.")
        lease_id = self.lease_id
        if lease_id is not None and (not is_int(lease_id) or not m.MIN_LEASE_ID <= lease_id <= m.MAX_LEASE_ID):
            raise ValueError(f"The load {self.job_id} has no lease of a lookup, but {lease_id!r}.")
        if not isinstance(self.keep_lease, bool):
            raise ValueError(f"keep_lease is True or False, not {self.keep_lease!r}.")
        keys = 0
        for one in self.groups:
            count = namespace.count_keys(one.group, one.keys)
            if not isinstance(one.block_ids, bytes) or len(one.block_ids) % m.BLOCK_ID_BYTES:
                raise ValueError(
                    "Block ids are bytes, 4 for each; GroupTransfer.of(keys, block_ids) makes them from a list."
                )
            blocks, first = len(one.block_ids) // m.BLOCK_ID_BYTES, one.first_block
            if not is_int(first):
                raise ValueError(f"first_block is an int, not {type(first).__name__}.")
            is_empty = not (count or blocks or first)
            if not is_empty and not m.blocks_fit(count, blocks, first, blocks_per_key, store=self.is_store):
                raise ValueError(
                    f"{blocks} block ids from block {first} on do not fit {count} keys of {blocks_per_key} blocks each."
                )
            tokens = count * namespace.groups[one.group].tokens_per_block * m.TOKEN_ID_BYTES
            for field, what, nbytes in (
                (one.parents, "parents", len(one.keys)),
                (one.tokens, "tokens", tokens),
                (one.before, "the key before them", namespace.key_bytes),
            ):
                if not isinstance(field, bytes) or len(field) not in (0, nbytes):
                    raise ValueError(f"{count} keys have {nbytes} bytes of {what}, or none, not {field[:80]!r}.")
            keys += count
        if not keys:
            raise ValueError(f"The job {self.job_id} has no keys; leave it out.")
        if len({one.group for one in self.groups}) < len(self.groups):
            raise ValueError(f"A group comes twice in the job {self.job_id}; put its keys into one transfer.")

    def size(self, namespace: NamespaceSpec) -> Size:
        """Return its keys, and the bytes that it adds to a message at most."""
        nbytes = _empty_job_bytes(namespace) + TRANSFER_BYTES * len(self.groups)
        for one in self.groups:
            nbytes += len(one.keys) + len(one.block_ids) + len(one.parents) + len(one.tokens)
        return Size(sum([len(one.keys) for one in self.groups]) // namespace.key_bytes, nbytes)

    def parts(self, namespace: NamespaceSpec, blocks_per_key: int, most: Size, first_id: int) -> list[Job]:
        """Split it into jobs of at most ``most`` keys and bytes, or of one key, with consecutive ids.

        Only the last one ends the lease: the daemon has accepted the others by then, and they pin their blocks.
        """
        key_bytes = namespace.key_bytes
        parts: list[list[GroupTransfer]] = [[]]
        left = in_new_part = Size(most.keys, most.nbytes - _empty_job_bytes(namespace))
        """Space in the last part, and in one without keys."""
        for one in self.groups:
            count, begin = len(one.keys) // key_bytes, 0
            while begin < count:
                bytes_of_key = (
                    key_bytes + blocks_per_key * m.BLOCK_ID_BYTES + (len(one.parents) + len(one.tokens)) // count
                )
                fitting = min(left.keys, (left.nbytes - TRANSFER_BYTES) // bytes_of_key, count - begin)
                if fitting < 1 and parts[-1]:
                    parts.append([])
                    left = in_new_part
                    continue  # with the same keys
                end = begin + max(1, fitting)
                parts[-1].append(_slice(one, begin, end, key_bytes, blocks_per_key, is_store=self.is_store))
                left = Size(left.keys - (end - begin), left.nbytes - TRANSFER_BYTES - (end - begin) * bytes_of_key)
                begin = end
        return [
            Job(first_id + number, part, self.lease_id, self.keep_lease or part is not parts[-1])
            for number, part in enumerate(parts)
        ]


def _empty_job_bytes(namespace: NamespaceSpec) -> int:
    """Return the most bytes that a job without keys adds to a frame: a message has, for each group, three counts and
    one key (``before``) of each of its jobs."""
    return JOB_BYTES + len(namespace.groups) * (3 * m.COUNT_BYTES + namespace.key_bytes)


def _slice(
    one: GroupTransfer, begin: int, end: int, key_bytes: int, blocks_per_key: int, *, is_store: bool
) -> GroupTransfer:
    """Return keys ``begin`` to ``end`` of a transfer with their blocks; the last key gets all remaining blocks.

    The key before those of a store, ``before``, is the last of the slice before.
    """
    count = len(one.keys) // key_bytes
    # ``block_ids`` begins with block ``first_block`` of key 0, so each later key begins this much earlier in it.
    start, stop = (max(0, key * blocks_per_key - one.first_block) * m.BLOCK_ID_BYTES for key in (begin, end))
    keys, tokens = slice(begin * key_bytes, end * key_bytes), len(one.tokens) // count
    return GroupTransfer(
        one.group,
        one.keys[keys],
        one.block_ids[start : None if end == count else stop],
        0 if begin else one.first_block,
        one.parents[keys],
        one.tokens[begin * tokens : end * tokens],
        one.keys[(begin - 1) * key_bytes : begin * key_bytes] if begin and is_store else one.before,
    )


def batches_of(jobs: Iterable[tuple[Job, Size]], limits: m.Limits) -> list[list[Job]]:
    """Return jobs, given with their sizes, in batches that fit a message each. In it all stores of a group have parents
    and tokens, or none has."""
    batches: list[list[Job]] = []
    most, total = Size.of_jobs(limits), Size(0, 0)
    has_tokens: dict[int, tuple[bool, bool]] = {}
    """Whether the stores of each group in the last batch have parents, and tokens."""
    for job, size in jobs:
        total = Size(total.keys + size.keys, total.nbytes + size.nbytes)
        stored = job.groups if job.is_store else ()
        kinds = {one.group: (bool(one.parents), bool(one.tokens)) for one in stored}
        full = not total.fits(most) or any(has_tokens.get(group, kind) != kind for group, kind in kinds.items())
        if not batches or full or len(batches[-1]) == limits.max_jobs_per_message:
            batches.append([])
            total, has_tokens = size, {}
        has_tokens |= kinds
        batches[-1].append(job)
    return batches


def submit_of(
    request_id: int, registration_id: bytes, key_bytes: int, jobs: Sequence[Job], acknowledged: int = 0, sole: int = 0
) -> m.Submit:
    """Return the message with these jobs: for each group the blocks of all stores, and those of all loads.

    Either all stores of a group have tokens, or none has. ``acknowledged``: number up to which the client has all
    completions. ``sole``: see ``WorkerClient.submit``.
    """
    stores, loads = [job for job in jobs if job.is_store], [job for job in jobs if not job.is_store]
    leases, keep = [load.lease_id or 0 for load in loads], [load.keep_lease for load in loads]
    return m.Submit(
        request_id,
        registration_id,
        m.Stores([store.job_id for store in stores], _blocks_by_group(stores, key_bytes)),
        m.Loads([load.job_id for load in loads], leases, keep, _blocks_by_group(loads, key_bytes)),
        acknowledged,
        sole,
    )


def _blocks_by_group(jobs: Sequence[Job], key_bytes: int) -> list[m.GroupBlocks]:
    by_group: dict[int, list[tuple[int, GroupTransfer]]] = {}
    for number, job in enumerate(jobs):
        for one in job.groups:
            by_group.setdefault(one.group, []).append((number, one))
    return [m.GroupBlocks.of(group, len(jobs), key_bytes, parts) for group, parts in by_group.items()]


ONE_IS_WRONG = (ErrorCode.BAD_KEYS, ErrorCode.BAD_BLOCK_IDS)
"""Refusals of a message for what one of its jobs has."""


class Sent(NamedTuple):
    """A job, or part of one, that was sent and has no result.

    Attributes:
        job: with the id that it has on the wire.
        of_job: id of the caller's job, which is the same unless the job was split.
        request_id, sole: fields of its message.
    """

    job: Job
    of_job: int
    request_id: int
    sole: int


@dataclass(slots=True)
class Unfinished:
    """A caller's job without a result. ``parts``: how many of it have not ended; ``so_far``: merged results of the
    others."""

    job: Job
    sent_at: float
    parts: int
    so_far: m.JobResult | None = None


class WorkerClient(Session):
    """Registers one worker's KV memory with one daemon, and submits stores and loads.

    Every job gets exactly one result, from the daemon or, if it is gone, from the client itself. The client connects,
    and reconnects, in the background.

    Args:
        registration: the worker's KV memory, which must outlive this client. For the other arguments see
            SchedulerClient.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        namespace: NamespaceSpec,
        registration: Registration,
        *,
        name: str = "worker",
        software: str = "",
        options: ClientOptions = DEFAULT_OPTIONS,
        transport: Transport | None = None,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(directory, m.Role.WORKER, namespace, name, software, options, transport, rng)
        self._namespace = namespace
        self._registration = registration
        self._registration_id = b""
        self.memory_on_gpu = registration.on_gpu
        self._fds: list[int] = []
        """Descriptors of the memory, of which ``_attached_count`` have arrived in the daemon."""
        self._attached_count = 0
        self._jobs: dict[int, Unfinished] = {}
        """Jobs without a result by id, oldest first."""
        self._sent: dict[int, Sent] = {}
        """Sent jobs and parts without a result, by their id on the wire."""
        self._next_part_id = FIRST_PART_ID
        self._results: list[m.JobResult] = []
        """Results for take_results()."""
        self._topic = b""
        self._sequence = 0
        """All completions up to this number have arrived."""
        self._ahead: set[int] = set()
        """Later numbers that have arrived."""
        self._asking = False
        """Whether a ``Results`` request is unanswered."""
        self._patience_s = JOB_PATIENCE_S
        """Either JOB_PATIENCE_S or DARK_PATIENCE_S."""
        self._transport.start(self)

    # --- for any thread --------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Number of jobs without a result; not those whose result waits for take_results()."""
        return len(self._jobs)

    def store(self, job_id: int, groups: Sequence[GroupTransfer]) -> None:
        """Copy engine blocks into the pool; see ``submit``."""
        self.submit([Job(job_id, groups)])

    def load(self, job_id: int, lease_id: int, groups: Sequence[GroupTransfer], keep_lease: bool = False) -> None:
        """Copy blocks that a scheduler's lookup leased into engine blocks; see ``submit``.

        The lease ends once every rank has loaded successfully. With ``keep_lease``, for workers that load the shards of
        one rank, the scheduler releases it.
        """
        self.submit([Job(job_id, groups, lease_id, keep_lease)])

    def submit(self, jobs: Sequence[Job], sole: int = 0) -> None:
        """Start the stores and loads of one step. While not connected, they fail at once (SESSION_ENDED).

        They are sent in one message if they fit. Jobs that are too large for a message are split.

        ``sole``: if not 0, only stores with this number add shards to the blocks that these begin. All ranks give the
        same number for one store, and no other store has it.

        Raises:
            ValueError: a job of the same id is unfinished, or a field of a job has a wrong type, length or value. No
                job is started then. The daemon looks at the keys and block ids: a wrong one fails its job alone.
        """
        namespace = self._namespace
        for job in jobs:
            job.check(namespace, self._registration.blocks_per_key)
        if not is_int(sole) or not 0 <= sole <= m.MAX_SOLE:
            raise ValueError(f"sole is a number from 0 to {m.MAX_SOLE}, not {sole!r}.")
        ids = {job.job_id for job in jobs}
        with self._transport.lock:
            now = self._transport.now()
            if len(ids) < len(jobs) or not ids.isdisjoint(self._jobs):
                raise ValueError("A job of the same id is unfinished; use another id.")
            limits = self._limits
            if not self.ready or limits is None:
                self._refuse(jobs, ErrorCode.SESSION_ENDED)
                return
            self._role_due = min(self._role_due, now + self._patience_s)  # when to ask for results
            left, refused_jobs = limits.max_jobs_in_flight - len(self._sent), list[Job]()
            parts_of: dict[int, list[tuple[Job, Size]]] = {}
            """Parts of each accepted job, by its id."""
            # Loads first: a prompt whose load is refused is computed, a store comes again with the next such prompt.
            for job in sorted(jobs, key=lambda one: one.is_store):
                parts = self._cut(job, limits)
                if len(parts) > left:
                    refused_jobs.append(job)
                    continue
                left -= len(parts)
                parts_of[job.job_id] = parts
                self._jobs[job.job_id] = Unfinished(job, now, len(parts))
            if refused_jobs:
                self._refuse(refused_jobs, ErrorCode.TOO_MANY)
            all_parts = [part for job in jobs for part in parts_of.get(job.job_id, ())]  # in the caller's order
            job_ids = {part.job_id: job_id for job_id, parts in parts_of.items() for part, _ in parts}
            for batch in batches_of(all_parts, limits):
                self._send_jobs(batch, job_ids, sole)

    def take_results(self) -> list[m.JobResult]:
        """Return the results since the last call, including those that have arrived and were not read yet."""
        if not self._jobs and not self._results:  # vLLM asks in every step
            return []
        self.poll()
        with self._transport.lock:
            taken, self._results = self._results, []
        return taken

    def wait_results(self, timeout_s: float) -> list[m.JobResult]:
        """As take_results(), but wait up to ``timeout_s`` seconds for the first one."""
        self._transport.wait(lambda: bool(self._results), timeout_s)
        return self.take_results()

    def fence(self, job_ids: Iterable[int], timeout_s: float, busy: Callable[[], bool] = lambda: False) -> None:
        """Wait until the daemon no longer accesses the blocks of these jobs. Then each of them has a result.

        Jobs that have not started after FENCE_PATIENCE_S are cancelled. Stores without a result ``timeout_s`` later, or
        FENCE_SILENCE_S if the daemon gives no sign of life, are abandoned: the client closes the lifeline, so that the
        daemon does not commit them, then fails them and reconnects. Loads are waited for without limit, because their
        copies may still write: a completion or the daemon's death ends them. Unknown ids are ignored. Results stay for
        take_results().

        ``busy`` returns whether the caller must wait for something else too. Nothing is cancelled during that, which
        must be a finite time.
        """
        wanted = set(job_ids)
        if self._transport.wait(lambda: not self._has_any(wanted), min(FENCE_PATIENCE_S, timeout_s)):
            return
        while busy():
            if self._transport.wait(lambda: not self._has_any(wanted), BUSY_CHECK_S):
                return
        with self._transport.lock:
            asked_at = self._transport.now()
            self._cancel(wanted)
            self._ask_for_results(asked_at)
        if self._wait_unless_silent(lambda: not self._has_any(wanted), asked_at, FENCE_SILENCE_S, timeout_s):
            return
        with self._transport.lock:
            self._abandon_stores(wanted, self._transport.now())
        while not self._transport.wait(lambda: not self._has_any(wanted), LOAD_WAIT_S):
            log.warning("Still waiting for loads: the daemon neither finishes them nor ends.")

    def unregister(self, timeout_s: float) -> bool:
        """End the registration for good and wait until the daemon no longer accesses the memory.

        False if the daemon did not confirm that in time, or gives no sign of life. Then the session ends, and the
        memory is released by the daemon's clean-up or death. The client accepts no jobs afterwards.
        """
        outcome: list[bool] = []  # empty until it is known
        with self._transport.lock:
            asked_at = self._transport.now()
            self._unregister(outcome, asked_at, timeout_s)
            self._ask_for_results(asked_at)  # answered at once, even while copies delay the answer to Unregister
        if not self._wait_unless_silent(lambda: bool(outcome), asked_at, RELEASE_SILENCE_S, timeout_s):
            with self._transport.lock:
                if not outcome:
                    self.disconnect(UNRELEASED, self._transport.now())
        return outcome == [True]

    def _wait_unless_silent(
        self, ready: Callable[[], bool], asked_at: float, silence_s: float, timeout_s: float
    ) -> bool:
        """Wait until ``ready()``; False after ``timeout_s``, or ``silence_s`` if no reply came since ``asked_at``.

        ``asked_at``: time of a request that the daemon answers at once.
        """
        silence_s = min(silence_s, timeout_s)
        if self._transport.wait(ready, silence_s):
            return True
        # The request left ``asked_at`` in it, or an earlier time; a reply sets it to a later time, or to NEVER.
        has_replied = self._owed_since > asked_at
        return has_replied and self._transport.wait(ready, timeout_s - silence_s)

    def close(self) -> None:
        """End the session and the thread, in less than a second. Unfinished jobs fail. Repeatable.

        Until it has noticed, the daemon may still write to the blocks of an unfinished load: ``unregister`` before, if
        the memory is used for something else afterwards.
        """
        super().close()
        for memory in self._registration.memories:
            if isinstance(memory, GpuSegment):
                memory.close()  # its descriptors keep it allocated

    # --- jobs, with the lock held ----------------------------------------------------------------

    def _cut(self, job: Job, limits: m.Limits) -> list[tuple[Job, Size]]:
        """Return the job, or its parts with ids of their own if it is too large for a message, with their sizes."""
        namespace, most = self._namespace, Size.of_jobs(limits)
        if (size := job.size(namespace)).fits(most):
            return [(job, size)]
        parts = job.parts(namespace, self._registration.blocks_per_key, most, self._next_part_id)
        self._next_part_id += len(parts)
        return [(part, part.size(namespace)) for part in parts]

    def _send_jobs(self, parts: Sequence[Job], job_ids: Mapping[int, int], sole: int) -> None:
        """Send jobs, or parts of jobs, in one message. If it cannot be sent, they fail.

        ``job_ids``: the caller's job by the id of each part, which is its own id unless the job was split.
        """
        request_id, key_bytes = self._next_request_id(), self._namespace.key_bytes
        self._sent.update({part.job_id: Sent(part, job_ids[part.job_id], request_id, sole) for part in parts})
        message = submit_of(request_id, self._registration_id, key_bytes, parts, self._sequence, sole)
        if (refused := self._send(message)) is not None:
            code = refused.code if isinstance(refused, RequestRefused) else ErrorCode.TOO_MANY
            self._fail_sent([part.job_id for part in parts], code)
            self._transport.notify()

    def _refuse(self, jobs: Sequence[Job], code: ErrorCode) -> None:
        self._results += [m.JobResult(job.job_id, False, 0, 0.0, code, job.keys) for job in jobs]
        self._transport.notify()

    def _fail_sent(self, ids: Iterable[int], code: ErrorCode) -> None:
        """Fail jobs, or parts of jobs, by their ids on the wire."""
        for job in [self._sent[job_id].job for job_id in ids]:
            self._on_result(m.JobResult(job.job_id, False, 0, 0.0, code, job.keys))

    def _on_result(self, result: m.JobResult) -> None:
        if (sent := self._sent.pop(result.job_id, None)) is None:
            return
        unfinished = self._jobs[sent.of_job]
        unfinished.parts -= 1
        if sent.of_job != result.job_id:  # a part: add it to the others
            known = unfinished.so_far or m.JobResult(sent.of_job, True, 0, 0.0)
            result = m.JobResult(
                sent.of_job,
                known.ok and result.ok,
                known.bytes + result.bytes,
                known.seconds + result.seconds,
                known.error or result.error,
                [*known.failed, *result.failed],
                [*known.rejected, *result.rejected],
            )
        if unfinished.parts:
            unfinished.so_far = result
        else:
            del self._jobs[sent.of_job]
            self._results.append(result)

    def _cancel(self, job_ids: Iterable[int]) -> None:
        """Ask the daemon to cancel the jobs that have not started."""
        wanted = set(job_ids)
        known = [job_id for job_id, sent in self._sent.items() if sent.of_job in wanted]
        if known and self._phase is Phase.OPEN:
            self._send(m.Cancel(m.NO_REPLY, known, self._sequence))

    def _has_any(self, job_ids: Iterable[int], *, loads: bool = True) -> bool:
        """Return whether any of the jobs has no result; with ``loads=False``, any of the stores among them."""
        jobs = self._jobs
        return any(job_id in jobs and (loads or jobs[job_id].job.is_store) for job_id in job_ids)

    def _abandon_stores(self, job_ids: Iterable[int], now: float) -> None:
        """Disconnect if any of these stores has no result: none is committed, and all fail at once."""
        if self._has_any(job_ids, loads=False):
            self.disconnect("Running stores were abandoned; reconnecting.", now)

    def _unregister(self, outcome: list[bool], now: float, timeout_s: float) -> None:
        """End the registration. Once it is known, append to ``outcome`` whether the daemon has released the memory."""
        self._wanted, self._problem = False, "The registration was ended."
        if self._phase is not Phase.OPEN:
            if self._phase in CONNECTED:
                self.disconnect(self._problem, now)
            # IDLE: if jobs were running when the connection ended, it was drained. ``close`` does not wait for that.
            outcome.append(self._phase is Phase.IDLE)
            return

        def on_answer(reply: ReplyOrError, reply_now: float) -> None:
            outcome.append(isinstance(reply, m.Done))
            if not isinstance(reply, m.Done):
                self.disconnect(UNRELEASED, reply_now)

        message = m.Unregister(self._next_request_id(), self._registration_id)
        self._send(message, now, on_answer, timeout_s)

    # --- registering -----------------------------------------------------------------------------

    def _on_namespace_opened(self, reply: m.NamespaceOpened, now: float) -> None:
        if not self._wanted:  # there is nothing to register any more
            self._become_open(now)
            return
        self._attached_count = 0
        _, self._fds = self._registration.handles()
        self._attach_or_register(now)

    def _on_attached(self, message: Attached, now: float) -> None:
        if message.segment_id != self._attached_count or self._attached_count >= len(self._fds):
            super()._on_attached(message, now)
            return
        self._attached_count += 1
        self._attach_or_register(now)

    def _attach_or_register(self, now: float) -> None:
        """Send the next descriptor, or Register once the daemon has all.

        The next one goes out when the last has arrived: ``_on_attached``.
        """
        # One at a time, to keep the stream's buffer and the kernel's count of descriptors in flight small.
        if self._attached_count < len(self._fds):
            try:
                self._transport.attach(Attach(self._attached_count), self._fds[self._attached_count])
            except OSError as error:
                self.disconnect(f"The memory could not be sent to the daemon: {error.strerror or error}.", now)
            return
        registration = self._registration
        self._registration_id = self._rng.randbytes(16)
        message = m.Register(
            self._next_request_id(),
            self._namespace.fingerprint,
            self._registration_id,
            registration.rank,
            registration.blocks_per_key,
            registration.handles()[0],
            list(registration.tensors),
            [list(pages) for pages in registration.groups],
        )
        if self.memory_on_gpu:
            self._handshake_deadline = now + GPU_REGISTER_S
        self._send_handshake(message, lambda _, now: self._become_open(now), now)

    # --- completions -----------------------------------------------------------------------------

    def on_publication(self, topic: bytes, sequence: bytes, payload: bytes, now: float) -> None:
        """Handle published completions. Undecodable ones count as dropped."""
        if topic != self._topic:
            return
        try:
            self._complete(decode_completions(payload))
            self._patience_s = JOB_PATIENCE_S
        except CODEC_ERRORS:
            self._ask_for_results(now)
        if self._ahead:
            self._ask_for_results(now)
        self._transport.notify()

    def _complete(self, batch: m.Completions) -> None:
        # Handle each batch once: a job id may have been reused when an old batch arrives again.
        if batch.sequence <= self._sequence or batch.sequence in self._ahead:
            return
        self._ahead.add(batch.sequence)
        while self._sequence + 1 in self._ahead:
            self._sequence += 1
            self._ahead.remove(self._sequence)
        self._credit_bytes = batch.credit_bytes
        for result in batch.results:
            self._on_result(result)

    def _ask_for_results(self, now: float) -> None:
        if self._asking or self._phase is not Phase.OPEN:
            return
        self._asking = True
        message = m.Results(self._next_request_id(), self._sequence)
        asked = message.request_id
        self._send(message, now, lambda reply, reply_now: self._on_results(asked, reply, reply_now))

    def _on_results(self, asked: int, reply: ReplyOrError, now: float) -> None:
        """Handle the answer to the ``Results`` request with the id ``asked``."""
        self._asking = False
        if isinstance(reply, m.ResultsReply):
            # It has completions that were published, and did not arrive.
            if any(batch.sequence > self._sequence for batch in reply.batches):
                self._patience_s = DARK_PATIENCE_S
            for batch in reply.batches:
                self._complete(batch)
            # The daemon has handled all earlier messages: jobs that its reply does not name are lost.
            sent_before = [job_id for job_id, sent in self._sent.items() if sent.request_id < asked]
            unfinished = set(reply.unfinished)
            self._fail_sent([one for one in sent_before if one not in unfinished], ErrorCode.INTERNAL)
        elif not isinstance(reply, KvoffdClientError):
            self.disconnect(f"The daemon answered Results with {type(reply).__name__}.", now)

    def _on_other_refusal(self, reply: m.Error, refusal: RequestRefused, now: float) -> None:
        """Handle the refusal of a Submit, which has no callback: results answer it."""
        refused = {job_id: sent for job_id, sent in self._sent.items() if sent.request_id == reply.request_id}
        if not refused:
            super()._on_other_refusal(reply, refusal, now)
        elif len(refused) > 1 and reply.code in ONE_IS_WRONG and self._phase is Phase.OPEN:
            # The daemon has begun none of them: each goes out alone, so that the wrong one fails alone.
            for job_id, sent in refused.items():
                self._send_jobs([sent.job], {job_id: sent.of_job}, sent.sole)
        else:
            self._fail_sent(refused, reply.code)

    # --- hooks of Session -------------------------------------------------------------------------

    def _topics(self) -> Sequence[bytes]:
        self._topic = session_topic(self.epoch, self.session_id)
        return [self._topic]

    def _role_disconnected(self, now: float) -> None:
        self._sequence, self._ahead, self._role_due = 0, set(), NEVER
        # Loads may still write until the daemon has released the memory or is gone.
        is_draining = self._phase is Phase.DRAINING
        ended = [job_id for job_id, sent in self._sent.items() if not is_draining or sent.job.is_store]
        self._fail_sent(ended, ErrorCode.SESSION_ENDED)

    def _must_drain(self) -> bool:
        # For stores too, which fail at once: unregister() may not say that the memory is free while they are copied.
        return bool(self._jobs)

    def _role_tick(self, now: float) -> None:
        has_no_load = all(sent.job.is_store for sent in self._sent.values())
        if has_no_load and not self._responsive and self._phase is Phase.OPEN:
            # An engine that pauses waits until no store runs. With a load, which waits for the daemon in any case, the
            # session stays.
            self._abandon_stores(self._jobs, now)
        if now < self._role_due:
            return
        if not self._jobs:
            self._role_due = NEVER
            return
        oldest = next(iter(self._jobs.values()))
        self._role_due = oldest.sent_at + self._patience_s
        if now >= self._role_due:
            self._role_due = now + self._patience_s
            self._ask_for_results(now)
