"""The most that a namespace may have of the pool, where an operator says so.

A namespace that has its quota takes from itself: the next of its own blocks in the policy's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvoffd.cache.namespace import Block, BlockState, Namespace
from kvoffd.errors import KvoffdError
from kvoffd_proto.errors import ErrorCode

MAX_QUOTAS = 1024
"""Namespaces that have a quota, open or not."""
MAX_PASSED = 1024
"""Blocks of others in the policy's order that are passed over; behind them the least recently used go."""
USE_BYTES = 104
"""What is known of a block's use: a place in a dict."""


@dataclass(slots=True)
class _Uses:
    """Which of a namespace's blocks were used before which."""

    older: list[Block]
    """Those of which it is not known, and others that are gone or were used since."""
    since: dict[Block, None] = field(default_factory=dict)
    """Ready blocks that were stored or used since there is a quota, the least recently used first."""
    passed: int = 0
    """How many of the others were passed over in ``older`` since it was last cleared of them."""


class Quotas:
    """Bytes by fingerprint, and the order in which the blocks of namespaces with a quota were used."""

    def __init__(self) -> None:
        self._quotas: dict[bytes, int] = {}
        self._uses: dict[Namespace, _Uses] = {}

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        return iter(self._quotas.items())

    def of(self, fingerprint: bytes) -> int | None:
        """Bytes; None for no quota."""
        return self._quotas.get(fingerprint)

    def set(self, fingerprint: bytes, quota_bytes: int | None) -> None:
        """Set the quota of a namespace, open or not; None takes it away. Raises KvoffdError, BAD_ARGUMENT."""
        if quota_bytes is None:
            self._quotas.pop(fingerprint, None)
            for namespace in [one for one in self._uses if one.fingerprint == fingerprint]:
                del self._uses[namespace]
            return
        if fingerprint not in self._quotas and len(self._quotas) >= MAX_QUOTAS:
            why = f"{MAX_QUOTAS} namespaces have a quota, the most there may be; take those of others away."
            raise KvoffdError(why, ErrorCode.BAD_ARGUMENT)
        self._quotas[fingerprint] = quota_bytes

    def forget(self, namespace: Namespace) -> None:
        """The namespace is gone; its quota holds for the next one of its fingerprint."""
        self._uses.pop(namespace, None)

    def own(self, namespace: Namespace, ordered: Iterable[Block]) -> Iterator[Block]:
        """The namespace's own blocks of those in the policy's order, next first, then the least recently used."""
        given: set[Block] = set()
        passed = 0
        for block in ordered:
            if block.namespace is namespace:
                given.add(block)
                yield block
            elif (passed := passed + 1) >= MAX_PASSED:
                break
        else:
            return
        yield from (block for block in self.by_use(namespace) if block not in given)

    def by_use(self, namespace: Namespace) -> Iterator[Block]:
        """The namespace's ready blocks, the least recently used first; those used before it had a quota come first,
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
        if namespace.fingerprint in self._quotas:
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


@dataclass(slots=True)
class Allowance:
    """What a namespace with a quota may still take in one change of the cache."""

    namespace: Namespace
    quota_bytes: int
    taken_bytes: int = 0
    """Slots that were taken and belong to no block yet."""

    @property
    def room(self) -> int:
        """Bytes to the quota; below 0 where the namespace has more."""
        return self.quota_bytes - self.namespace.held_bytes - self.taken_bytes
