"""Jobs, completions and events counted outside the daemon, and compared with the daemon's own state."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_table import READY
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.policy import Group
from kvoffd.pool.allocator import SlotIds
from kvoffd.server.jobs import LoadJob
from kvoffd.server.service import Service
from kvoffd_proto import codec
from kvoffd_proto.events import (
    KV_TOPIC_PREFIX,
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockStored,
    KvEvent,
    decode_event_batch,
    kv_topic,
)
from tests.kit.slot_cache import check_invariants
from tests.sim.clock import Broken

if TYPE_CHECKING:
    from tests.sim.tiers import SimTiers

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
        self.accepted = 0
        self._sequences: dict[int, int] = {}
        self.next_event_message: Counter[bytes] = Counter()
        """By topic, the number of the next message of KV events."""
        self._readable: dict[bytes, Readable] = {}
        self._on_disk: dict[bytes, Readable] = {}
        self._unannounced: WeakKeyDictionary[Namespace, Readable] = WeakKeyDictionary()
        """Blocks that the disk had before the namespace was opened, of which no event was published."""

    def accept(self, session_id: int, job_id: int) -> None:
        if (session_id, job_id) in self.unfinished:
            raise Broken(f"job {job_id} was accepted twice")
        self.unfinished.add((session_id, job_id))
        self.accepted += 1

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
            (job.session.id, job_id) for job in self._service.jobs.running if not job.answered for job_id in job.ids
        }
        if running != self.unfinished:
            lost, unknown = self.unfinished - running, running - self.unfinished
            raise Broken(f"jobs without completion {sorted(lost)}, jobs that should have ended {sorted(unknown)}")

    def check_events(self, tiers: SimTiers | None) -> None:
        """After a flush: what the events fold to is the index, and what is on disk and was not before."""
        cache = self._service.cache
        announced = blocks_of(cache, (cache.blocks.state == READY) & ~cache.unannounced)
        if cache.unannounced.any() and not cache._to_announce.size:
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
        """Each block is pinned by its leases, the loads that read it and the writes to a tier, and by nothing else."""
        cache, tiering = self._service.cache, self._service.tiers.tiering
        pins = Counter[int]()
        for lease in cache.leases.values():
            pins.update(lease.blocks.tolist())
        for job in self._service.jobs.running:
            if isinstance(job, LoadJob):
                for ticket in job.tickets:
                    pins.update(ticket.blocks.tolist())
        if tiering is not None:
            for level in tiering.levels:
                pins.update(list(level.writer.under_way))
        found = {int(block): int(cache.blocks.pins[block]) for block in np.flatnonzero(cache.blocks.pins)}
        assert found == dict(pins), f"pins of nobody, or too few: {found} and {dict(pins)}"

    def check_cache(self) -> None:
        try:
            check_invariants(self._service.cache)
            self._check_pins()
        except (AssertionError, KeyError) as error:
            raise Broken(f"the cache's books: {error}") from error


def watch_quotas(cache: Cache) -> None:
    """Hold every change against what quotas promise: new blocks never take a namespace beyond its own."""
    take = cache._take

    def watched(group: Group, keys: bytes, below: float) -> SlotIds:
        slots = take(group, keys, below)
        quota_bytes = cache.quotas.get(group.namespace.fingerprint)
        if quota_bytes is not None and len(slots):
            assert group.namespace.held_bytes <= quota_bytes, "a namespace has more than its quota"
        return slots

    cache._take = watched  # type: ignore[method-assign]


def blocks_of(cache: Cache, wanted: npt.NDArray[np.bool_]) -> dict[bytes, Readable]:
    """By namespace, its blocks among those wanted."""
    found = defaultdict[bytes, Readable](set)
    for group, alike in cache.by_group(np.flatnonzero(wanted).astype(np.uint32)):
        if not group.dead:
            keys = group.namespace.split(group.index, cache.blocks.keys(alike, group.key_bytes))
            found[group.namespace.fingerprint] |= {(group.index, key) for key in keys}
    return found
