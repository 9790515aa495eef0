"""A peer of the simulated daemon: it borrows blocks, reads them as long as the lease allows, and may return nothing."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvoffd.cache.states import READY
from kvoffd.pool.checksums import digest
from kvoffd.server.lender import PeerServer
from kvoffd.tiers.peer_messages import LENT, PIN, RELEASE, Find, Pin, Pinned
from tests.sim.clock import Broken
from tests.sim.pool import Slot
from tests.sim.tiers import followed_of

if TYPE_CHECKING:
    from tests.sim.daemon import SimDaemon

MAX_BLOCKS = 6
RAISED_PART, LATE_PART = 0.05, 0.1
"""Part of its questions before which a reset of all nodes came, and part of those that do not know of the last."""


class SimBorrower:
    """What borrows from one life of the daemon."""

    def __init__(self, daemon: SimDaemon, rng: random.Random) -> None:
        self._daemon, self._rng = daemon, rng
        service = daemon.service
        state = service.state
        self._server = PeerServer(service.cache, daemon.clock, lambda: state.is_saved, state.generations)
        self._knows: Counter[bytes] = Counter()
        """Generations of namespaces that it has raised, as another node's administrator does."""
        service.tier_supervisor.peers.server = self._server
        self._ids = 0
        self._lent: dict[int, list[Slot]] = {}
        self._after = daemon.process.after
        self._after(self._rng.uniform(0.0, 1.0), self._borrow)
        self._after(self._rng.expovariate(0.05), self._die)

    def _die(self) -> None:
        """End the helper, and what peers read through it."""
        self._daemon.clock.note("the helper of peers dies")
        for ident in list(self._lent):
            self._let_go(ident)
        self._server.end_all()

    def _let_go(self, ident: int) -> None:
        for slot in self._lent.pop(ident):
            slot.transfers -= 1

    def _generation_of(self, fingerprint: bytes) -> int:
        """Return what it knows of a namespace, which may have been raised elsewhere, or not be the latest."""
        followed = followed_of(self._daemon.service.state)
        self._knows[fingerprint] = max(self._knows[fingerprint], followed.get(fingerprint, 0))
        if self._rng.random() < RAISED_PART:
            self._knows[fingerprint] += 1
            self._daemon.world.faults.counts["raised_by_peer"] += 1
            if (objects := self._daemon.world.shared) is not None:
                objects.raised[fingerprint] = max(objects.raised[fingerprint], self._knows[fingerprint])
        return max(0, self._knows[fingerprint] - (self._rng.random() < LATE_PART))

    def _borrow(self) -> None:
        if self._daemon.world.faults.calm:
            return
        self._after(self._rng.uniform(0.05, 1.0), self._borrow)
        cache, pool = self._daemon.service.cache, self._daemon.pool
        groups = [
            namespace.group(number) for namespace in cache.namespaces.values() for number in range(len(namespace.specs))
        ]
        groups = [group for group in groups if group.lengths and group.by_state.blocks[READY]]
        if not groups:
            return
        group, ident = self._rng.choice(groups), self._ids
        self._ids += 1
        blocks = cache.blocks.oldest(group, MAX_BLOCKS)
        keys = cache.blocks.split_keys(blocks, group.key_bytes)
        fingerprint, state = group.namespace.fingerprint, self._daemon.service.state
        generation = self._generation_of(fingerprint)
        wanted = Find(fingerprint, generation, group.index, group.key_bytes, b"".join(keys))
        answer = self._server.answer(b"peer", ident, PIN, msgspec.msgpack.encode(Pin(wanted, list(group.lengths))))
        assert answer is not None
        lent = msgspec.msgpack.decode(answer, type=Pinned)
        if lent.there.count(LENT) and state.generations.is_unshared(fingerprint):
            raise Broken("a block is lent of a namespace that an engine reset")
        if lent.there.count(LENT) and generation != followed_of(state).get(fingerprint, 0):
            raise Broken("a block is lent to a peer that has another generation")
        ranks = len(group.lengths)
        offsets = np.frombuffer(lent.offsets, "<u8").reshape(-1, ranks).tolist()
        checksums = np.frombuffer(lent.checksums, "<u8").reshape(-1, ranks).tolist()
        its = [key for key, there in zip(keys, lent.there, strict=True) if there == LENT]

        def read() -> None:
            for key, where, sums in zip(its, offsets, checksums, strict=True):
                for rank, (offset, checksum) in enumerate(zip(where, sums, strict=True)):
                    found = pool.data[offset : offset + group.lengths[rank]]
                    owner = pool.used[offset].owner
                    named = None if owner is None else (owner.fingerprint, owner.group, owner.key, owner.rank)
                    if named != (fingerprint, group.index, key, rank):
                        raise Broken("a peer reads another block than it borrowed")
                    if digest(memoryview(found)) != checksum:
                        raise Broken("a peer reads bytes that are not those of the checksum")

        def end() -> None:
            if ident not in self._lent:
                return
            read()
            self._let_go(ident)
            if returns:
                self._server.answer(b"peer", ident, RELEASE, b"")

        read()
        self._lent[ident] = slots = [pool.used[offset] for where in offsets for offset in where]
        for slot in slots:
            slot.transfers += 1
        self._daemon.world.faults.counts["lent"] += len(its)
        returns = self._rng.random() < 0.8
        self._after(self._rng.uniform(0.0, 0.99 * lent.seconds if self._rng.random() < 0.2 else 0.2), end)
