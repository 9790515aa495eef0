"""The worker's client: registration, stores, loads, fences."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvoffd_client.errors import KvoffdClientError, RequestRefused
from kvoffd_client.jobs import GroupTransfer, Job, submit_of
from kvoffd_client.lifeline_stream import NEVER
from kvoffd_client.memory import Registration
from kvoffd_client.namespace import NamespaceSpec
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

log = logging.getLogger("kvoffd_client")

FENCE_PATIENCE_S = 0.05
"""How long a fence waits for jobs to end by themselves before it cancels those that have not started."""
LOAD_WAIT_S = 10.0
"""How often a fence says that it still waits for loads."""
JOB_PATIENCE_S = 1.0
"""A job older than this makes the client ask for its result, and again at this interval."""


class Sent(NamedTuple):
    """A job that has no result, with the id of the message that it went out in."""

    job: Job
    sent_at: float
    request_id: int


class WorkerClient(Session):
    """Moves one worker's blocks to and from one daemon, which it registers the worker's KV memory with.

    Every job gets exactly one result, from the daemon or, when that is gone, from the client itself. It connects in the
    background, and again whenever the daemon goes.

    Args:
        registration: the worker's KV memory; must outlive this client. The other arguments are as SchedulerClient's.
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
        self._attached_count = 0
        tokens = max([group.tokens_per_block for group in namespace.groups], default=0)
        self._bytes_of_key = (
            2 * namespace.key_bytes + m.BLOCK_ID_BYTES * registration.blocks_per_key + m.TOKEN_ID_BYTES * tokens
        )
        """About the most that a key takes in a message, with its parent, blocks and tokens."""
        self._jobs: dict[int, Sent] = {}
        """By id, oldest first."""
        self._results: list[m.JobResult] = []
        """Results that were not taken yet."""
        self._topic = b""
        self._sequence = 0
        """All completions up to this number have arrived."""
        self._ahead: set[int] = set()
        """Numbers beyond it of what has arrived."""
        self._asking = False
        self._transport.start(self)

    # --- for any thread --------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Jobs without a result (those waiting in take_results() have one)."""
        return len(self._jobs)

    def store(self, job_id: int, groups: Sequence[GroupTransfer]) -> None:
        """Copy engine blocks into the pool; see ``submit``."""
        self.submit([Job(job_id, groups)])

    def load(self, job_id: int, lease_id: int, groups: Sequence[GroupTransfer], keep_lease: bool = False) -> None:
        """Copy blocks that a scheduler's lookup leased into engine blocks; see ``submit``.

        The lease ends with a good load of every rank of the namespace. With ``keep_lease``, for workers that load the
        shards of one rank, the scheduler releases it.
        """
        self.submit([Job(job_id, groups, lease_id, keep_lease)])

    def submit(self, jobs: Sequence[Job]) -> None:
        """Start the stores and loads of one step. When not ready, failed results (SESSION_ENDED) are queued at once.

        They go out in one message where it has room for all. What is too large for a message of its own fails.

        Raises:
            ValueError: a job of the same id is unfinished, or lengths in ``groups`` do not fit.
            TypeError: keys or block ids are no bytes.
        """
        namespace = self._namespace
        counts = [job.key_count(len(namespace.groups), namespace.key_bytes) for job in jobs]
        ids = {job.job_id for job in jobs}
        with self._transport.lock:
            now = self._transport.now()
            if len(ids) < len(jobs) or not ids.isdisjoint(self._jobs):
                raise ValueError("A job of the same id is unfinished; use another id.")
            limits = self._limits
            if not self.ready or limits is None:
                self._refuse(jobs, ErrorCode.SESSION_ENDED)
                return
            accepted = max(0, limits.max_jobs_in_flight - len(self._jobs))
            if len(jobs) > accepted:
                self._refuse(jobs[accepted:], ErrorCode.TOO_MANY)
            self._role_due = min(self._role_due, now + JOB_PATIENCE_S)
            # Half a frame: the bytes of a key are an estimate.
            most_keys = min(limits.max_keys_per_request, limits.max_frame_bytes // (2 * self._bytes_of_key))
            batches: list[list[Job]] = []
            keys, tells = 0, None  # whether the last batch's stores have tokens; None where it has no store
            for job, count in zip(jobs[:accepted], counts, strict=False):
                keys += count
                is_store, has_tokens = job.lease_id is None, any(one.tokens for one in job.groups)
                full = keys > most_keys or (is_store and tells not in (None, has_tokens))
                if not batches or full or len(batches[-1]) == limits.max_jobs_per_message:
                    batches.append([])
                    keys, tells = count, None
                batches[-1].append(job)
                if is_store:  # all stores of a message tell their tokens, or none does
                    tells = has_tokens
            for batch in batches:
                request_id = self._next_request_id()
                self._jobs.update([(job.job_id, Sent(job, now, request_id)) for job in batch])
                message = submit_of(request_id, self._registration_id, namespace.key_bytes, batch, self._sequence)
                if (refused := self._send(message)) is not None:
                    code = refused.code if isinstance(refused, RequestRefused) else ErrorCode.TOO_MANY
                    self._fail([job.job_id for job in batch], code)
                    self._transport.notify()

    def take_results(self) -> list[m.JobResult]:
        """Results since the last call, those included that have arrived and were not read yet."""
        if not self._jobs and not self._results:  # vLLM asks in every step
            return []
        self._transport.wait(bool, 0.0)
        with self._transport.lock:
            taken, self._results = self._results, []
        return taken

    def wait_results(self, timeout_s: float) -> list[m.JobResult]:
        """As take_results(), but wait up to ``timeout_s`` seconds for the first one."""
        self._transport.wait(lambda: bool(self._results), timeout_s)
        return self.take_results()

    def fence(self, job_ids: Iterable[int], timeout_s: float) -> None:
        """Wait until the daemon touches the blocks of these jobs no more; then each of them has a result.

        What has not started after FENCE_PATIENCE_S is cancelled. Stores that still run after ``timeout_s`` seconds are
        abandoned: the lifeline is closed, so that the daemon will not commit them, they fail here, and the client
        connects again. Loads are waited for however long it takes, since a copy may still land: a completion or the
        daemon's death ends that. Unknown ids are ignored. Results stay for take_results().
        """
        wanted = set(job_ids)
        if self._transport.wait(lambda: not self._has_any(wanted), min(FENCE_PATIENCE_S, timeout_s)):
            return
        with self._transport.lock:
            self._cancel(wanted)
        if self._transport.wait(lambda: not self._has_any(wanted), timeout_s):
            return
        with self._transport.lock:
            self._abandon_stores(wanted, self._transport.now())
        while not self._transport.wait(lambda: not self._has_any(wanted), LOAD_WAIT_S):
            log.warning("Still waiting for loads: the daemon neither finishes them nor ends.")

    def unregister(self, timeout_s: float) -> bool:
        """Give the registration up for good and wait until the daemon touches the memory no more.

        False when the daemon did not confirm that in time; then the session is ended, and only the daemon's
        death or its own clean-up releases the memory. The client takes no jobs afterwards.
        """
        outcome: list[bool] = []
        with self._transport.lock:
            self._unregister(outcome, self._transport.now(), timeout_s)
        self._transport.wait(lambda: bool(outcome), timeout_s)
        return outcome == [True]

    def close(self) -> None:
        """End the session and the thread, in less than a second. Unfinished jobs fail. Repeatable."""
        super().close()
        self._registration.close_exports()

    # --- jobs, with the lock held ----------------------------------------------------------------

    def _refuse(self, jobs: Sequence[Job], code: ErrorCode) -> None:
        self._results += [m.JobResult(job.job_id, False, 0, 0.0, code, job.keys) for job in jobs]
        self._transport.notify()

    def _fail(self, ids: Iterable[int], code: ErrorCode) -> None:
        for job in [self._jobs[job_id].job for job_id in ids]:
            self._on_result(m.JobResult(job.job_id, False, 0, 0.0, code, job.keys))

    def _on_result(self, result: m.JobResult) -> None:
        if self._jobs.pop(result.job_id, None) is not None:
            self._results.append(result)

    def _cancel(self, job_ids: Iterable[int]) -> None:
        """Have the daemon fail those of the jobs that have not started."""
        known = [job_id for job_id in job_ids if job_id in self._jobs]
        if known and self._phase is Phase.READY:
            self._send(m.Cancel(m.NO_REPLY, known, self._sequence))

    def _has_any(self, job_ids: Iterable[int], *, loads: bool = True) -> bool:
        """Whether one of the jobs has no result; without ``loads``, whether one of the stores among them has none."""
        jobs = self._jobs
        return any(job_id in jobs and (loads or jobs[job_id].job.lease_id is None) for job_id in job_ids)

    def _abandon_stores(self, job_ids: Iterable[int], now: float) -> None:
        """Where one of these stores runs, close the lifeline: the daemon commits none, and all fail here and now."""
        if self._has_any(job_ids, loads=False):
            self.disconnect("Running stores were abandoned; the client connects again.", now)

    def _unregister(self, outcome: list[bool], now: float, timeout_s: float) -> None:
        self._wanted, self._problem = False, "The registration was ended."
        if self._phase is not Phase.READY:
            if self._phase in CONNECTED:
                self.disconnect(self._problem, now)
            outcome.append(not self._jobs and self._phase is not Phase.DRAINING)
            return

        def on_reply(reply: ReplyOrError, reply_now: float) -> None:
            outcome.append(isinstance(reply, m.Done))
            if not isinstance(reply, m.Done):
                self.disconnect("The daemon did not confirm that it released the worker's memory.", reply_now)

        message = m.Unregister(self._next_request_id(), self._registration_id)
        self._send(message, now, on_reply, timeout_s)

    # --- registering -----------------------------------------------------------------------------

    def _on_namespace_opened(self, now: float) -> None:
        if not self._wanted:
            self._become_ready(now)
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
        # One at a time: the stream's buffer and the kernel's count of descriptors in flight stay small.
        if self._attached_count < len(self._fds):
            try:
                self._transport.attach(Attach(self._attached_count), self._fds[self._attached_count])
            except OSError as error:
                self.disconnect(f"The memory could not be handed to the daemon: {error.strerror or error}.", now)
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
        self._shake(message, lambda _, now: self._become_ready(now), now)

    # --- completions -----------------------------------------------------------------------------

    def on_publication(self, topic: bytes, sequence: bytes, payload: bytes, now: float) -> None:
        """Take published completions. Those that do not decode count as dropped."""
        if topic != self._topic:
            return
        try:
            self._complete(decode_completions(payload))
        except CODEC_ERRORS:
            self._ask_for_results(now)
        if self._ahead:
            self._ask_for_results(now)
        self._transport.notify()

    def _complete(self, batch: m.Completions) -> None:
        # Each batch counts once: a job id may be in use again when an old batch comes again.
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
        if self._asking or self._phase is not Phase.READY:
            return
        self._asking = True
        message = m.Results(self._next_request_id(), self._sequence)
        asked = message.request_id
        self._send(message, now, lambda reply, reply_now: self._on_results(asked, reply, reply_now))

    def _on_results(self, asked: int, reply: ReplyOrError, now: float) -> None:
        self._asking = False
        if isinstance(reply, m.ResultsReply):
            for batch in reply.batches:
                self._complete(batch)
            # It never received the others, or lost them: it has seen every message before the one that asks.
            sent_before = [job_id for job_id, sent in self._jobs.items() if sent.request_id < asked]
            unfinished = set(reply.unfinished)
            self._fail([one for one in sent_before if one not in unfinished], ErrorCode.INTERNAL)
        elif not isinstance(reply, KvoffdClientError):
            self.disconnect(f"The daemon answered Results with {type(reply).__name__}.", now)

    def _on_unexpected_refusal(self, reply: m.Error, refusal: RequestRefused, now: float) -> None:
        refused = [job_id for job_id, sent in self._jobs.items() if sent.request_id == reply.request_id]
        if refused:
            self._fail(refused, reply.code)
        else:
            super()._on_unexpected_refusal(reply, refusal, now)

    # --- what Session asks of a role --------------------------------------------------------------

    def _topics(self) -> Sequence[bytes]:
        self._topic = session_topic(self.epoch, self.session_id)
        return [self._topic]

    def _role_disconnected(self, now: float) -> None:
        self._sequence, self._ahead, self._role_due = 0, set(), NEVER
        # A copy of a load may still land until the daemon has released the memory, or is gone.
        loads_land = self._phase is Phase.DRAINING
        ended = [job_id for job_id, sent in self._jobs.items() if not loads_land or sent.job.lease_id is None]
        self._fail(ended, ErrorCode.SESSION_ENDED)

    def _must_drain(self) -> bool:
        # Stores fail here and now, but unregister() must know when the last of them has ended there too.
        return bool(self._jobs)

    def _role_tick(self, now: float) -> None:
        stores_only = bool(self._jobs) and all(sent.job.lease_id is None for sent in self._jobs.values())
        if stores_only and not self._responsive and self._phase is Phase.READY:
            self._abandon_stores(self._jobs, now)  # an engine that pauses waits until nothing is stored
        if now >= self._role_due:
            oldest = next(iter(self._jobs.values()), None)
            self._role_due = NEVER if oldest is None else oldest.sent_at + JOB_PATIENCE_S
            if now >= self._role_due:
                self._role_due = now + JOB_PATIENCE_S
                self._ask_for_results(now)
