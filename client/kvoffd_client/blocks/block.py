"""A block in the hand: its shards, their layers, and arrays over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffd_client.errors import BlockDamaged, BlockUnavailable
from kvoffd_client.namespace_spec import Geometry
from kvoffd_proto.blocks import PageSpec, ShardSpec

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]

# By torch's names: numpy's, where it has the type, else an unsigned integer of the same size; and safetensors'.
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
    """What the daemon keeps for a shard's bytes: XXH3 of 64 bits, never 0."""
    return xxhash.xxh3_64_intdigest(data) or 1


@dataclass(frozen=True)
class TensorSpec:
    """What a layer's part of a shard is.

    Attributes:
        dtype: as torch names it; ``uint8`` where nobody told, or where it does not fit the bytes.
        shape: ``(blocks_per_key, *shape of a page)``.
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
        """safetensors' name of the dtype."""
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
    def array(self) -> npt.NDArray[Any]:
        """An array of ``shape`` over the bytes themselves, read-only where they are in the pool.

        A dtype that numpy does not have comes as unsigned integers of its size.
        """
        return self._read().view(self.numpy_dtype).reshape(self.shape)

    def tensor(self) -> torch.Tensor:
        """A torch tensor of ``shape`` with a copy of the bytes: torch knows no memory that must not be written."""
        import torch

        flat = torch.from_numpy(self._read().copy())
        return flat.view(getattr(torch, self.dtype)).reshape(self.shape)


class Shard:
    """One rank's part of a block."""

    def __init__(self, rank: int, spec: ShardSpec, read: Callable[[], Bytes], checksum: int) -> None:
        self.rank = rank
        self.spec = spec
        self.checksum = checksum
        """Of the bytes in the pool; 0 for a block that is not from there, or was not checked when it was stored."""
        self._read = read

    @property
    def data(self) -> Bytes:
        """Its bytes, layer after layer. Raises BlockUnavailable once the block is not held any more."""
        return self._read()

    @property
    def layers(self) -> list[Layer]:
        """In the order of the slot."""
        found = []
        start = 0
        for page in self.spec.pages:
            nbytes = self.spec.blocks_per_key * page.page_bytes
            spec = tensor_spec(page, self.spec.blocks_per_key)
            name = page.layer.name if page.layer else ""
            found.append(Layer(spec.dtype, spec.shape, spec.layout, name, self._part(start, nbytes)))
            start += nbytes
        return found

    def _part(self, start: int, nbytes: int) -> Callable[[], Bytes]:
        return lambda: self._read()[start : start + nbytes]

    def __repr__(self) -> str:
        return f"Shard(rank {self.rank}, {len(self.spec.pages)} layers)"


class Block:
    """What one key names: one shard for each rank. From the pool it is pinned there until ``close``, and read-only.

    Attributes:
        geometry: of its namespace.
        group: its KV cache group.
        key: its hash.
        shards: by rank.
        first_block: engine blocks at the start of each layer that hold nothing that was stored.
    """

    def __init__(
        self,
        geometry: Geometry,
        group: int,
        key: bytes,
        shards: Sequence[Shard],
        first_block: int = 0,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.geometry = geometry
        self.group = group
        self.key = key
        self.shards = tuple(shards)
        self.first_block = first_block
        self._close: Callable[[], None] | None = close

    @classmethod
    def blank(cls, geometry: Geometry, group: int = 0, key: bytes = b"") -> Block:
        """A block of zeros to write into, in memory of its own."""
        return cls.of_bytes(
            geometry,
            group,
            key,
            [np.zeros(geometry.shard_bytes(rank, group), np.uint8) for rank in range(geometry.world_size)],
        )

    @classmethod
    def of_bytes(
        cls, geometry: Geometry, group: int, key: bytes, shards: Sequence[Bytes], first_block: int = 0
    ) -> Block:
        """A block over the caller's memory: the bytes of each rank's shard. Raises ValueError where they do not fit."""
        if len(shards) != geometry.world_size:
            raise ValueError(f"A block of this namespace has {geometry.world_size} shards, not {len(shards)}.")
        made = []
        for rank, data in enumerate(shards):
            expected = geometry.shard_bytes(rank, group)
            if data.nbytes != expected:
                raise ValueError(f"The shard of rank {rank} has {expected} bytes, not {data.nbytes}.")
            made.append(Shard(rank, geometry.shards[rank][group], _over(data), 0))
        return cls(geometry, group, key, made, first_block)

    @property
    def closed(self) -> bool:
        """It was closed; its bytes are out of reach."""
        return self._close is None

    def copy(self) -> Block:
        """The same block in memory of its own: writable, and not held in the pool."""
        return Block.of_bytes(
            self.geometry, self.group, self.key, [shard.data.copy() for shard in self.shards], self.first_block
        )

    def verify(self) -> None:
        """Compare all shards with their checksums. Raises BlockDamaged."""
        for shard in self.shards:
            if shard.checksum and checksum_of(shard.data.data) != shard.checksum:
                raise BlockDamaged(
                    f"The shard of rank {shard.rank} of block {self.key.hex()} does not have its checksum; "
                    "`kvoffd-cli scrub` has the daemon look at all of them."
                )

    def close(self) -> None:
        """Let it go. Repeatable."""
        close, self._close = self._close, None
        if close is not None:
            close()

    def __enter__(self) -> Block:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Block({self.key.hex()[:16]}, group {self.group}, {len(self.shards)} shards)"


def gone(key: bytes) -> BlockUnavailable:
    """What reading a block raises that nobody holds any more."""
    return BlockUnavailable(
        f"Block {key.hex()[:16]} is not held any more (it was closed, or the daemon ended the session); get it again."
    )


def _over(data: Bytes) -> Callable[[], Bytes]:
    flat = data.reshape(-1).view(np.uint8)
    return lambda: flat
