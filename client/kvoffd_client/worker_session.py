"""The worker's session: registration, jobs and their completions. Pure, like ``Session``."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence

from kvoffd_client.client_options import ClientOptions, Identity
from kvoffd_client.client_session import Link, Phase, Session
from kvoffd_client.errors import KvoffdClientError, RequestRefused
from kvoffd_client.job_parts import FIRST_PART_ID, Job, Part, PartSizes
from kvoffd_client.pending_requests import NEVER, ReplyOrError
from kvoffd_proto import messages as m
from kvoffd_proto.codec import CodecError, decode_completions
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.events import session_topic
from kvoffd_proto.handles import Handle
from kvoffd_proto.lifeline import Attach, Attached, AttachRefused

ACKNOWLEDGE_RESULTS = 4096
"""After this many results a heartbeat goes out early, so that the daemon need not keep more."""


class WorkerSession(Session):
    """Adds to ``Session`` what a worker does. One registration.

    Attributes:
        jobs: unfinished jobs by id, oldest first.
        results: results that were not taken yet.
        registration_wanted: False once the registration was given up for good.
    """

    def __init__(self, link: Link, identity: Identity, options: ClientOptions, rng: random.Random) -> None:
        super().__init__(link, identity, options, rng)
        assert identity.registration is not None
        self._registration = identity.registration
        self._registration_id = b""
        self._handles: list[Handle] = []
        self._fds: list[int] = []
        self._attached_count = 0
        self.jobs: dict[int, Job] = {}
        registered, namespace = identity.registration, identity.namespace
        assert namespace is not None
        self._part_sizes = PartSizes(namespace.key_bytes, registered.blocks_per_key, tuple(map(len, registered.groups)))
        self._queues: tuple[deque[Job], deque[Job]] = deque(), deque()  # of stores and of loads
        self._parts: dict[int, tuple[Job, Part, int]] = {}  # sent, by their ids; with the request's id
        self._pieces = [0, 0]  # in flight, of stores and of loads
        self._next_part = 0
        self._by_request: dict[int, set[int]] = {}  # ids of its parts that have no result, by the request's id
        self._draining: set[int] = set()
        self.results: list[m.JobResult] = []
        self.registration_wanted = True
        self._sequence = 0
        self._ahead: set[int] = set()
        self._unacknowledged = 0
        self._replaying = False

    # --- jobs ------------------------------------------------------------------------------------

    def submit(self, stores: Sequence[m.Store], loads: Sequence[m.Load], now: float) -> None:
        """Send jobs; their results come in ``results``, at once when they cannot be sent.

        What is too large for one job goes out as several, and what the daemon has no room for now when there is some.

        Raises:
            ValueError: a job of this id is unfinished, or comes twice. Nothing was sent.
        """
        wanted = {job.job_id for some in (stores, loads) for job in some}
        if len(wanted) < len(stores) + len(loads) or not wanted.isdisjoint(self.jobs):
            raise ValueError("A job of the same id is unfinished; use another id.")
        if max(wanted, default=0) >= FIRST_PART_ID:
            raise ValueError(f"Job ids are below {FIRST_PART_ID}; {max(wanted)} is not.")
        for load in loads:
            self._enqueue(load.job_id, load.lease_id, load.keep_lease, load.groups, now)
        for store in stores:
            self._enqueue(store.job_id, None, False, store.groups, now)
        self._send_parts(now)

    def _enqueue(
        self, job_id: int, lease_id: int | None, keep_lease: bool, groups: list[m.GroupTransfer], now: float
    ) -> None:
        full = self.limits is not None and len(self.jobs) >= self.limits.max_jobs_in_flight
        parts = self._part_sizes.cut(groups, self.limits)
        job = self.jobs[job_id] = Job(job_id, lease_id, keep_lease, groups, now, self.generation, parts)
        if not self.usable or not self.registration_wanted:
            self._fail(job, ErrorCode.SESSION_ENDED, now)
        elif full:
            self._fail(job, ErrorCode.TOO_MANY, now)
        else:
            self._queues[job.is_load].append(job)

    def _send_parts(self, now: float) -> None:
        """Send what the daemon has room for. Loads and stores have half of it each, and do not wait for each other."""
        while self.limits is not None and self._send_message(self.limits, now):
            pass

    def _send_message(self, limits: m.Limits, now: float) -> bool:
        """Send one message with as many jobs as it may hold; False when there is nothing to send."""
        request_id, nbytes = self._next_request_id + 1, 0
        stores: list[m.Store] = []
        loads: list[m.Load] = []
        sent: set[int] = set()
        for is_load in (True, False):
            queue = self._queues[is_load]
            while queue and len(sent) < limits.max_jobs_per_message:
                job = queue[0]
                if not job.waiting or self.jobs.get(job.job_id) is not job:
                    queue.popleft()
                    continue
                part = job.waiting[0]
                fits = self._pieces[is_load] + part.pieces <= limits.max_pieces_in_flight // 2 or not any(self._pieces)
                nbytes += part.nbytes
                in_flight = len(self._parts)
                if not fits or in_flight >= limits.max_jobs_in_flight or (sent and nbytes > limits.max_frame_bytes):
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
        message = m.Submit(self.next_request_id(), self.token, self._registration_id, stores, loads)
        if (refused := self.send(message)) is not None:
            code = refused.code if isinstance(refused, RequestRefused) else ErrorCode.TOO_MANY
            for part_id in list(sent):
                self._fail_part(part_id, code, now)
        else:
            self._role_wake_at = min(self._role_wake_at, now + self.options.job_patience_s)
        return True

    def _part_id(self, job: Job) -> int:
        if not (job.waiting or job.sent or job.outcome is not None):
            return job.job_id
        self._next_part += 1
        return FIRST_PART_ID + self._next_part

    def _fail_part(self, part_id: int, code: ErrorCode, now: float) -> None:
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
        if self.jobs.pop(result.job_id, None) is not None:
            self.results.append(result)
            self.on_change()

    def cancel(self, job_ids: Iterable[int], unsent: int = 0) -> None:
        """Have the daemon fail those of the jobs that have not started. What was not sent is not sent any more.

        ``unsent`` more stores were dropped before they came here: the daemon is told how many there are.
        """
        wanted = {job_id: self.jobs[job_id] for job_id in job_ids if job_id in self.jobs}
        for job in wanted.values():
            unsent += not job.is_load and not job.sent and job.outcome is None
            job.withdraw()
            self._finish_if_done(job)
        known = [part_id for part_id, (job, _, _) in self._parts.items() if wanted.get(job.job_id) is job]
        if (known or unsent) and self.phase is Phase.READY:
            self.send(m.Cancel(self.next_request_id(), self.token, known, min(unsent, m.MAX_REPORTED)))

    def has_any(self, job_ids: Iterable[int], *, loads: bool = True) -> bool:
        """Whether one of the jobs has no result; without ``loads``, whether one of the stores among them has none."""
        jobs = self.jobs
        return any(job_id in jobs and (loads or not jobs[job_id].is_load) for job_id in job_ids)

    def abandon_stores(self, now: float) -> None:
        """Close the lifeline, so that the daemon commits no running store; the stores fail here and now."""
        self.disconnect("Running stores were abandoned; the client connects again.", now)

    def unregister(self, outcome: list[bool], now: float, timeout_s: float) -> None:
        """Give the registration up for good; whether the daemon confirmed that is appended to ``outcome``."""
        self.registration_wanted = False
        if self.phase is not Phase.READY:
            if self.phase is not Phase.WAITING:
                self.disconnect("The registration was ended.", now)
            outcome.append(not self.jobs and not self._draining)
            return

        def on_reply(reply: ReplyOrError, reply_now: float) -> None:
            outcome.append(isinstance(reply, m.Done) and not self._draining)
            if not isinstance(reply, m.Done):
                self.disconnect("The daemon did not confirm that it released the worker's memory.", reply_now)
            self.on_change()

        self.request(m.Unregister(self.next_request_id(), self.token, self._registration_id), on_reply, now, timeout_s)

    # --- registering -----------------------------------------------------------------------------

    def _after_namespace_opened(self, now: float) -> None:
        self._attached_count = 0
        if not self.registration_wanted:
            self._become_ready(now)
            return
        self._handles, self._fds = self._registration.handles()
        if self._fds:
            self.phase = Phase.ATTACHING
            self._attach_next(now)
        else:
            self._register(now)

    def _attach_next(self, now: float) -> None:
        # One at a time: the stream's buffer and the kernel's count of descriptors in flight stay small.
        try:
            self._link.attach(Attach(self._attached_count), self._fds[self._attached_count])
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
        assert self.identity.namespace is not None
        self.phase = Phase.REGISTERING
        registration = self._registration
        self._registration_id = self._rng.randbytes(16)
        message = m.Register(
            self.next_request_id(),
            self.token,
            self.identity.namespace.fingerprint,
            self._registration_id,
            registration.rank,
            registration.blocks_per_key,
            self._handles,
            list(registration.tensors),
            [list(pages) for pages in registration.groups],
        )
        timeout_s = self.options.handshake_timeout_s
        if registration.on_gpu:
            timeout_s = self.options.gpu_register_timeout_s
            self._handshake_deadline = now + timeout_s
        self.request(message, self._on_registered, now, timeout_s)

    def _on_registered(self, reply: ReplyOrError, now: float) -> None:
        if isinstance(reply, m.Registered):
            self._become_ready(now)
        else:
            self._fail_handshake("Register", reply, now)

    # --- completions -----------------------------------------------------------------------------

    def on_publication(self, topic: bytes, sequence: bytes, payload: bytes, now: float) -> None:
        """Take published completions. Those that do not decode count as dropped: a replay brings them."""
        if topic != session_topic(self.epoch, self.session_id):
            return
        try:
            self._complete(decode_completions(payload), now)
        except CodecError:
            self._replay(now)
        if self._ahead:
            self._replay(now)
        if self._unacknowledged >= ACKNOWLEDGE_RESULTS:
            self._heartbeat_at = now

    def _complete(self, batch: m.Completions, now: float) -> None:
        if (batch.epoch, batch.session_id) != (self.epoch, self.session_id):
            return
        # Each batch counts once: a job id may be in use again when an old batch is replayed.
        if batch.sequence <= self._sequence or batch.sequence in self._ahead:
            return
        self._ahead.add(batch.sequence)
        while self._sequence + 1 in self._ahead:
            self._sequence += 1
            self._ahead.remove(self._sequence)
        self._unacknowledged += len(batch.results)
        self.credit_bytes = batch.credit_bytes
        for result in batch.results:
            if self._part_sizes.fit(result.failed) and self._part_sizes.fit(result.declined):
                self._part_done(result)
            elif result.job_id in self._parts:
                self._fail_part(result.job_id, ErrorCode.INTERNAL, now)
        self._send_parts(now)

    def _replay(self, now: float) -> None:
        if self._replaying or self.phase is not Phase.READY:
            return
        self._replaying = True
        message = m.Replay(self.next_request_id(), self.token, self._sequence)
        last = message.request_id
        self.request(message, lambda reply, reply_now: self._on_replay_reply(last, reply, reply_now), now)

    def _on_replay_reply(self, asked: int, reply: ReplyOrError, now: float) -> None:
        self._replaying = False
        self._role_wake_at = now + self.options.job_patience_s if self.jobs else NEVER
        if isinstance(reply, m.ReplayReply):
            for batch in reply.batches:
                self._complete(batch, now)
            self._fail_unknown(asked, set(reply.unfinished), now)
        elif not isinstance(reply, KvoffdClientError):
            self.disconnect(f"The daemon answered Replay with {type(reply).__name__}.", now)

    def _fail_unknown(self, asked: int, unfinished: set[int], now: float) -> None:
        """Fail jobs that the daemon never received, or lost: it has seen every message before request ``asked``."""
        for part_id, (_, _, request_id) in list(self._parts.items()):
            if request_id < asked and part_id not in unfinished:
                self._fail_part(part_id, ErrorCode.INTERNAL, now)
        self._send_parts(now)

    def _on_unexpected_refusal(self, reply: m.Error, refusal: RequestRefused, now: float) -> None:
        if (sent := self._by_request.get(reply.request_id)) is None:
            super()._on_unexpected_refusal(reply, refusal, now)
            return
        for part_id in list(sent):
            self._fail_part(part_id, reply.code, now)
        self._send_parts(now)

    def _on_unasked_reply(self, reply: m.AnyReply, now: float) -> None:
        if not isinstance(reply, m.JobsRefused):
            return
        sent = self._by_request.get(reply.request_id, set())
        for refusal in reply.refused:
            if refusal.job_id in sent:
                self._fail_part(refusal.job_id, refusal.code, now)
        self._send_parts(now)

    # --- what Session asks of a role --------------------------------------------------------------

    def _role_ready(self, now: float) -> None:
        self._sequence = 0
        self._ahead.clear()
        self._unacknowledged = 0
        self._replaying = False
        self._role_wake_at = NEVER

    def _role_disconnected(self, dead: bool, now: float) -> None:
        self._role_wake_at = NEVER
        if not dead and self._must_drain():
            self._draining.add(self.generation)
        self._parts.clear()
        self._by_request.clear()
        self._pieces = [0, 0]
        for queue in self._queues:
            queue.clear()
        for job in list(self.jobs.values()):
            # A copy of a load may still land until the daemon has let go of the memory, or is gone.
            ended = dead and job.generation == self.generation
            if ended or not job.is_load or self.phase is Phase.CLOSED:
                self._fail(job, ErrorCode.SESSION_ENDED, now)

    def on_drained(self, generation: int, now: float) -> None:
        """Fail the loads of an ended session: the daemon has let go of its memory, so that no copy lands any more."""
        self._draining.discard(generation)
        for job in list(self.jobs.values()):
            if job.generation == generation:
                self._fail(job, ErrorCode.SESSION_ENDED, now)

    def _copies_outlive_lifeline(self) -> bool:
        # Copies in host memory are made by the daemon's threads, which end before the kernel closes its descriptors.
        return self._registration.on_gpu

    def _must_drain(self) -> bool:
        # Stores fail here and now, but unregister() must know when the last of them has ended there too.
        return any(job.generation == self.generation for job in self.jobs.values())

    def _role_tick(self, now: float) -> None:
        stores_only = bool(self.jobs) and not any(job.is_load for job in self.jobs.values())
        if stores_only and not self.responsive and self.phase is Phase.READY:
            self.abandon_stores(now)  # an engine that pauses waits until nothing is stored
        if now < self._role_wake_at:
            return
        oldest = min((job.sent_at for job in self.jobs.values() if job.generation == self.generation), default=NEVER)
        due = oldest + self.options.job_patience_s
        if due <= now:
            self._replay(now)
            due = now + self.options.job_patience_s
        self._role_wake_at = due

    def _acknowledged(self) -> int:
        self._unacknowledged = 0
        return self._sequence

    def _role_heartbeat(self, reply: m.HeartbeatReply, sent_at: float, now: float) -> None:
        if reply.sequence > self._sequence:
            self._replay(now)
