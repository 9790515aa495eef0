"""Which blocks of a namespace are void, on this node and on all, and from where on it is shared.

A namespace's **generation** is raised by each reset and clear, which make its blocks stale. Pools and disks record the
generation in which a block was stored. A block of a lower generation is void wherever it is found: on a disk that was
detached or read-only, in an older copy of a file, in another pool. This is the only protection against cleared blocks,
so a reset (``NamespaceResets``) is answered only when ``kvoffd.state`` is on its device.

A generation is a time, in microseconds since 1970, above all generations seen in the state file, pools and disks. So
one that is raised after the state file was lost is above all earlier ones. A higher one that is found in a pool or on a
disk replaces the known one. One in the future was raised before the clock was set back: it may be older or newer than
the known ones, so all existing blocks of the namespace become void.

Its **fleet generation** is the one that nodes share: the highest that this node raised, or that a store or peer has
shown. It is a time in seconds, or slightly more. A node has one for all its stores and peers, since a block that one of
them voids may have come from another. It takes and gives blocks of this fleet generation only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

from kvoffd.system.newest import put_newest
from kvoffd.tiers.header import MAX_GENERATION
from kvoffd.tiers.store import StoreError, StoreFault
from kvoffd_proto.messages import Count

logger = logging.getLogger(__name__)

MAX_NAMES = 4096
"""Limit of the namespaces with an entry in each table of ``Resets``.

Beyond it the oldest entries of namespaces that are not known are removed. Then all namespaces without one have at least
its generation, or are not shared; those that are known get an entry, and stay as they were.
"""
AHEAD_S = 1
"""Seconds by which a fleet generation may be ahead of the clock: the second one within a second has the next number."""
MAX_HEARD = 65_536
"""Limit of the namespaces whose fleet generation is known."""
MAX_AHEAD_S = 10 * 365 * 86_400
"""Limit of what a clock that may be wrong is ahead of this node's, for fleet generations from elsewhere."""


class Resets(msgspec.Struct):
    """Protection against cleared blocks, as ``kvoffd.state`` has it. Keys are fingerprints of namespaces."""

    floor: Count = 0
    """Generation of all namespaces without their own, from the last time that all were cleared."""
    generations: dict[bytes, Count] = {}
    followed: dict[bytes, Count] = {}
    """Fleet generations that were followed here."""
    fleet: dict[str, dict[bytes, Count]] = {}
    """The same as release 0.2 wrote them, by URL of the shared store. ``Generations.restore`` empties it."""
    unshared: dict[bytes, Count | bool] = {}
    """Namespaces that an engine has reset here: shared stores and peers are not used for one until its fleet generation
    is above this number. With 0 they are used, although ``unshared_floor`` is not 0. True, which release 0.2 wrote,
    becomes 1."""
    unshared_floor: Count = 0
    """The same number for all namespaces that are not in ``unshared``: 0 unless the resets or an entry were lost."""


class Generations:
    """The table of all namespaces. For the daemon's thread, except ``of``, ``fleet`` and ``is_valid``.

    A higher fleet generation is heard of (``hear``). Then the namespace is ``voided`` until its blocks are dropped
    here; after that the generation is ``followed``.

    Args:
        save: called after each change of ``resets``.

    Attributes:
        resets: what outlives the daemon.
        voided: namespaces whose earlier blocks are still in the pool and on disks.
        known: fingerprints of namespaces that are open or have blocks: one client's many resets displace no entry of
            theirs, and do not count for those without one.
    """

    def __init__(
        self,
        resets: Resets | None = None,
        save: Callable[[], None] = lambda: None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._save, self._wall_clock = save, wall_clock
        self.known: Collection[bytes] = ()
        self.voided: set[bytes] = set()
        self._cleared_at: dict[bytes, int] = {}
        """Time of the latest clear of each namespace that ``void_before`` was given."""
        self.restore(resets or Resets())

    def restore(self, resets: Resets) -> None:
        """Continue with what an earlier daemon has left. Fleet generations that no node can have written are dropped,
        and numbers that no clear could exceed become the time now: an earlier release followed any number."""
        now = self._wall_clock()
        for numbers in resets.fleet.values():
            for fingerprint, number in numbers.items():
                if is_sound(number, now):
                    resets.followed[fingerprint] = max(number, resets.followed.get(fingerprint, 0))
        resets.fleet = {}
        for fingerprint, number in resets.unshared.items():
            resets.unshared[fingerprint] = int(number if is_sound(number, now) else now)
        self.resets = resets
        self._fleet = {one: number for one, number in resets.followed.items() if is_sound(number, now)}
        """Fleet generations that were heard of, followed or not."""

    # --- this node -------------------------------------------------------------------------------

    def of(self, fingerprint: bytes) -> int:
        """Return the namespace's generation on this node; blocks of lower ones are void."""
        return self.resets.generations.get(fingerprint, self.resets.floor)

    def void_here(self, fingerprint: bytes | None) -> int:
        """Make all existing blocks of a namespace void on this node, or those of all namespaces. Returns the generation
        of later ones."""
        generation = self._next()
        if fingerprint is None:
            self.resets.floor = generation
            self.resets.generations.clear()
        else:
            self.resets.floor = self._put(self.resets.generations, fingerprint, generation, self.resets.floor)
        self._save()
        return generation

    def accept(self, fingerprint: bytes, generation: int) -> bool:
        """Return whether blocks of this generation, found in a pool or on a disk, are valid.

        A generation above the known one replaces it: the state file had lost it. Blocks of the known one are void then.
        """
        if generation <= (known := self.of(fingerprint)):
            return generation == known
        if generation >= MAX_GENERATION:  # one above it could not be kept
            logger.warning("A namespace's generation in a pool or on a disk is no time; its blocks there are void.")
            return False
        if not (are_valid := generation <= self.now()):
            logger.warning("The clock was set back: a namespace's reset is in the future. All its blocks are void.")
            generation = self._next(generation)
        self.resets.floor = self._put(self.resets.generations, fingerprint, generation, self.resets.floor)
        self._save()
        return are_valid

    def now(self) -> int:
        """Return the time in microseconds since 1970."""
        return int(1e6 * self._wall_clock())

    def _next(self, found: int = 0) -> int:
        """Return a generation above all known ones, and ``found``."""
        last = max(found, self.resets.floor, *self.resets.generations.values())
        if (now := self.now()) <= last:
            logger.info("The clock is behind the last reset; generations continue from that.")
        return max(now, last + 1)

    def _put(self, numbers: dict[bytes, Any], fingerprint: bytes, number: int, floor: int) -> int:
        """Enter a namespace's number, as the newest, in a table: ``floor`` is the number of all namespaces without an
        entry. Return the new floor: if entries had to go (see ``MAX_NAMES``), it is at least the highest of their
        numbers, so that no namespace has a lower one than before."""
        numbers.pop(fingerprint, None)
        numbers[fingerprint] = number
        unknown = (one for one in numbers if one not in self.known)
        gone = [int(numbers.pop(one)) for one in list(islice(unknown, max(0, len(numbers) - MAX_NAMES)))]
        if (raised := max(gone, default=0)) > floor:  # known ones without an entry get one: their number stays
            numbers.update({one: floor for one in self.known if one not in numbers})
        return max(floor, raised)

    # --- all nodes -------------------------------------------------------------------------------

    def fleet(self, fingerprint: bytes) -> int:
        """Return the time when a namespace's blocks were last voided for all nodes; 0 for never."""
        return self._fleet.get(fingerprint, 0)

    def is_valid(self, fingerprint: bytes, generation: int) -> bool:
        """Return whether blocks of this fleet generation may be exchanged now."""
        return generation == self.fleet(fingerprint) and fingerprint not in self.voided

    def next_of_all(self, fingerprint: bytes) -> int:
        """Return a fleet generation that voids a namespace's blocks on all nodes, and shares it again."""
        # The time, because a store that lost the number must not return to one that it had before.
        above = max(self.fleet(fingerprint), self.unshared_at(fingerprint))
        return max(above + 1, int(self._wall_clock()))

    def hear(self, fingerprint: bytes, generation: int) -> bool:
        """Void a namespace's blocks if this fleet generation is above the known one; return whether it is.

        A number that no node can have written is ignored: followed, it could not be raised.
        """
        if generation <= self.fleet(fingerprint) or not is_sound(generation, self._wall_clock()):
            return False
        put_newest(self._fleet, fingerprint, generation, MAX_HEARD)
        self.voided.add(fingerprint)
        return True

    def void_before(self, fingerprint: bytes, generation: int, cleared_at: int) -> None:
        """Void a namespace's blocks from before a clear of all nodes that has the known fleet generation, if there may
        be any: another clear may have it too. ``cleared_at``: in microseconds, by the clock of the node that cleared.
        """
        is_new = cleared_at > self._cleared_at.get(fingerprint, 0)  # once for each clear: its clock may be ahead
        if is_new and generation == self.fleet(fingerprint) and self.of(fingerprint) < cleared_at:
            put_newest(self._cleared_at, fingerprint, cleared_at, MAX_HEARD)
            self.voided.add(fingerprint)

    def followed(self, fingerprint: bytes) -> None:
        """Note that the blocks of a namespace that was voided on all nodes are gone here, and share it again, unless an
        engine has reset it on this node since.
        """
        generation, resets = self.fleet(fingerprint), self.resets
        if generation > self.unshared_at(fingerprint):
            resets.unshared.pop(fingerprint, None)
            if resets.unshared_floor:
                resets.unshared_floor = self._put(resets.unshared, fingerprint, 0, resets.unshared_floor)
        put_newest(resets.followed, fingerprint, generation, MAX_NAMES, self.known.__contains__)
        self.voided.discard(fingerprint)
        self._save()

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        """Iterate over namespaces and their fleet generations."""
        return iter(self._fleet.items())

    # --- sharing ---------------------------------------------------------------------------------

    def is_unshared(self, fingerprint: bytes) -> bool:
        """Return whether the namespace may neither be read from shared stores nor written to them."""
        return self.unshared_at(fingerprint) > 0

    def unshared_of(self, fingerprints: Iterable[bytes]) -> list[bytes]:
        """Return those of ``fingerprints`` that are not shared, then all others that are known not to be."""
        candidates = dict.fromkeys((*fingerprints, *self.resets.unshared))
        return [fingerprint for fingerprint in candidates if self.is_unshared(fingerprint)]

    def unshared_at(self, fingerprint: bytes) -> int:
        """Return the number above which a fleet generation shares the namespace again; 0 if it is shared."""
        return int(self.resets.unshared.get(fingerprint, self.resets.unshared_floor))

    def stop_sharing(self, fingerprint: bytes) -> int:
        """Void a namespace here, and stop sharing it until it is voided on all nodes after now: blocks of other nodes
        may be as stale. Returns the generation of later blocks."""
        # Not below the clock, so that a void of all nodes that came before, and is heard of later, does not end this.
        now, resets = int(self._wall_clock()) + AHEAD_S, self.resets
        until = max(now, self.fleet(fingerprint), self.unshared_at(fingerprint))
        resets.unshared_floor = self._put(resets.unshared, fingerprint, until, resets.unshared_floor)
        return self.void_here(fingerprint)  # which saves both

    def stop_sharing_all(self) -> None:
        """Void all namespaces here, and stop sharing them: earlier voids are unknown."""
        self.resets.unshared_floor = int(self._wall_clock())
        self.void_here(None)


def is_sound(generation: int, now: float) -> bool:
    """Return whether a fleet generation is small enough to come from a node. ``now``: seconds since 1970.

    A larger one that was followed could not be raised: it would be refused everywhere, and end the namespace's sharing.
    """
    return 0 <= generation <= now + MAX_AHEAD_S


def checked(generation: int, fingerprint: bytes) -> int:
    """Return a fleet generation from a store or peer. Raises StoreError for one that no node can have written."""
    if not is_sound(generation, time.time()):
        why = f"The generation {generation} of the namespace {fingerprint.hex()} was not written by a node"
        raise StoreError(StoreFault.GENERATION, f"{why}; remove it there.")
    return generation
