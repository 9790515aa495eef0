"""Sources of the memory for a pool and its slot table: memory of this process alone, memfds, or a file on tmpfs or
hugetlbfs; existing or new."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from kvoffd.errors import KvoffdError, PoolTooLarge, UnsafeSegment
from kvoffd.pool.allocator import PoolSegment
from kvoffd.pool.memory import PoolMemory, allocate_near
from kvoffd.pool.slot_table import BadTable, TableGeometry, check_table, is_table
from kvoffd.system.files import (
    FileCalls,
    FileInUse,
    OnError,
    claim_file,
    foreign_owner,
    held_bytes,
    is_regular,
    try_lock,
)
from kvoffd.system.limits import (
    MemoryLimit,
    check_fits,
    fits_reserved,
    free_huge_pages,
    lies_on_hugetlbfs,
    memory_limit,
    open_pool_directory,
    tmpfs_limit,
)
from kvoffd.system.mappings import HUGETLBFS_MAGIC, filesystem_magic
from kvoffd.system.numa import NOWHERE
from kvoffd_proto.units import format_size

# The pool's offset in the file is a multiple of this and of the file system's page size, so tmpfs can use huge pages.
_ALIGNMENT = 2 << 20
POOL_NAME, TABLE_NAME = "kvoffd-pool", "kvoffd-slot-table"
"""Names of memfds, in /proc/self/maps and in systemd's fd store."""
NO_LIMIT = 2**63 - 1
_RESERVED_LIMIT = MemoryLimit(NO_LIMIT, "reserved huge pages")
"""Limit of a pool all of which fits into reserved huge pages: no other memory matters."""

Memories: TypeAlias = tuple[PoolMemory, PoolMemory]
"""Memory of a pool, and of its slot table."""


class NewBacking:
    """New memory, which ends with this process: in reserved huge pages if the machine has enough, else private.

    Args:
        on_progress: called with the bytes of reserved pages taken so far.
        should_stop: once it returns True, no more are taken: the daemon ends without using the pool.
        takes_reserved: False: not in reserved huge pages.
    """

    def __init__(
        self,
        on_progress: Callable[[int], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
        *,
        takes_reserved: bool = True,
    ) -> None:
        self._take_reserved = partial(
            PoolMemory.take_reserved, name=POOL_NAME, on_progress=on_progress, should_stop=should_stop
        )
        self._may_use_reserved = takes_reserved

    def limit(self, pool_bytes: int) -> MemoryLimit:
        return _RESERVED_LIMIT if self._fits_reserved(pool_bytes) else memory_limit()

    def find(self, geometry: TableGeometry) -> None:
        """There never is an earlier daemon's."""

    def make(self, geometry: TableGeometry, segments: Sequence[PoolSegment]) -> Memories:
        """Make new memory, all zeros; reserved huge pages of each segment near its NUMA node. Raises PoolTooLarge."""
        size_bytes = geometry.pool_bytes
        in_reserved = self._fits_reserved(size_bytes)
        if not in_reserved:  # another process may have taken the pages that ``limit`` saw
            check_fits(size_bytes + geometry.size_bytes, memory_limit())
        create = partial(PoolMemory.create_private, size_bytes)
        take_reserved = partial(self._take_reserved, size_bytes, segments=segments) if in_reserved else None
        return _make_new(geometry, create, take_reserved)

    def _fits_reserved(self, pool_bytes: int) -> bool:
        return self._may_use_reserved and fits_reserved(pool_bytes)


class MemfdBacking:
    """Sealed memfds: new ones, in reserved huge pages if the machine has enough, or an earlier daemon's.

    Args:
        stored: descriptors of the earlier daemon's pool and table; this object closes them.
        on_discard: called if they are unusable, after they are closed and before new ones are made.
        on_progress, should_stop, takes_reserved: see ``NewBacking``. An earlier daemon's memory is reused in any case.
    """

    def __init__(
        self,
        stored: tuple[int, int] | None = None,
        on_discard: Callable[[], None] | None = None,
        on_progress: Callable[[int], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
        *,
        takes_reserved: bool = True,
    ) -> None:
        self._stored, self._on_discard = stored, on_discard
        self._take_reserved = partial(
            PoolMemory.take_reserved, name=POOL_NAME, on_progress=on_progress, should_stop=should_stop
        )
        self._may_use_reserved = takes_reserved

    def limit(self, pool_bytes: int) -> MemoryLimit:
        """Return the memory available for a pool and its table, including what they hold already in either kind of
        memory."""
        reserved_bytes = self._held_bytes(reserved=True)
        is_reserved = reserved_bytes >= pool_bytes  # an earlier daemon's, which is reused whatever the setting is now
        if is_reserved or (self._may_use_reserved and fits_reserved(pool_bytes, freed_bytes=reserved_bytes)):
            return _RESERVED_LIMIT
        limit = memory_limit()
        return MemoryLimit(limit.bytes + self._held_bytes(reserved=False), limit.source)

    def find(self, geometry: TableGeometry) -> Memories | None:
        """Map the memory of an earlier daemon; None if there is none. Raises BadTable if it has another geometry."""
        if self._stored is None:
            return None
        pool_fd, table_fd = self._stored
        check_table(table_fd, geometry)
        if (size := os.fstat(pool_fd).st_size) != geometry.pool_bytes:
            raise BadTable(f"The pool's memory has {size} bytes, but its slot table gives another size.")
        try:
            pool = PoolMemory.of_memfd(pool_fd, geometry.pool_bytes)
            with OnError(pool.close):
                return pool, PoolMemory.of_memfd(table_fd, geometry.size_bytes)
        except UnsafeSegment as error:
            raise BadTable(f"The stored memory is not a pool of kvoffd: {error.message}") from error

    def make(self, geometry: TableGeometry, segments: Sequence[PoolSegment]) -> Memories:
        """Make new memory, as ``NewBacking`` does, after freeing an earlier daemon's. Raises PoolTooLarge."""
        size_bytes = geometry.pool_bytes
        in_reserved = self._may_use_reserved and fits_reserved(size_bytes, freed_bytes=self._held_bytes(reserved=True))
        if not in_reserved:
            # ``limit`` may have counted reserved pages alone: those of an earlier daemon, whose pool turned out to be
            # unusable, or free ones that another process has taken since.
            freed_bytes = self._held_bytes(reserved=False)
            check_fits(size_bytes + geometry.size_bytes, memory_limit(freed_bytes=freed_bytes))
        if self._stored is not None:
            self.close()
            if self._on_discard is not None:
                self._on_discard()
        create = partial(PoolMemory.create, size_bytes, POOL_NAME)
        take_reserved = partial(self._take_reserved, size_bytes, segments=segments) if in_reserved else None
        return _make_new(geometry, create, take_reserved)

    def _held_bytes(self, *, reserved: bool) -> int:
        """Return the bytes that an earlier daemon's memfds hold in reserved huge pages, or in all other memory.

        Reserved pages, once free, are reserved again: no other memory grows by them.
        """
        fds = (fd for fd in self._stored or () if (filesystem_magic(fd) == HUGETLBFS_MAGIC) is reserved)
        return sum(held_bytes(os.fstat(fd)) for fd in fds)

    def close(self) -> None:
        """Close the descriptors of the earlier daemon. Mappings stay."""
        for fd in self._stored or ():
            os.close(fd)
        self._stored = None


def _make_new(
    geometry: TableGeometry, create: Callable[[], PoolMemory], take_reserved: Callable[[], PoolMemory | None] | None
) -> Memories:
    """Make new memory for a pool and its table: the pool's by ``take_reserved``, or where that is None or returns None,
    by ``create``.

    Raises PoolTooLarge.
    """
    pool: PoolMemory | None = None
    if take_reserved is not None and (pool := take_reserved()) is None:
        # A cgroup's limit refused them, or another process took them; other memory was not checked yet.
        check_fits(geometry.pool_bytes + geometry.size_bytes, memory_limit())
    if pool is None:
        pool = create()
    with OnError(pool.close):
        return pool, PoolMemory.create(geometry.size_bytes, TABLE_NAME)


class FileBacking:
    """One file at ``path``: the slot table, then the pool. It is locked while the daemon lives.

    All memory of the file is allocated at once, because a write to a hole in a full file system raises SIGBUS. The file
    gets its name when it is complete, and only the daemon's user may open it (mode 0600).

    Args:
        on_progress: called with the bytes allocated so far.
        should_stop: once it returns True, no more are allocated, and a new file gets no name.

    Raises:
        KvoffdError: not on tmpfs or hugetlbfs, not a pool file, owned by another user, or in use by another daemon.
    """

    def __init__(
        self,
        path: Path,
        on_progress: Callable[[int], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._on_progress, self._should_stop = on_progress, should_stop
        self._path = path
        self._calls = FileCalls()
        self._directory_fd = open_pool_directory(path)
        self._fd = -1
        with OnError(self.close):
            self._huge = lies_on_hugetlbfs(self._directory_fd, path)
            self._page_bytes = os.fstatvfs(self._directory_fd).f_bsize
            self._fd = self._claim()

    def limit(self, pool_bytes: int) -> MemoryLimit:
        held = held_bytes(os.fstat(self._fd)) if self._fd >= 0 else 0
        if self._huge:
            return MemoryLimit(NO_LIMIT, "huge pages are counted when they are taken")
        return tmpfs_limit(self._directory_fd, self._path.parent, held)

    def find(self, geometry: TableGeometry) -> Memories | None:
        if self._fd < 0:
            raise BadTable(f"There was no pool file {self._path}: this is its first start, or the file was removed.")
        check_table(self._fd, geometry)
        wanted, status = sum(self._parts(geometry)), os.fstat(self._fd)
        if status.st_size != wanted:
            raise BadTable(f"The pool file has {status.st_size} bytes and should have {wanted}.")
        if held_bytes(status) < wanted:
            self._allocate(wanted, [PoolSegment(0, wanted, NOWHERE)])  # somebody punched holes into it
        return self._map(geometry)

    def make(self, geometry: TableGeometry, segments: Sequence[PoolSegment]) -> Memories:
        table_bytes, size = self._parts(geometry)[0], sum(self._parts(geometry))
        try:
            if self._fd >= 0:
                if not self._huge:
                    # ``limit`` counted all that the old file holds, as for one that is reused. Once that is freed, this
                    # cgroup gets back only what it was charged for.
                    check_fits(size, memory_limit(freed_bytes=held_bytes(os.fstat(self._fd))))
                os.unlink(self._path.name, dir_fd=self._directory_fd)
                os.close(self._fd)
                self._fd = -1
            self._fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=self._directory_fd)
            os.fchmod(self._fd, 0o600)
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise KvoffdError(
                f"The pool file {self._path} cannot be made ({error.strerror}); make {self._path.parent} writable for "
                "the daemon's user, or name another file."
            ) from error
        locked = try_lock(self._fd)
        assert locked, "nobody else can know a file without a name"
        parts = [PoolSegment(0, table_bytes, NOWHERE)]
        parts += [PoolSegment(table_bytes + one.begin, table_bytes + one.end, one.locality) for one in segments]
        # The rest: what rounds the pool up, or the whole pool if there are no segments.
        parts.append(PoolSegment(parts[-1].end, size, NOWHERE))
        self._allocate(size, parts)
        return self._map(geometry)

    def publish(self) -> None:
        """Link a new file to its path; do nothing for an existing one, or if not all of it may be allocated. The table
        must have its header."""
        if self._fd < 0 or os.fstat(self._fd).st_nlink or self._should_stop():
            return
        try:
            # Python passes AT_SYMLINK_FOLLOW, which is needed here, only if a directory descriptor is given.
            os.link(f"/proc/self/fd/{self._fd}", self._path.name, src_dir_fd=self._fd, dst_dir_fd=self._directory_fd)
        except OSError as error:
            raise KvoffdError(
                f"The pool file {self._path} cannot be linked ({error.strerror}); if another daemon just created it, "
                "give each daemon its own pool file."
            ) from error

    def close(self) -> None:
        for fd in (self._fd, self._directory_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._directory_fd = -1

    def _claim(self) -> int:
        """Open and lock the file if it is the daemon's; -1 if there is none."""
        try:
            return claim_file(self._calls, self._path.name, self._directory_fd, create=False, check=self._check_ours)
        except FileNotFoundError:
            return -1
        except OSError as error:
            raise KvoffdError(
                f"The pool file {self._path} cannot be opened ({error.strerror}); remove it or name another."
            ) from error
        except FileInUse as error:
            raise KvoffdError(
                f"Another kvoffd is using the pool file {self._path}; stop it first or name another file."
            ) from error

    def _check_ours(self, fd: int, status: os.stat_result) -> None:
        if not is_regular(status) or (status.st_size and not is_table(fd)):
            raise KvoffdError(
                f"{self._path} is not a pool file of kvoffd and is left unchanged; name another file, or remove it."
            )
        if fault := foreign_owner(status, "a pool"):
            raise KvoffdError(f"The pool file {self._path} {fault}. Remove it or name another.")

    def _parts(self, geometry: TableGeometry) -> tuple[int, int]:
        """Bytes of the table and of the pool, rounded up to whole pages of the file system (huge pages map whole)."""
        step = max(_ALIGNMENT, self._page_bytes)
        return -(-geometry.size_bytes // step) * step, -(-geometry.pool_bytes // step) * step

    def _allocate(self, size_bytes: int, parts: Sequence[PoolSegment]) -> None:
        try:
            for done_bytes in allocate_near(self._calls, self._fd, parts, self._should_stop):
                self._on_progress(done_bytes)
        except OSError as error:
            what, cure = "memory", "free some memory"
            if self._huge:
                what, cure = "huge pages", self._huge_page_cure(size_bytes)
            raise PoolTooLarge(
                f"{self._path.parent} lacks the {what} for a pool file of {size_bytes} bytes "
                f"({format_size(size_bytes)}): {error.strerror}. Choose a smaller pool or {cure}."
            ) from error

    def _huge_page_cure(self, size_bytes: int) -> str:
        """Return what lets the file have its huge pages: more of them, or a higher limit if the machine has enough."""
        free_bytes = free_huge_pages(self._page_bytes) * self._page_bytes
        if free_bytes + held_bytes(os.fstat(self._fd)) < size_bytes:
            return "raise vm.nr_hugepages"
        number, unit = (self._page_bytes >> 30, "G") if self._page_bytes >> 30 else (self._page_bytes >> 20, "M")
        return (
            f"raise a limit, since the machine has enough: hugetlb.{number}{unit}B.max of the daemon's cgroup (in "
            f"Kubernetes hugepages-{number}{unit}i), or the option size of the mount"
        )

    def _map(self, geometry: TableGeometry) -> Memories:
        table_bytes, pool_bytes = self._parts(geometry)
        pool = PoolMemory.of_file(self._fd, pool_bytes, table_bytes)
        with OnError(pool.close):
            return pool, PoolMemory.of_file(self._fd, table_bytes, 0)


PoolBacking: TypeAlias = NewBacking | MemfdBacking | FileBacking
"""Source of the memory of one pool."""
