"""Engines whose loads are compared, byte by byte, with what was stored, and which must not find what was dropped; and
daemons over a disk."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from kvoffd_client import NamespaceSpec
from kvoffd_client.testing import FakeEngine

from .daemon import DaemonProcess
from .waiting import wait_until
from .wire import DiskStats, books, keys

STEP = 32
"""Keys stored or looked up at once."""
VERSION = 1_000_000
SCRIBBLE = 0xBAD


class Truth(dict[int, int]):
    """What may be served: by number of the key, the checksum of its bytes. Empty it where everything was dropped."""

    version = 0
    """Raised with each drop: what is stored later has other bytes."""

    def drop(self, numbers: Iterable[int] | None = None) -> None:
        """From now on these, or all, must not be found unless they are stored again."""
        for number in list(self) if numbers is None else numbers:
            del self[number]
        self.version += 1


class CheckedEngine(FakeEngine):
    """A FakeEngine that knows what it stored. ``truth`` may be that of several engines; ``shape``: as FakeEngine's.

    The upper half of its blocks is where loads arrive; it is scribbled over before each.
    """

    def __init__(
        self,
        daemon: DaemonProcess | Path,
        truth: Truth | None = None,
        namespace: str | NamespaceSpec = "demo",
        **shape: Any,
    ) -> None:
        self.truth = Truth() if truth is None else truth
        directory = daemon if isinstance(daemon, Path) else daemon.directory
        super().__init__(directory, namespace, **{"layers": 1, "page_bytes": 65536, **shape}, blocks=2 * STEP)

    def put(self, numbers: Iterable[int]) -> None:
        """Store keys, in order, with bytes of their own, which are the same whenever a key is stored again."""
        for _, group in groupby(numbers, lambda number: number // STEP):
            some = list(group)
            blocks = self.write(some)
            result = self.store(keys(*some), blocks, 60.0)
            assert result.ok, result

    def write(self, numbers: Sequence[int]) -> list[int]:
        """Write the bytes of keys, at most ``STEP`` neighbours, into blocks, and return these."""
        blocks = [number % STEP for number in numbers]
        for block, number in zip(blocks, numbers, strict=True):
            self.fill([block], self.truth.version * VERSION + number)
        self.truth.update(zip(numbers, self.checksums(blocks), strict=True))
        return blocks

    def get(self, numbers: Iterable[int], timeout_s: float = 10.0) -> list[int]:
        """Look up, load and compare. Returns the keys that were there; each of them was right."""
        wanted, right = list(numbers), list[int]()
        while wanted:
            found = self.lookup(keys(*wanted[:STEP]), timeout_s)
            some, wanted = wanted[:found], wanted[max(1, found) :]
            if some:
                right += self._load(some, timeout_s)
        return right

    def has(self, numbers: Iterable[int]) -> bool:
        """Whether all are there, and right."""
        return self.get(numbers) == list(numbers)

    def _load(self, numbers: Sequence[int], timeout_s: float) -> list[int]:
        blocks = range(STEP, STEP + len(numbers))
        self.fill(blocks, SCRIBBLE)
        result = self.load(keys(*numbers), blocks, timeout_s)
        assert result.ok or result.failed_keys, result
        failed = set(result.failed_keys)
        sums = dict(zip(numbers, self.checksums(blocks), strict=True))
        arrived = [number for number in numbers if keys(number)[0] not in failed]
        stale = [number for number in arrived if number not in self.truth]
        wrong = [number for number in arrived if number not in stale and sums[number] != self.truth[number]]
        assert not stale, f"served after they were dropped: {stale}"
        assert not wrong, f"served with wrong bytes: {wrong}"
        return arrived

    def count(self, numbers: Iterable[int]) -> int:
        """How many are found, without a load."""
        wanted, found = list(numbers), 0
        while wanted:
            some = self.lookup(keys(*wanted[:STEP]))
            found += some
            wanted = wanted[max(1, some) :]
        return found


# --- daemons over a disk ---------------------------------------------------------------------------


def over_disk(place: Path, pool_size: str = "16MiB", size: str = "32MiB", **given: Any) -> DaemonProcess:
    """A daemon with a disk that takes every block."""
    return DaemonProcess(pool_size, disk=f"{place}={size}", disk_write="always", **given)


def disk_of(daemon: DaemonProcess) -> DiskStats:
    (disk,) = books(daemon.directory).disks
    return disk


def wait_disk(daemon: DaemonProcess, state: str = "serving") -> DiskStats:
    """Until each disk serves, or is in another state; return the first."""
    wait_until(lambda: {one.state for one in books(daemon.directory).disks} == {state}, explain=lambda: daemon.log)
    return books(daemon.directory).disks[0]


def wait_written(daemon: DaemonProcess, blocks: int) -> None:
    """Until so many blocks are on the disk, since the daemon's start."""
    wait_until(lambda: books(daemon.directory).tiers.written_blocks >= blocks, explain=lambda: daemon.log)


def put_on_disk(daemon: DaemonProcess, engine: CheckedEngine, count: int, first: int = 0) -> None:
    """Store this many keys, from ``first`` on, as fast as the disk takes them."""
    before = books(daemon.directory).tiers.written_blocks
    for done in range(0, count, 8):
        engine.put(range(first + done, first + done + 8))
        wait_written(daemon, before + done + 8)


# --- files of pools and disks ----------------------------------------------------------------------


def places_of(file: Path, checksums: Iterable[int], nbytes: int = 65536) -> list[int]:
    """Where a file of a pool or a disk has the bytes of blocks of one page."""
    data, wanted = file.read_bytes(), set(checksums)
    return [at for at in range(0, len(data) - nbytes + 1, 4096) if zlib.crc32(data[at : at + nbytes]) in wanted]


def overwrite(file: Path, place: int, content: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(content)


def flip(file: Path, checksum: int, nbytes: int = 65536, at: int = 100) -> None:
    """Change a byte of the one place that has a block."""
    (place,) = places_of(file, [checksum], nbytes)
    overwrite(file, place + at, bytes([file.read_bytes()[place + at] ^ 1]))
