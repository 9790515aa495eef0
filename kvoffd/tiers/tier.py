"""The interface of tiers: stores of whole blocks below the pool, on a disk or shared by several nodes.

All methods of a tier are called in the daemon's one thread, return at once and do no I/O there. An ``on_end`` is called
in that thread too, never from within the call that it belongs to. So are the methods of ``TierListener``, some in the
middle of a change: they must not call a tier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import NamedTuple, Protocol, TypeAlias

from kvoffd.tiers.header import Block, BlockGroup

PEER = "peer://"
"""Beginning of the names of tiers that are other nodes' pools."""
ABSENT, PRESENT, ASKED = 0, 1, 2
"""Answers of ``find``. ASKED: ``TierListener.answered`` gets the answer before the tier's ask deadline."""
FULL_PART = 15 / 16
"""Part of what it can hold from which on a tier counts as full."""

READERS_NICE = 5
"""Nice value that reading threads add to the daemon's, whose thread answers engines. Measured on two CPUs shared with
other processes, while blocks came from Redis: lookups took at most 2 ms instead of 5 (p50) and 13 instead of 49 (p99).
If an engine never sleeps, blocks come a fifth slower; otherwise as fast."""


class Result(StrEnum):
    """Result of a read or write."""

    DONE = "done"
    EXISTED = "existed"  # only of a write: the block was there already
    GONE = "gone"  # not there: removed, evicted or of an older generation; of a write: removed before it ended
    CORRUPT = "corrupt"  # the bytes read are not those written; the block is removed
    FAILED = "failed"  # the device, server or file system failed
    DEADLINE = "deadline"  # nothing came within the block's patience, or the device or server hung before its turn
    CANCELLED = "cancelled"  # the tier was closed first
    UNWANTED = "unwanted"  # only of a read: nobody waited for the block when its turn came


class TierListener(Protocol):
    def blocks_stored(self, tier: Tier, group: BlockGroup, keys: Sequence[bytes]) -> None:
        """A disk has these blocks from now on (for KV events). Shared tiers do not call this."""

    def blocks_removed(self, tier: Tier, group: BlockGroup, keys: Sequence[bytes]) -> None:
        """A disk does not have these blocks any more. Shared tiers do not call this."""

    def answered(
        self, tier: Tier, group: BlockGroup, keys: Sequence[bytes], found: Sequence[bool], question: object
    ) -> None:
        """The answers for keys that ``find`` called ASKED. ``question``: see ``Found``."""

    def error(self, tier: Tier, kind: str, sentence: str) -> None:
        """An error occurred. ``kind`` is one of ``DiskFault`` or ``StoreFault``, or ``mismatch``; of a store with
        several servers, a space and the server's name may follow. Each is logged now and then."""


class Found(NamedTuple):
    """The answer of ``Tier.find``.

    Attributes:
        states: ABSENT, PRESENT or ASKED for each key.
        question: identifies the question to a store, if this call asked for all of its keys in one: ``answered`` gets
            the same object. Else None.
    """

    states: bytes
    question: object = None


ReadEnd: TypeAlias = Callable[[Result, Block | None], None]
WriteEnd: TypeAlias = Callable[[Result], None]


@dataclass
class TierStats:
    """Current sizes and queues, and counters since the tier was opened: fields of ``DiskStats`` and ``SharedStats``."""

    size_bytes: int = 0
    used_bytes: int = 0
    physical_bytes: int = 0
    blocks: int = 0
    asked_keys: int = 0
    found_keys: int = 0
    unanswered_keys: int = 0
    missed_keys: int = 0
    ask_seconds: float = 0.0
    read_blocks: int = 0
    read_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    evicted_blocks: int = 0
    already_stored: int = 0
    dropped_writes: int = 0
    dropped_removals: int = 0
    mismatches: int = 0
    queued_reads: int = 0
    queued_writes: int = 0
    errors: Counter[str] = field(default_factory=Counter)


class Tier(ABC):
    """A store of whole blocks. The caller keeps a read's or write's pool memory unchanged until it ends.

    A failure is a miss, and is reported to the listener. Device errors are never raised here.

    Attributes:
        is_peer: whether it is another node's pool, or a place for one.
        only_named: whether it is asked only for requests that name it, as a peer of a network.
        may_be_away: whether it is no error that it is away, as one of many nodes behind a name.
        found_at: time of its last answer that it has a key; -inf for none.
    """

    only_named = may_be_away = False
    found_at = -inf

    def __init__(self, name: str, listener: TierListener) -> None:
        self.name, self._listener, self.counters = name, listener, TierStats()
        """``name``: for operators, such as ``disk:/mnt/nvme0``."""
        self.is_peer = name.startswith(PEER)

    def _error(self, kind: str, sentence: str) -> None:
        """Count an error by its kind, without a server's name, and report it: see ``TierListener.error``."""
        self.counters.errors[kind.partition(" ")[0]] += 1
        self._listener.error(self, kind, sentence)

    @abstractmethod
    def find(self, group: BlockGroup, keys: Sequence[bytes], *, prefix: bool) -> Found:
        """Look for keys. ``prefix``: keys behind the first that is absent are useless, as of full attention.

        A device that hangs has no keys. A shared tier asks for keys that it does not know, up to a limit; the others
        are ABSENT.
        """

    @abstractmethod
    def wants(self, group: BlockGroup, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether a write would be useful: it is absent, or due to be refreshed."""

    @abstractmethod
    def read(
        self,
        group: BlockGroup,
        key: bytes,
        offsets: Sequence[int],
        patience_s: float,
        on_end: ReadEnd,
        is_awaited: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Begin to read into these pool offsets, by rank. Returns False if the block is absent or not accepted now.

        Args:
            patience_s: time that the block may take once its turn has begun. The wait for its turn has no limit while
                earlier blocks come; it ends if the device or server hangs, or is not used any more.
            is_awaited: asked when the block's turn comes, in any thread. If False, the read ends as UNWANTED, and the
                device or server is not asked for the block.
        """

    @abstractmethod
    def write(self, block: Block, offsets: Sequence[int], on_end: WriteEnd) -> bool:
        """Begin to write from these pool offsets, by rank. Returns False if the block is not accepted now."""

    def spare(self, group: BlockGroup, keys: Sequence[bytes]) -> None:  # noqa: B027
        """These blocks leave the pool: a disk's hand spares them once, as after a read. Ignores unknown blocks."""

    @abstractmethod
    def remove(self, group: BlockGroup, keys: Sequence[bytes], *, for_all_nodes: bool = False) -> None:
        """Remove blocks for this node, also ones being written; a store's for 30 s. After a kill a disk may have them.

        ``for_all_nodes``: a store's objects are deleted too: incomplete ones would be found again by all nodes.
        """

    def remove_all(self, fingerprint: bytes | None) -> int:
        """Remove all blocks of a namespace, of any generation, also those being written; None: of all namespaces.

        Returns how many were readable. The listener is not called. A shared store keeps its blocks. After a kill, the
        namespace's generation hides blocks that are still on a disk.
        """
        return 0

    @property
    def lifetime_bytes(self) -> int:
        """Bytes of writes that a block survives; 0 while there is free space."""
        return 0

    @abstractmethod
    def available(self) -> bool:
        """Return whether reads and writes are tried now."""

    def refuses_writes(self) -> bool:
        """Return whether the last write was refused or failed, as of a full or read-only one. Then ``write`` accepts a
        block now and then, to try it again."""
        return False

    def takes(self, group: BlockGroup, key: bytes) -> bool:
        """Return whether ``write`` accepts a block like this at some time: it is neither too large for the tier nor
        void."""
        return True

    def is_down(self) -> bool:
        """Return whether it fails: keys that it does not report may be there all the same."""
        return not self.available()

    @abstractmethod
    def tick(self) -> None:
        """Called a few times a second: ends what is too late, detects devices that hang, has stores probed."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Return ``counters`` with current values."""

    @abstractmethod
    def close(self, deadline_s: float) -> bool:
        """Cancel waiting work, and wait until all ends were called. Returns False if something hangs.

        Blocks: do not call it in the daemon's thread while it serves engines.
        """
