"""What the daemon asks of a tier, whether it is a disk or something farther away."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple, Protocol


class TierKey(NamedTuple):
    """Names a block among those of all namespaces."""

    fingerprint: bytes
    group: int
    key: bytes


class TierShard(NamedTuple):
    """One rank's part of a block: ``length`` bytes, of which those of ``first_block`` engine blocks are left out."""

    length: int
    first_block: int
    checksum: int
    """As in the pool's slot table, never 0: every read compares it."""


class TierBlock(NamedTuple):
    """A whole block."""

    id: TierKey
    shards: tuple[TierShard, ...]
    """By rank; their number is the world size."""

    @property
    def nbytes(self) -> int:
        """Bytes of all shards together."""
        return sum(shard.length for shard in self.shards)


class TierResult(Enum):
    """How a read or a write ended."""

    DONE = "done"
    """Every byte is in place; of a read: and has its checksum."""
    GONE = "gone"
    """The block left the tier before it was read, or was forgotten before it was written."""
    CORRUPT = "corrupt"
    """What was read is not what was written. The block has left the tier; the memory holds nothing of worth."""
    FAILED = "failed"
    """The device or the file system failed. After a read the block has left the tier."""
    DEADLINE = "deadline"
    """Its time was over before it began."""
    CANCELLED = "cancelled"
    """The tier was closed before it began."""


OnDone = Callable[[TierResult], None]


class TierListener(Protocol):
    """Told what comes and goes, in the daemon's thread."""

    def tier_stored(self, tier: Tier, block: TierBlock) -> None:
        """A block can be read from the tier from now on."""

    def tier_removed(self, tier: Tier, ids: Sequence[TierKey]) -> None:
        """These cannot be read from the tier any more, whatever the reason."""

    def tier_error(self, tier: Tier, kind: str, sentence: str) -> None:
        """Something was wrong; ``kind`` is one word or two joined by ``_``, to be counted by."""


class TierStats(NamedTuple):
    """A tier's figures since it was opened, but for those that say how it is now."""

    size_bytes: int
    """The most it may take of its device."""
    used_bytes: int = 0
    """Bytes of the slots that hold blocks."""
    physical_bytes: int = 0
    """What its files take of the device now."""
    blocks: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    evicted_blocks: int = 0
    refused_writes: int = 0
    """Writes that were not taken, for want of room or because too many were under way."""
    queued_reads: int = 0
    queued_writes: int = 0
    running_reads: int = 0
    running_writes: int = 0
    busy_seconds: float = 0.0
    """Time that threads spent reading and writing."""
    errors: Mapping[str, int] = MappingProxyType({})
    """By kind, as told to the listener."""


class Tier(ABC):
    """Keeps whole blocks outside the pool and brings them back.

    Every method is called in the daemon's one thread, returns at once and does no input or output there. So are
    ``on_done`` and the listener, and never from within the call that they belong to. A read or write that was
    taken ends by exactly one ``on_done``; until then its pool memory stays as it is, and the tier touches no other.
    What fails is a miss and is told to the listener; nothing a device does raises here.
    """

    name: str
    """What people call it, such as ``disk:/mnt/nvme0``."""

    @abstractmethod
    def groups(self) -> Collection[tuple[bytes, int]]:
        """Fingerprints and groups that there are blocks of, as they are now: each has an ``index``."""

    @abstractmethod
    def index(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        """The blocks that the tier has, by key: a live view, not to be changed nor kept over other calls."""

    def readable(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        """Those of the ``index`` that may be read now: none of a device that hangs. As live as that."""
        return self.index(fingerprint, group)

    @abstractmethod
    def write(self, block: TierBlock, offsets: Sequence[int], on_done: OnDone) -> bool:
        """Begin to keep a block, whose shards lie at these pool offsets, by rank. False where it is not taken now.

        What is older makes room. A block that is there already is not taken. It can be read once this is DONE.
        """

    @abstractmethod
    def read(self, block_id: TierKey, offsets: Sequence[int], deadline: float, on_done: OnDone) -> bool:
        """Begin to bring a block up into these pool offsets, by rank. False where it is not there, or not taken now.

        Reads go before writes. One that has not begun by the ``deadline`` (of the daemon's clock) ends by DEADLINE.
        """

    @abstractmethod
    def touch(self, block_ids: Iterable[TierKey]) -> None:
        """Note a use, the oldest first. Ids that are not there are no error."""

    @abstractmethod
    def remove(self, block_ids: Iterable[TierKey]) -> int:
        """Forget blocks, for good: they do not come back after a restart. Returns how many were there."""

    @abstractmethod
    def remove_namespace(self, fingerprint: bytes) -> int:
        """Forget all blocks of a namespace, for good. Writes under way are forgotten when they are done."""

    @abstractmethod
    def tick(self) -> None:
        """Called a few times a second: deadlines, and devices that hang."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Its figures."""

    @abstractmethod
    def drain(self) -> None:
        """Take no more writes. Reads go on."""

    @abstractmethod
    def close(self, deadline_s: float) -> bool:
        """End what has not begun by CANCELLED, wait for what has. False where something hangs still, in pool memory.

        What ends meanwhile has its ``on_done`` before this returns. Blocks are kept for the next to open the tier.
        This one waits: not for the daemon's thread while it serves.
        """
