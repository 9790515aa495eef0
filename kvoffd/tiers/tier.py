"""What a tier is: a store of whole blocks below the pool, on a disk or shared by several nodes.

Every method of a tier is called in the daemon's one thread, returns at once and does no I/O there. An ``on_end`` is
called in that thread too, never from within the call that it belongs to. So are the methods of ``TierListener``, some
in the middle of a change: they call no tier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeAlias

from kvoffd.tiers.header import Block, BlockGroup

ABSENT, PRESENT, ASKED = 0, 1, 2
"""What ``find`` says of a key. ASKED: its answer comes to ``TierListener.answered`` before the tier's ask deadline."""

READERS_NICE = 5
"""How much the priority of threads that read is below that of the daemon's own, which answers engines. Measured on two
CPUs that other processes wanted too, while blocks came up from Redis: half of the lookups took at most 2 ms instead of
5, 99 of 100 at most 13 instead of 49. While an engine never sleeps blocks come a fifth slower, else as fast."""


class Result(StrEnum):
    """How a read or write ended."""

    DONE = "done"
    PRESENT = "present"  # a write only: the block was there already
    GONE = "gone"  # removed, evicted or of an older generation
    CORRUPT = "corrupt"  # the bytes that were read are not those that were written; the block is removed
    FAILED = "failed"  # the device, server or file system failed
    DEADLINE = "deadline"  # the device or server had its turn and nothing came, or hangs before the turn
    CANCELLED = "cancelled"  # the tier was closed first


class TierListener(Protocol):
    def blocks_stored(self, tier: Tier, group: BlockGroup, keys: Sequence[bytes]) -> None:
        """A disk has these blocks from now on (for KV events). Shared tiers do not call it."""

    def blocks_removed(self, tier: Tier, group: BlockGroup, keys: Sequence[bytes]) -> None:
        """A disk has these blocks no more, whatever the reason. Shared tiers do not call it."""

    def answered(self, tier: Tier, group: BlockGroup, keys: Sequence[bytes], found: Sequence[bool]) -> None:
        """What ``find`` called ASKED is known."""

    def error(self, tier: Tier, kind: str, sentence: str) -> None:
        """Something went wrong. ``kind`` is a word or two joined by ``_``; errors are counted by kind."""


ReadEnd: TypeAlias = Callable[[Result, Block | None], None]
WriteEnd: TypeAlias = Callable[[Result], None]


@dataclass
class TierStats:
    """Sizes and queues as they are now, and what was done since the tier was opened: fields of ``DiskStats`` and
    ``SharedStats``."""

    size_bytes: int = 0
    used_bytes: int = 0
    physical_bytes: int = 0
    blocks: int = 0
    asked_keys: int = 0
    found_keys: int = 0
    unanswered_keys: int = 0
    ask_seconds: float = 0.0
    read_blocks: int = 0
    read_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    evicted_blocks: int = 0
    refused_writes: int = 0
    already_stored: int = 0
    dropped_writes: int = 0
    dropped_removals: int = 0
    mismatches: int = 0
    queued_reads: int = 0
    queued_writes: int = 0
    running_reads: int = 0
    running_writes: int = 0
    busy_seconds: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)


class Tier(ABC):
    """A store of whole blocks. Until a read or write ends, its pool memory stays as it is; no other is touched.

    A failure is a miss, and the listener is called with it. An error of a device is never raised here.
    """

    def __init__(self, name: str, listener: TierListener) -> None:
        self.name, self._listener, self.counters = name, listener, TierStats()
        """``name``: for operators, such as ``disk:/mnt/nvme0``."""

    def _error(self, kind: str, sentence: str) -> None:
        """Count an error by the first word of its kind, and tell of it."""
        self.counters.errors[kind.partition(" ")[0]] += 1
        self._listener.error(self, kind, sentence)

    @abstractmethod
    def find(self, group: BlockGroup, keys: Sequence[bytes], *, prefix: bool) -> bytes:
        """Say of each key ABSENT, PRESENT or ASKED. ``prefix``: behind a gap nothing is of use.

        A device that hangs has nothing. A shared tier asks for what it does not know, up to a bound; beyond it ABSENT.
        """

    @abstractmethod
    def wants(self, group: BlockGroup, keys: Sequence[bytes]) -> list[bool]:
        """Of each key, whether a write of it would be of use: it is absent, or due to be refreshed."""

    @abstractmethod
    def read(self, group: BlockGroup, key: bytes, offsets: Sequence[int], patience_s: float, on_end: ReadEnd) -> bool:
        """Begin to read into these pool offsets, by rank. False where the block is not there or not taken now.

        Args:
            patience_s: how long the block may take from when its turn has come. Until then it waits for those before
                it, as long as these come; once the device or server hangs, or is left alone, it ends too.
        """

    @abstractmethod
    def write(self, block: Block, offsets: Sequence[int], on_end: WriteEnd) -> bool:
        """Begin to write from these pool offsets, by rank. False where it is not taken now."""

    def used(self, group: BlockGroup, keys: Sequence[bytes]) -> None:  # noqa: B027
        """These blocks leave the pool: a disk's hand spares them once, as what is read. Unknown ones are ignored."""

    @abstractmethod
    def remove(self, group: BlockGroup, keys: Sequence[bytes], why: str) -> None:
        """Have nobody on this node read these blocks any more, nor what is being written of them. After a kill a disk
        may have them again, as they were written.

        Args:
            why: ``invalidated``; ``partial``, where the pool has more of them now, which others are to have too; or
                ``corrupt``, which goes to no store of several nodes.
        """

    @abstractmethod
    def remove_all(self, fingerprint: bytes | None) -> int:
        """Remove what there is of a namespace, of whatever generation, also what is being written; None: of all.

        Returns how many blocks could be read. The listener is called for none. A store that others use only forgets
        what it knows. After a kill the namespace's generation keeps away what a disk has still.
        """

    @property
    def lifetime_bytes(self) -> int:
        """Bytes of writes that a block survives; 0 while there is room."""
        return 0

    @abstractmethod
    def available(self) -> bool:
        """Whether reads and writes are tried at all now."""

    @abstractmethod
    def tick(self) -> None:
        """Called a few times a second: ends what is too late, notices devices that hang."""

    @abstractmethod
    def stats(self) -> TierStats:
        """What ``counters`` has, and how it is now."""

    @abstractmethod
    def close(self, deadline_s: float) -> bool:
        """Cancel what has not begun and wait for the rest; ends come until then. False where something hangs still.

        Waits: not for the daemon's thread while it serves engines.
        """
