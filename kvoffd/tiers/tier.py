"""What a tier is: a store of whole blocks below the pool, on a disk or shared by several nodes. And what these two have
in common: the header of a block, and threads for what waits.

Every method of a tier is called in the daemon's one thread, returns at once and does no I/O there. An ``on_end`` is
called in that thread too, never from within the call that it belongs to. So are the methods of ``TierListener``, some
in the middle of a change: they call no tier.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import xxhash

from kvoffd.system.threads import DaemonThreads

logger = logging.getLogger(__name__)

ABSENT, PRESENT, ASKED = 0, 1, 2
"""What ``find`` says of a key. ASKED: its answer comes to ``TierListener.answered`` before the tier's ask deadline."""

HEADER_BYTES = 4096
"""Of a block on a disk and in a shared store: they say which block it is, and its checksums.

Little-endian: a magic, the generation, the group, the lengths of fingerprint and key, the number of shards; fingerprint
and key; of each shard its length in bytes, its checksum and its first block; zeros; and the checksum of all this."""
MAGIC = b"kvoffdB1"
_HEAD = struct.Struct("<8sQIHHI")
_SHARD = struct.Struct("<QQI")
_SUM = struct.Struct("<Q")
MOST_GENERATION = 2**62
"""Of a block that is believed: others can follow."""
MOST_FIRST_BLOCK = 0xFFFF
"""The last engine block of a key that a shard may begin with: the cache has no room for more."""

ENDED_AT_ONCE = 8
"""Tasks whose ends are handled before the daemon's thread does other work: one or two milliseconds."""

READERS_NICE = 5
"""How much the priority of threads that read is below that of the daemon's own, which answers engines. Measured on two
CPUs that other processes wanted too, while blocks came up from Redis: half of the lookups took at most 2 ms instead of
5, 99 of 100 at most 13 instead of 49. While an engine never sleeps blocks come a fifth slower, else as fast."""

REMEMBERED_SPACES = 1024
"""Whose hash is not taken again."""

T = TypeVar("T")
R = TypeVar("R")


class Space(NamedTuple):
    """One group of the blocks of a namespace. A reset raises ``generation``: what was written before is absent then.

    Attributes:
        fingerprint: of the namespace, 32 bytes.
        generation: when the namespace was last reset, in microseconds since 1970, or a little more; 0 for never.
        group: index of the group in the namespace.
        lengths: bytes of a block's shard, by rank.
        tag: 64 bits of a hash of the first three.
    """

    fingerprint: bytes
    generation: int
    group: int
    lengths: tuple[int, ...]
    tag: int

    @property
    def nbytes(self) -> int:
        """Bytes of a block, all ranks together."""
        return sum(self.lengths)


def make_space(fingerprint: bytes, generation: int, group: int, lengths: Sequence[int]) -> Space:
    return _space(fingerprint, generation, group, tuple(lengths))


@lru_cache(REMEMBERED_SPACES)
def _space(fingerprint: bytes, generation: int, group: int, lengths: tuple[int, ...]) -> Space:
    identity = fingerprint + generation.to_bytes(8, "little") + group.to_bytes(2, "little")
    tag = int.from_bytes(blake2b(identity, digest_size=8).digest(), "little")
    return Space(fingerprint, generation, group, lengths, tag)


class Block(NamedTuple):
    """A block as it is written, and as a read found it.

    Attributes:
        space: its group.
        key: at most 64 bytes.
        first_blocks: by rank, the first engine block of the shard that is valid.
        checksums: by rank, as in the pool's slot table; never 0.
    """

    space: Space
    key: bytes
    first_blocks: tuple[int, ...]
    checksums: tuple[int, ...]


def fits_header(space: Space, key_bytes: int) -> bool:
    """Whether there is room for the names and all shards of a block."""
    named = _HEAD.size + len(space.fingerprint) + key_bytes + len(space.lengths) * _SHARD.size
    return named + _SUM.size <= HEADER_BYTES


def _names(space: Space, key: bytes) -> bytes:
    """What a header begins with."""
    head = _HEAD.pack(MAGIC, space.generation, space.group, len(space.fingerprint), len(key), len(space.lengths))
    return head + space.fingerprint + key


def encode_header(block: Block) -> bytes:
    shards = map(_SHARD.pack, block.space.lengths, block.checksums, block.first_blocks)
    data = b"".join([_names(block.space, block.key), *shards]).ljust(HEADER_BYTES - _SUM.size, b"\0")
    return data + _SUM.pack(xxhash.xxh3_64_intdigest(data))


def decode_header(data: bytes | memoryview, space: Space, key: bytes) -> Block | None:
    """The block that a header tells of; None where it is not a whole header of this very block, or of one that cannot
    be."""
    names = _names(space, key)
    end = len(names) + len(space.lengths) * _SHARD.size
    if data[: len(names)] != names or len(data) != HEADER_BYTES or end + _SUM.size > HEADER_BYTES:
        return None
    if data[-_SUM.size :] != _SUM.pack(xxhash.xxh3_64_intdigest(data[: -_SUM.size])):
        return None
    shards = list(_SHARD.iter_unpack(data[len(names) : end]))
    lengths, checksums, firsts = zip(*shards, strict=True) if shards else ((), (), ())
    if lengths != space.lengths or not all(checksums) or max(firsts, default=0) > MOST_FIRST_BLOCK:
        return None
    return Block(space, key, firsts, checksums)


def parse_header(data: bytes | memoryview) -> Block | None:
    """As ``decode_header``, of whatever block."""
    if len(data) != HEADER_BYTES:
        return None
    _, generation, group, fingerprint_bytes, key_bytes, ranks = _HEAD.unpack_from(data)
    key_at = _HEAD.size + fingerprint_bytes
    shards_at = key_at + key_bytes
    if generation > MOST_GENERATION or group > 0xFFFF or shards_at + ranks * _SHARD.size > HEADER_BYTES:
        return None
    lengths = [_SHARD.unpack_from(data, shards_at + rank * _SHARD.size)[0] for rank in range(ranks)]
    space = make_space(bytes(data[_HEAD.size : key_at]), generation, group, lengths)
    return decode_header(data, space, bytes(data[key_at:shards_at]))


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
    def blocks_stored(self, tier: Tier, space: Space, keys: Sequence[bytes]) -> None:
        """A disk has these blocks from now on (for KV events). Shared tiers do not call it."""

    def blocks_removed(self, tier: Tier, space: Space, keys: Sequence[bytes]) -> None:
        """A disk has these blocks no more, whatever the reason. Shared tiers do not call it."""

    def answered(self, tier: Tier, space: Space, keys: Sequence[bytes], found: Sequence[bool]) -> None:
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
    def find(self, space: Space, keys: Sequence[bytes], *, prefix: bool) -> bytes:
        """Say of each key ABSENT, PRESENT or ASKED. ``prefix``: behind a gap nothing is of use.

        A device that hangs has nothing. A shared tier asks for what it does not know, up to a bound; beyond it ABSENT.
        """

    @abstractmethod
    def wants(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        """Of each key, whether a write of it would be of use: it is absent, or due to be refreshed."""

    @abstractmethod
    def read(self, space: Space, key: bytes, offsets: Sequence[int], patience_s: float, on_end: ReadEnd) -> bool:
        """Begin to read into these pool offsets, by rank. False where the block is not there or not taken now.

        Args:
            patience_s: how long the block may take from when its turn has come. Until then it waits for those before
                it, as long as these come; once the device or server hangs, or is left alone, it ends too.
        """

    @abstractmethod
    def write(self, block: Block, offsets: Sequence[int], on_end: WriteEnd) -> bool:
        """Begin to write from these pool offsets, by rank. False where it is not taken now."""

    def used(self, space: Space, keys: Sequence[bytes]) -> None:  # noqa: B027
        """These blocks leave the pool: a disk's hand spares them once, as what is read. Unknown ones are ignored."""

    @abstractmethod
    def remove(self, space: Space, keys: Sequence[bytes], why: str) -> None:
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


class Workers(Generic[T, R]):
    """A queue and its threads, which do not keep a process from ending. Each task ends once.

    Args:
        name: of the threads.
        works: one for each thread, so that it may have a connection of its own. It does some tasks and gives the result
            of each, in their order. A task has ended when its result was taken, though others of them go on.
        failed: gives the result of those that have none where it raises. For any thread.
        on_end: called in the daemon's thread, with a task and its result.
        post: calls a function in the daemon's thread. For any thread.
        clock: in seconds. For any thread.
        take: takes from the queue, which is not empty, what is done in one go. Called in any thread, one at a time.
        nice: how much the threads' priority is below that of the daemon's thread.

    Raises NoMoreThreads; then none runs.
    """

    def __init__(
        self,
        name: str,
        works: Sequence[Callable[[list[T]], Iterable[R]]],
        failed: Callable[[Exception], R],
        on_end: Callable[[T, R], None],
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        take: Callable[[deque[T]], list[T]] = lambda waiting: [waiting.popleft()],
        *,
        nice: int = 0,
    ) -> None:
        self._name = name
        self._works, self._failed, self._on_end = works, failed, on_end
        self._post, self._clock, self._take = post, clock, take
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._idle = threading.Condition(lock)
        self._waiting: deque[T] = deque()
        self._running: dict[int, tuple[float, list[T]]] = {}  # by thread: since when, and what has not ended
        self._ended: deque[tuple[T, R]] = deque()
        self._posted = self._stopped = self._called = False
        self.busy_seconds = 0.0
        self._nice = nice
        self._start()

    def _start(self) -> None:
        works = ((f"{self._name}-{number}", partial(self._run, number)) for number in range(len(self._works)))
        self._threads = DaemonThreads(works, self._stop, self._nice)

    def put(self, task: T) -> None:
        with self._changed:
            self._waiting.append(task)
            self._call_one()

    def end(self, result: R, which: Callable[[T], bool] = lambda task: True) -> int:
        """End tasks that nobody has begun, in this thread and with this result; returns how many."""
        with self._changed:
            ended = [task for task in self._waiting if which(task)]
            if ended:
                kept = [task for task in self._waiting if not which(task)]
                self._waiting.clear()
                self._waiting.extend(kept)
            self._notify_idle()
        for task in ended:
            self._finish(task, result)
        return len(ended)

    @property
    def waiting(self) -> int:
        """Tasks that nobody has begun."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Tasks that have begun and not ended."""
        with self._changed:
            return sum(len(tasks) for _, tasks in self._running.values())

    @property
    def longest_s(self) -> float:
        """How long the oldest running call has taken so far."""
        with self._changed:
            return max((self._clock() - begun for begun, _ in self._running.values()), default=0.0)

    def close(self, until: float) -> bool:
        """Wait until nothing waits or runs, handle all ends, and end the threads. For the daemon's thread.

        False where something still hangs at ``until`` (of ``time.monotonic``); then it may be called again.
        """
        idle = self._wait_idle(until)
        self._deliver(len(self._ended))
        if not idle:
            return False
        self._stop()
        return self._threads.join(until)

    def _wait_idle(self, until: float) -> bool:
        with self._idle:
            return self._idle.wait_for(
                lambda: not self._waiting and not self._running, max(0.0, until - time.monotonic())
            )

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _deliver_some(self) -> None:
        self._posted = False
        self._deliver(min(ENDED_AT_ONCE, len(self._ended)))
        if self._ended:
            self._posted = True
            self._post(self._deliver_some)

    def _deliver(self, count: int) -> None:
        for _ in range(count):
            self._finish(*self._ended.popleft())

    def _finish(self, task: T, result: R) -> None:
        try:
            self._on_end(task, result)
        except Exception:
            logger.exception("The end of a task of %s raised: a bug; the others go on.", self._name)

    def _run(self, number: int) -> None:
        while True:
            with self._changed:
                if self._stopped:
                    return
                self._called = False
                if not (tasks := self._begin(number)):
                    self._changed.wait()
                    continue
                if self._waiting:
                    self._call_one()
            self._do(number, tasks)

    def _call_one(self) -> None:
        """Wake a thread; one that takes tasks and leaves some wakes the next."""
        if not self._called:
            self._called = True
            self._changed.notify()

    def _begin(self, number: int) -> list[T]:
        tasks = self._take(self._waiting) if self._waiting else []
        if tasks:
            self._running[number] = self._clock(), tasks
        return tasks

    def _do(self, number: int, tasks: list[T]) -> None:
        begun = time.perf_counter()
        try:
            for result in self._works[number](tasks.copy()):
                self._end_first(tasks, [result])
            assert not tasks
        except Exception as error:
            self._end_first(tasks, [self._failed(error)] * len(tasks))
        with self._changed:
            self.busy_seconds += time.perf_counter() - begun
            del self._running[number]
            # This thread takes the next tasks: no other need be woken.
            self._notify_idle()

    def _end_first(self, tasks: list[T], results: list[R]) -> None:
        """The first of these have ended."""
        with self._changed:
            self._ended.extend([(tasks.pop(0), result) for result in results])
            wake, self._posted = not self._posted, True
        if wake:
            self._post(self._deliver_some)

    def _notify_idle(self) -> None:
        if not self._waiting and not self._running:
            self._idle.notify_all()
