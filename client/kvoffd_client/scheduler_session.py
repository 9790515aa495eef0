"""The scheduler's session: lookups, the leases they leave, KV events. Pure, like ``Session``."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvoffd_client.errors import KvoffdClientError, RequestRefused
from kvoffd_client.event_stream import EventStream
from kvoffd_client.identity import Identity
from kvoffd_client.link import Link
from kvoffd_client.options import ClientOptions
from kvoffd_client.session import Session
from kvoffd_client.tickets import LookupTicket
from kvoffd_proto.events import END_OF_REPLAY, KV_TOPIC_PREFIX, SEQUENCE_BYTES, kv_topic
from kvoffd_proto.messages import (
    AnyReply,
    Done,
    GroupKeys,
    HeartbeatReply,
    Invalidate,
    Lookup,
    LookupReply,
    Release,
    Reset,
)

MAX_RENEWALS = 65536
"""Leases that one Heartbeat can name."""


class SchedulerSession(Session):
    """Adds to ``Session`` what a scheduler does. One namespace."""

    def __init__(
        self, link: Link, identity: Identity, options: ClientOptions, dice: random.Random, *, events: bool = False
    ) -> None:
        super().__init__(link, identity, options, dice)
        assert identity.namespace is not None
        self._fingerprint = identity.namespace.fingerprint
        self.events = EventStream(kv_topic(self._fingerprint), options.max_buffered_events) if events else None
        self._leases: dict[int, tuple[LookupTicket, float]] = {}
        self._unanswered: set[int] = set()
        self._unwanted: set[int] = set()
        self._next_lease = 1
        self._replay_deadline = 0.0

    @property
    def live_leases(self) -> int:
        """Leases that are renewed at each heartbeat."""
        return len(self._leases)

    # --- requests --------------------------------------------------------------------------------

    def lookup(
        self, groups: Sequence[GroupKeys], key_counts: Sequence[int], now: float, again: bool = False
    ) -> LookupTicket:
        """Send a lookup; ``key_counts`` is the number of keys per group. ``again``: something of it was pending."""
        if not self.usable:
            ticket = LookupTicket(0)
            ticket.fail()
            return ticket
        lease_id = (self.session_id << 32) | self._next_lease
        self._next_lease += 1
        ticket = LookupTicket(lease_id)
        self._unanswered.add(lease_id)
        message = Lookup(self.next_request_id(), self.token, self._fingerprint, lease_id, list(groups), again)
        self.request(message, lambda reply, then_now: self._looked_up(ticket, key_counts, now, reply, then_now), now)
        return ticket

    def release(self, lease_id: int) -> None:
        """End a lease, also one whose lookup is still on its way: messages keep their order."""
        found = self._leases.pop(lease_id, None)
        if found is not None:
            found[0].alive = False
        if lease_id in self._unanswered:
            self._unwanted.add(lease_id)
        if self.usable and lease_id >> 32 == self.session_id:
            self.send(Release(self.next_request_id(), self.token, [lease_id]))

    def invalidate(self, groups: Sequence[GroupKeys]) -> None:
        """Have blocks forgotten."""
        if self.usable:
            self.send(Invalidate(self.next_request_id(), self.token, self._fingerprint, list(groups)))

    def reset(self, outcome: list[bool], now: float, timeout_s: float) -> None:
        """Drop the namespace's blocks; whether that was confirmed is appended to ``outcome``."""
        if not self.usable:
            outcome.append(False)
            return

        def then(reply: AnyReply | KvoffdClientError, _: float) -> None:
            outcome.append(isinstance(reply, Done))
            self.on_change()

        self.request(Reset(self.next_request_id(), self.token, self._fingerprint), then, now, timeout_s)

    def _looked_up(
        self,
        ticket: LookupTicket,
        key_counts: Sequence[int],
        sent_at: float,
        reply: AnyReply | KvoffdClientError,
        now: float,
    ) -> None:
        unwanted = ticket.lease_id in self._unwanted
        self._unanswered.discard(ticket.lease_id)
        self._unwanted.discard(ticket.lease_id)
        if isinstance(reply, LookupReply) and [len(states) for states in reply.states] == key_counts:
            if unwanted:
                # The Release may not have gone out; renewed at every heartbeat the lease would live for ever.
                self.release(ticket.lease_id)
            elif reply.pinned:
                # The lease's life began at the daemon between sending and now: count from the earlier.
                self._leases[ticket.lease_id] = (ticket, sent_at + reply.ttl_ms / 1000)
            ticket.answer(reply.states, 0 if unwanted else reply.pinned, now, reply.wait_ms / 1000)
            self.on_change()
            return
        ticket.fail()
        self.on_change()
        if not isinstance(reply, KvoffdClientError):
            self.lose(f"The daemon answered Lookup with a {type(reply).__name__} that does not fit it.", now)
        elif not isinstance(reply, RequestRefused):
            self.release(ticket.lease_id)  # it may be answered later, with pins that nobody wants

    # --- what Session asks of a role --------------------------------------------------------------

    def _extra_topics(self) -> Sequence[bytes]:
        return () if self.events is None else (KV_TOPIC_PREFIX,)

    def _new_epoch(self, epoch: int) -> None:
        if self.events is not None:
            self.events.new_epoch(epoch)

    def _role_ready(self, now: float) -> None:
        self._next_lease = 1
        self._replay_deadline = 0.0
        self._replay_events(now)

    def _role_lost(self, dead: bool, now: float) -> None:
        leases, self._leases = self._leases, {}
        for ticket, _ in leases.values():
            ticket.alive = False

    def _renewals(self, now: float) -> list[int]:
        for lease_id, (ticket, ends_at) in list(self._leases.items()):
            if ends_at <= now:  # renewed too late, as after a stall: the daemon has ended it
                ticket.alive = False
                del self._leases[lease_id]
        return list(self._leases)[:MAX_RENEWALS]

    def _role_heartbeat(self, reply: HeartbeatReply, sent_at: float, now: float) -> None:
        ended = set(reply.ended)
        ends_at = sent_at + self.lease_ttl_s
        for lease_id, (ticket, before) in list(self._leases.items()):
            if lease_id in ended:
                ticket.alive = False
                del self._leases[lease_id]
            elif before < ends_at and ticket.answered_at <= sent_at:
                self._leases[lease_id] = (ticket, ends_at)
        # Only a replay tells whether the last messages before a silence were dropped.
        self._replay_events(now)

    # --- KV events -------------------------------------------------------------------------------

    def publication(self, topic: bytes, sequence: bytes, payload: bytes, now: float) -> None:
        """A KV event message was published."""
        if self.events is None or not topic.startswith(KV_TOPIC_PREFIX) or len(sequence) != SEQUENCE_BYTES:
            return
        self.events.message(topic, sequence, payload)
        if self.events.has_gap:
            self._replay_events(now)

    def event_replay(self, topic: bytes, sequence: bytes, payload: bytes, now: float) -> None:
        """A part of a replay came."""
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
