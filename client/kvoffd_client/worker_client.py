"""The worker's client: registration, stores, loads, fences."""

from __future__ import annotations

import logging
import os
import random
from collections import deque
from collections.abc import Iterable, Sequence

from kvoffd_client.errors import KvoffdClientError, RequestRefused
from kvoffd_client.job_parts import FIRST_PART_ID, Job, Part, PartSizes
from kvoffd_client.memory import Registration
from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.session import (
    CONNECTED,
    DEFAULT_OPTIONS,
    NEVER,
    ClientOptions,
    Phase,
    ReplyOrError,
    Session,
    Transport,
)
from kvoffd_proto import messages as m
from kvoffd_proto.codec import CodecError, decode_completions
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.events import session_topic
from kvoffd_proto.lifeline import Attach, Attached, AttachRefused
from kvoffd_proto.messages import Handle

log = logging.getLogger("kvoffd_client")

FENCE_PATIENCE_S = 0.05
"""How long a fence waits for jobs to end by themselves before it cancels those that have not started."""
LOAD_WAIT_S = 10.0
"""How often a fence says that it still waits for loads."""
JOB_PATIENCE_S = 1.0
"""A job older than this makes the client ask for its result, and again at this interval."""


class WorkerClient(Session):
    """Moves one worker's blocks to and from one daemon, which it registers the worker's KV memory with.

    Every job gets exactly one result, from the daemon or, when that is gone, from the client itself. It connects in the
    background, and again whenever the daemon goes.

    Args:
        registration: the worker's KV memory; must outlive this client. The other arguments are as SchedulerClient's.
        admit_all: store what the eviction policy would not keep, too.

    Raises:
        ValueError: the registration does not fit the namespace.
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
        admit_all: bool = False,
    ) -> None:
        if not 0 <= registration.rank < namespace.world_size:
            raise ValueError(f"Rank {registration.rank} is outside the namespace's world of {namespace.world_size}.")
        if len(registration.groups) != len(namespace.groups):
            raise ValueError(
                f"The registration has {len(registration.groups)} groups and the namespace {len(namespace.groups)}."
            )
        if registration.blocks_per_key < 1 or not registration.memories or not registration.tensors:
            raise ValueError("A registration needs memory, tensors and at least one block per key.")
        super().__init__(directory, m.Role.WORKER, name, software, namespace, options, transport, rng)
        self._namespace = namespace
        self._registration = registration
        self._admit_all = admit_all
        self._registration_id = b""
        self._registration_wanted = True
        """False once the registration was given up for good."""
        self._handles: list[Handle] = []
        self._fds: list[int] = []
        self._attached_count = 0
        self._jobs: dict[int, Job] = {}
        """Unfinished jobs by id, oldest first."""
        self._results: list[m.JobResult] = []
        """Results that were not taken yet."""
        pages = tuple(map(len, registration.groups))
        self._part_sizes = PartSizes(namespace.key_bytes, registration.blocks_per_key, pages)
        self._queues: tuple[deque[Job], deque[Job]] = deque(), deque()  # of stores and of loads
        self._parts: dict[int, tuple[Job, Part, int]] = {}  # sent, by their ids; with the request's id
        self._pieces = [0, 0]  # in flight, of stores and of loads
        self._last_part = 0
        self._by_request: dict[int, set[int]] = {}  # ids of its parts that have no result, by the request's id
        self._sequence = 0
        """All completions up to this number have arrived."""
        self._ahead: set[int] = set()
        self._asking = False
        self._transport.start(self)

    # --- for any thread --------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """The memory is registered and the daemon answers: jobs are sent."""
        return self._phase is Phase.READY and self._responsive and self._registration_wanted

    @property
    def unfinished(self) -> int:
        """Jobs without a result (those waiting in take_results() have one)."""
        return len(self._jobs)

    def store(self, job_id: int, groups: Sequence[m.GroupTransfer]) -> None:
        """Copy engine blocks into the pool. When not ready, a failed result (SESSION_ENDED) is queued at once.

        Raises:
            ValueError: a job of this id is unfinished, or lengths in ``groups`` do not fit.
            TypeError: keys or block ids in ``groups`` are no bytes.
        """
        self.submit([m.Store(job_id, list(groups))])

    def load(self, job_id: int, lease_id: int, groups: Sequence[m.GroupTransfer], keep_lease: bool = False) -> None:
        """Copy blocks that a scheduler's lookup leased into engine blocks. Otherwise as ``store``.

        The lease ends with a good load of every rank of the namespace. With ``keep_lease``, for workers that load the
        shards of one rank, the scheduler releases it.
        """
        self.submit([], [m.Load(job_id, lease_id, list(groups), keep_lease)])

    def submit(self, stores: Sequence[m.Store], loads: Sequence[m.Load] = ()) -> None:
        """Start the stores and loads of one step: they go out in one message. See ``store`` and ``load``.

        What is too large for one job goes out as several, and what the daemon has no room for now when there is some.
        """
        for some in (stores, loads):
            for job in some:
                self._check(job.groups)
        with self._transport.locked() as now:
            wanted = {job.job_id for some in (stores, loads) for job in some}
            if len(wanted) < len(stores) + len(loads) or not wanted.isdisjoint(self._jobs):
                raise ValueError("A job of the same id is unfinished; use another id.")
            if max(wanted, default=0) >= FIRST_PART_ID:
                raise ValueError(f"Job ids are below {FIRST_PART_ID}; {max(wanted)} is not.")
            for load in loads:
                self._enqueue(load.job_id, load.lease_id, load.keep_lease, load.groups, now)
            for store in stores:
                self._enqueue(store.job_id, None, False, store.groups, now)
            self._send_jobs(now)

    def take_results(self) -> list[m.JobResult]:
        """Results since the last call, those included that have arrived and were not read yet."""
        if not self._jobs and not self._results:  # vLLM asks in every step
            return []
        self._transport.poll()
        with self._transport.locked():
            taken, self._results = self._results, []
        return taken

    def wait_results(self, timeout_s: float) -> list[m.JobResult]:
        """As take_results(), but wait up to ``timeout_s`` seconds for the first one."""
        self._transport.wait(lambda: bool(self._results), timeout_s)
        return self.take_results()

    def fence(self, job_ids: Iterable[int], timeout_s: float, unsent: int = 0) -> None:
        """Wait until the daemon touches the blocks of these jobs no more; then each of them has a result.

        What has not started after FENCE_PATIENCE_S is cancelled. Stores that still run after ``timeout_s`` seconds are
        abandoned: the lifeline is closed, so that the daemon will not commit them, they fail here, and the client
        connects again. Loads are waited for however long it takes, since a copy may still land: a completion or the
        daemon's death ends that. Unknown ids are ignored. Results stay for take_results(). ``unsent`` is how many
        stores the caller has dropped at this fence before it submitted them, for the daemon's count.
        """
        wanted = set(job_ids)
        settled = self._transport.wait(lambda: not self._has_any(wanted), min(FENCE_PATIENCE_S, timeout_s))
        if settled and not unsent:
            return
        with self._transport.locked():
            self._cancel(wanted, unsent)
        if self._transport.wait(lambda: not self._has_any(wanted), timeout_s):
            return
        with self._transport.locked() as now:
            self._abandon_stores(wanted, now)
        while not self._transport.wait(lambda: not self._has_any(wanted), LOAD_WAIT_S):
            log.warning("Still waiting for loads: the daemon neither finishes them nor ends.")

    def unregister(self, timeout_s: float) -> bool:
        """Give the registration up for good and wait until the daemon touches the memory no more.

        False when the daemon did not confirm that in time; then the session is ended, and only the daemon's
        death or its own clean-up releases the memory. The client takes no jobs afterwards.
        """
        return self._outcome_of(self._unregister, timeout_s) == [True]

    def close(self) -> None:
        """End the session and the thread, in less than a second. Unfinished jobs fail. Repeatable."""
        super().close()
        self._registration.close_exports()

    def _check(self, groups: Sequence[m.GroupTransfer]) -> None:
        group_count = len(self._namespace.groups)
        for item in groups:
            if not isinstance(item.keys, bytes) or not isinstance(item.block_ids, bytes):
                raise TypeError("A GroupTransfer has bytes; GroupTransfer.of(keys, block_ids) makes it from lists.")
            if not 0 <= item.group < group_count:
                raise ValueError(f"The namespace has {group_count} groups; {item.group} is none of them.")
            self._namespace.count_keys(item.keys)
            if len(item.block_ids) % m.BLOCK_ID_BYTES:
                raise ValueError(f"{len(item.block_ids)} bytes are not a whole number of int32 block ids.")

    # --- jobs, with the lock held ----------------------------------------------------------------

    def _enqueue(
        self, job_id: int, lease_id: int | None, keep_lease: bool, groups: list[m.GroupTransfer], now: float
    ) -> None:
        full = self._limits is not None and len(self._jobs) >= self._limits.max_jobs_in_flight
        parts = self._part_sizes.cut(groups, self._limits)
        job = self._jobs[job_id] = Job(job_id, lease_id, keep_lease, groups, now, parts)
        if not self.ready:
            self._fail(job, ErrorCode.SESSION_ENDED, now)
        elif full:
            self._fail(job, ErrorCode.TOO_MANY, now)
        else:
            self._queues[job.is_load].append(job)

    def _send_jobs(self, now: float) -> None:
        """Send what the daemon has room for. Loads and stores have half of it each, and do not wait for each other."""
        while self._limits is not None and self._send_submit(self._limits, now):
            pass

    def _send_submit(self, limits: m.Limits, now: float) -> bool:
        """Send one message with as many jobs as it may hold; False when there is nothing to send."""
        request_id, nbytes, keys, pieces = self._last_request_id + 1, 0, 0, 0
        stores: list[m.Store] = []
        loads: list[m.Load] = []
        sent: set[int] = set()
        for is_load in (True, False):
            queue = self._queues[is_load]
            while queue and len(sent) < limits.max_jobs_per_message:
                job = queue[0]
                if not job.waiting or self._jobs.get(job.job_id) is not job:
                    queue.popleft()
                    continue
                part = job.waiting[0]
                fits = self._pieces[is_load] + part.pieces <= limits.max_pieces_in_flight // 2 or not any(self._pieces)
                nbytes += part.nbytes
                keys += self._part_sizes.keys_in(part)
                pieces += part.pieces
                too_much = (
                    nbytes > limits.max_frame_bytes
                    or keys > limits.max_keys_per_request
                    or pieces > limits.max_pieces_per_job
                )
                if not fits or len(self._parts) >= limits.max_jobs_in_flight or (sent and too_much):
                    break
                job.waiting.popleft()
                part_id = self._part_id(job)
                if job.lease_id is None:
                    stores.append(m.Store(part_id, part.groups))
                else:
                    # The lease ends with the last part: the daemon has accepted the others, which hold their blocks.
                    keep = job.keep_lease or bool(job.waiting)
                    loads.append(m.Load(part_id, job.lease_id, part.groups, keep))
                job.sent += 1
                sent.add(part_id)
                self._parts[part_id] = job, part, request_id
                self._pieces[is_load] += part.pieces
        if not sent:
            return False
        self._by_request[request_id] = sent
        ids = self._next_request_id(), self._registration_id, self._part_sizes.key_bytes
        message = m.Submit.of(*ids, stores, loads, self._sequence, self._admit_all)
        if (refused := self._send(message)) is not None:
            code = refused.code if isinstance(refused, RequestRefused) else ErrorCode.TOO_MANY
            self._fail_parts(sent, code, now)
        else:
            self._role_wake_at = min(self._role_wake_at, now + JOB_PATIENCE_S)
        return True

    def _part_id(self, job: Job) -> int:
        if not (job.waiting or job.sent or job.outcome is not None):
            return job.job_id
        self._last_part += 1
        return FIRST_PART_ID + self._last_part

    def _fail_parts(self, part_ids: Iterable[int], code: ErrorCode, now: float) -> None:
        for part_id in list(part_ids):
            job, part, _ = self._parts[part_id]
            failed = [m.GroupKeys(transfer.group, transfer.keys) for transfer in part.groups]
            self._part_done(m.JobResult(part_id, False, 0, max(0.0, now - job.sent_at), code, failed))

    def _part_done(self, result: m.JobResult) -> None:
        found = self._parts.pop(result.job_id, None)
        if found is None:
            return
        job, part, request_id = found
        (of_message := self._by_request[request_id]).remove(result.job_id)
        if not of_message:
            del self._by_request[request_id]
        self._pieces[job.is_load] -= part.pieces
        job.add(result)
        self._finish_if_done(job)

    def _finish_if_done(self, job: Job) -> None:
        if job.outcome is not None and not job.sent and not job.waiting:
            self._finish(job.outcome)

    def _fail(self, job: Job, code: ErrorCode, now: float) -> None:
        """End a job, whatever became of its parts."""
        failed = [m.GroupKeys(transfer.group, transfer.keys) for transfer in job.groups]
        self._finish(m.JobResult(job.job_id, False, 0, max(0.0, now - job.sent_at), code, failed))

    def _finish(self, result: m.JobResult) -> None:
        if self._jobs.pop(result.job_id, None) is not None:
            self._results.append(result)
            self._transport.notify()

    def _cancel(self, job_ids: Iterable[int], unsent: int = 0) -> None:
        """Have the daemon fail those of the jobs that have not started. What was not sent is not sent any more."""
        wanted = {job_id: self._jobs[job_id] for job_id in job_ids if job_id in self._jobs}
        for job in wanted.values():
            unsent += not job.is_load and not job.sent and job.outcome is None
            job.withdraw()
            self._finish_if_done(job)
        known = [part_id for part_id, (job, _, _) in self._parts.items() if wanted.get(job.job_id) is job]
        if (known or unsent) and self._phase is Phase.READY:
            self._send(m.Cancel(self._next_request_id(), known, min(unsent, m.MAX_REPORTED), self._sequence))

    def _has_any(self, job_ids: Iterable[int], *, loads: bool = True) -> bool:
        """Whether one of the jobs has no result; without ``loads``, whether one of the stores among them has none."""
        jobs = self._jobs
        return any(job_id in jobs and (loads or not jobs[job_id].is_load) for job_id in job_ids)

    def _abandon_stores(self, job_ids: Iterable[int], now: float) -> None:
        """Where one of these stores runs, close the lifeline: the daemon commits none, and all fail here and now."""
        if self._has_any(job_ids, loads=False):
            self.disconnect("Running stores were abandoned; the client connects again.", now)

    def _unregister(self, outcome: list[bool], now: float, timeout_s: float) -> None:
        self._registration_wanted = False
        if self._phase is not Phase.READY:
            if self._phase in CONNECTED:
                self.disconnect("The registration was ended.", now)
            outcome.append(not self._jobs and self._phase is not Phase.DRAINING)
            return

        def on_reply(reply: ReplyOrError, reply_now: float) -> None:
            outcome.append(isinstance(reply, m.Done))
            if not isinstance(reply, m.Done):
                self.disconnect("The daemon did not confirm that it released the worker's memory.", reply_now)
            self._transport.notify()

        message = m.Unregister(self._next_request_id(), self._registration_id)
        self._request(message, on_reply, now, timeout_s)

    # --- registering -----------------------------------------------------------------------------

    def _after_namespace_opened(self, now: float) -> None:
        self._attached_count = 0
        if not self._registration_wanted:
            self._become_ready(now)
            return
        self._handles, self._fds = self._registration.handles()
        if self._fds:
            self._phase = Phase.ATTACHING
            self._attach_next(now)
        else:
            self._register(now)

    def _attach_next(self, now: float) -> None:
        # One at a time: the stream's buffer and the kernel's count of descriptors in flight stay small.
        try:
            self._transport.attach(Attach(self._attached_count), self._fds[self._attached_count])
        except OSError as error:
            self.disconnect(f"The memory could not be handed to the daemon: {error.strerror or error}.", now)

    def _on_attached(self, message: Attached | AttachRefused, now: float) -> None:
        if isinstance(message, AttachRefused):
            self._end_refused(RequestRefused(message.code, message.message), now)
        elif message.segment_id != self._attached_count:
            self.disconnect("The daemon acknowledged a descriptor that was not sent.", now)
        else:
            self._attached_count += 1
            if self._attached_count < len(self._fds):
                self._attach_next(now)
            else:
                self._register(now)

    def _register(self, now: float) -> None:
        self._phase = Phase.REGISTERING
        registration = self._registration
        self._registration_id = self._rng.randbytes(16)
        message = m.Register(
            self._next_request_id(),
            self._namespace.fingerprint,
            self._registration_id,
            registration.rank,
            registration.blocks_per_key,
            self._handles,
            list(registration.tensors),
            [list(pages) for pages in registration.groups],
        )
        timeout_s = self._options.handshake_timeout_s
        if registration.on_gpu:
            timeout_s = self._options.gpu_register_timeout_s
            self._handshake_deadline = now + timeout_s
        self._request(message, self._on_registered, now, timeout_s)

    def _on_registered(self, reply: ReplyOrError, now: float) -> None:
        if isinstance(reply, m.Registered):
            self._become_ready(now)
        else:
            self._fail_handshake("Register", reply, now)

    # --- completions -----------------------------------------------------------------------------

    def on_publication(self, topic: bytes, sequence: bytes, payload: bytes, now: float) -> None:
        """Take published completions. Those that do not decode count as dropped."""
        if topic != session_topic(self._epoch, self._session_id):
            return
        try:
            self._complete(decode_completions(payload), now)
        except CodecError:
            self._ask_for_results(now)
        if self._ahead:
            self._ask_for_results(now)

    def _complete(self, batch: m.Completions, now: float) -> None:
        if (batch.epoch, batch.session_id) != (self._epoch, self._session_id):
            return
        # Each batch counts once: a job id may be in use again when an old batch comes again.
        if batch.sequence <= self._sequence or batch.sequence in self._ahead:
            return
        self._ahead.add(batch.sequence)
        while self._sequence + 1 in self._ahead:
            self._sequence += 1
            self._ahead.remove(self._sequence)
        self._credit_bytes = batch.credit_bytes
        for result in batch.results:
            if self._part_sizes.fit(result.failed) and self._part_sizes.fit(result.declined):
                self._part_done(result)
            elif result.job_id in self._parts:
                self._fail_parts([result.job_id], ErrorCode.INTERNAL, now)
        self._send_jobs(now)

    def _ask_for_results(self, now: float) -> None:
        if self._asking or self._phase is not Phase.READY:
            return
        self._asking = True
        message = m.Results(self._next_request_id(), self._sequence)
        asked = message.request_id
        self._request(message, lambda reply, reply_now: self._on_results(asked, reply, reply_now), now)

    def _on_results(self, asked: int, reply: ReplyOrError, now: float) -> None:
        self._asking = False
        self._role_wake_at = now + JOB_PATIENCE_S if self._jobs else NEVER
        if isinstance(reply, m.ResultsReply):
            for batch in reply.batches:
                self._complete(batch, now)
            self._fail_unknown(asked, set(reply.unfinished), now)
        elif not isinstance(reply, KvoffdClientError):
            self.disconnect(f"The daemon answered Results with {type(reply).__name__}.", now)

    def _fail_unknown(self, asked: int, unfinished: set[int], now: float) -> None:
        """Fail jobs that the daemon never received, or lost: it has seen every message before request ``asked``."""
        for part_id, (_, _, request_id) in list(self._parts.items()):
            if request_id < asked and part_id not in unfinished:
                self._fail_parts([part_id], ErrorCode.INTERNAL, now)
        self._send_jobs(now)

    def _on_unexpected_refusal(self, reply: m.Error, refusal: RequestRefused, now: float) -> None:
        if (sent := self._by_request.get(reply.request_id)) is None:
            super()._on_unexpected_refusal(reply, refusal, now)
            return
        self._fail_parts(sent, reply.code, now)
        self._send_jobs(now)

    # --- what Session asks of a role --------------------------------------------------------------

    def _topics(self) -> Sequence[bytes]:
        return [session_topic(self._epoch, self._session_id)]

    def _role_ready(self, now: float) -> None:
        self._sequence = 0
        self._ahead.clear()
        self._asking = False
        self._role_wake_at = NEVER

    def _role_disconnected(self, now: float) -> None:
        self._role_wake_at = NEVER
        self._parts.clear()
        self._by_request.clear()
        self._pieces = [0, 0]
        for queue in self._queues:
            queue.clear()
        for job in list(self._jobs.values()):
            # A copy of a load may still land until the daemon has released the memory, or is gone.
            if self._phase is not Phase.DRAINING or not job.is_load:
                self._fail(job, ErrorCode.SESSION_ENDED, now)

    def _role_released(self, now: float) -> None:
        """Fail the loads of the ended session: no copy lands any more."""
        for job in list(self._jobs.values()):
            self._fail(job, ErrorCode.SESSION_ENDED, now)

    def _copies_outlive_lifeline(self) -> bool:
        # Copies in host memory are made by the daemon's threads, which end before the kernel closes its descriptors.
        return self._registration.on_gpu

    def _must_drain(self) -> bool:
        # Stores fail here and now, but unregister() must know when the last of them has ended there too.
        return bool(self._jobs)

    def _role_tick(self, now: float) -> None:
        stores_only = bool(self._jobs) and not any(job.is_load for job in self._jobs.values())
        if stores_only and not self._responsive and self._phase is Phase.READY:
            self._abandon_stores(self._jobs, now)  # an engine that pauses waits until nothing is stored
        if now < self._role_wake_at:
            return
        due = min((job.sent_at for job in self._jobs.values()), default=NEVER) + JOB_PATIENCE_S
        if due <= now:
            self._ask_for_results(now)
            due = now + JOB_PATIENCE_S
        self._role_wake_at = due
