"""Lends READY blocks to peers: they are pinned until they are returned or the lease's deadline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np

from kvoffd.cache.block_table import BlockIds
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Group
from kvoffd.cache.states import CORRUPT, READY
from kvoffd.tiers.generations import Generations
from kvoffd.tiers.peer_messages import (
    BUSY,
    FIND,
    FOLLOW,
    GENERATION_BYTES,
    LENT,
    MAX_BLOCKS,
    MAX_FOLLOWED,
    MAX_KEYS,
    MAX_MESSAGE_BYTES,
    MAX_SHARDS,
    PIN,
    RELEASE,
    Find,
    Follow,
    Pin,
    Pinned,
)
from kvoffd_proto.messages import FINGERPRINT_BYTES

MAX_VOIDED = 64
"""Resets of all nodes that are not carried out yet, beyond which peers' further ones are not followed."""
LEASE_S = 10.0
"""Time after which what a peer has not returned is not lent any more. It must have read and checked it before."""
MAX_LEASES, MAX_LEASES_EACH = 256, 16
"""Leases of all peers, and of one connection. A request beyond them gets no blocks."""
OVERDUE_AT_ONCE = 64
"""Leases that one tick ends."""
LENT_SHARE = 1 / 8
"""Share of the pool that all peers together may pin."""
LOOP_SHARE, WINDOW_S = 0.25, 0.25
"""Part of the loop's time for peers, in windows of this length: beyond it no block is found for them."""


@dataclass(slots=True, eq=False)
class PeerLease:
    """Blocks that one PIN has borrowed: they are pinned. ``nbytes``: of their slots."""

    blocks: BlockIds
    nbytes: int
    deadline: float


class PeerServer:
    """Answers peers' requests, which the helper passes on. Called in the daemon's thread.

    Args:
        is_saved: whether the next daemon would know of all resets.
        generations: of a namespace that is unshared, or that a peer has with another fleet generation, nothing is lent.

    Attributes:
        asked_keys, found_keys: keys that peers asked for, and those that were READY.
        lent_blocks, served_bytes: blocks lent so far, and the bytes of their shards.
        pinned_bytes: pool bytes of the blocks that are lent now.
        refused: requests without an answer in full, because of a limit.
    """

    def __init__(
        self,
        cache: Cache,
        clock: Callable[[], float],
        is_saved: Callable[[], bool],
        generations: Generations,
    ) -> None:
        self._cache, self._clock, self._is_saved, self._generations = cache, clock, is_saved, generations
        self._most_bytes = int(LENT_SHARE * cache.slots.pool_bytes)
        self._lent: dict[tuple[bytes, int], PeerLease] = {}
        """Leases by the peer's route and the id of its request, in the order of their deadlines."""
        self._window_at = self._spent_s = 0.0
        """Begin of the current window, and the loop's time that peers have used in it: see ``LOOP_SHARE``."""
        self.asked_keys = self.found_keys = self.lent_blocks = self.served_bytes = self.pinned_bytes = self.refused = 0

    @property
    def leases(self) -> int:
        return len(self._lent)

    def answer(self, route: bytes, ident: int, kind: int, payload: bytes) -> bytes | None:
        """Answer one request, with nothing if it is not valid; None for one without an answer."""
        began = self._clock()
        if kind == RELEASE:
            if (route, ident) in self._lent:
                self._end([(route, ident)])
            return None
        if began >= self._window_at + WINDOW_S:
            self._window_at, self._spent_s = began, 0.0
        try:
            if kind == FIND:
                return self._find(msgspec.msgpack.decode(payload, type=Find))
            if kind == PIN:
                return self._pin(route, ident, msgspec.msgpack.decode(payload, type=Pin))
            if kind == FOLLOW:
                return self._follow(msgspec.msgpack.decode(payload, type=Follow))
        except (msgspec.MsgspecError, ValueError):
            self.refused += 1
        finally:
            self._spent_s += self._clock() - began
        return b""

    def _group(self, wanted: Find) -> Group | None:
        """Return the group of a request; None if nothing of it may be lent."""
        if not self._generations.is_valid(wanted.fingerprint, wanted.generation):
            return None
        namespace = self._cache.namespaces.get(wanted.fingerprint)
        if namespace is None or namespace.key_bytes != wanted.key_bytes or namespace.of_bench:
            return None
        if not 0 <= wanted.group < len(namespace.specs) or self._generations.is_unshared(wanted.fingerprint):
            return None
        group = namespace.group(wanted.group)
        # Without lengths no rank has registered; a retired one was reset, and its successor is empty.
        return group if group.lengths and not group.retired else None

    def _hear(self, fingerprint: bytes, generation: int) -> None:
        """Follow a fleet generation that a peer has, if it is higher. Raises ValueError for what is no fingerprint."""
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise ValueError
        if len(self._generations.voided) < MAX_VOIDED:
            self._generations.hear(fingerprint, generation)

    def _follow(self, wanted: Follow) -> bytes:
        """Return the reply, see ``Follow``. The blocks are dropped later: until then the peer is told that they are
        not, and asks again."""
        count = len(wanted.others) // FINGERPRINT_BYTES
        if len(wanted.others) % FINGERPRINT_BYTES or count > MAX_FOLLOWED:
            raise ValueError
        self._hear(wanted.fingerprint, wanted.generation)
        places = range(0, len(wanted.others), FINGERPRINT_BYTES)
        others = [wanted.others[at : at + FINGERPRINT_BYTES] for at in places]
        generations = self._generations
        may_have_followed = self._is_saved()  # until then a kill would bring back what was dropped
        if wanted.cleared_at and len(generations.voided) < MAX_VOIDED:
            generations.void_before(wanted.fingerprint, wanted.generation, wanted.cleared_at)
        elif wanted.cleared_at:
            may_have_followed = False  # too many clears wait, so this one is not noted: the peer tells it again
        return b"".join(
            generations.fleet(one).to_bytes(GENERATION_BYTES, "little")
            + bytes([may_have_followed and one not in generations.voided])
            for one in (wanted.fingerprint, *others)
        )

    def _find(self, wanted: Find) -> bytes:
        """Return the reply, see ``Find``."""
        count = _count_keys(wanted, MAX_KEYS)
        self._hear(wanted.fingerprint, wanted.generation)
        group = self._group(wanted)
        generation = self._generations.fleet(wanted.fingerprint).to_bytes(GENERATION_BYTES, "little")
        if group is None or not count:
            return generation + bytes(count)
        if self._spent_s > LOOP_SHARE * WINDOW_S:
            self.refused += 1
            return generation + bytes(count)
        states, _ = self._cache.blocks.find(group, wanted.keys)
        there = bytes(state == READY for state in states)
        self.asked_keys += count
        self.found_keys += sum(there)
        return generation + there

    def _pin(self, route: bytes, ident: int, request: Pin) -> bytes:
        """Lend the blocks that may be lent; return the reply, see ``Pinned``."""
        wanted, ranks = request.wanted, len(request.lengths)
        count = _count_keys(wanted, min(MAX_BLOCKS, MAX_SHARDS // max(1, ranks)))
        self._hear(wanted.fingerprint, wanted.generation)
        group = self._group(wanted)
        answers = np.zeros(count, np.uint8)
        columns: tuple[bytes, bytes, bytes] = b"", b"", b""
        if group is not None and list(group.lengths) == request.lengths:
            table = self._cache.blocks
            states, blocks = table.find(group, wanted.keys)
            lent = np.flatnonzero(np.frombuffer(states, np.uint8) == READY)  # indices of keys
            most = self._lendable_blocks(group.block_bytes) if self._may_lend(route, ident) else 0
            if len(lent) > most:
                self.refused += 1
                answers[lent[most:]] = BUSY
                lent = lent[:most]
            slots = table.slots(blocks[lent], ranks)
            records = self._cache.table.records[slots]
            # The peer compares checksums, so all shards of a block must have one, and none be known to be wrong.
            sound = ((records["checksum"] != 0) & (table.shard[slots] & CORRUPT == 0)).all(axis=1)
            lent, slots, records = lent[sound], slots[sound], records[sound]
            if len(lent):
                answers[lent] = LENT
                offsets = self._cache.slots.offsets(slots).astype("<u8").tobytes()
                sums, firsts = records["checksum"].astype("<u8"), records["first_block"].astype("<u2")
                columns = offsets, sums.tobytes(), firsts.tobytes()
                self._lend(route, ident, blocks[lent], len(lent) * group.block_bytes)
                self.served_bytes += len(lent) * sum(group.lengths)
        reply = msgspec.msgpack.encode(Pinned(LEASE_S, answers.tobytes(), *columns))
        assert len(reply) <= MAX_MESSAGE_BYTES
        return reply

    def _may_lend(self, route: bytes, ident: int) -> bool:
        """Return whether a peer may have one more lease, and peers have time left in this window."""
        each = sum(one == route for one, _ in self._lent)
        may = len(self._lent) < MAX_LEASES and each < MAX_LEASES_EACH and (route, ident) not in self._lent
        return may and self._spent_s <= LOOP_SHARE * WINDOW_S

    def _lendable_blocks(self, block_bytes: int) -> int:
        """Return how many blocks of this size may be lent in one more lease."""
        # What is reserved for promotions counts as free here: a slow source may reserve all that leases may pin, and
        # would leave peers nothing. They pin their part of it for some seconds only.
        left = min(self._most_bytes - self.pinned_bytes, self._cache.leases.pinnable_bytes)
        # One block at a time is lent even if it is larger than the limit: it could never be read otherwise.
        return max(left // max(1, block_bytes), 0 if self._lent else 1)

    def _lend(self, route: bytes, ident: int, blocks: BlockIds, nbytes: int) -> None:
        self._cache.blocks.pin(blocks)
        self._cache.order.share(blocks)  # a peer's prompts use them too
        self._lent[route, ident] = PeerLease(blocks, nbytes, self._clock() + LEASE_S)
        self.pinned_bytes += nbytes
        self.lent_blocks += len(blocks)

    def _end(self, ended: list[tuple[bytes, int]]) -> None:
        for one in ended:
            lent = self._lent.pop(one)
            self.pinned_bytes -= lent.nbytes
            self._cache.life.unpin(lent.blocks)

    def tick(self) -> None:
        """End overdue leases, some at a time."""
        now = self._clock()
        oldest = islice(self._lent.items(), OVERDUE_AT_ONCE)
        self._end([one for one, lease in oldest if lease.deadline <= now])

    def end_all(self) -> None:
        """End all leases: the helper is gone, and with it all that reads here."""
        self._end(list(self._lent))


def _count_keys(wanted: Find, most: int) -> int:
    """Return the number of keys. Raises ValueError if these are more, or no keys."""
    if not 1 <= wanted.key_bytes <= 64 or len(wanted.keys) % wanted.key_bytes:
        raise ValueError
    if (count := len(wanted.keys) // wanted.key_bytes) > most:
        raise ValueError
    return count
