"""The scheduler's client: lookups, leases, KV events."""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from msgspec import Struct, structs

from kvoffd_client.errors import KvoffdClientError, RequestTimeout
from kvoffd_client.lifeline_stream import NEVER
from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.session import DEFAULT_OPTIONS, ClientOptions, Phase, ReplyOrError, Session, Transport, check
from kvoffd_proto import messages as m
from kvoffd_proto.codec import CODEC_ERRORS
from kvoffd_proto.events import SEQUENCE_BYTES, AllBlocksCleared, BlockStored, KvEvent, decode_event_batch, kv_topic

_READY_BYTE = bytes([m.READY])
MAX_BUFFERED_EVENTS = 100_000
"""Most KV events kept for take_events(). Beyond that all are dropped and counted."""
MAX_STORED_KEYS = 65_536
"""Most keys that ``StoredKeys`` remembers, about 10 MiB."""
REPORT_PAUSE_S = 1.0
"""Time for which reports of prompts are collected before they are sent together. Releases and invalidations that the
queue to the daemon did not take are sent again after it."""
MAX_WAITING_INVALIDATIONS = 1024
"""Invalidations kept while the queue to the daemon is full; the oldest are dropped."""
MAX_WAITING_REPORTS = 4096
"""Reports of prompts kept while they cannot be sent, such as during a restart of the daemon, which counts all prompts.
"""


class LookupFuture(Struct, eq=False):
    """The answer to one lookup, like a future. Reading it never blocks; wait() does.

    Attributes:
        lease_id: id of the lease for loads and release; 0 while not connected.
        done: the answer has come, or never will.
        failed: done without an answer (not connected, refused, too late): treat every key as absent.
        states: one ``KeyState`` byte per key, for each group of the request; empty until done and if failed. Pending
            keys are being promoted, or a shared store is being asked for them: look up again.
        wait_s: the daemon's estimate of the seconds until all pending keys are ready; 0.0 if it has none.
        asking: number of pending keys for which a shared store has not answered yet.
        pinned: blocks pinned under the lease at the time of the answer. Pending blocks are pinned once promoted.
        ttl_ms: lifetime of the lease; 0: there is no lease.
        answered_at: time.monotonic() of the answer, or of the failure; 0.0 before.
        stale_at: time after which to look up again: half of the lease's life; 0.0 once it is released or lost.
        transport: the session's; None without one.
        unwanted: it was released before its answer.
        missing: number of its requests without an answer.
        partial: states in the other answers, for each group.
    """

    lease_id: int
    done: bool = False
    failed: bool = False
    states: list[bytes] = []
    wait_s: float = 0.0
    asking: int = 0
    pinned: int = 0
    ttl_ms: int = 0
    answered_at: float = 0.0
    stale_at: float = 0.0
    transport: Transport | None = None
    unwanted: bool = False
    missing: int = 1
    partial: list[bytes] = []

    @property
    def alive(self) -> bool:
        """Whether the pins still hold, as far as is known: not released, same connection, and less than half of the
        lease's lifetime has passed. Look up again after that."""
        return self.transport is not None and self.transport.now() < self.stale_at

    @property
    def leased(self) -> bool:
        """Whether the answer came with a lease, which must be released."""
        return self.ttl_ms > 0

    @property
    def pending(self) -> bool:
        """Whether some key is being promoted, or a shared store is being asked for it."""
        return any(not m.COMING.isdisjoint(states) for states in self.states)

    def leading_ready(self, index: int = 0) -> int:
        """Return the number of ready keys before the first other one in the ``index``-th group of the request."""
        if index >= len(self.states):
            return 0
        states = self.states[index]
        return len(states) - len(states.lstrip(_READY_BYTE))

    def wait(self, timeout_s: float) -> bool:
        """Wait until done; False if it is not after ``timeout_s`` seconds."""
        return self.done or (self.transport is not None and self.transport.wait(lambda: self.done, timeout_s))


class StoredKeys:
    """The keys that were stored most recently, by any engine: which answers to lookups may be outdated.

    One thread changes it at a time, while others may read ``count``, ``forgotten`` and single keys. So ``count`` is
    raised last.

    Attributes:
        count: how many keys were stored so far, and so the number of the last one.
        forgotten: number of the last key that is not remembered; an answer from when ``count`` was lower may be
            outdated in any case.
    """

    def __init__(self) -> None:
        self.count = self.forgotten = 0
        self._lock = threading.Lock()
        self._numbers: dict[bytes, int] = {}
        """Number of each remembered key when it was stored last, oldest first."""

    def add(self, keys: Iterable[bytes]) -> None:
        """Record that keys were stored."""
        with self._lock:
            for key in keys:
                self._numbers.pop(key, None)
                self._numbers[key] = self.count + 1
                self.count += 1
            while len(self._numbers) > MAX_STORED_KEYS:
                oldest = next(iter(self._numbers))
                self.forgotten = self._numbers.pop(oldest)

    def forget(self) -> None:
        """Forget all keys, because some may have been missed, which count as one."""
        with self._lock:
            self._numbers.clear()
            self.forgotten = self.count + 1
            self.count += 1

    def since(self, count: int) -> list[bytes]:
        """Return at least the remembered keys that were stored after ``count`` was this, the newest first."""
        with self._lock:
            return list(islice(reversed(self._numbers), max(0, self.count - count)))

    def was_stored(self, key: bytes, since: int) -> bool:
        """Return whether a key was stored after ``count`` was ``since``, if that is remembered."""
        return self._numbers.get(key, 0) > since


class SchedulerClient(Session):
    """Asks one daemon which blocks of one namespace are ready. While it is not connected every lookup is a miss.

    It connects, and reconnects, in the background. While its session is open but the daemon does not answer, it is not
    ``ready``: lookups fail, but what the daemon may as well read later is sent.

    Args:
        directory: where the daemon's sockets are.
        namespace: opened or joined at every connection.
        name: shown to operators.
        software: client and engine versions, shown to operators.
        subscribe_events: collect the namespace's KV events for take_events().
        record_stored: keep ``stored`` up to date.
        options: timeouts.

    Attributes:
        events_lost: KV event messages that did not arrive, and events dropped because take_events() was not called.
        stored: keys of the namespace that any engine stored, if ``record_stored``.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        namespace: NamespaceSpec,
        *,
        name: str = "scheduler",
        software: str = "",
        subscribe_events: bool = False,
        record_stored: bool = False,
        options: ClientOptions = DEFAULT_OPTIONS,
        transport: Transport | None = None,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(directory, m.Role.SCHEDULER, namespace, name, software, options, transport, rng)
        self._namespace = namespace
        self._fingerprint = namespace.fingerprint
        self._events_topic = kv_topic(self._fingerprint) if subscribe_events or record_stored else None
        self._collects_events, self._records_stored = subscribe_events, record_stored
        self.stored = StoredKeys()
        self._events: deque[KvEvent] = deque([AllBlocksCleared()])
        self._next_events_sequence: int | None = None
        self._leases: dict[int, LookupFuture] = {}
        """Lookups with pinned blocks by lease id, oldest first."""
        self._unanswered: dict[int, LookupFuture] = {}
        self._to_release: list[int] = []
        """Leases whose releases the queue to the daemon did not take."""
        self._to_invalidate: deque[m.Invalidate] = deque(maxlen=MAX_WAITING_INVALIDATIONS)
        """Invalidations that the queue to the daemon did not take, the oldest first."""
        self.events_lost = 0
        self._reports: deque[tuple[int, m.PromptReport]] = deque(maxlen=MAX_WAITING_REPORTS)
        """Reports that are not sent, with the ``epoch`` in which each prompt was decided."""
        self._transport.start(self)

    def lookup(
        self,
        groups: Sequence[m.GroupKeys],
        again: bool = False,
        *,
        reported: bool = False,
        peer: str = "",
        giver: int = 0,
    ) -> LookupFuture:
        """Ask which keys are ready and pin those under a new lease. While not connected, return a failed lookup.

        Keys that exceed the limit of one request are sent in several.

        Args:
            groups: keys, root of the prefix first.
            again: do not count the keys, or show them to the policy, as for a repeated lookup.
            reported: report_prompt() follows for this lease, and the daemon counts the keys then.
            peer: host of the only peer of the daemon that is asked for what it lacks, if it has that peer.
            giver: number of the owner of this prompt's hints, as in hint(); 0 if it gives none.

        Raises:
            ValueError: no group of the namespace, keys that are not a whole number of the namespace's key_bytes, or
                another argument of a wrong type or value.
        """
        count = self._count_keys(groups)
        # Without the keys, which may be many and are checked above.
        check(m.Lookup(m.NO_REPLY, self._fingerprint, m.MIN_LEASE_ID, [], again, reported, peer, giver))
        with self._transport.lock:
            now = self._transport.now()
            if not self.ready or self._limits is None:
                return LookupFuture(0, done=True, failed=True, answered_at=now)
            fits = count <= self._limits.max_keys_per_request
            parts = [(range(len(groups)), groups)] if fits else self._split(groups)
            lease_id = self._rng.getrandbits(63) | m.MIN_LEASE_ID  # random: any worker that knows it may load
            found = LookupFuture(lease_id, transport=self._transport, missing=len(parts), partial=[b""] * len(groups))
            self._unanswered[lease_id] = found
            for places, asked in parts:
                which = self._next_request_id(), self._fingerprint, lease_id
                message = m.Lookup(*which, list(asked), again, reported, peer, giver)
                self._send(message, now, functools.partial(self._on_answer, found, places, asked, now))
                if found.done:  # it could not be sent
                    break
            return found

    def show_used(self, groups: Sequence[m.GroupKeys], *, giver: int = 0) -> None:
        """Show the daemon's policy keys that are used although no counted lookup named them: count them as looked up,
        and pin nothing. Raises as lookup()."""
        self.release(self.lookup(groups, giver=giver).lease_id)

    def release(self, lease_id: int) -> None:
        """End a lease. Harmless if it has ended, or its lookup is unanswered or was never sent.

        Raises ValueError if it is no id of a lease.
        """
        if lease_id != 0:  # the id of a lookup that was not sent
            check(m.Release(m.NO_REPLY, [lease_id]))
        with self._transport.lock:
            self._release(lease_id)

    def invalidate(self, groups: Sequence[m.GroupKeys]) -> None:
        """Have the daemon drop unusable blocks, be it once it answers again. Does nothing without a session.

        Raises ValueError as lookup().
        """
        self._count_keys(groups)
        with self._transport.lock:
            if self._phase is Phase.OPEN and self._limits is not None:
                for _, keys in self._split(groups):
                    self._to_invalidate.append(m.Invalidate(m.NO_REPLY, self._fingerprint, list(keys)))
                self._send_or_keep()

    def add_stored(self, keys: Iterable[bytes]) -> None:
        """Add keys to ``stored`` whose store is known to have ended before the daemon's event of it has come."""
        with self._transport.lock:
            self.stored.add(keys)

    def hint(
        self,
        action: m.HintAction,
        groups: Sequence[m.GroupKeys],
        priority: int = 0,
        ttl_s: float = 0.0,
        *,
        giver: int = 0,
    ) -> bool:
        """Pass on a hint about blocks; see ``HintAction`` and ``Hint``. A daemon that stands still reads it later.

        Return False if it was lost, in whole or in part: without a session, or because the queue to the daemon is full.

        Raises ValueError for an action, a priority or a time that ``Hint`` does not have, and as lookup().
        """
        self._count_keys(groups)
        check(m.Hint(m.NO_REPLY, self._fingerprint, action, [], priority, ttl_s, giver))
        with self._transport.lock:
            if self._phase is not Phase.OPEN or self._limits is None:
                return False
            for _, keys in self._split(groups, m.MAX_HINT_KEYS):
                hint = m.Hint(m.NO_REPLY, self._fingerprint, action, list(keys), priority, ttl_s, giver)
                if self._send(hint) is not None:  # it could not be sent
                    return False
            return True

    def report(
        self,
        prefill_rate: float,
        skipped_loads: int,
        paused_stores: int,
        late_lookups: int = 0,
        unknown_hints: int = 0,
        *,
        problem: str = "",
        late_age_s: float = 0.0,
    ) -> bool:
        """Report the prefill rate in tokens per second, and counts since the last report. Return False if they could
        not be sent, as without a session.

        ``late_lookups``: lookups that the engine gave up. ``unknown_hints``: hints that are not known, cannot be read
        or were not sent. ``problem``: why the engine stores and loads nothing. ``late_age_s``: mean time since the late
        lookups.

        Raises ValueError for a value that ``ReportEngine`` does not have.
        """
        message = m.ReportEngine(
            m.NO_REPLY,
            self._fingerprint,
            prefill_rate,
            skipped_loads=skipped_loads,
            paused_stores=paused_stores,
            late_lookups=late_lookups,
            problem=problem[: m.MAX_PROBLEM_CHARACTERS],
            unknown_hints=unknown_hints,
            late_age_s=max(0.0, late_age_s),
        )
        check(message)
        with self._transport.lock:
            # Also while it does not answer, which is when lookups are late.
            return self._phase is Phase.OPEN and self._send(message) is None

    def report_prompt(self, report: m.PromptReport) -> None:
        """Report the outcome of a prompt within about a second. While not connected, only the last are kept: the next
        daemon shows them, and does not count their tokens.

        Raises ValueError for a value that ``PromptReport`` does not have: others are sent with it.
        """
        check(m.ReportPrompts(m.NO_REPLY, self._fingerprint, [report]))
        with self._transport.lock:
            self._reports.append((self.epoch, report))
            if len(self._reports) % m.MAX_PROMPT_REPORTS == 0:
                self._send_reports()
            self._role_due = min(self._role_due, self._transport.now() + REPORT_PAUSE_S)  # then _role_tick sends it
            self._transport.notify()

    def reset(self, timeout_s: float = 2.0) -> bool:
        """Drop every block of the namespace and wait for that; False if the daemon did not confirm it."""
        outcome: list[bool] = []
        with self._transport.lock:
            if not self.ready:
                return False
            message, now = m.Reset(self._next_request_id(), self._fingerprint), self._transport.now()
            self._send(message, now, lambda reply, _: outcome.append(isinstance(reply, m.Done)), timeout_s)
        self._transport.wait(lambda: bool(outcome), timeout_s)
        return outcome == [True]

    def take_events(self) -> list[KvEvent]:
        """Return the namespace's KV events since the last call, in order.

        ``AllBlocksCleared`` comes first, and again after a lost connection or lost events: the daemon's blocks are then
        unknown.
        """
        if not self._collects_events:
            return []
        with self._transport.lock:
            taken = list(self._events)
            self._events.clear()
            return taken

    def _count_keys(self, groups: Sequence[m.GroupKeys]) -> int:
        """Return the number of keys of all groups. Raises ValueError if they are no keys of the namespace."""
        if len(groups) > m.MAX_GROUPS:
            raise ValueError(f"A request has {m.MAX_GROUPS} groups at most, not {len(groups)}.")
        return sum([self._namespace.count_keys(one.group, one.keys) for one in groups])

    # --- with the lock held ----------------------------------------------------------------------

    def _release(self, lease_id: int) -> None:
        if (found := self._leases.pop(lease_id, None)) is not None:
            found.stale_at = 0.0
        if lease_id in self._unanswered:
            self._unanswered[lease_id].unwanted = True
        # Also while the daemon does not answer: it would pin the blocks until the lease expires. Messages keep their
        # order, so this one arrives after its lookup.
        if self._phase is Phase.OPEN and lease_id:
            self._to_release.append(lease_id)
            self._send_or_keep()

    def _send_or_keep(self) -> None:
        """Send the releases and invalidations that wait; if some are left, have ``_role_tick`` try again."""
        self._send_waiting()
        if self._to_release or self._to_invalidate:
            self._role_due = min(self._role_due, self._transport.now() + REPORT_PAUSE_S)
            self._transport.notify()

    def _send_waiting(self) -> None:
        """Send the releases and invalidations that wait; keep those that cannot be sent now."""
        if self._to_release and self._send(m.Release(m.NO_REPLY, self._to_release)) is None:
            self._to_release = []
        while self._to_invalidate and self._send(self._to_invalidate[0]) is None:
            self._to_invalidate.popleft()

    def _on_answer(
        self,
        found: LookupFuture,
        places: Sequence[int],
        asked: Sequence[m.GroupKeys],
        sent_at: float,
        reply: ReplyOrError,
        now: float,
    ) -> None:
        """Handle the reply to one request of a lookup: the states of the ``asked`` keys of the groups ``places``."""
        if found.done:  # another request of this lookup failed
            self._on_late_reply(reply)
            return
        counts = [len(item.keys) // self._namespace.key_bytes for item in asked]
        if not isinstance(reply, m.LookupReply) or list(map(len, reply.states)) != counts:
            self._on_failed(found, reply, now)
            return
        for place, states in zip(places, reply.states, strict=True):
            found.partial[place] += states
        # pinned and ttl_ms are the lease's totals; asking is per request.
        found.pinned, found.ttl_ms = max(found.pinned, reply.pinned), max(found.ttl_ms, reply.ttl_ms)
        found.wait_s, found.asking = max(found.wait_s, reply.wait_ms / 1000), found.asking + reply.asking
        found.missing -= 1
        if found.missing:
            return
        del self._unanswered[found.lease_id]
        if found.unwanted:
            found.pinned = found.ttl_ms = 0
        elif found.leased:
            # The lease began at some time between sending and now: assume the earliest.
            found.stale_at = sent_at + found.ttl_ms / 2000
            while self._leases and (oldest := next(iter(self._leases.values()))).stale_at <= now:
                del self._leases[oldest.lease_id]  # never released: it expires in the daemon
            self._leases[found.lease_id] = found
        found.states, found.answered_at = found.partial, now
        found.done = True  # last, because readers do not take the lock

    def _on_failed(self, found: LookupFuture, reply: ReplyOrError, now: float) -> None:
        was_leased = found.leased  # by the answer to another of its requests
        del self._unanswered[found.lease_id]
        found.pinned, found.ttl_ms, found.failed, found.answered_at = 0, 0, True, now
        found.done = True
        if not isinstance(reply, KvoffdClientError):
            self.disconnect(f"The daemon answered Lookup with a {type(reply).__name__} that does not fit it.", now)
        elif was_leased or isinstance(reply, RequestTimeout):  # others were not sent, or refused
            self._release(found.lease_id)

    def _split(
        self, groups: Sequence[m.GroupKeys], most: int = sys.maxsize
    ) -> list[tuple[Sequence[int], Sequence[m.GroupKeys]]]:
        """Split groups into requests: for each, the indices of its groups in ``groups``, and their keys.

        A group without keys is in one of them.
        """
        assert self._limits is not None
        size = self._namespace.key_bytes
        most_bytes = left = min(most, self._limits.max_keys_per_request) * size
        requests: list[tuple[list[int], list[m.GroupKeys]]] = [([], [])]
        for place, one in enumerate(groups):
            at = 0
            while True:
                if not left:
                    requests.append(([], []))
                    left = most_bytes
                keys = one.keys[at : at + left]
                places, asked = requests[-1]
                places.append(place)
                asked.append(m.GroupKeys(one.group, keys))
                at, left = at + len(keys), left - len(keys)
                if at == len(one.keys):
                    break
        return [*requests]

    # --- hooks of Session -------------------------------------------------------------------------

    def _topics(self) -> Sequence[bytes]:
        return [] if self._events_topic is None else [self._events_topic]

    def _on_late_reply(self, reply: ReplyOrError) -> None:
        if isinstance(reply, m.LookupReply) and reply.ttl_ms:
            self._release(reply.lease_id)

    def _role_disconnected(self, now: float) -> None:
        self._role_due = now + REPORT_PAUSE_S if self._reports else NEVER
        self._to_release = []
        self._to_invalidate.clear()
        leases, self._leases = self._leases, {}
        for found in leases.values():
            found.stale_at = 0.0
        self._next_events_sequence = None
        self._lose_events(0)  # events until the next connection, perhaps to another daemon, do not arrive

    def _role_tick(self, now: float) -> None:
        if now >= self._role_due:
            self._send_reports()
            self._send_waiting()
            waits = self._reports or self._to_release or self._to_invalidate
            self._role_due = now + REPORT_PAUSE_S if waits else NEVER

    def _send_reports(self) -> None:
        """Send the reports of prompts that wait; keep those that cannot be sent now."""
        while self._reports and self.ready:
            some = [
                report if epoch == self.epoch else structs.replace(report, again=True)
                for epoch, report in islice(self._reports, m.MAX_PROMPT_REPORTS)
            ]
            if self._send(m.ReportPrompts(m.NO_REPLY, self._fingerprint, some)) is not None:
                break
            for _ in some:
                self._reports.popleft()

    # --- KV events -------------------------------------------------------------------------------

    def on_publication(self, topic: bytes, sequence: bytes, payload: bytes, now: float) -> None:
        if topic != self._events_topic or len(sequence) != SEQUENCE_BYTES:
            return
        number, expected = int.from_bytes(sequence, "big"), self._next_events_sequence
        self._next_events_sequence = number + 1
        if expected is not None and number != expected:
            self._lose_events(max(1, number - expected))
        try:
            events = decode_event_batch(payload).events
        except CODEC_ERRORS:
            self._lose_events(1)
            return
        if self._records_stored:
            for event in events:
                if isinstance(event, BlockStored):
                    self.stored.add(event.block_hashes)
        if self._collects_events:
            self._events += events
        if len(self._events) > MAX_BUFFERED_EVENTS:
            self._lose_events(len(self._events))

    def _lose_events(self, count: int) -> None:
        """Count lost events, after which the daemon's blocks are unknown."""
        self.events_lost += count
        self.stored.forget()
        self._events = deque([AllBlocksCleared()])
