"""Pins of operators: blocks that stay though nobody reads them."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffd.cache.block import Block, BlockState
from kvoffd.cache.blocks import Blocks
from kvoffd.cache.namespace import Namespace
from kvoffd.errors import KvoffdError
from kvoffd_proto.errors import ErrorCode

MOST_OF_POOL = 2
"""One part in so many may be pinned: engines must still find room."""


class OperatorPins:
    """One pin each on ready blocks. It is the daemon's and not a session's: it lasts until it is taken back, until the
    block is dropped, or until the daemon ends. A successor adopts the block without it.
    """

    def __init__(self, blocks: Blocks, pool_bytes: int) -> None:
        self._blocks = blocks
        self._most_bytes = pool_bytes // MOST_OF_POOL

    def __contains__(self, block: Block) -> bool:
        return block in self._blocks.kept

    @property
    def blocks(self) -> list[Block]:
        """Those that are pinned, the earliest first."""
        return list(self._blocks.kept)

    @property
    def pinned_bytes(self) -> int:
        """Pool bytes of these blocks."""
        return sum(block.slot_bytes for block in self._blocks.kept)

    def pin(self, namespace: Namespace, group: int, keys: Sequence[bytes]) -> int:
        """Pin those of the keys that are ready; returns how many were not pinned before.

        Raises:
            KvoffdError: NOT_READY, one of them is not; NO_ROOM, together they would be more than may be pinned.
        """
        found = [namespace.index[group].get(key) for key in dict.fromkeys(keys)]
        fresh = [block for block in found if block is not None and block.state is BlockState.READY]
        if len(fresh) < len(found):
            raise KvoffdError(
                f"{len(found) - len(fresh)} of the {len(found)} blocks are not in the pool, or not completely; only "
                "ready ones can be pinned.",
                ErrorCode.NOT_READY,
            )
        fresh = [block for block in fresh if block not in self._blocks.kept]
        wanted = self.pinned_bytes + sum(block.slot_bytes for block in fresh)
        if wanted > self._most_bytes:
            raise KvoffdError(
                f"{wanted} bytes would be pinned by operators, and {self._most_bytes} may be, half of the pool; unpin "
                "others first.",
                ErrorCode.NO_ROOM,
            )
        self._blocks.kept.update(dict.fromkeys(fresh))
        self._blocks.pin(fresh)
        return len(fresh)

    def unpin(self, namespace: Namespace, group: int, keys: Sequence[bytes]) -> int:
        """Take pins back; returns how many there were. Keys without one are no error."""
        found = [namespace.index[group].get(key) for key in dict.fromkeys(keys)]
        kept = [block for block in found if block is not None and block in self._blocks.kept]
        for block in kept:
            del self._blocks.kept[block]
        self._blocks.unpin(kept)
        return len(kept)
