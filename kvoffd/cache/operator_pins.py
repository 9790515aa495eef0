"""Blocks that operators keep in the pool."""

from __future__ import annotations

from kvoffd.cache.lookup import LeasedBlocks
from kvoffd.cache.namespace import BlockState, Namespace
from kvoffd.errors import KvoffdError
from kvoffd_proto.errors import ErrorCode

OPERATORS_PART = 2
"""Operators may pin one part in so many of the pool: engines must still find room."""


class OperatorPins:
    """Pins and unpins blocks by key."""

    def __init__(self, cache: LeasedBlocks, pool_bytes: int) -> None:
        self._cache = cache
        self._pool_bytes = pool_bytes

    def pin(self, namespace: Namespace, group: int, keys: bytes) -> int:
        """Pin ready blocks for an operator; returns how many were not pinned so before.

        The pin is the daemon's and not a session's: it lasts until it is taken back, until the block is dropped, or
        until the daemon ends. A successor adopts the block without it.

        Raises:
            BadGeometry, BadKeys.
            KvoffdError: NOT_READY, one of the blocks is not; NO_ROOM, together they would be more than may be pinned.
        """
        blocks = self._cache.blocks
        found = namespace.index[group].find(b"".join(dict.fromkeys(namespace.split(group, keys))))
        ready = [block for block in found if block is not None and block.state is BlockState.READY]
        if len(ready) < len(found):
            raise KvoffdError(
                f"{len(found) - len(ready)} of the {len(found)} blocks are not in the pool, or not completely; only "
                "ready ones can be pinned.",
                ErrorCode.NOT_READY,
            )
        fresh = [block for block in ready if block not in blocks.operator_pinned]
        pinned_bytes = self.nbytes + sum(block.slot_bytes for block in fresh)
        most_bytes = self._pool_bytes // OPERATORS_PART
        if pinned_bytes > most_bytes:
            raise KvoffdError(
                f"{pinned_bytes} bytes would be pinned by operators, and {most_bytes} may be, half of the pool; unpin "
                "others first.",
                ErrorCode.NO_ROOM,
            )
        blocks.operator_pinned.update(dict.fromkeys(fresh))
        blocks.pin(fresh)
        return len(fresh)

    def unpin(self, namespace: Namespace, group: int, keys: bytes) -> int:
        """Undo ``pin``; returns how many pins there were. Keys without one are no error."""
        blocks = self._cache.blocks
        found = namespace.index[group].find(b"".join(dict.fromkeys(namespace.split(group, keys))))
        pinned = [block for block in found if block is not None and block in blocks.operator_pinned]
        for block in pinned:
            del blocks.operator_pinned[block]
        blocks.unpin(pinned)
        return len(pinned)

    @property
    def nbytes(self) -> int:
        return sum(block.slot_bytes for block in self._cache.blocks.operator_pinned)
