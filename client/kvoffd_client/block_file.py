"""Files of blocks: safetensors, so that any notebook opens them, with all that is needed to put them back.

The tensors of a block are named ``group0/<key in hex>/rank0/layers0-31``: layers of one kind are one tensor, of shape
``[layers, engine blocks, *page]``, since that is how they lie in the pool. In the file they follow each other: block
by block, rank by rank, without gaps. ``__metadata__`` holds

* ``format`` and ``version``,
* ``namespace``: the geometry, see ``Geometry.to_json``,
* ``blocks``: ``group:key:first block:checksums`` of each block, in the order of the file, with ``;`` between. Checksums
  are those of the shards by rank, XXH3 of 64 bits in hex, with ``,`` between,
* ``checksum``: XXH3 of ``namespace``, a blank and ``blocks``; so that damage to them is found.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np

from kvoffd_client.blocks import DTYPES, Block, BlockClient, TensorSpec, checksum_of
from kvoffd_client.errors import BlockUnavailable, KvoffdClientError
from kvoffd_client.namespace import Geometry, differing_fields
from kvoffd_client.session import Closing
from kvoffd_proto.admin import BlockInfo, ShardSpec
from kvoffd_proto.messages import READY

FORMAT = "kvoffd-blocks"
VERSION = "1"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""What safetensors itself reads."""
ALIGNMENT = 4096


class BlockFileError(KvoffdClientError):
    """A file of blocks cannot be used. The message says why and what to do."""


@dataclass(frozen=True)
class Entry:
    """One block in a file.

    Attributes:
        group: its KV cache group.
        key: its hash.
        first_block: engine blocks at the start of each layer that hold nothing.
        checksums: of its shards, by rank.
    """

    group: int
    key: bytes
    first_block: int
    checksums: tuple[int, ...]

    @classmethod
    def of(cls, block: Block) -> Entry:
        """The entry of a block that matches its checksums, as far as it has any."""
        sums = tuple(shard.checksum or checksum_of(shard.data) for shard in block.shards)
        return cls(block.group, block.key, block.first_block, sums)

    @classmethod
    def parse(cls, text: str) -> Entry:
        """Undo ``text``. Raises ValueError."""
        group, key, first_block, sums = text.split(":")
        return cls(int(group), bytes.fromhex(key), int(first_block), tuple(int(item, 16) for item in sums.split(",")))

    @property
    def text(self) -> str:
        sums = ",".join(f"{item:016x}" for item in self.checksums)
        return f"{self.group}:{self.key.hex()}:{self.first_block}:{sums}"


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in safetensors' header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_items = msgspec.json.Decoder(dict[str, msgspec.Raw])
_metadata = msgspec.json.Decoder(dict[str, str])
_tensor = msgspec.json.Decoder(Tensor)


@dataclass(frozen=True)
class Run:
    """Equal neighbouring layers of a shard, which are one tensor."""

    name: str
    dtype: str
    shape: list[int]
    nbytes: int

    @classmethod
    def of_shard(cls, shard: ShardSpec, rank: int) -> Iterator[Run]:
        first, layers = 0, ((page.page_bytes, TensorSpec.of(page, shard.blocks_per_key)) for page in shard.pages)
        for (page_bytes, spec), run in groupby(layers):
            count = len(list(run))
            nbytes = count * shard.blocks_per_key * page_bytes
            yield cls(
                f"rank{rank}/layers{first}-{first + count - 1}", DTYPES[spec.dtype][1], [count, *spec.shape], nbytes
            )
            first += count


Runs = list[list[Run]]
"""By group: of all ranks, in the order of the file."""


def _runs_of(geometry: Geometry) -> Runs:
    return [
        [run for rank, shards in enumerate(geometry.shards) for run in Run.of_shard(shards[group], rank)]
        for group in range(len(geometry.groups))
    ]


def _tensors_of(runs: Runs, entry: Entry, start: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a block whose bytes begin at ``start``, in the order of the file."""
    block = f"group{entry.group}/{entry.key.hex()}"
    for run in runs[entry.group]:
        yield f"{block}/{run.name}", Tensor(run.dtype, run.shape, (start, start + run.nbytes))
        start += run.nbytes


def _header_of(geometry: Geometry, entries: Sequence[Entry]) -> bytes:
    """The header of a file of these blocks, as JSON, without padding."""
    header: dict[str, object] = {"__metadata__": _metadata_of(geometry, entries)}
    start, runs = 0, _runs_of(geometry)
    for entry in entries:
        header.update(_tensors_of(runs, entry, start))
        start += geometry.block_bytes(entry.group)
    return msgspec.json.encode(header)


def _metadata_of(geometry: Geometry, entries: Iterable[Entry]) -> dict[str, str]:
    namespace, blocks = geometry.to_json(), ";".join(entry.text for entry in entries)
    return {
        "format": FORMAT,
        "version": VERSION,
        "namespace": namespace,
        "blocks": blocks,
        "checksum": _metadata_checksum(namespace, blocks),
    }


def _metadata_checksum(namespace: str, blocks: str) -> str:
    return f"{checksum_of(f'{namespace} {blocks}'.encode()):016x}"


def _read_at(fd: int, into: memoryview, at: int) -> bool:
    """Fill all of ``into`` from an offset of a file; False where the file ends before. Raises OSError."""
    while into:
        count = os.preadv(fd, [into], at)
        if not count:
            return False
        at += count
        into = into[count:]
    return True


def _write_at(fd: int, data: memoryview, at: int) -> None:
    """Write all of ``data`` at an offset of a file. Raises OSError."""
    while data:
        written = os.pwrite(fd, data, at)
        at += written
        data = data[written:]


class BlockFile(Closing):
    """A file of blocks, opened for reading. Its header is checked as a whole; its blocks are when they are read.

    Attributes:
        geometry: of the blocks' namespace.
        entries: its blocks, in the order of the file.
        data_bytes: bytes of all of them.

    Raises:
        BlockFileError: it is no whole file of blocks.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise BlockFileError(f"{path} cannot be opened ({error.strerror}).") from error
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(LENGTH_BYTES), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
            raise self._not_a_block_file("it does not begin as safetensors do")
        raw = self._file.read(length)
        try:
            header = _items.decode(raw)
            metadata = _metadata.decode(header.pop("__metadata__", msgspec.Raw(b"{}")))
            tensors = {name: _tensor.decode(item) for name, item in header.items()}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._not_a_block_file(f"its header is damaged: {error}") from error
        if metadata.get("format") != FORMAT:
            raise self._not_a_block_file("it holds other tensors than blocks")
        if metadata.get("version") != VERSION:
            raise BlockFileError(
                f"{self.path} has version {metadata.get('version')!r} of the format, this kvoffd reads {VERSION}; "
                "install the release that wrote it."
            )
        namespace, blocks = metadata.get("namespace", ""), metadata.get("blocks", "")
        if metadata.get("checksum") != _metadata_checksum(namespace, blocks):
            raise BlockFileError(
                f"{self.path} is damaged: its list of blocks does not match its checksum. Export again."
            )
        try:
            self.geometry = Geometry.of_json(namespace)
            self.entries = [Entry.parse(item) for item in blocks.split(";") if item]
        except ValueError as error:
            raise self._not_a_block_file(str(error)) from error
        self._data_at = LENGTH_BYTES + length
        self._check_tensors(tensors)
        if size != self._data_at + self.data_bytes:
            raise BlockFileError(
                f"{self.path} has {size} bytes and should have {self._data_at + self.data_bytes}: it was cut off, or "
                "written to. Export or copy it again."
            )

    def _check_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The tensors must be those of the listed blocks: else one of the two is damaged."""
        geometry, runs = self.geometry, _runs_of(self.geometry)
        expected: dict[str, Tensor] = {}
        self._starts: list[int] = []
        start = 0
        for entry in self.entries:
            sizes = len(entry.key), len(entry.checksums)
            if entry.group >= len(geometry.groups) or sizes != (geometry.key_bytes, geometry.world_size):
                raise self._not_a_block_file("its blocks do not fit its namespace")
            self._starts.append(start)
            expected.update(_tensors_of(runs, entry, start))
            start += geometry.block_bytes(entry.group)
        self.data_bytes = start
        if tensors != expected:
            raise self._not_a_block_file("its tensors are not those of its blocks")

    def _not_a_block_file(self, why: str) -> BlockFileError:
        return BlockFileError(f"{self.path} is no file of blocks: {why}. `kvoffd-cli export` writes such files.")

    def read(self, number: int) -> Block:
        """Block ``number``, compared with its checksums.

        Raises:
            BlockFileError: the bytes are not those that were exported.
        """
        entry, geometry = self.entries[number], self.geometry
        at, shards = self._data_at + self._starts[number], []
        for rank, expected in enumerate(entry.checksums):
            data = np.empty(geometry.shard_bytes(rank, entry.group), np.uint8)
            _read_at(self._file.fileno(), data.data, at)
            if checksum_of(data) != expected:
                raise BlockFileError(
                    f"{self.path} is damaged: the bytes of block {entry.key.hex()} (group {entry.group}, rank {rank}) "
                    "do not match their checksum. Export or copy it again."
                )
            shards.append(data)
            at += data.nbytes
        return Block.of_bytes(geometry, entry.group, entry.key, shards, entry.first_block)

    def close(self) -> None:
        self._file.close()


class BlockFileWriter(Closing):
    """Writes a file of blocks: a ``.part`` beside it and a log of what is in that, so that it can go on after an end.

    The header comes first in the file, and is written last: there must be room for it.

    Args:
        path: of the file, which ``finish`` gives its name.
        geometry: of the blocks.
        counts: how many blocks of each group are wanted.

    Attributes:
        entries: the blocks that are written, by this attempt or an earlier one.
        data_bytes: bytes of these blocks.

    Raises:
        BlockFileError: the file cannot be written, or belongs to another export.
    """

    def __init__(self, path: Path, geometry: Geometry, counts: Sequence[int]) -> None:
        self._path = path
        self._part = path.with_name(path.name + ".part")
        self._log_path = path.with_name(path.name + ".part.log")
        self._geometry = geometry
        self._header_bytes = LENGTH_BYTES + len(_header_of(geometry, ()))
        self._entry_bytes = self._most_bytes()
        self.entries: list[Entry] = []
        self.data_bytes = 0
        self._fd = self._log = -1
        try:
            self._fd = _open(self._part)
            self._log = _open(self._log_path, os.O_APPEND)
            fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._resume():
                self._begin(counts)
        except BlockingIOError:
            self.close()
            raise BlockFileError(f"Another export is writing {self._part}; wait for it or name another file.") from None
        except BaseException:
            self.close()
            raise

    def _begin(self, counts: Sequence[int]) -> None:
        self._room = self._header_bytes
        for wanted, nbytes in zip(counts, self._entry_bytes, strict=True):
            # Blocks that come while it runs, or until it is resumed, should find room too.
            self._room += (wanted + wanted // 8 + 8) * nbytes if wanted else 0
        self._room = -(-self._room // ALIGNMENT) * ALIGNMENT
        if self._room > MAX_HEADER_BYTES:
            raise BlockFileError(
                f"{sum(counts)} blocks are more than one file of safetensors can list; export them in parts, with "
                "--prefix 0 to --prefix f for instance."
            )
        os.ftruncate(self._fd, 0)
        os.ftruncate(self._log, 0)
        self._log_line(msgspec.json.encode(_LogHead(self._geometry.to_json(), self._room)).decode())

    def _resume(self) -> bool:
        """Go on where an earlier attempt stopped; False where there was none."""
        with open(self._log, "rb", closefd=False) as log:
            lines = log.read().split(b"\n")[:-1]
        if not lines:
            return False
        try:
            head = msgspec.json.decode(lines[0], type=_LogHead)
            entries = [Entry.parse(line.decode()) for line in lines[1:]]
        except (msgspec.MsgspecError, ValueError) as error:
            raise self._cannot_resume(f"its log cannot be read: {error}") from error
        if head.namespace != self._geometry.to_json():
            raise self._cannot_resume("it is of another namespace, or an engine has described its layers since")
        self._room = head.room
        log_bytes = len(lines[0]) + 1
        for entry, line in zip(entries, lines[1:], strict=True):
            if not self._is_whole(entry):
                break  # the machine lost it, or the attempt was killed within it: from here on again
            self._enter(entry)
            log_bytes += len(line) + 1
        os.ftruncate(self._log, log_bytes)
        return True

    def _cannot_resume(self, why: str) -> BlockFileError:
        return BlockFileError(f"{self._part} cannot be resumed: {why}. Remove it or name another file.")

    def _is_whole(self, entry: Entry) -> bool:
        at = self._room + self.data_bytes
        for rank, expected in enumerate(entry.checksums):
            data = np.empty(self._geometry.shard_bytes(rank, entry.group), np.uint8)
            if not _read_at(self._fd, data.data, at) or checksum_of(data) != expected:
                return False
            at += data.nbytes
        return True

    def _most_bytes(self) -> list[int]:
        """The most bytes that a block takes in the header, wherever in the file it lies; by group."""
        runs, found = _runs_of(self._geometry), []
        for group in range(len(runs)):
            entry = Entry(group, bytes(self._geometry.key_bytes), 65535, (0,) * self._geometry.world_size)
            found.append(len(msgspec.json.encode(dict(_tensors_of(runs, entry, 10**18)))) + len(entry.text) + 2)
        return found

    def _enter(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.data_bytes += self._geometry.block_bytes(entry.group)
        self._header_bytes += self._entry_bytes[entry.group]

    def add(self, block: Block) -> bool:
        """Append a block that matches its checksums; False where the header has no room for it. Raises OSError."""
        entry = Entry.of(block)
        if self._header_bytes + self._entry_bytes[entry.group] > self._room:
            return False
        at = self._room + self.data_bytes
        for shard in block.shards:
            _write_at(self._fd, shard.data.data, at)
            at += shard.data.nbytes
        self._log_line(entry.text)
        self._enter(entry)
        return True

    def _log_line(self, line: str) -> None:
        data = line.encode() + b"\n"
        if os.write(self._log, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def finish(self) -> None:
        """Write the header and give the file its name. Raises OSError, BlockFileError."""
        header = _header_of(self._geometry, self.entries).ljust(self._room - LENGTH_BYTES)
        assert len(header) == self._room - LENGTH_BYTES, "room was made for more"
        os.ftruncate(self._fd, self._room + self.data_bytes)
        _write_at(self._fd, memoryview(len(header).to_bytes(LENGTH_BYTES, "little") + header), 0)
        os.fsync(self._fd)
        try:
            if self._path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            self._part.rename(self._path)
        except OSError as error:
            raise BlockFileError(
                f"{self._path} cannot be written ({error.strerror}); the blocks are in {self._part}."
            ) from error
        self._log_path.unlink()

    def close(self) -> None:
        for fd in (self._fd, self._log):
            if fd >= 0:
                os.close(fd)
        self._fd = self._log = -1


class _LogHead(msgspec.Struct, frozen=True):
    """First line of the log: the geometry of the file's blocks, and the room for its length and its header."""

    namespace: str
    room: int


def _open(path: Path, flags: int = 0) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        raise BlockFileError(f"{path} cannot be written ({error.strerror}).") from error


# --- between a daemon and a file --------------------------------------------------------------------

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
    wanted = _listed(client, geometry, prefixes, keys)
    try:
        with BlockFileWriter(path, geometry, list(map(len, wanted))) as writer:
            done = Exported(resumed=len(writer.entries))
            for entry in writer.entries:
                wanted[entry.group].pop(entry.key, None)
            passed = writer.data_bytes
            total = passed + sum(geometry.block_bytes(group) * len(of_group) for group, of_group in enumerate(wanted))
            for group, of_group in enumerate(wanted):
                progress(passed, total)
                for read in client.read_blocks(geometry.fingerprint, list(of_group.values()), group):
                    done.late += [writer.add(block) for block in read.blocks].count(False)
                    done.damaged += read.damaged
                    done.evicted += len(read.evicted)
                    passed += geometry.block_bytes(group) * read.count
                    progress(passed, total)
            writer.finish()
            done.blocks, done.nbytes = len(writer.entries), writer.data_bytes
            return done
    except OSError as error:
        raise BlockFileError(
            f"{path}.part cannot be written to its end ({error.strerror}); the same command goes on where it stopped."
        ) from error


def _listed(
    client: BlockClient, geometry: Geometry, prefixes: Sequence[str], keys: Sequence[tuple[int, bytes]] | None
) -> list[dict[bytes, BlockInfo]]:
    """The ready blocks that are wanted, by group and key."""
    return [
        {
            info.key: info
            for prefix in (prefixes or [""] if keys is None else [key.hex() for of, key in keys if of == group])
            for info in client.list_blocks(geometry.fingerprint, group, prefix)
            if info.state == READY
        }
        for group in range(len(geometry.groups))
    ]


@dataclass
class Imported:
    """What an import did.

    Attributes:
        blocks: blocks that were stored.
        nbytes: bytes of these blocks.
        present: blocks that were in the pool already.
        declined: blocks that the eviction policy did not take, since it keeps others.
        no_room: blocks that found no room.
        created: the namespace was not open before.
    """

    blocks: int = 0
    nbytes: int = 0
    present: int = 0
    declined: int = 0
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
    """Store all blocks of ``file``, each compared with its checksum before. Opens the namespace where no engine has.

    Args:
        namespace: the namespace that the blocks must be of; None for the file's.
        beside: open the file's namespace although one of the same label and another fingerprint is open.

    Raises:
        BlockFileError: the file is damaged, or of another namespace than the one wanted.
        DaemonUnavailable, RequestRefused: the daemon went away or says no; called again it goes on.
    """
    geometry = file.geometry
    done = Imported(created=_check_namespace(client, geometry, namespace, beside))
    if not done.created:
        with suppress(BlockUnavailable):  # no engine has registered yet
            if why := client.geometry(geometry.fingerprint).mismatch(geometry):
                raise BlockFileError(f"The blocks of {file.path} do not fit the namespace that is open here: {why}.")
    passed = 0
    progress(0, file.data_bytes)
    for group, numbers in groupby(range(len(file.entries)), lambda number: file.entries[number].group):
        size = client.batch_blocks(geometry, group)  # opens the namespace
        there = {info.key for info in client.list_blocks(geometry.fingerprint, group) if info.state == READY}
        left = [number for number in numbers if file.entries[number].key not in there]
        for start in range(0, len(left), size):
            blocks: list[Block] = []
            try:
                for number in left[start : start + size]:
                    blocks.append(file.read(number))  # noqa: PERF401 - what comes before damage is good, and stored
            finally:
                written = client.write_blocks(geometry, group, blocks)
            done.blocks += written.stored
            done.nbytes += written.stored * geometry.block_bytes(group)
            done.declined += written.declined
            done.no_room += written.no_room
            passed += len(blocks) * geometry.block_bytes(group)
            progress(passed, file.data_bytes)
    done.present = len(file.entries) - done.blocks - done.declined - done.no_room
    progress(file.data_bytes, file.data_bytes)
    return done


def _check_namespace(client: BlockClient, geometry: Geometry, namespace: str | bytes | None, beside: bool) -> bool:
    """Whether the namespace is to be opened anew.

    Raises BlockFileError where the engines that the operator wants to serve would not read the file's blocks.
    """
    open_namespaces = client.namespaces().namespaces
    others = [info for info in open_namespaces if info.namespace != geometry.fingerprint]
    created = len(others) == len(open_namespaces)
    if namespace is not None:
        try:
            wanted = client.find_namespace(namespace)
        except ValueError as error:
            raise BlockFileError(str(error)) from error
        others = [info for info in others if info.namespace == wanted]
    else:
        others = [info for info in others if info.label == geometry.label and created and not beside]
    if others:
        why = differing_fields(geometry.description, others[0].description)
        advice = "" if namespace is not None else " Add --beside to import them all the same."
        raise BlockFileError(
            f"The blocks of the file are of namespace {geometry.fingerprint.hex()[:12]}, and {others[0].label!r} is "
            f"open here as {others[0].namespace.hex()[:12]}: the engines differ {why}, so none would read them.{advice}"
        )
    return created
