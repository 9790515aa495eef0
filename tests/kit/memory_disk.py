"""A file in memory in the place of the kernel's: it can lose what was not synced, and fail in every way."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from kvoffd.system.files import FileCalls
from kvoffd.tiers.disk.workers import Workers

PAGE = 4096


class Killed(BaseException):
    """The process is dead: nothing may catch this but the test."""


class WorkersWithoutThreads(Workers):
    """What the threads would do, tests do."""

    def __init__(self, *given: Any) -> None:
        *others, _, name = given
        super().__init__(*others, 0, name)


class MemoryDisk(FileCalls):
    """One file. What it holds outlives those who open it; ``lose_power`` leaves what was synced and some of the rest.

    ``fault`` is asked before every call: it gets the call's name and number (from 1 on, by name), may raise OSError or
    Killed, and says of a read or write how many bytes of it are done; None for all.
    """

    def __init__(self, direct: bool = True) -> None:
        self.data = bytearray()
        self.counts: Counter[str] = Counter()
        self.fault: Callable[[str, int], int | None] = lambda name, number: None
        self.locked = False
        self.room = 2**40
        """Bytes that the file system has for the file."""
        self._direct = direct
        self._durable = bytearray()
        self._pending: list[tuple[int, bytes]] = []

    def copy(self) -> MemoryDisk:
        """Another file with what is in this one."""
        twin = MemoryDisk(self._direct)
        twin.data, twin._durable, twin._pending = self.data[:], self._durable[:], list(self._pending)
        return twin

    def lose_power(self, random: Random) -> None:
        """Of what was not synced, each page is there or not, in any order."""
        for offset, page in self._pending:
            if random.random() < 0.5 and offset + len(page) <= len(self._durable):
                self._durable[offset : offset + len(page)] = page
        self._pending.clear()
        self.data = bytearray(self._durable)
        self.locked = False

    def flip(self, offset: int, bit: int) -> None:
        """A bit changes on the device."""
        for image in (self.data, self._durable):
            image[offset] ^= 1 << bit

    def open(self, path: str, directory_fd: int, create: bool) -> int:
        self._ask("open")
        return 1_000_000

    def lock(self, fd: int) -> bool:
        was, self.locked = self.locked, True
        return not was

    def set_direct(self, fd: int, direct: bool) -> None:
        if direct and not self._direct:
            raise OSError(22, "Invalid argument")

    def stat(self, fd: int) -> os.stat_result:
        status = SimpleNamespace(
            st_mode=stat.S_IFREG | 0o600,
            st_nlink=1,
            st_uid=os.geteuid(),
            st_size=len(self.data),
            st_blocks=len(self.data) // 512,
        )
        return cast(os.stat_result, status)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._ask("allocate")
        if offset + length > self.room:
            raise OSError(28, "No space left on device")
        self._resize(max(len(self.data), offset + length))

    def truncate(self, fd: int, size: int) -> None:
        self._ask("truncate")
        self._resize(size)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        limit = self._ask("read")
        done = 0
        for buffer in buffers:
            part = self.data[offset + done : offset + done + len(buffer)]
            if limit is not None:
                part = part[: limit - done]
            buffer[: len(part)] = part
            done += len(part)
            if len(part) < len(buffer):
                break
        return done

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert offset % PAGE == 0, "O_DIRECT takes whole pages"
        try:
            limit = self._ask("write")
        except Killed as death:
            # What was on its way may have come to pass in part.
            self._put(offset, b"".join(buffers)[: death.args[0]])
            raise
        data = b"".join(buffers)
        assert len(data) % PAGE == 0
        assert offset + len(data) <= len(self.data) or offset < 2 * PAGE, "beyond the end of what is allocated"
        self._put(offset, data[:limit])
        return len(data) if limit is None else min(limit, len(data))

    def sync(self, fd: int) -> None:
        self._ask("sync")
        for offset, page in self._pending:
            self._durable[offset : offset + len(page)] = page
        self._pending.clear()

    def close(self, fd: int) -> None:
        self.locked = False

    def _ask(self, name: str) -> int | None:
        self.counts[name] += 1
        return self.fault(name, self.counts[name])

    def _put(self, offset: int, data: bytes) -> None:
        if offset + len(data) > len(self.data):
            self._resize(offset + len(data))
        self.data[offset : offset + len(data)] = data
        for at in range(0, len(data), PAGE):
            self._pending.append((offset + at, data[at : at + PAGE]))

    def _resize(self, size: int) -> None:
        for image in (self.data, self._durable):
            del image[size:]
            image.extend(bytes(size - len(image)))
