"""How namespaces share the pool, where operators say so: a minimum, a maximum and a weight of each.

A namespace loses nothing to others below its minimum, and takes from itself once it has its maximum. As soon as any
namespace has a weight, what the minima leave is shared by weight between those in use, 1 where none is set: one that
has its share takes from itself, or from others that have more than theirs; one that has less takes from those.
Within that blocks go in the policy's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf, isfinite

from kvoffd.cache.namespace import Block, BlockState, Namespace
from kvoffd.errors import KvoffdError
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import NamespaceLimits
from kvoffd_proto.units import format_size

MINIMA_PART = 0.75
"""The part of the pool that all minima may take together: what is left lets any namespace begin."""
MAX_LIMITED = 1024
"""Namespaces that have limits, open or not."""
IDLE_AFTER_S = 600.0
"""Without a request or a store for so long a namespace has no share by its weight; its minimum it keeps."""
MAX_PASSED = 1024
"""Blocks in the policy's order that may not go and are passed over; behind them the least recently used go."""
MAX_WEIGHT = 1000.0
USE_BYTES = 104
"""What is known of a block's use: a place in a dict."""
NO_LIMITS = NamespaceLimits()


@dataclass(slots=True)
class _Uses:
    """Which of a namespace's blocks were used before which."""

    older: list[Block]
    """Those of which it is not known, and others that are gone or were used since."""
    since: dict[Block, None] = field(default_factory=dict)
    """Ready blocks that were stored or used since there are limits, the least recently used first."""
    passed: int = 0
    """How many of the others were passed over in ``older`` since it was last cleared of them."""


class Shares:
    """The limits of namespaces, by fingerprint, and what follows from them."""

    def __init__(self, pool_bytes: int, clock: Callable[[], float]) -> None:
        self._pool_bytes = pool_bytes
        self._clock = clock
        self._limits: dict[bytes, NamespaceLimits] = {}
        self._minima = 0
        self._weighted = False
        self._used_at: dict[Namespace, float] = {}
        """The namespaces in use, where weights make that matter: the one that has not been used for longest first."""
        self._uses: dict[Namespace, _Uses] = {}
        """Of namespaces that are in use while there are limits."""

    def __bool__(self) -> bool:
        return bool(self._limits)

    def __iter__(self) -> Iterator[tuple[bytes, NamespaceLimits]]:
        return iter(self._limits.items())

    def of(self, fingerprint: bytes) -> NamespaceLimits:
        return self._limits.get(fingerprint, NO_LIMITS)

    def set(self, fingerprint: bytes, limits: NamespaceLimits) -> None:
        """Set the limits of a namespace; NO_LIMITS takes them away. Raises KvoffdError, BAD_ARGUMENT."""
        if problem := self._problem(fingerprint, limits):
            raise KvoffdError(problem, ErrorCode.BAD_ARGUMENT)
        if limits == NO_LIMITS:
            self._limits.pop(fingerprint, None)
        else:
            self._limits[fingerprint] = limits
        self._minima = sum(one.minimum_bytes for one in self._limits.values())
        self._weighted = any(one.weight is not None for one in self._limits.values())
        if not self._weighted:
            self._used_at.clear()
        if not self._limits:
            self._uses.clear()

    def _problem(self, fingerprint: bytes, limits: NamespaceLimits) -> str:
        """Why these cannot be the limits of a namespace; empty where they can."""
        least, most, weight = limits.minimum_bytes, limits.maximum_bytes, limits.weight
        if weight is not None and not (isfinite(weight) and 0 < weight <= MAX_WEIGHT):
            return f"A weight is more than 0 and at most {MAX_WEIGHT:g}, not {weight:g}."
        if most is not None and not least <= most:
            return f"The minimum, {format_size(least)}, is more than the maximum, {format_size(most)}."
        others = sum(one.minimum_bytes for name, one in self._limits.items() if name != fingerprint)
        allowed = int(self._pool_bytes * MINIMA_PART)
        if least and least + others > allowed:
            return (
                f"A minimum of {format_size(least)} is too much: with {format_size(others)} for other namespaces the "
                f"minima would be more than {format_size(allowed)}, three quarters of the pool of "
                f"{format_size(self._pool_bytes)}."
            )
        if limits != NO_LIMITS and fingerprint not in self._limits and len(self._limits) >= MAX_LIMITED:
            return f"{MAX_LIMITED} namespaces have limits, the most there may be; take those of others away."
        return ""

    def note_use(self, namespace: Namespace) -> None:
        """Note that something is asked for or stored in the namespace."""
        if self._weighted:
            self._used_at.pop(namespace, None)
            self._used_at[namespace] = self._clock()

    def forget(self, namespace: Namespace) -> None:
        """The namespace is gone; its limits hold for the next one of its fingerprint."""
        self._used_at.pop(namespace, None)
        self._uses.pop(namespace, None)

    def by_use(self, namespace: Namespace) -> Iterator[Block]:
        """The namespace's ready blocks, the least recently used first; those used before there were limits come first,
        in no order."""
        uses = self._uses_of(namespace)
        older, since = uses.older, uses.since
        if uses.passed > len(older):
            older[:] = [block for block in older if block.state is BlockState.READY and block not in since]
            uses.passed = 0
        for block in older:
            if block.state is BlockState.READY and block not in since:
                yield block
            else:
                uses.passed += 1
        yield from since

    def _uses_of(self, namespace: Namespace) -> _Uses:
        if (uses := self._uses.get(namespace)) is None:
            uses = self._uses[namespace] = _Uses([block for index in namespace.index for block in index.blocks()])
        return uses

    @property
    def nbytes(self) -> int:
        return sum(USE_BYTES * len(uses.since) + 8 * len(uses.older) for uses in self._uses.values())

    def used(self, namespace: Namespace, blocks: Sequence[Block]) -> None:
        """A request found these blocks, root first."""
        since = self._uses_of(namespace).since
        for block in reversed(blocks):
            since.pop(block, None)
            since[block] = None

    def moved(self, namespace: Namespace, blocks: Sequence[Block], before: BlockState, after: BlockState) -> None:
        """Blocks, the oldest first, are in another state."""
        if (uses := self._uses.get(namespace)) is None:
            return
        if before is BlockState.INHERITED:
            uses.older.extend(blocks)
        elif after is BlockState.READY:
            uses.since.update(dict.fromkeys(blocks))
        elif before is BlockState.READY:
            for block in blocks:
                uses.since.pop(block, None)

    def weights(self) -> float:
        """The weights of all namespaces in use together, for ``kept_bytes``."""
        until = self._clock() - IDLE_AFTER_S
        while self._used_at and (first := next(iter(self._used_at.items())))[1] <= until:
            del self._used_at[first[0]]
        return sum(map(self._weight, self._used_at))

    def kept_bytes(self, namespace: Namespace, weights: float) -> int:
        """Pool bytes that the namespace does not lose to others now: its minimum, and its share by weight."""
        limits = self.of(namespace.fingerprint)
        if namespace not in self._used_at:
            return limits.minimum_bytes
        kept = limits.minimum_bytes + int((self._pool_bytes - self._minima) * self._weight(namespace) / weights)
        return kept if limits.maximum_bytes is None else min(kept, limits.maximum_bytes)

    def _weight(self, namespace: Namespace) -> float:
        weight = self.of(namespace.fingerprint).weight
        return 1.0 if weight is None else weight


class Whose(Enum):
    """Whose blocks are asked for."""

    OWN = auto()
    OTHERS = auto()
    """Those of namespaces that have more than they keep."""
    BOTH = auto()


class Claim:
    """One namespace that wants room, and what it may take from whom. For one change of the cache."""

    def __init__(self, shares: Shares, namespace: Namespace, namespaces: Iterable[Namespace]) -> None:
        self._shares = shares
        self.namespace = namespace
        self._namespaces = namespaces
        self._held: dict[Namespace, int] = {}
        self._weights = shares.weights()

    @property
    def room(self) -> float:
        """Bytes to the namespace's maximum; below 0 where it has more."""
        most = self._shares.of(self.namespace.fingerprint).maximum_bytes
        return inf if most is None else most - self.held(self.namespace)

    @property
    def owed(self) -> int:
        """Bytes that the namespace may take from those that have more than they keep."""
        return max(0, self._kept(self.namespace) - self.held(self.namespace))

    def held(self, namespace: Namespace) -> int:
        """Pool bytes of a namespace, less those of the blocks that are to go, with the slots that were taken."""
        if namespace not in self._held:
            self._held[namespace] = namespace.held_bytes
        return self._held[namespace]

    def _kept(self, namespace: Namespace) -> int:
        return self._shares.kept_bytes(namespace, self._weights)

    def take(self, nbytes: int) -> None:
        """The namespace takes slots."""
        self._held[self.namespace] = self.held(self.namespace) + nbytes

    def evict(self, block: Block) -> None:
        self.give_up(block.namespace, block.slot_bytes)

    def give_up(self, owner: Namespace, nbytes: int) -> None:
        """Blocks of so many bytes are to go."""
        self._held[owner] = self.held(owner) - nbytes

    def may_take(self, blocks: Iterable[Block]) -> bool:
        """Whether all these blocks may go for the namespace."""
        wanted: dict[Namespace, int] = {}
        for block in blocks:
            wanted[block.namespace] = wanted.get(block.namespace, 0) + block.slot_bytes
        return all(self.may_take_from(owner, nbytes) for owner, nbytes in wanted.items())

    def may_take_from(self, owner: Namespace, nbytes: int) -> bool:
        """Whether so many bytes of another's blocks, or its own, may go for the namespace."""
        if owner is self.namespace:
            return True
        # By weight the last region that is passed on may be one too many: shares need not be whole regions.
        least, held = self._shares.of(owner.fingerprint).minimum_bytes, self.held(owner)
        return held > self._kept(owner) and held - nbytes >= least

    def candidates(self, ordered: Iterable[Block], whose: Whose) -> Iterator[Block]:
        """Those of the blocks that may go, next first. What is taken is told by ``evict`` at once."""
        given: set[Block] = set()
        passed = 0
        for block in ordered:
            if self._is_meant(block.namespace, whose) and self.may_take_from(block.namespace, block.slot_bytes):
                given.add(block)
                yield block
            elif (passed := passed + 1) >= MAX_PASSED:
                break
        else:
            return
        for owner in sorted(self._namespaces, key=lambda one: one is not self.namespace):
            if self._is_meant(owner, whose):
                for block in self._shares.by_use(owner):
                    if block in given:
                        continue
                    if not self.may_take_from(owner, block.slot_bytes):
                        break
                    yield block

    def _is_meant(self, owner: Namespace, whose: Whose) -> bool:
        return whose is Whose.BOTH or (owner is self.namespace) == (whose is Whose.OWN)
