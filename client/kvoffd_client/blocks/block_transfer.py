"""Moves blocks of a namespace between daemons: exports them into a file, imports a file's blocks."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import msgspec
import numpy as np

from kvoffd_client.blocks.block import Block, checksum_of
from kvoffd_client.blocks.block_client import STAGING_BYTES, BlockClient, put_shard
from kvoffd_client.blocks.block_file import (
    MAX_HEADER_BYTES,
    BlockFile,
    BlockFileError,
    Entry,
    entry_room,
    room_for,
    room_without_blocks,
    write_at,
    write_header,
)
from kvoffd_client.errors import BlockDamaged, BlockUnavailable
from kvoffd_client.namespace_spec import Geometry, differing_fields
from kvoffd_proto.blocks import PUT_NO_ROOM, PUT_STORED, PutShard
from kvoffd_proto.messages import READY

BATCH_BYTES, BATCH_BLOCKS = 64 << 20, 1024
"""Most that an export pins, or an import puts, in one request."""

Progress = Callable[[int, int], None]
"""Called with the bytes that are done and the bytes in all."""


@dataclass
class Exported:
    """What an export did.

    Attributes:
        blocks: blocks in the file.
        nbytes: bytes of these blocks.
        resumed: how many of them an earlier attempt had written.
        evicted: blocks that were evicted before they were read.
        damaged: keys of blocks that do not have their checksum; they are left out.
        late: blocks that came into the pool after the first attempt and found no room in the file's header.
    """

    blocks: int = 0
    nbytes: int = 0
    resumed: int = 0
    evicted: int = 0
    damaged: list[bytes] = field(default_factory=list)
    late: int = 0


class _Plan(msgspec.Struct, frozen=True):
    """First line of the log: the geometry of the file's blocks, and the bytes of its header."""

    namespace: str
    room: int


def export_blocks(
    client: BlockClient,
    namespace: str | bytes,
    path: str | os.PathLike[str],
    prefixes: Sequence[str] = (),
    *,
    keys: Sequence[tuple[int, bytes]] | None = None,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Write the ready blocks of a namespace into ``path``, which must not exist.

    Args:
        prefixes: first hex digits of the keys wanted; all where there are none.
        keys: instead, groups and keys of the blocks wanted.

    Raises:
        BlockFileError: the file cannot be written, or belongs to another export.
        DaemonUnavailable, RequestRefused: the daemon went away or says no; called again it goes on.
    """
    path = Path(path)
    if path.exists():
        raise BlockFileError(f"{path} exists; remove it or name another file.")
    geometry = client.geometry(namespace)
    wanted = _wanted(client, geometry, prefixes) if keys is None else list(keys)
    counts = [sum(group == of for of, _ in wanted) for group in range(len(geometry.groups))]
    try:
        with closing(_PartialFile(path, geometry, counts)) as part:
            done = Exported(resumed=len(part.entries))
            written = {(entry.group, entry.key) for entry in part.entries}
            wanted = [item for item in wanted if item not in written]
            _write(client, geometry, part, wanted, done, progress)
            part.finish(path)
            done.blocks, done.nbytes = len(part.entries), part.data_bytes
            return done
    except OSError as error:
        raise BlockFileError(
            f"{path}.part cannot be written to its end ({error.strerror}); the same command goes on where it stopped."
        ) from error


def _wanted(client: BlockClient, geometry: Geometry, prefixes: Sequence[str]) -> list[tuple[int, bytes]]:
    found = (
        (group, info.key)
        for group in range(len(geometry.groups))
        for prefix in prefixes or ("",)
        for info in client.list_blocks(geometry.fingerprint, group, prefix)
        if info.state == READY
    )
    return list(dict.fromkeys(found))


def _write(
    client: BlockClient,
    geometry: Geometry,
    part: _PartialFile,
    wanted: Sequence[tuple[int, bytes]],
    done: Exported,
    progress: Progress,
) -> None:
    total = part.data_bytes + sum(geometry.block_bytes(group) for group, _ in wanted)
    progress(part.data_bytes, total)
    passed = part.data_bytes
    for group, run in groupby(wanted, itemgetter(0)):
        keys = [key for _, key in run]
        nbytes = geometry.block_bytes(group)
        count = min(BATCH_BLOCKS, max(1, BATCH_BYTES // max(1, nbytes)))
        for start in range(0, len(keys), count):
            batch = keys[start : start + count]
            lost = _write_batch(client, geometry, part, group, batch, done)
            # Without the daemon this raises DaemonUnavailable, and the export goes on another time.
            done.evicted += len(_write_batch(client, geometry, part, group, lost, done)) if lost else 0
            passed += nbytes * len(batch)
            progress(passed, total)


def _write_batch(
    client: BlockClient, geometry: Geometry, part: _PartialFile, group: int, keys: Sequence[bytes], done: Exported
) -> list[bytes]:
    """Write the blocks of these keys. Returns those that were lost while they were read, as with the session's end."""
    lost = []
    for block in client.get_blocks(geometry.fingerprint, keys, group):
        if block is None:
            done.evicted += 1
            continue
        with block:
            try:
                block.verify()
                done.late += not part.add(block)
            except BlockDamaged:
                done.damaged.append(block.key)
            except BlockUnavailable:
                lost.append(block.key)
    return lost


class _PartialFile:
    """The file of an export that is not finished, and its log."""

    def __init__(self, path: Path, geometry: Geometry, counts: Sequence[int]) -> None:
        self._path = path.with_name(path.name + ".part")
        self._log_path = path.with_name(path.name + ".part.log")
        self._geometry = geometry
        self.entries: list[Entry] = []
        self.data_bytes = 0
        self._fd = self._log = -1
        try:
            self._fd = _open(self._path)
            self._log = _open(self._log_path, os.O_APPEND)
            fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._resume():
                self._begin(counts)
        except BlockingIOError:
            self.close()
            raise BlockFileError(f"Another export is writing {self._path}; wait for it or name another file.") from None
        except BaseException:
            self.close()
            raise

    def _begin(self, counts: Sequence[int]) -> None:
        # Blocks that come while it runs, or until it is resumed, should find room too.
        self._header_room = room_for(self._geometry, [count + count // 8 + 8 * bool(count) for count in counts])
        if self._header_room > MAX_HEADER_BYTES:
            raise BlockFileError(
                f"{sum(counts)} blocks are more than one file of safetensors can list; export them in parts, with "
                "--prefix 0 to --prefix f for instance."
            )
        os.ftruncate(self._fd, 0)
        os.ftruncate(self._log, 0)
        self._header_bytes = room_without_blocks(self._geometry)
        self._log_line(msgspec.json.encode(_Plan(self._geometry.to_json(), self._header_room)).decode())

    def _resume(self) -> bool:
        """Go on where an earlier attempt stopped; False where there was none."""
        with open(self._log, "rb", closefd=False) as log:
            lines = log.read().split(b"\n")[:-1]
        if not lines:
            return False
        try:
            plan = msgspec.json.decode(lines[0], type=_Plan)
            entries = [Entry.parse(line.decode()) for line in lines[1:]]
        except (msgspec.MsgspecError, ValueError) as error:
            raise self._cannot_resume(f"its log cannot be read: {error}") from error
        geometry = self._geometry
        if plan.namespace != geometry.to_json():
            raise self._cannot_resume("it is of another namespace, or an engine has described its layers since")
        self._header_room = plan.room
        self._header_bytes = room_without_blocks(geometry)
        log_bytes = len(lines[0]) + 1
        for entry, line in zip(entries, lines[1:], strict=True):
            if not self._is_whole(entry):
                break  # the machine lost it, or the attempt was killed within it: from here on again
            self._add_entry(entry)
            log_bytes += len(line) + 1
        os.ftruncate(self._log, log_bytes)
        return True

    def _cannot_resume(self, why: str) -> BlockFileError:
        return BlockFileError(f"{self._path} cannot be resumed: {why}. Remove it or name another file.")

    def _is_whole(self, entry: Entry) -> bool:
        at = self._header_room + self.data_bytes
        for rank, expected in enumerate(entry.checksums):
            nbytes = self._geometry.shard_bytes(rank, entry.group)
            data = np.empty(nbytes, np.uint8)
            if os.preadv(self._fd, [data.data], at) != nbytes or checksum_of(data.data) != expected:
                return False
            at += nbytes
        return True

    def _add_entry(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.data_bytes += self._geometry.block_bytes(entry.group)
        self._header_bytes += entry_room(self._geometry, entry)

    def add(self, block: Block) -> bool:
        """Append a block; False where the header has no room for it. Raises BlockUnavailable."""
        entry = Entry.of(block)
        if self._header_bytes + entry_room(self._geometry, entry) > self._header_room:
            return False
        at = self._header_room + self.data_bytes
        for shard in block.shards:
            write_at(self._fd, shard.data.data, at)
            at += shard.data.nbytes
        block.check_held()
        self._log_line(entry.text)
        self._add_entry(entry)
        return True

    def _log_line(self, line: str) -> None:
        data = line.encode() + b"\n"
        if os.write(self._log, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def finish(self, path: Path) -> None:
        """Write the header and give the file its name."""
        os.ftruncate(self._fd, self._header_room + self.data_bytes)
        write_header(self._fd, self._geometry, self.entries, self._header_room)
        os.fsync(self._fd)
        try:
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            self._path.rename(path)
        except OSError as error:
            raise BlockFileError(
                f"{path} cannot be written ({error.strerror}); the blocks are in {self._path}."
            ) from error
        self._log_path.unlink()

    def close(self) -> None:
        for fd in (self._fd, self._log):
            if fd >= 0:
                os.close(fd)


def _open(path: Path, flags: int = 0) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        raise BlockFileError(f"{path} cannot be written ({error.strerror}).") from error


BATCHES_PER_POOL = 8
"""Blocks are put in batches of at most this part of the pool; the daemon allows twice that."""


@dataclass
class Imported:
    """What an import did.

    Attributes:
        blocks: blocks that were put.
        nbytes: bytes of these blocks.
        present: blocks that were in the pool already.
        no_room: blocks that found no room.
        created: the namespace was not open before.
    """

    blocks: int = 0
    nbytes: int = 0
    present: int = 0
    no_room: int = 0
    created: bool = False


def import_blocks(
    client: BlockClient,
    file: BlockFile,
    namespace: str | bytes | None = None,
    *,
    beside: bool = False,
    progress: Progress = lambda done, total: None,
) -> Imported:
    """Put all blocks of ``file`` into the pool. The namespace is opened where no engine has done so.

    Args:
        namespace: the namespace that the blocks must be of; None for the file's.
        beside: open the file's namespace although one of the same label and another fingerprint is open.

    Raises:
        BlockFileError: the file is damaged, or of another namespace than the one wanted.
        DaemonUnavailable, RequestRefused: the daemon went away or says no; called again it goes on.
    """
    geometry = file.geometry
    _check_namespace(client, geometry, namespace, beside)
    done = Imported(created=client.restore_namespace(geometry))
    present = {
        (group, info.key)
        for group in {entry.group for entry in file.entries}
        for info in client.list_blocks(geometry.fingerprint, group)
        if info.state == READY
    }
    passed = 0
    progress(0, file.data_bytes)
    most_bytes = min(STAGING_BYTES, client.stats().pool.pool_bytes // BATCHES_PER_POOL)
    for batch in _batches(file, present, most_bytes):
        group, first_block = file.entries[batch[0]].group, file.entries[batch[0]].first_block
        states = _put(client, file, batch, group, first_block)
        stored = states.count(PUT_STORED)
        done.blocks += stored
        done.nbytes += stored * geometry.block_bytes(group)
        done.no_room += states.count(PUT_NO_ROOM)
        passed += len(batch) * geometry.block_bytes(group)
        progress(passed, file.data_bytes)
    done.present = len(file.entries) - done.blocks - done.no_room
    progress(file.data_bytes, file.data_bytes)
    return done


def _check_namespace(client: BlockClient, geometry: Geometry, namespace: str | bytes | None, beside: bool) -> None:
    """Raise BlockFileError where the engines that the operator wants to serve would not read the file's blocks."""
    open_namespaces = client.namespaces().namespaces
    if namespace is not None:
        try:
            wanted = client.find_namespace(namespace)
        except ValueError as error:
            raise BlockFileError(str(error)) from error
        others = [info for info in open_namespaces if info.namespace == wanted and wanted != geometry.fingerprint]
    else:
        fingerprints = {info.namespace for info in open_namespaces}
        same_label = [info for info in open_namespaces if info.label == geometry.label]
        others = same_label if geometry.fingerprint not in fingerprints and not beside else []
    if others:
        why = differing_fields(geometry.description, others[0].description)
        advice = "" if namespace is not None else " Add --beside to import them all the same."
        raise BlockFileError(
            f"The blocks of the file are of namespace {geometry.fingerprint.hex()[:12]}, and {others[0].label!r} is "
            f"open here as {others[0].namespace.hex()[:12]}: the engines differ {why}, so none would read them.{advice}"
        )


def _batches(file: BlockFile, present: set[tuple[int, bytes]], most_bytes: int) -> Iterator[list[int]]:
    """Numbers of the blocks to put, as many at a time as ``most_bytes`` hold, all of one group."""
    batch: list[int] = []
    for number, entry in enumerate(file.entries):
        if (entry.group, entry.key) in present:
            continue
        nbytes = file.geometry.block_bytes(entry.group)
        # Only the first key of a request may begin with a hole.
        other = bool(batch) and (file.entries[batch[0]].group != entry.group or entry.first_block > 0)
        if batch and (other or len(batch) == BATCH_BLOCKS or (len(batch) + 1) * nbytes > most_bytes):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _put(client: BlockClient, file: BlockFile, batch: Sequence[int], group: int, first_block: int) -> bytes:
    geometry = file.geometry
    nbytes = geometry.block_bytes(group)
    memory = client.staging(len(batch) * nbytes)
    keys = [file.entries[number].key for number in batch]
    shards: list[list[PutShard]] = []
    for place, number in enumerate(batch):
        at = place * nbytes
        try:
            file.read(number, memory.view[at : at + nbytes])
        except BlockFileError:
            if shards:  # what comes before the damage is good
                client.put_staged(geometry, group, keys[:place], shards, first_block)
            raise
        of_key: list[PutShard] = []
        for rank, checksum in enumerate(file.entries[number].checksums):
            of_key.append(put_shard(at, checksum))
            at += geometry.shard_bytes(rank, group)
        shards.append(of_key)
    return client.put_staged(geometry, group, keys, shards, first_block)
