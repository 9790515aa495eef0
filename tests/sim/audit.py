"""Jobs, completions and events counted outside the daemon, and compared with the daemon's own state."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Group, Namespace
from kvoffd.cache.states import READY
from kvoffd.cache.tickets import StorePart, StoreTicket
from kvoffd.pool.allocator import SlotIds
from kvoffd.server.jobs import LoadJob
from kvoffd.server.service import Service
from kvoffd.tiering.block_group import block_group_of
from kvoffd.tiering.tiering import Tiering
from kvoffd_proto import codec
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.events import (
    KV_TOPIC_PREFIX,
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockStored,
    KvEvent,
    decode_event_batch,
    kv_topic,
    session_topic,
)
from tests.kit.slot_cache import check_invariants
from tests.sim.clock import Broken

if TYPE_CHECKING:
    from tests.sim.tiers import SimTiers

UNREAD = {ErrorCode.SHUTTING_DOWN, ErrorCode.NO_HELLO, ErrorCode.WRONG_ROLE}
"""Why a request is refused before it acknowledges anything."""
Readable = set[tuple[int, bytes]]
"""Blocks of a namespace that can be read: (group, key)."""


def fold(events: Iterable[KvEvent], readable: Readable, strict: bool = True, medium: str = MEDIUM_CPU) -> None:
    """Apply events to what a medium held before them. ``strict``: nothing is stored twice or removed twice."""
    for event in events:
        if not isinstance(event, AllBlocksCleared) and event.medium != medium:
            continue
        if isinstance(event, AllBlocksCleared):
            readable.clear()
            continue
        for key in event.block_hashes:
            entry = (event.group_idx, key)
            if strict and (entry in readable) is isinstance(event, BlockStored):
                raise Broken(f"{type(event).__name__} of a block that {'is' if entry in readable else 'is not'} there")
            if isinstance(event, BlockStored):
                readable.add(entry)
            else:
                readable.discard(entry)


class Audit:
    """One life of the daemon: its accepted jobs and completions, and its events folded from the start."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.unfinished: set[tuple[int, int]] = set()
        """(session, job) that was accepted and has no completion."""
        self._sequences: dict[int, int] = {}
        self._batches = defaultdict[int, list[m.Completions]](list)
        """By session, what was published and not acknowledged."""
        self.next_event_message: Counter[bytes] = Counter()
        """By topic, the number of the next message of KV events."""
        self._readable: dict[bytes, Readable] = {}
        self._on_disk: dict[bytes, Readable] = {}
        self._unannounced: WeakKeyDictionary[Namespace, Readable] = WeakKeyDictionary()
        """Blocks that the disk had before the namespace was opened, of which no event was published."""

    def served(self, session_id: int, request: m.AnyRequest, replies: Sequence[m.AnyReply]) -> None:
        """A session's request was handled: see what it has acknowledged, what results it is given, what it released."""
        refusals = {reply.code for reply in replies if isinstance(reply, m.Error)}
        if isinstance(request, m.Submit | m.Cancel | m.Results) and not refusals & UNREAD:
            kept = [one for one in self._batches[session_id] if one.sequence > request.acknowledged]
            self._batches[session_id] = kept
        if isinstance(request, m.Submit) and not refusals:
            for job_id in (*request.stores.job_ids, *request.loads.job_ids):
                if (session_id, job_id) in self.unfinished:
                    raise Broken(f"job {job_id} was accepted twice")
                self.unfinished.add((session_id, job_id))
        for reply in replies:
            if isinstance(reply, m.ResultsReply):
                topic = session_topic(self._service.sessions.epoch, session_id)
                new = [
                    codec.decode_completions(one[2]) for one in self._service.sessions.publications if one[0] == topic
                ]
                if reply.batches != self._batches[session_id] + new:
                    raise Broken("a session is given other results than those that it has not acknowledged")
                ended = {(session_id, result.job_id) for one in new for result in one.results}
                known = ended | {(session_id, job_id) for job_id in reply.unfinished}
                if known != {job for job in self.unfinished if job[0] == session_id}:
                    raise Broken("a session is told neither that a job runs nor how it ended, or both")
        if isinstance(request, m.Release):
            held = [self._service.cache.leases.by_id.get(lease_id) for lease_id in request.lease_ids]
            if any(lease is not None and lease.active and lease.session == session_id for lease in held):
                raise Broken("a session has a lease that it released")

    def publication(self, topic: bytes, sequence: bytes, payload: bytes) -> None:
        number = int.from_bytes(sequence, "big")
        if topic.startswith(KV_TOPIC_PREFIX):
            events = decode_event_batch(payload).events
            opened = number == 0 and isinstance(events[0], AllBlocksCleared)  # it was forgotten before
            if number != self.next_event_message[topic] and not opened:
                raise Broken("KV event messages are not numbered one by one")
            self.next_event_message[topic] = number + 1
            fold(events, self._readable.setdefault(topic, set()))
            fold(events, self._on_disk.setdefault(topic, set()), strict=False, medium=MEDIUM_STORAGE)
            return
        batch = codec.decode_completions(payload)
        session_id = int(topic.split(b"/")[1])
        if batch.sequence != number or number != self._sequences.get(session_id, 0) + 1:
            raise Broken("completions are not numbered one by one")
        self._sequences[session_id] = number
        self._batches[session_id].append(batch)
        for result in batch.results:
            job = (session_id, result.job_id)
            if job not in self.unfinished:
                raise Broken(f"job {result.job_id} has a second completion, or was never accepted")
            self.unfinished.remove(job)
            if result.ok and (result.error is not None or result.failed):
                raise Broken("a job is ok and failed")

    def check_jobs(self) -> None:
        """After a flush: the jobs without a completion are those that run."""
        running = {
            (job.session.id, job_id) for job in self._service.jobs.running if not job.hangs for job_id in job.ids
        }
        if running != self.unfinished:
            lost, unknown = self.unfinished - running, running - self.unfinished
            raise Broken(f"jobs without completion {sorted(lost)}, jobs that should have ended {sorted(unknown)}")

    def check_events(self, tiers: SimTiers | None) -> None:
        """After a flush: what the events fold to is the index, and what is on disk and was not before."""
        cache = self._service.cache
        announced = blocks_of(cache, (cache.blocks.state == READY) & ~cache.life.unannounced)
        if cache.life.unannounced.any() and not cache.life._to_announce.size:
            raise Broken("some recovered blocks are never announced")
        for namespace in cache.namespaces.values():
            if self.folded(namespace.fingerprint) != announced.get(namespace.fingerprint, set()):
                raise Broken("folding the KV events does not give the index")
            if tiers is not None:
                published, there = self._on_disk.get(kv_topic(namespace.fingerprint), set()), tiers.readable(namespace)
                before = self._unannounced.get(namespace, there)
                if not published <= there or not there - published <= before:
                    raise Broken("folding the KV events does not give what is on disk")
                self._unannounced[namespace] = there - published

    def folded(self, fingerprint: bytes) -> Readable:
        """What the events of a namespace that were published so far fold to."""
        return self._readable.get(kv_topic(fingerprint), set())

    def _check_pins(self) -> None:
        """Each block is pinned by its leases, the loads that read it, the writes to a tier and what peers borrow."""
        cache, tiering = self._service.cache, self._service.tier_supervisor.tiering
        pins = Counter[int]()
        sessions = {session.id for session in self._service.sessions}
        for lease in dict.fromkeys(chain(cache.leases.by_id.values(), *cache.leases._to_unpin)):
            assert lease.session in sessions or not lease.active, "a lease of a session that has ended"
            assert not lease.active or not any(group.retired for group, _ in cache.blocks.by_group(lease.blocks)), (
                "a lease outlives a reset"
            )
            pins.update(lease.blocks.tolist())  # of one that has ended they are unpinned in the background
        for job in self._service.jobs.running:
            if isinstance(job, LoadJob):
                for ticket in job.tickets:
                    pins.update(ticket.blocks.tolist())
        if tiering is not None:
            for writer in tiering.writers:
                pins.update(list(writer.under_way))
        if (lends := self._service.tier_supervisor.peers.server) is not None:
            for lent in lends._lent.values():
                pins.update(lent.blocks.tolist())
        found = {int(block): int(cache.blocks.pins[block]) for block in np.flatnonzero(cache.blocks.pins)}
        assert found == dict(pins), f"pins of nobody, or too few: {found} and {dict(pins)}"

    def check_cache(self) -> None:
        try:
            check_invariants(self._service.cache)
            self._check_pins()
            for one in self._service.cache.namespaces.values():
                assert one.generation == self._service.state.generations.of(one.fingerprint), (
                    "another generation is known"
                )
        except (AssertionError, KeyError) as error:
            raise Broken(f"the cache's books: {error}") from error


def watch_quotas(cache: Cache) -> None:
    """Hold every change against what quotas promise: new blocks never take a namespace beyond its own."""
    take = cache.space.take

    def watched(group: Group, keys: bytes, below: float, older_than: int) -> SlotIds:
        slots = take(group, keys, below, older_than)
        quota_bytes = cache.quotas.get(group.namespace.fingerprint)
        if quota_bytes is not None and len(slots):
            assert group.namespace.held_bytes <= quota_bytes, "a namespace has more than its quota"
        return slots

    cache.space.take = watched  # type: ignore[method-assign]


def watch_narrow(cache: Cache) -> None:
    """A store that offers more of a block than there is replaces it, in the tiers too, where nothing holds it."""
    begin = cache.stores.begin

    def watched(namespace: Namespace, rank: int, parts: Sequence[StorePart], sole: int = 0) -> list[StoreTicket]:
        def narrow(part: StorePart) -> list[bytes]:
            group, keys = namespace.group(part.group), namespace.split(part.group, part.keys)
            states, blocks = cache.blocks.find(group, part.keys)
            loose = [at for at, state in enumerate(states) if state == READY and not cache.blocks.pins[blocks[at]]]
            slots = cache.blocks.slots(blocks[loose], namespace.world_size)[:, rank]
            firsts = zip(loose, cache.table.records["first_block"][slots].tolist(), strict=True)
            return [keys[at] for at, first in firsts if first > part.first_blocks.get(at, 0)]

        before = [(part, block_group_of(namespace.group(part.group)), narrow(part)) for part in parts]
        ticket = begin(namespace, rank, parts, sole)
        for part, block_group, keys in before:
            assert not set(keys) & set(narrow(part)), "a block that begins later than what is offered stays"
            for source in cache.life.tiers.sources if keys and isinstance(cache.life.tiers, Tiering) else ():
                there = source.tier.find(block_group, keys, prefix=False).states
                assert not any(there), "a tier has a block that begins later than what is offered"
        return ticket

    cache.stores.begin = watched  # type: ignore[method-assign]


def blocks_of(cache: Cache, wanted: npt.NDArray[np.bool_]) -> dict[bytes, Readable]:
    """By namespace, its blocks among those wanted."""
    found = defaultdict[bytes, Readable](set)
    for group, alike in cache.blocks.by_group(np.flatnonzero(wanted).astype(np.uint32)):
        if not group.retired:
            keys = group.namespace.split(group.index, cache.blocks.keys(alike, group.key_bytes))
            found[group.namespace.fingerprint] |= {(group.index, key) for key in keys}
    return found
