"""The scheduler's session: lookups, the leases they leave, KV events. Pure, like ``Session``."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from kvoffd_client.client_options import ClientOptions, Identity
from kvoffd_client.client_session import Link, Session, new_lease_id
from kvoffd_client.errors import KvoffdClientError, RequestRefused
from kvoffd_client.pending_requests import ReplyOrError
from kvoffd_proto import messages as m
from kvoffd_proto.events import (
    END_OF_REPLAY,
    KV_TOPIC_PREFIX,
    SEQUENCE_BYTES,
    AllBlocksCleared,
    KvEvent,
    decode_event_batch,
    kv_topic,
)

_READY_BYTE = bytes([m.READY])

Waiter = Callable[[Callable[[], bool], float], bool]
"""Waits until its first argument returns True, at most as many seconds as its second; returns what the first does."""


@dataclass(slots=True, eq=False)
class LookupFuture:
    """The answer to one lookup, now or later. Reading it never blocks; wait() does.

    Attributes:
        lease_id: name of the lease for Load and release; 0 when the lookup never left this process.
        done: the answer is here, or will never come.
        failed: done without an answer (not connected, refused, too late): treat every key as absent.
        states: per group of the request one byte a key, a ``KeyState``; empty until done or when failed. What is
            pending comes up from a tier below the pool: ask again.
        wait_s: the daemon's guess of how long until all pending keys are ready, in seconds; 0.0 where it has none.
        pinned: blocks pinned under the lease; 0 means that there is no lease.
        answered_at: time.monotonic() of the answer, 0.0 before.
        alive: the answer's pins still hold as far as is known: not released, not ended, same connection.
    """

    lease_id: int
    done: bool = False
    failed: bool = False
    states: list[bytes] = field(default_factory=list)
    wait_s: float = 0.0
    pinned: int = 0
    answered_at: float = 0.0
    alive: bool = False
    waiter: Waiter | None = field(default=None, repr=False)

    @property
    def pending(self) -> bool:
        """Whether some key is on its way up from a tier below the pool."""
        return any(not m.COMING.isdisjoint(states) for states in self.states)

    def leading_ready(self, index: int = 0) -> int:
        """Length of the unbroken run of ready keys at the start of the ``index``-th group of the request."""
        if index >= len(self.states):
            return 0
        states = self.states[index]
        return len(states) - len(states.lstrip(_READY_BYTE))

    def wait(self, timeout_s: float) -> bool:
        """Wait until done; False when it is not after ``timeout_s`` seconds."""
        return self.done or (self.waiter is not None and self.waiter(lambda: self.done, timeout_s))

    def answer(self, states: list[bytes], pinned: int, now: float, wait_s: float = 0.0) -> None:
        """Set the daemon's answer. For the session only."""
        if self.done:
            return
        self.wait_s = wait_s
        self.states, self.pinned, self.answered_at, self.alive = states, pinned, now, pinned > 0
        self.done = True  # last, since readers hold no lock

    def fail(self) -> None:
        """Set that no answer comes. For the session only."""
        if not self.done:
            self.failed = True
            self.done = True


_Part: TypeAlias = list[tuple[int, m.GroupKeys, int]]
"""What one request asks for: places in the lookup's groups, keys of theirs, and how many these are."""


@dataclass(slots=True, eq=False)
class _AnswerInParts:
    """What is known of a lookup that was sent in several requests."""

    missing: int
    states: list[bytes]
    pinned: int = 0
    ttl_ms: int = 0
    wait_ms: int = 0

    def add(self, part: _Part, reply: m.LookupReply) -> None:
        for (place, _, _), states in zip(part, reply.states, strict=True):
            self.states[place] += states
        self.pinned += reply.pinned
        self.ttl_ms, self.wait_ms = max(self.ttl_ms, reply.ttl_ms), max(self.wait_ms, reply.wait_ms)
        self.missing -= 1


def _parts_of(groups: Sequence[m.GroupKeys], key_counts: Sequence[int], most: int) -> list[_Part]:
    """Cut a lookup into requests of at most ``most`` keys; the daemon answers them in their order."""
    parts: list[_Part] = [[]]
    room = most
    for place, (asked, count) in enumerate(zip(groups, key_counts, strict=True)):
        size, begin = len(asked.keys) // max(1, count), 0
        while count - begin > room:
            end = begin + room
            parts[-1].append((place, m.GroupKeys(asked.group, asked.keys[begin * size : end * size]), room))
            parts.append([])
            begin, room = end, most
        rest = asked if not begin else m.GroupKeys(asked.group, asked.keys[begin * size :])
        parts[-1].append((place, rest, count - begin))
        room -= count - begin
    return parts


MAX_AHEAD = 10_000


class EventStream:
    """Puts messages in order and keeps the events of one topic until they are taken.

    The daemon numbers all its KV event messages from 0, whatever their namespace, so a subscriber that wants to see
    gaps reads every topic and decodes its own.

    Attributes:
        lost: messages that no replay could bring any more, and events that were dropped because they were not taken.
        next_sequence: number of the message that comes next; a replay is asked for from here on.
    """

    def __init__(self, topic: bytes, max_events: int) -> None:
        self._topic = topic
        self._max_events = max_events
        self._events: deque[KvEvent] = deque()
        self._ahead: dict[int, tuple[bytes, bytes]] = {}
        self._epoch: int | None = None
        self._replay_upto = -1
        self.next_sequence = 0
        self.lost = 0

    @property
    def has_gap(self) -> bool:
        """Messages are missing that a replay may bring."""
        return bool(self._ahead)

    def new_epoch(self, epoch: int) -> None:
        """Begin anew where the epoch is another: a new daemon numbers its messages from 0 and holds no block."""
        if epoch == self._epoch:
            return
        if self._epoch is not None:
            self._keep(AllBlocksCleared())
        self._epoch = epoch
        self._ahead.clear()
        self._replay_upto = -1
        self.next_sequence = 0

    def begin_replay(self) -> int:
        """Prepare for a replay that is asked for now; returns the number that it must begin with."""
        self._replay_upto = max(self._ahead, default=-1)
        return self.next_sequence

    def replayed(self, topic: bytes, sequence: bytes, payload: bytes) -> None:
        """Take a replayed message. The end marker gives up what this replay should have brought and did not."""
        if sequence == END_OF_REPLAY:
            while self._ahead and min(self._ahead) <= self._replay_upto:
                self._skip_gap()
            return
        # The daemon replays in order: an earlier message has come already, or cannot be replayed any more.
        self._replay_upto = max(self._replay_upto, int.from_bytes(sequence, "big"))
        self.message(topic, sequence, payload)

    def message(self, topic: bytes, sequence: bytes, payload: bytes) -> None:
        number = int.from_bytes(sequence, "big")
        if number < self.next_sequence:
            return
        self._ahead[number] = (topic, payload)
        self._deliver()
        if len(self._ahead) > MAX_AHEAD:
            self._skip_gap()

    def take(self) -> list[KvEvent]:
        """Events since the last call, in order."""
        taken = list(self._events)
        self._events.clear()
        return taken

    def _skip_gap(self) -> None:
        first = min(self._ahead)
        self.lost += first - self.next_sequence
        self.next_sequence = first
        self._deliver()

    def _deliver(self) -> None:
        while (found := self._ahead.pop(self.next_sequence, None)) is not None:
            self.next_sequence += 1
            topic, payload = found
            if topic != self._topic:
                continue
            try:
                batch = decode_event_batch(payload)
            except msgspec.MsgspecError:
                self.lost += 1
                continue
            for event in batch.events:
                self._keep(event)

    def _keep(self, event: KvEvent) -> None:
        if len(self._events) >= self._max_events:
            self._events.popleft()
            self.lost += 1
        self._events.append(event)


MAX_RENEWALS = 65536
"""Leases that one Heartbeat can name."""


class SchedulerSession(Session):
    """Adds to ``Session`` what a scheduler does. One namespace.

    Attributes:
        events: the namespace's KV events; None where they are not asked for.
        leases: by id, those renewed at each heartbeat: their lookups' futures, and when they end.
    """

    def __init__(
        self, link: Link, identity: Identity, options: ClientOptions, rng: random.Random, *, events: bool = False
    ) -> None:
        super().__init__(link, identity, options, rng)
        assert identity.namespace is not None
        self._fingerprint = identity.namespace.fingerprint
        self.events = EventStream(kv_topic(self._fingerprint), options.max_buffered_events) if events else None
        self.leases: dict[int, tuple[LookupFuture, float]] = {}
        self._unanswered: set[int] = set()
        self._unwanted: set[int] = set()
        self._replay_deadline = 0.0
        if events:
            self._topics = [KV_TOPIC_PREFIX]

    # --- requests --------------------------------------------------------------------------------

    def lookup(
        self, groups: Sequence[m.GroupKeys], key_counts: Sequence[int], now: float, again: bool = False
    ) -> LookupFuture:
        """Send a lookup; ``key_counts`` is the number of keys per group. ``again``: something of it was pending.

        What are too many keys for one request is asked for by several.
        """
        if not self.usable or self.limits is None:
            future = LookupFuture(0)
            future.fail()
            return future
        lease_id = new_lease_id(self._rng)
        future = LookupFuture(lease_id)
        self._unanswered.add(lease_id)
        parts = _parts_of(groups, key_counts, self.limits.max_keys_per_request)
        answer = _AnswerInParts(len(parts), [b""] * len(groups))
        for number, part in enumerate(parts):
            names = self.next_request_id(), self.token, self._fingerprint, lease_id
            message = m.Lookup(*names, [keys for _, keys, _ in part], again, extend=number > 0)
            self.request(message, functools.partial(self._on_part, future, answer, part, now), now)
            if future.done:  # it could not be sent
                break
        return future

    def release(self, lease_id: int) -> None:
        """End a lease, also one whose lookup is still on its way: messages keep their order. 0 names none."""
        found = self.leases.pop(lease_id, None)
        if found is not None:
            found[0].alive = False
        if lease_id in self._unanswered:
            self._unwanted.add(lease_id)
        if self.usable and lease_id:
            self.send(m.Release(self.next_request_id(), self.token, [lease_id]))

    def invalidate(self, groups: Sequence[m.GroupKeys]) -> None:
        if self.usable:
            self.send(m.Invalidate(self.next_request_id(), self.token, self._fingerprint, list(groups)))

    def report(
        self, prefill_rate: float, load_rate: float, skipped_loads: int, paused_stores: int, late_lookups: int
    ) -> None:
        """Tell the daemon what the engine learned: see ``ReportEngine``."""
        if self.usable:
            fields = prefill_rate, load_rate, skipped_loads, paused_stores, late_lookups
            self.send(m.ReportEngine(self.next_request_id(), self.token, self._fingerprint, *fields))

    def reset(self, outcome: list[bool], now: float, timeout_s: float) -> None:
        """Drop the namespace's blocks; whether that was confirmed is appended to ``outcome``."""
        if not self.usable:
            outcome.append(False)
            return

        def on_reply(reply: ReplyOrError, _: float) -> None:
            outcome.append(isinstance(reply, m.Done))
            self.on_change()

        self.request(m.Reset(self.next_request_id(), self.token, self._fingerprint), on_reply, now, timeout_s)

    def _on_part(
        self, future: LookupFuture, answer: _AnswerInParts, part: _Part, sent_at: float, reply: ReplyOrError, now: float
    ) -> None:
        if future.done:  # another part failed
            return
        if isinstance(reply, m.LookupReply) and [len(states) for states in reply.states] == [
            count for _, _, count in part
        ]:
            answer.add(part, reply)
            if not answer.missing:
                self._on_lookup_answered(future, answer, sent_at, now)
            return
        if answer.pinned:
            self._unwanted.add(future.lease_id)
        self._on_lookup_failed(future, reply, now)

    def _on_lookup_answered(self, future: LookupFuture, answer: _AnswerInParts, sent_at: float, now: float) -> None:
        unwanted = future.lease_id in self._unwanted
        self._unanswered.discard(future.lease_id)
        self._unwanted.discard(future.lease_id)
        if unwanted:
            # The Release may not have gone out; renewed at every heartbeat the lease would live for ever.
            self.release(future.lease_id)
        elif answer.pinned:
            # The lease's life began at the daemon between sending and now: count from the earlier.
            self.leases[future.lease_id] = (future, sent_at + answer.ttl_ms / 1000)
        future.answer(answer.states, 0 if unwanted else answer.pinned, now, answer.wait_ms / 1000)
        self.on_change()

    def _on_lookup_failed(self, future: LookupFuture, reply: ReplyOrError, now: float) -> None:
        held = future.lease_id in self._unwanted
        self._unanswered.discard(future.lease_id)
        self._unwanted.discard(future.lease_id)
        future.fail()
        self.on_change()
        if not isinstance(reply, KvoffdClientError):
            self.disconnect(f"The daemon answered Lookup with a {type(reply).__name__} that does not fit it.", now)
        elif held or not isinstance(reply, RequestRefused):
            self.release(future.lease_id)  # the daemon may answer later and pin blocks in vain

    # --- what Session asks of a role --------------------------------------------------------------

    def _on_epoch(self, epoch: int) -> None:
        if self.events is not None:
            self.events.new_epoch(epoch)

    def _role_ready(self, now: float) -> None:
        self._replay_deadline = 0.0
        self._replay_events(now)

    def _role_disconnected(self, dead: bool, now: float) -> None:
        leases, self.leases = self.leases, {}
        for future, _ in leases.values():
            future.alive = False

    def _renewals(self, now: float) -> list[int]:
        for lease_id, (future, ends_at) in list(self.leases.items()):
            if ends_at <= now:  # renewed too late, as after a stall: the daemon has ended it
                future.alive = False
                del self.leases[lease_id]
        return list(self.leases)[:MAX_RENEWALS]

    def _role_heartbeat(self, reply: m.HeartbeatReply, sent_at: float, now: float) -> None:
        ended = set(reply.ended)
        ends_at = sent_at + self.lease_ttl_s
        for lease_id, (future, before) in list(self.leases.items()):
            if lease_id in ended:
                future.alive = False
                del self.leases[lease_id]
            elif before < ends_at and future.answered_at <= sent_at:
                self.leases[lease_id] = (future, ends_at)
        # Only a replay tells whether the last messages before a silence were dropped.
        self._replay_events(now)

    # --- KV events -------------------------------------------------------------------------------

    def on_publication(self, topic: bytes, sequence: bytes, payload: bytes, now: float) -> None:
        if self.events is None or not topic.startswith(KV_TOPIC_PREFIX) or len(sequence) != SEQUENCE_BYTES:
            return
        self.events.message(topic, sequence, payload)
        if self.events.has_gap:
            self._replay_events(now)

    def on_event_replay(self, topic: bytes, sequence: bytes, payload: bytes, now: float) -> None:
        if self.events is None or len(sequence) != SEQUENCE_BYTES:
            return
        self.events.replayed(topic, sequence, payload)
        if sequence == END_OF_REPLAY:
            self._replay_deadline = 0.0
            if self.events.has_gap:  # it opened while the replay ran
                self._replay_events(now)

    def _replay_events(self, now: float) -> None:
        """Ask for what is missing, in the format of vLLM's event publisher; one such request at a time."""
        if self.events is None or not self.usable or now < self._replay_deadline:
            return
        start = self.events.begin_replay().to_bytes(SEQUENCE_BYTES, "big")
        if self._link.send((b"", start)):
            self._replay_deadline = now + self.options.request_timeout_s
