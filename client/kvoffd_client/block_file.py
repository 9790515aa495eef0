"""Files of blocks: safetensors, which any notebook can open, with the metadata to import them.

The tensors of a block are named ``group0/<key in hex>/rank0/layers0-31``: adjacent equal layers are one tensor of shape
``[layers, engine blocks, *page]``, as in the pool. The file has them block by block, rank by rank, without gaps.
``__metadata__`` holds

* ``format`` and ``version``,
* ``namespace``: the geometry, see ``Geometry.to_json``,
* ``blocks``: ``group:key:first block:checksums`` of each block, in the order of the file, separated by ``;``. Checksums
  are those of the shards by rank, XXH3 of 64 bits in hex, separated by ``,``,
* ``generation``: time of the namespace's last reset or clear before the export; see ``BlockClient.generation``. Missing
  in version 1,
* ``checksum``: XXH3 of ``namespace``, ``blocks`` and ``generation``, separated by blanks.
"""

from __future__ import annotations

import builtins
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from kvoffd_client.blocks import DTYPES, NO_BYTES, Block, BlockClient, Layer, checksum_of
from kvoffd_client.errors import BlockUnavailable, KvoffdClientError
from kvoffd_client.namespace import Geometry
from kvoffd_client.namespace_differences import how_they_differ
from kvoffd_client.session import Closing
from kvoffd_proto.admin import BlockInfo
from kvoffd_proto.messages import READY

FORMAT, VERSION = "kvoffd-blocks", "2"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""Limit of safetensors."""
ALIGNMENT = 4096
MAX_FIRST_BLOCK = 65535

Progress = Callable[[int, int], None]
"""Callback with the bytes done and the total."""


class BlockFileError(KvoffdClientError):
    """A file of blocks is unusable. The message says why and what to do."""


class Entry(NamedTuple):
    """One block in a file. ``first_block``: see Block; ``checksums``: of its shards, by rank."""

    group: int
    key: bytes
    first_block: int
    checksums: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Entry:
        """Return the entry of a ``text``. Raises ValueError."""
        group, key, first_block, sums = text.split(":")
        return cls(int(group), bytes.fromhex(key), int(first_block), tuple(int(item, 16) for item in sums.split(",")))

    @property
    def text(self) -> str:
        sums = ",".join(f"{item:016x}" for item in self.checksums)
        return f"{self.group}:{self.key.hex()}:{self.first_block}:{sums}"


def _tensors_of(geometry: Geometry, entries: Sequence[Entry]) -> dict[str, object]:
    """Return the tensors of consecutive blocks by name, as in a safetensors header."""
    runs = [list(_runs(geometry, group)) for group in range(len(geometry.groups))]
    tensors: dict[str, object] = {}
    start = 0
    for entry in entries:
        for name, dtype, shape, nbytes in runs[entry.group]:
            offsets = [start, start + nbytes]
            tensor = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            tensors[f"group{entry.group}/{entry.key.hex()}/{name}"] = tensor
            start += nbytes
    return tensors


def _runs(geometry: Geometry, group: int) -> Iterator[tuple[str, str, list[int], int]]:
    """Yield name, dtype, shape and bytes of the tensors of a group's block, in the order of the file."""
    for rank, shards in enumerate(geometry.shards):
        shard, first = shards[group], 0
        layers = [Layer.of(page, shard.blocks_per_key, NO_BYTES) for page in shard.pages]
        for (dtype, shape, _), run in groupby(layers, lambda one: (one.dtype, one.shape, one.layout)):
            count = len(list(run))
            nbytes = count * shard.blocks_per_key * shard.pages[first].page_bytes
            yield f"rank{rank}/layers{first}-{first + count - 1}", DTYPES[dtype][1], [count, *shape], nbytes
            first += count


def _header_of(geometry: Geometry, entries: Sequence[Entry], generation: int) -> bytes:
    """Return the header of a file of these blocks, as JSON without padding."""
    parts = namespace, blocks, _ = geometry.to_json(), ";".join(entry.text for entry in entries), str(generation)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "namespace": namespace,
        "blocks": blocks,
        "generation": str(generation),
        "checksum": _metadata_checksum(*parts),
    }
    return msgspec.json.encode({"__metadata__": metadata, **_tensors_of(geometry, entries)})


def _metadata_checksum(*parts: str) -> str:
    return f"{checksum_of(' '.join(parts).encode()):016x}"


class BlockFile(Closing):
    """A file of blocks, opened for reading. The header is checked at once, blocks when they are read.

    ``entries`` are its blocks in the order of the file, ``data_bytes`` their total size, ``generation`` their
    namespace's. Raises BlockFileError if it is not a complete file of blocks.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            # Does not wait for the writer of a pipe.
            self._file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
        except OSError as error:
            raise BlockFileError(f"{path} cannot be opened ({error.strerror}).") from error
        try:
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise self._no_block_file("it is a pipe or a device")
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(LENGTH_BYTES), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
            raise self._no_block_file("it is not in the safetensors format")
        try:
            header = msgspec.json.decode(self._file.read(length), type=dict[str, dict[str, object]])
            metadata = msgspec.convert(header.pop("__metadata__", {}), dict[str, str])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._no_block_file(f"its header is damaged: {error}") from error
        if metadata.get("format") != FORMAT:
            raise self._no_block_file("its tensors are not blocks")
        if metadata.get("version") not in ("1", VERSION):
            raise BlockFileError(
                f"{self.path} has version {metadata.get('version')!r} of the format, but this kvoffd reads {VERSION}; "
                "use the release that wrote it."
            )
        namespace, blocks = metadata.get("namespace", ""), metadata.get("blocks", "")
        generation = (metadata["generation"],) if "generation" in metadata else ()
        if metadata.get("checksum") != _metadata_checksum(namespace, blocks, *generation):
            raise BlockFileError(
                f"{self.path} is damaged: its list of blocks does not match its checksum. Export again."
            )
        try:
            self.geometry = geometry = Geometry.of_json(namespace)
            self.entries = [Entry.parse(item) for item in blocks.split(";") if item]
            self.generation = int(*generation)
        except ValueError as error:
            raise self._no_block_file(str(error)) from error
        self._starts: list[int] = []
        at = self._data_at = LENGTH_BYTES + length
        for entry in self.entries:
            sizes = len(entry.key), len(entry.checksums)
            numbers_fit = 0 <= entry.group < len(geometry.groups) and 0 <= entry.first_block <= MAX_FIRST_BLOCK
            if not numbers_fit or sizes != (geometry.key_bytes, geometry.world_size):
                raise self._no_block_file("its blocks do not fit its namespace")
            self._starts.append(at)
            at += geometry.block_bytes(entry.group)
        self.data_bytes = at - self._data_at
        if len({(entry.group, entry.key) for entry in self.entries}) < len(self.entries):
            raise self._no_block_file("it has a block twice")
        if header != _tensors_of(geometry, self.entries):
            raise self._no_block_file("its tensors do not fit its blocks")
        if size != at:
            raise BlockFileError(
                f"{self.path} has {size} bytes instead of {at}: it was truncated or modified. Export or copy it again."
            )

    def _no_block_file(self, why: str) -> BlockFileError:
        return BlockFileError(
            f"{self.path} is not a file of blocks: {why}. `kvoffd-cli blocks export` writes such files."
        )

    def read(self, number: int) -> Block:
        """Return block ``number``, compared with its checksums.

        Raises:
            BlockFileError: the bytes differ from those that were exported.
        """
        entry, geometry, shards = self.entries[number], self.geometry, []
        self._file.seek(self._starts[number])
        for rank, expected in enumerate(entry.checksums):
            data = np.empty(geometry.shard_bytes(rank, entry.group), np.uint8)
            self._file.readinto(data.data)
            if checksum_of(data) != expected:
                raise BlockFileError(
                    f"{self.path} is damaged: the bytes of block {entry.key.hex()} (group {entry.group}, rank {rank}) "
                    "do not match their checksum. Export or copy it again."
                )
            shards.append(data)
        return Block.of_bytes(geometry, entry.group, entry.key, shards, entry.first_block)

    def close(self) -> None:
        self._file.close()


class BlockFileWriter(Closing):
    """Writes a file of blocks as ``.part``, which ``finish`` renames and ``close`` removes.

    The header is at the start but written last, so its space is reserved for all ``wanted`` blocks, (group, key).
    ``entries`` are those added, ``data_bytes`` their total size. Raises BlockFileError; OSError if the file cannot be
    written.
    """

    def __init__(
        self, path: Path, geometry: Geometry, wanted: Sequence[tuple[int, bytes]], generation: int = 0
    ) -> None:
        self._path, self._geometry, self._generation = path, geometry, generation
        self.entries: list[Entry] = []
        self.data_bytes = 0
        most = [Entry(group, key, MAX_FIRST_BLOCK, (0,) * geometry.world_size) for group, key in wanted]
        self._data_at = -(-(LENGTH_BYTES + len(_header_of(geometry, most, generation))) // ALIGNMENT) * ALIGNMENT
        if self._data_at > MAX_HEADER_BYTES:
            raise BlockFileError(
                f"{len(wanted)} blocks are more than one safetensors file can list; export them in parts, with "
                "--prefix 0 to --prefix f for instance."
            )
        self._part = path.with_name(path.name + ".part")
        try:
            self._file = self._part.open("xb")
        except FileExistsError:
            why = f"{self._part} exists: another export is writing it, or was killed; then remove it."
            raise BlockFileError(why) from None
        self._file.seek(self._data_at)

    def add(self, block: Block) -> None:
        """Append a block that matches its checksums."""
        sums = []
        for shard in block.shards:
            self._file.write(shard.data.data)
            self.data_bytes += shard.data.nbytes
            sums.append(checksum_of(shard.data))
        self.entries.append(Entry(block.group, block.key, block.first_block, tuple(sums)))

    def finish(self) -> None:
        """Write the header and rename the file."""
        self._file.truncate(self._data_at + self.data_bytes)
        header = _header_of(self._geometry, self.entries, self._generation).ljust(self._data_at - LENGTH_BYTES)
        assert len(header) == self._data_at - LENGTH_BYTES, "the header fits its space"
        self._file.seek(0)
        self._file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._path.exists():
            raise BlockFileError(f"{self._path} was created by another program during the export; choose another name.")
        self._part.rename(self._path)

    def close(self) -> None:
        with suppress(OSError):  # of buffered bytes, if the disk is full
            self._file.close()
        self._part.unlink(missing_ok=True)


@dataclass
class Exported:
    """Numbers of blocks and bytes in the file; number of blocks evicted before they were read; keys of damaged ones,
    which are left out."""

    blocks: int = 0
    bytes: int = 0
    evicted: int = 0
    damaged: list[builtins.bytes] = field(default_factory=list)


def export_blocks(
    client: BlockClient,
    namespace: str | bytes,
    path: str | os.PathLike[str],
    prefixes: Sequence[str] = (),
    *,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Write the ready blocks of a namespace to ``path``, which must not exist.

    Args:
        prefixes: first hex digits of the keys; all keys without any.

    Raises:
        BlockFileError: the file cannot be written.
        DaemonUnavailable, RequestRefused: the daemon ended or refused.
    """
    path = Path(path)
    if path.exists():
        raise BlockFileError(f"{path} exists; remove it or name another file.")
    geometry = client.geometry(namespace)
    generation = client.generation(geometry.fingerprint)
    wanted: list[list[BlockInfo]] = []
    for group in range(len(geometry.groups)):
        listed = (
            info for prefix in prefixes or [""] for info in client.list_blocks(geometry.fingerprint, group, prefix)
        )
        wanted.append(list({info.key: info for info in listed if info.state == READY}.values()))
    total = sum(geometry.block_bytes(group) * len(infos) for group, infos in enumerate(wanted))
    done, passed = Exported(), 0
    try:
        named = [(group, info.key) for group, infos in enumerate(wanted) for info in infos]
        with BlockFileWriter(path, geometry, named, generation) as writer:
            for group, infos in enumerate(wanted):
                for read in client.read_blocks(geometry.fingerprint, infos, group):
                    for block in read.blocks:
                        writer.add(block)
                    done.damaged += read.damaged
                    done.evicted += len(read.evicted)
                    passed += geometry.block_bytes(group) * (len(read.blocks) + len(read.damaged) + len(read.evicted))
                    progress(passed, total)
            writer.finish()
            done.blocks, done.bytes = len(writer.entries), writer.data_bytes
    except OSError as error:
        raise BlockFileError(f"{path} cannot be written ({error.strerror}).") from error
    return done


@dataclass
class Imported:
    """Numbers of blocks and bytes stored; of blocks that were in the pool already, that found no space, and that were
    evicted again before the end; whether the import opened the namespace."""

    blocks: int = 0
    bytes: int = 0
    present: int = 0
    no_space: int = 0
    evicted: int = 0
    created: bool = False


def import_blocks(
    client: BlockClient,
    file: BlockFile,
    *,
    beside: bool = False,
    stale: bool = False,
    progress: Progress = lambda done, total: None,
) -> Imported:
    """Store all blocks of ``file`` after comparing each with its checksum. Opens the namespace if no engine has.

    Args:
        beside: open the file's namespace even if one of the same label and another fingerprint is open.
        stale: store blocks even if the namespace was reset or cleared since they were exported.

    Raises:
        BlockUnavailable: the namespace was reset or cleared since.
        BlockFileError: the file is damaged, or no engine here would read its blocks.
        DaemonUnavailable, RequestRefused: the daemon ended or refused; blocks stored before that stay.
    """
    geometry = file.geometry
    done = Imported(created=_check_namespace(client, geometry, beside))
    passed, groups = 0, sorted({entry.group for entry in file.entries})
    for group in groups:
        numbers = [number for number, entry in enumerate(file.entries) if entry.group == group]
        generation = None if stale else file.generation
        for written in client.write_blocks(geometry, group, map(file.read, numbers), len(numbers), generation):
            done.blocks += written.stored
            done.bytes += written.stored * geometry.block_bytes(group)
            done.present += written.present
            done.no_space += written.no_space
            passed += (written.stored + written.present + written.no_space) * geometry.block_bytes(group)
            progress(passed, file.data_bytes)
    listed = ((group, info) for group in groups for info in client.list_blocks(geometry.fingerprint, group))
    ready = {(group, info.key) for group, info in listed if info.state == READY}
    done.evicted = sum((entry.group, entry.key) not in ready for entry in file.entries) - done.no_space
    return done


def _check_namespace(client: BlockClient, geometry: Geometry, beside: bool) -> bool:
    """Return whether the import opens the namespace. Raises BlockFileError if no engine here would read the blocks."""
    known = client.namespaces().namespaces
    if any(info.namespace == geometry.fingerprint for info in known):
        with suppress(BlockUnavailable):  # no engine has registered yet
            if why := client.geometry(geometry.fingerprint).mismatch(geometry):
                raise BlockFileError(f"The blocks of the file do not fit the namespace that is open here: {why}.")
        return False
    if same_label := [info for info in known if info.label == geometry.label and not beside]:
        why = how_they_differ(geometry.description, same_label[0].description)
        raise BlockFileError(
            f"The blocks of the file are of namespace {geometry.fingerprint.hex()[:12]}, but {geometry.label!r} is "
            f"open here as {same_label[0].namespace.hex()[:12]}: the engines differ in {why}, so none would read them. "
            "Add --beside to import them all the same."
        )
    return True
