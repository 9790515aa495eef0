"""A block: its shards, their layers, and arrays over their bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffd_client.client_options import Closing
from kvoffd_client.errors import BlockDamaged, BlockUnavailable
from kvoffd_client.namespace_spec import Geometry
from kvoffd_proto.blocks import PageSpec, ShardSpec

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]

# By torch's name of a dtype: numpy's name, or that of an unsigned integer of its size; safetensors' name.
_DTYPES = {
    "float64": ("float64", "F64"),
    "float32": ("float32", "F32"),
    "float16": ("float16", "F16"),
    "bfloat16": ("uint16", "BF16"),
    "float8_e4m3fn": ("uint8", "F8_E4M3"),
    "float8_e5m2": ("uint8", "F8_E5M2"),
    "int64": ("int64", "I64"),
    "int32": ("int32", "I32"),
    "int16": ("int16", "I16"),
    "int8": ("int8", "I8"),
    "uint8": ("uint8", "U8"),
    "bool": ("bool", "BOOL"),
}


def checksum_of(data: memoryview | bytes) -> int:
    """The checksum of a shard's bytes as the daemon takes it: XXH3 of 64 bits, never 0."""
    return xxhash.xxh3_64_intdigest(data) or 1


@dataclass(frozen=True)
class TensorSpec:
    """How the bytes of a layer in a shard are read.

    Attributes:
        dtype: as torch names it; ``uint8`` where the engine did not say, or where it does not fit the bytes.
        shape: ``(engine blocks of a key, *shape of a page)``.
        layout: names of a page's dimensions, with blanks between; empty if unknown.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str

    @property
    def numpy_dtype(self) -> str:
        """numpy's name of the dtype, or of an unsigned integer of its size where numpy has none."""
        return _DTYPES[self.dtype][0]

    @property
    def file_dtype(self) -> str:
        return _DTYPES[self.dtype][1]


def tensor_spec(page: PageSpec, blocks_per_key: int) -> TensorSpec:
    """How to read pages of a layer: as the engine described them, if that fits their size, else as bytes."""
    layer = page.layer
    if layer is not None and layer.dtype in _DTYPES and layer.shape:
        item_bytes = np.dtype(_DTYPES[layer.dtype][0]).itemsize
        if math.prod(layer.shape) * item_bytes == page.page_bytes:
            return TensorSpec(layer.dtype, (blocks_per_key, *layer.shape), layer.layout)
    return TensorSpec("uint8", (blocks_per_key, page.page_bytes), "")


@dataclass(frozen=True)
class Layer(TensorSpec):
    """One layer of one shard.

    Attributes:
        name: as the engine calls it; empty if unknown.
    """

    name: str
    _read: Callable[[], Bytes] = field(repr=False, compare=False)

    @property
    def array(self) -> npt.NDArray[np.generic]:
        """An array of ``shape`` over the bytes themselves, read-only where they are in the pool.

        A dtype that numpy does not have comes as unsigned integers of its size.
        """
        return self._read().view(self.numpy_dtype).reshape(self.shape)

    def tensor(self) -> torch.Tensor:
        """A torch tensor of ``shape`` with a copy of the bytes: torch knows no memory that must not be written."""
        import torch

        flat = torch.from_numpy(self._read().copy())
        return flat.view(getattr(torch, self.dtype)).reshape(self.shape)


@dataclass(eq=False)
class Shard:
    """One rank's part of a block.

    Attributes:
        rank: the worker's rank.
        spec: its layers' pages.
        checksum: of the bytes in the pool; 0 for a block that is not from there, or was stored without checksums.
    """

    rank: int
    spec: ShardSpec
    _read: Callable[[], Bytes] = field(repr=False)
    checksum: int

    @property
    def data(self) -> Bytes:
        """The shard's bytes, layer after layer: uint8, flat. Raises BlockUnavailable once the block is closed."""
        return self._read()

    @property
    def layers(self) -> list[Layer]:
        """The shard's layers, in the order of the slot."""
        layers: list[Layer] = []
        start = 0
        for page in self.spec.pages:
            nbytes = self.spec.blocks_per_key * page.page_bytes
            spec = tensor_spec(page, self.spec.blocks_per_key)
            name = page.layer.name if page.layer else ""
            layers.append(Layer(spec.dtype, spec.shape, spec.layout, name, self._part(start, nbytes)))
            start += nbytes
        return layers

    def _part(self, start: int, nbytes: int) -> Callable[[], Bytes]:
        return lambda: self._read()[start : start + nbytes]

    def __repr__(self) -> str:
        return f"Shard(rank {self.rank}, {len(self.spec.pages)} layers)"


@dataclass(eq=False)
class Block(Closing):
    """What one key names: one shard for each rank. A block from the pool is read-only and pinned there until ``close``.

    Attributes:
        geometry: of its namespace.
        group: its KV cache group.
        key: its hash.
        shards: by rank.
        first_block: engine blocks at the start of each layer that were not stored.
    """

    geometry: Geometry
    group: int
    key: bytes
    shards: tuple[Shard, ...]
    first_block: int = 0
    _close: Callable[[], None] | None = lambda: None

    @classmethod
    def blank(cls, geometry: Geometry, group: int = 0, key: bytes = b"") -> Block:
        """A block of zeros to write into, in memory of its own."""
        zeros = [np.zeros(geometry.shard_bytes(rank, group), np.uint8) for rank in range(geometry.world_size)]
        return cls.of_bytes(geometry, group, key, zeros)

    @classmethod
    def of_bytes(
        cls, geometry: Geometry, group: int, key: bytes, shards: Sequence[Bytes], first_block: int = 0
    ) -> Block:
        """A block over the caller's memory: the bytes of each rank's shard. Raises ValueError where they do not fit."""
        if len(shards) != geometry.world_size:
            raise ValueError(f"A block of this namespace has {geometry.world_size} shards, not {len(shards)}.")
        parts = []
        for rank, data in enumerate(shards):
            expected = geometry.shard_bytes(rank, group)
            if data.nbytes != expected:
                raise ValueError(f"The shard of rank {rank} has {expected} bytes, not {data.nbytes}.")
            parts.append(Shard(rank, geometry.shards[rank][group], _reader_of(data), 0))
        return cls(geometry, group, key, tuple(parts), first_block)

    @property
    def closed(self) -> bool:
        return self._close is None

    def copy(self) -> Block:
        """The same block in memory of its own: writable, and not pinned. Raises BlockUnavailable."""
        shards = [shard.data.copy() for shard in self.shards]
        self.check_held()
        return Block.of_bytes(self.geometry, self.group, self.key, shards, self.first_block)

    def check_held(self) -> None:
        """Raise BlockUnavailable where what was read up to now may have been other bytes: as when the process was
        stopped for longer than the daemon keeps its pins.
        """
        for shard in self.shards:
            shard._read()

    def verify(self) -> None:
        """Compare all shards with their checksums. Raises BlockDamaged, BlockUnavailable."""
        for shard in self.shards:
            if shard.checksum and checksum_of(shard.data.data) != shard.checksum:
                self.check_held()
                raise BlockDamaged(
                    f"The shard of rank {shard.rank} of block {self.key.hex()} does not match its checksum; "
                    "`kvoffd-cli scrub` checks all of them."
                )

    def close(self) -> None:
        close, self._close = self._close, None
        if close is not None:
            close()

    def __repr__(self) -> str:
        return f"Block({self.key.hex()[:16]}, group {self.group}, {len(self.shards)} shards)"


def not_held(key: bytes) -> BlockUnavailable:
    return BlockUnavailable(
        f"Block {key.hex()[:16]} is not held any more: it was closed, the daemon ended the session, or this process "
        "was stopped for longer than a lease lives; get it again."
    )


def _reader_of(data: Bytes) -> Callable[[], Bytes]:
    flat = data.reshape(-1).view(np.uint8)
    return lambda: flat
