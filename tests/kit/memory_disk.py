"""Files in memory in the place of the kernel's: they can lose what was not synced, and fail in every way."""

from __future__ import annotations

import os
import stat
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_ubyte
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from kvoffd.pool.checksums import digest
from kvoffd.system.files import FileCalls, read_all
from kvoffd.system.threads import ENDED_AT_ONCE, AbandonableThreads, Workers
from kvoffd.tiers import DISK_NAME
from kvoffd.tiers.disk import DiskTier
from kvoffd.tiers.disk_io import BlockRead, EndedRead, Reads
from kvoffd.tiers.header import BlockGroup

PAGE = 4096


class Killed(BaseException):
    """The process is dead: nothing may catch this but the test."""


class WorkersWithoutThreads(Workers[Any, Any]):
    """What the threads would do, tests do."""

    def _start(self) -> None:
        self._threads = AbandonableThreads((), lambda: None)

    def begin(self, number: int = 0) -> list[Any]:
        """What a thread that has nothing to do would do now."""
        with self._changed:
            return [] if number in self._running else self._begin(number)

    def work(self) -> None:
        """Do all that waits."""
        while tasks := self.begin():
            self._do(0, tasks)

    def _wait_idle(self, until: float) -> bool:
        for number, (_, tasks) in list(self._running.items()):
            self._do(number, tasks)
        self.work()
        return not self._waiting


class ReadsWithoutThreads(Reads):
    """What the kernel and a thread would do, tests do."""

    def _open(self) -> None:
        self.added, self._ended = deque[BlockRead](), list[EndedRead]()

    def _add(self, read: BlockRead) -> None:
        self.added.append(read)

    def _take_ended(self) -> list[EndedRead]:
        taken, self._ended = self._ended[:ENDED_AT_ONCE], self._ended[ENDED_AT_ONCE:]
        return taken

    def do(self, read: BlockRead) -> None:
        views = [memoryview((c_ubyte * size).from_address(at)).cast("B") for at, size in read.parts]
        try:
            read_all(self._file.calls, self._file.fd, views, read.offset)
        except OSError as error:
            ended = EndedRead(read.number, -(error.errno or 0), ())
        else:
            sums = [digest(view[:wanted]) for view, wanted in zip(views, read.summed, strict=True)]
            ended = EndedRead(read.number, sum(map(len, views)), sums)
        self._ended.append(ended)
        self._post(self._deliver)

    def work(self) -> None:
        """Do all that was begun."""
        while self.added:
            self.do(self.added.popleft())

    def _stop(self, until: float) -> bool:
        return True

    def close(self, until: float) -> bool:
        self.work()
        return super().close(until)


def names_of(tier: DiskTier) -> Iterator[tuple[BlockGroup, bytes]]:
    """All blocks of a disk tier that can be read."""
    for known in tier._map.readable_by_tag.values():
        yield from ((known.group, key) for key in tier._map.keys_of(known))


class MemoryFile:
    def __init__(self) -> None:
        self.data, self.durable = bytearray(), bytearray()
        self.pending: list[tuple[int, bytes]] = []

    def resize(self, size: int) -> None:
        for image in (self.data, self.durable):
            del image[size:]
            image.extend(bytes(size - len(image)))

    def copy(self) -> MemoryFile:
        twin = MemoryFile()
        twin.data, twin.durable, twin.pending = self.data[:], self.durable[:], list(self.pending)
        return twin


def no_fault(name: str, number: int) -> None: ...


class MemoryDisk(FileCalls):
    """A directory, which outlives those who open it; ``lose_power`` leaves what was synced and some of the rest.

    ``fault`` is asked before every call: it gets the call's name and number (from 1 on, by name), may raise OSError or
    Killed, and says of a read or write how many bytes of it are done; None for all.
    """

    def __init__(self, direct: bool = True) -> None:
        self.files: dict[str, MemoryFile] = {}
        self.counts: Counter[str] = Counter()
        self.fault: Callable[[str, int], int | None] = no_fault
        self.locked = False
        self.room = 2**40
        """Bytes that the file system has for ``kvoffd.disk``."""
        self._direct = direct

    @property
    def data(self) -> bytearray:
        """Of ``kvoffd.disk``."""
        return self.files[DISK_NAME].data

    def copy(self) -> MemoryDisk:
        """Another directory with what is in this one."""
        twin = MemoryDisk(self._direct)
        twin.files = {name: file.copy() for name, file in self.files.items()}
        return twin

    def lose_power(self, random: Random) -> None:
        """Of what was not synced, each page is there or not, in any order."""
        for file in self.files.values():
            for offset, page in file.pending:
                if random.random() < 0.5 and offset + len(page) <= len(file.durable):
                    file.durable[offset : offset + len(page)] = page
            file.pending.clear()
            file.data = bytearray(file.durable)
        self.locked = False

    def flip(self, offset: int, bit: int) -> None:
        """A bit of ``kvoffd.disk`` changes on the device."""
        for image in (self.data, self.files[DISK_NAME].durable):
            image[offset] ^= 1 << bit

    def open(self, path: str, directory_fd: int, create: bool) -> int:
        self._ask("open")
        self.files.setdefault(path, MemoryFile())
        return 1_000_000 + list(self.files).index(path)

    def _file(self, fd: int) -> MemoryFile:
        return list(self.files.values())[fd - 1_000_000]

    def lock(self, fd: int) -> bool:
        if fd > 1_000_000:
            return True
        was, self.locked = self.locked, True
        return not was

    def set_direct(self, fd: int, direct: bool) -> None:
        if direct and not self._direct:
            raise OSError(22, "Invalid argument")

    def stat(self, fd: int) -> os.stat_result:
        file = self._file(fd)
        status = SimpleNamespace(
            st_mode=stat.S_IFREG | 0o600,
            st_nlink=1,
            st_uid=os.geteuid(),
            st_size=len(file.data),
            st_blocks=len(file.data) // 512 if fd == 1_000_000 else 0,
        )
        return cast(os.stat_result, status)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._ask("allocate")
        if offset + length > self.room:
            raise OSError(28, "No space left on device")
        file = self._file(fd)
        file.resize(max(len(file.data), offset + length))

    def has_data(self, fd: int, offset: int, nbytes: int) -> bool:
        return any(self._file(fd).data[offset : offset + nbytes])

    def truncate(self, fd: int, size: int) -> None:
        self._ask("truncate")
        self._file(fd).resize(size)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        limit = self._ask("read")
        done, file = 0, self._file(fd)
        for buffer in buffers:
            part = file.data[offset + done : offset + done + len(buffer)]
            if limit is not None:
                part = part[: max(0, limit - done)]
            buffer[: len(part)] = part
            done += len(part)
            if len(part) < len(buffer):
                break
        return done

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        data, direct = b"".join(buffers), fd == 1_000_000
        if direct:
            assert offset % PAGE == 0, "O_DIRECT takes whole pages"
            assert len(data) % PAGE == 0
            assert offset + len(data) <= len(self.data) or offset == 0, "beyond the end of what is allocated"
        try:
            limit = self._ask("write" if direct else "note")
        except Killed as death:
            # What was on its way may have come to pass in part.
            self._put(fd, offset, data[: death.args[0]])
            raise
        self._put(fd, offset, data[:limit])
        return len(data) if limit is None else min(limit, len(data))

    def sync(self, fd: int) -> None:
        self._ask("sync")
        file = self._file(fd)
        for offset, page in file.pending:
            file.durable[offset : offset + len(page)] = page
        file.pending.clear()

    def close(self, fd: int) -> None:
        self.locked = self.locked and fd != 1_000_000

    def _ask(self, name: str) -> int | None:
        self.counts[name] += 1
        return self.fault(name, self.counts[name])

    def _put(self, fd: int, offset: int, data: bytes) -> None:
        file = self._file(fd)
        if offset + len(data) > len(file.data):
            file.resize(offset + len(data))
        file.data[offset : offset + len(data)] = data
        for at in range(0, len(data), PAGE):
            file.pending.append((offset + at, data[at : at + PAGE]))
