"""What a tier is: a store of whole blocks outside the pool, on a disk or farther away; and several tiers as one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from enum import Enum
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple, Protocol, cast

MOST_FIRST_BLOCK = 0xFFFF
"""The last engine block of a key that a shard may begin with: the cache has no room for more."""


class TierKey(NamedTuple):
    """Identifies a block among those of all namespaces."""

    fingerprint: bytes
    group: int
    key: bytes


class TierShard(NamedTuple):
    """One rank's part of a block: ``length`` bytes, which are valid from engine block ``first_block`` on."""

    length: int
    first_block: int
    checksum: int
    """As in the pool's slot table. Every read compares it; 0 in an ``AskedTier`` until the block was read."""


class TierBlock(NamedTuple):
    id: TierKey
    shards: tuple[TierShard, ...]
    """By rank; their number is the world size."""

    @property
    def nbytes(self) -> int:
        return sum(shard.length for shard in self.shards)


class TierResult(Enum):
    DONE = "done"
    """Every byte is in place; after a read, the bytes have their checksum."""
    PRESENT = "present"
    """The block was there already, and was not written. Only of an ``AskedTier``."""
    GONE = "gone"
    """The block was removed before it was read or written."""
    CORRUPT = "corrupt"
    """The bytes that were read are not those that were written. The block is removed; the memory's content is void."""
    FAILED = "failed"
    """The device or the file system failed. After a read the block is removed."""
    DEADLINE = "deadline"
    """The deadline passed before the read or write began."""
    CANCELLED = "cancelled"
    """The tier was closed before the read or write began."""


OnDone = Callable[[TierResult], None]
Digest = Callable[[memoryview], int]
"""The checksum of some bytes; never 0. For any thread."""


class TierListener(Protocol):
    """Called in the daemon's thread when a tier's blocks change."""

    def tier_stored(self, tier: Tier, block: TierBlock) -> None:
        """The block can be read from the tier from now on."""

    def tier_removed(self, tier: Tier, ids: Sequence[TierKey]) -> None:
        """The blocks cannot be read from the tier any more, whatever the reason."""

    def tier_error(self, tier: Tier, kind: str, sentence: str) -> None:
        """Something went wrong. ``kind`` is one word, or two joined by ``_``; errors are counted by kind.

        Of one of several servers its name follows, after a space.
        """

    def tier_answered(
        self, tier: AskedTier, fingerprint: bytes, group: int, keys: Sequence[bytes], found: Sequence[bool]
    ) -> None:
        """What an ``AskedTier`` was asked for is known: of each key whether it is there, and of use."""


class TierStats(NamedTuple):
    """A tier's sizes and queues as they are now, and what it has done since it was opened: fields of ``DiskStats``."""

    size_bytes: int
    used_bytes: int = 0
    physical_bytes: int = 0
    blocks: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    evicted_blocks: int = 0
    refused_writes: int = 0
    queued_reads: int = 0
    queued_writes: int = 0
    running_reads: int = 0
    running_writes: int = 0
    busy_seconds: float = 0.0
    errors: Mapping[str, int] = MappingProxyType({})


class Tier(ABC):
    """Keeps whole blocks outside the pool and brings them back.

    Every method is called in the daemon's one thread, returns at once and does no I/O there. ``on_done`` and the
    listener are called in that thread too, but never from within the call that they belong to. A read or write that was
    taken ends by exactly one ``on_done``; until then its pool memory stays as it is, and the tier touches no other.
    A failure is a miss, and the listener is told of it; an error of a device is never raised here.
    """

    name: str
    """The tier's name for operators, such as ``disk:/mnt/nvme0``."""

    @abstractmethod
    def groups(self) -> Collection[tuple[bytes, int]]:
        """The fingerprints and groups that the tier has blocks of now; each has an ``index``."""

    @abstractmethod
    def index(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        """The tier's blocks by key: a live view, neither to be changed nor to be kept over other calls."""

    def readable(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        """The blocks of the ``index`` that may be read now: none of a device that hangs. A live view too."""
        return self.index(fingerprint, group)

    @abstractmethod
    def write(self, block: TierBlock, offsets: Sequence[int], on_done: OnDone) -> bool:
        """Begin to write a block, whose shards lie at these pool offsets, by rank. False where it is not taken now.

        Older blocks are evicted for it. A block that is there already is not taken. It can be read once this is DONE.
        """

    @abstractmethod
    def read(self, block_id: TierKey, offsets: Sequence[int], deadline: float, on_done: OnDone) -> bool:
        """Begin to read a block into these pool offsets, by rank. False where it is not there, or not taken now.

        Reads go before writes. One that has not begun by the ``deadline`` (of the daemon's clock) ends by DEADLINE.
        """

    def contents(self, block: TierBlock) -> TierBlock:
        """The block as it was read. For the ``on_done`` of a read that is DONE."""
        return block

    @abstractmethod
    def touch(self, block_ids: Iterable[TierKey]) -> None:
        """Note a use of each block, in this order. Ids that are not there are ignored."""

    @abstractmethod
    def remove(self, block_ids: Iterable[TierKey]) -> int:
        """Remove blocks for good: see ``removals_kept``. Returns how many were there."""

    def forget(self, block_ids: Iterable[TierKey]) -> None:
        """Keep blocks from coming back that this node has dropped."""
        self.remove(block_ids)

    @abstractmethod
    def remove_namespace(self, fingerprint: bytes) -> int:
        """Remove all blocks of a namespace for good, also those being written. Returns how many could be read.

        The listener may be told of them later, but of each before it is stored again.
        """

    @property
    def full_bytes(self) -> int:
        """Bytes that it keeps if each block that is written takes the place of others; 0 while there is room."""
        return 0

    def removals_kept(self) -> Callable[[], bool]:
        """What says whether all that was removed up to now stays away also after a kill or a power cut."""
        return lambda: True

    @abstractmethod
    def tick(self) -> None:
        """Called a few times a second: ends what is too late, and notices devices that hang."""


class DeviceTier(Tier):
    """A tier of a device that no other daemon writes to. Who has opened it measures and closes it."""

    @abstractmethod
    def stats(self) -> TierStats: ...

    @abstractmethod
    def close(self, deadline_s: float) -> bool:
        """End reads and writes that have not begun by CANCELLED, and wait for the others.

        Returns False where one still hangs, and may use pool memory. What ends meanwhile has its ``on_done`` before
        this returns. The blocks stay for the next daemon that opens the tier. This call waits: it must not be made in
        the daemon's thread while that serves engines.
        """


class Answer(Enum):
    """What is known of whether a block is there."""

    YES = "yes"
    NO = "no"
    ASKED = "asked"
    """It is being asked. Within ``ask_deadline_s`` this becomes another answer."""
    UNKNOWN = "unknown"


class AskedTier(Tier):
    """A tier that others write to as well, and that may forget: what it has is only known by asking.

    ``index`` has what is believed to be there, for whoever would write it again; ``readable`` what it answered YES for
    a moment ago. Neither says what their checksums and first blocks are: that is learned by reading (``contents``).
    ``groups`` is empty, and the listener's ``tier_stored`` and ``tier_removed`` are not called. ``remove`` is for
    blocks that nobody may read; ``forget`` does without them for a while, and ``remove_namespace`` forgets the answers,
    since others use the blocks.
    """

    ask_deadline_s: float
    """What was asked and is not answered after so many seconds is not there."""
    most_window_keys: int
    """Keys of a window that may be asked for at a time, the last ones."""

    @property
    @abstractmethod
    def reachable(self) -> bool:
        """Whether asking, reading and writing are tried at all now."""

    @abstractmethod
    def ask(
        self, owner: int, fingerprint: bytes, group: int, lengths: Sequence[int], keys: Sequence[bytes], *, prefix: bool
    ) -> int:
        """Begin to ask for keys whose answer is UNKNOWN. ``lengths``: bytes of a block's shards, by rank.

        ``prefix``: they follow one another from the root of a prefix on, and behind a gap nothing is of use.

        Returns for how many of them, from the first on: where too much is being asked already, the others stay UNKNOWN.
        An ``owner`` who asks for much must not keep others waiting.
        """

    @abstractmethod
    def answers(self, fingerprint: bytes, group: int, keys: Sequence[bytes]) -> list[Answer]:
        """What is known of each key now."""

    @abstractmethod
    def forget(self, block_ids: Iterable[TierKey]) -> None: ...

    @abstractmethod
    def poll(self, fingerprint: bytes) -> None:
        """Look whether all blocks of a namespace were made void, unless that was done lately."""

    @abstractmethod
    def take_voided(self) -> Collection[bytes]:
        """Fingerprints of namespaces whose blocks were made void, for all nodes, since the last call."""


class CompositeTier(Tier):
    """Several tiers as one, such as the directories of the disk tier. Members may come while the daemon serves.

    Each block is in one member. A new block is written to the member that has room, the fewest waiting writes, and the
    least in use. Members are made with the listener, and call it themselves.
    """

    name = "disk"

    def __init__(self) -> None:
        self._members: list[DeviceTier] = []
        self._writing: set[TierKey] = set()

    def attach(self, tier: DeviceTier) -> None:
        """Adds a member; the blocks that it holds can be read from now on."""
        self._members.append(tier)

    def groups(self) -> Collection[tuple[bytes, int]]:
        return {name for tier in self._members for name in tier.groups()}

    def index(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        return _merged([tier.index(fingerprint, group) for tier in self._members])

    def readable(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        return _merged([tier.readable(fingerprint, group) for tier in self._members])

    def write(self, block: TierBlock, offsets: Sequence[int], on_done: OnDone) -> bool:
        if block.id in self._writing or self._holders(block.id):
            return False

        def done(result: TierResult) -> None:
            self._writing.discard(block.id)
            on_done(result)

        if any(tier.write(block, offsets, done) for tier in self._best_members(block.nbytes)):
            self._writing.add(block.id)
            return True
        return False

    def _best_members(self, nbytes: int) -> list[DeviceTier]:
        if len(self._members) < 2:
            return self._members
        figures = [(tier, tier.stats()) for tier in self._members]
        figures.sort(
            key=lambda item: (
                item[1].used_bytes + nbytes > item[1].size_bytes,
                item[1].queued_writes,
                item[1].used_bytes / item[1].size_bytes,
            )
        )
        return [tier for tier, _ in figures]

    def _holders(self, block_id: TierKey) -> list[DeviceTier]:
        return [tier for tier in self._members if block_id.key in tier.index(block_id.fingerprint, block_id.group)]

    def read(self, block_id: TierKey, offsets: Sequence[int], deadline: float, on_done: OnDone) -> bool:
        return any(tier.read(block_id, offsets, deadline, on_done) for tier in self._members)

    def touch(self, block_ids: Iterable[TierKey]) -> None:
        ids = list(block_ids)
        for tier in self._members:
            tier.touch(ids)

    def remove(self, block_ids: Iterable[TierKey]) -> int:
        ids = list(block_ids)
        return sum(tier.remove(ids) for tier in self._members)

    def remove_namespace(self, fingerprint: bytes) -> int:
        return sum(tier.remove_namespace(fingerprint) for tier in self._members)

    @property
    def full_bytes(self) -> int:
        each = [tier.full_bytes for tier in self._members]
        return sum(each) if all(each) else 0

    def removals_kept(self) -> Callable[[], bool]:
        kept = [tier.removals_kept() for tier in self._members]
        return lambda: all(one() for one in kept)

    def tick(self) -> None:
        for tier in self._members:
            tier.tick()


class _Merged(ChainMap[bytes, TierBlock]):
    """The blocks of several tiers. A key that two have comes twice: a set of a million takes 0.2 s."""

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self.maps)

    def __len__(self) -> int:
        return sum(map(len, self.maps))


def _merged(views: Sequence[Mapping[bytes, TierBlock]]) -> Mapping[bytes, TierBlock]:
    if len(views) == 1:
        return views[0]
    # A ChainMap changes its first map only when it is itself changed, which a view never is.
    return _Merged(*[cast(MutableMapping[bytes, TierBlock], view) for view in views])
