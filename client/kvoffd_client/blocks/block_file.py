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

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np

from kvoffd_client.blocks.block import Block, Bytes, checksum_of, tensor_spec
from kvoffd_client.client_options import Closing
from kvoffd_client.errors import KvoffdClientError
from kvoffd_client.namespace_spec import Geometry
from kvoffd_proto.blocks import ShardSpec

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
        """The entry of a block that has been verified, or that has no checksums yet."""
        sums = tuple(shard.checksum or checksum_of(shard.data.data) for shard in block.shards)
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


def tensors_of(geometry: Geometry, entry: Entry, start: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a block whose bytes begin at ``start``, in the order of the file."""
    for rank in range(geometry.world_size):
        shard = geometry.shards[rank][entry.group]
        for first, last, dtype, shape, nbytes in _runs(shard):
            name = f"group{entry.group}/{entry.key.hex()}/rank{rank}/layers{first}-{last}"
            yield name, Tensor(dtype, shape, (start, start + nbytes))
            start += nbytes


def _runs(shard: ShardSpec) -> Iterator[tuple[int, int, str, list[int], int]]:
    """Runs of equal neighbouring layers: first layer, last layer, dtype, shape and bytes of the run."""
    layers = ((page.page_bytes, tensor_spec(page, shard.blocks_per_key)) for page in shard.pages)
    first = 0
    for (page_bytes, spec), run in groupby(layers):
        count = len(list(run))
        nbytes = count * shard.blocks_per_key * page_bytes
        yield first, first + count - 1, spec.file_dtype, [count, *spec.shape], nbytes
        first += count


def header_of(geometry: Geometry, entries: Sequence[Entry]) -> bytes:
    """The header of a file of these blocks, as JSON, without padding."""
    header: dict[str, object] = {"__metadata__": metadata_of(geometry, entries)}
    start = 0
    for entry in entries:
        header.update(tensors_of(geometry, entry, start))
        start += geometry.block_bytes(entry.group)
    return msgspec.json.encode(header)


def metadata_of(geometry: Geometry, entries: Iterable[Entry]) -> dict[str, str]:
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


def room_without_blocks(geometry: Geometry) -> int:
    """Bytes of the length and the header of a file that holds no block."""
    return LENGTH_BYTES + len(header_of(geometry, ()))


def room_for(geometry: Geometry, counts: Sequence[int]) -> int:
    """Bytes for the length and the header of a file with ``counts`` blocks of each group; aligned."""
    sums = (0,) * geometry.world_size
    room = room_without_blocks(geometry)
    for group, count in enumerate(counts):
        if count:
            room += count * entry_room(geometry, Entry(group, bytes(geometry.key_bytes), 65535, sums))
    return -(-room // ALIGNMENT) * ALIGNMENT


def entry_room(geometry: Geometry, entry: Entry) -> int:
    """The most bytes that a block takes in the header, wherever in the file it lies."""
    return len(msgspec.json.encode(dict(tensors_of(geometry, entry, 10**18)))) + len(entry.text) + 2


def write_at(fd: int, data: memoryview, at: int) -> None:
    """Write all of ``data`` at an offset of a file. Raises OSError."""
    while data:
        written = os.pwrite(fd, data, at)
        at += written
        data = data[written:]


def write_header(fd: int, geometry: Geometry, entries: Sequence[Entry], room: int) -> None:
    """Write length and header at the start of a file, padded to ``room``."""
    header = header_of(geometry, entries).ljust(room - LENGTH_BYTES)
    assert len(header) == room - LENGTH_BYTES, "room was made for more"
    write_at(fd, memoryview((room - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little") + header), 0)


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
        geometry = self.geometry
        expected: dict[str, Tensor] = {}
        self._starts: list[int] = []
        start = 0
        for entry in self.entries:
            sizes = len(entry.key), len(entry.checksums)
            if entry.group >= len(geometry.groups) or sizes != (geometry.key_bytes, geometry.world_size):
                raise self._not_a_block_file("its blocks do not fit its namespace")
            self._starts.append(start)
            expected.update(tensors_of(geometry, entry, start))
            start += geometry.block_bytes(entry.group)
        self.data_bytes = start
        if tensors != expected:
            raise self._not_a_block_file("its tensors are not those of its blocks")

    def _not_a_block_file(self, why: str) -> BlockFileError:
        return BlockFileError(f"{self.path} is no file of blocks: {why}. `kvoffd-cli export` writes such files.")

    def read(self, number: int, into: Bytes) -> None:
        """Read the bytes of block ``number``, shard after shard, into a uint8 array of their size.

        Raises:
            BlockFileError: they do not have the checksums of what was exported.
        """
        entry = self.entries[number]
        at, data = self._data_at + self._starts[number], memoryview(into)  # type: ignore[arg-type]
        done = 0
        while done < into.nbytes:
            count = os.preadv(self._file.fileno(), [data[done:]], at + done)
            if not count:
                raise BlockFileError(f"{self.path} was cut off while it was read.")
            done += count
        start = 0
        for rank, expected in enumerate(entry.checksums):
            end = start + self.geometry.shard_bytes(rank, entry.group)
            if checksum_of(data[start:end]) != expected:
                raise BlockFileError(
                    f"{self.path} is damaged: the bytes of block {entry.key.hex()} (group {entry.group}, rank {rank}) "
                    "do not match their checksum. Export or copy it again."
                )
            start = end

    def block(self, number: int) -> Block:
        """Block ``number`` in memory of its own. Raises as ``read``."""
        entry = self.entries[number]
        data = np.empty(self.geometry.block_bytes(entry.group), np.uint8)
        self.read(number, data)
        sizes = [self.geometry.shard_bytes(rank, entry.group) for rank in range(self.geometry.world_size)]
        shards = np.split(data, np.cumsum(sizes[:-1], dtype=np.intp))
        return Block.of_bytes(self.geometry, entry.group, entry.key, shards, entry.first_block)

    def close(self) -> None:
        self._file.close()
