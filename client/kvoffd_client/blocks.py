"""Lists, reads and writes single blocks for programs other than engines, with an engine's copies."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffd_client.admin_client import AdminClient
from kvoffd_client.errors import (
    BlockDamaged,
    BlockUnavailable,
    DaemonUnavailable,
    KvoffdClientError,
    RequestRefused,
    RequestTimeout,
)
from kvoffd_client.memory import Registration, SharedMemory
from kvoffd_client.namespace import Geometry
from kvoffd_client.scheduler_client import SchedulerClient
from kvoffd_client.session import ClientOptions, Closing
from kvoffd_client.worker_client import Job, WorkerClient
from kvoffd_proto.admin import (
    CHECKSUM_BYTES,
    MAX_KEY_DIGITS,
    BlockInfo,
    DescribeNamespace,
    ListBlocks,
    PageSpec,
    ShardSpec,
)
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import READY, GroupKeys, GroupTransfer, JobResult, PageRef, TensorLayout
from kvoffd_proto.units import quoted

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]
NO_BYTES: Bytes = np.empty(0, np.uint8)

OPTIONS = ClientOptions(request_timeout_s=60.0, operator=True)
"""The long timeout is for copies by a busy daemon."""
BLOCKS_PER_LIST = 1024
CONNECT_S = 10.0
NAME = "kvoffd single blocks"
"""Name of the sessions, for operators."""
_INTERRUPTED = "The daemon was restarted, or ended the session during the copy; try again."
_OF_BLOCKS = (ErrorCode.NOT_READY, ErrorCode.CHECKSUM, ErrorCode.NO_SPACE)
"""Errors that concern the block."""

DTYPES = {
    "float64": ("float64", "F64"), "float32": ("float32", "F32"), "float16": ("float16", "F16"),
    "bfloat16": ("uint16", "BF16"), "float8_e4m3fn": ("uint8", "F8_E4M3"), "float8_e5m2": ("uint8", "F8_E5M2"),
    "int64": ("int64", "I64"), "int32": ("int32", "I32"), "int16": ("int16", "I16"), "int8": ("int8", "I8"),
    "uint8": ("uint8", "U8"), "bool": ("bool", "BOOL"),
}  # fmt: skip
"""Names of torch's dtypes in numpy (or of an unsigned integer of that size) and in safetensors."""


def checksum_of(data: memoryview | bytes | Bytes) -> int:
    """Return the checksum of a shard's bytes as the daemon computes it: XXH3 of 64 bits, never 0."""
    return xxhash.xxh3_64_intdigest(data) or 1  # type: ignore[arg-type]


@dataclass(frozen=True)
class Layer:
    """One layer of one shard.

    Attributes:
        name: the engine's name; empty if unknown.
        dtype: torch's name; ``uint8`` if unknown, or if it does not fit the bytes.
        shape: ``(engine blocks of a key, *shape of a page)``.
        layout: names of a page's dimensions, separated by blanks; empty if unknown.
        data: bytes: uint8, flat.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str
    data: Bytes = field(repr=False, compare=False)

    @classmethod
    def of(cls, page: PageSpec, blocks_per_key: int, data: Bytes) -> Layer:
        """Return the layer as the engine described it if that fits the size of its pages, else as bytes."""
        layer = page.layer
        if layer is not None and layer.dtype in DTYPES and layer.shape:
            item_bytes = np.dtype(DTYPES[layer.dtype][0]).itemsize
            if math.prod(layer.shape) * item_bytes == page.page_bytes:
                return cls(layer.name, layer.dtype, (blocks_per_key, *layer.shape), layer.layout, data)
        return cls(layer.name if layer else "", "uint8", (blocks_per_key, page.page_bytes), "", data)

    @property
    def array(self) -> npt.NDArray[np.generic]:
        """Array of ``shape`` over the bytes. Dtypes that numpy lacks are unsigned integers of the same size."""
        return self.data.view(DTYPES[self.dtype][0]).reshape(self.shape)

    def tensor(self) -> torch.Tensor:
        """Return a torch tensor of ``shape`` over the bytes."""
        import torch

        return torch.from_numpy(self.data).view(getattr(torch, self.dtype)).reshape(self.shape)


@dataclass(eq=False)
class Shard:
    """One rank's part of a block: the bytes of its layers, one after the other (uint8, flat)."""

    rank: int
    spec: ShardSpec
    data: Bytes = field(repr=False)

    @property
    def layers(self) -> list[Layer]:
        pages, per_key = self.spec.pages, self.spec.blocks_per_key
        ends = accumulate((per_key * page.page_bytes for page in pages), initial=0)
        parts = [self.data[begin:end] for begin, end in pairwise(ends)]
        return [Layer.of(page, per_key, data) for page, data in zip(pages, parts, strict=True)]


@dataclass(eq=False)
class Block:
    """The block of one key: a shard for each rank, in memory of its own.

    ``first_block``: engine blocks at the start of each layer that were not stored, and are read as zeros.
    """

    geometry: Geometry = field(repr=False)
    group: int
    key: bytes
    shards: tuple[Shard, ...] = field(repr=False)
    first_block: int = 0

    @classmethod
    def of_bytes(
        cls, geometry: Geometry, group: int, key: bytes, shards: Sequence[Bytes], first_block: int = 0
    ) -> Block:
        """Return a block over the caller's bytes of each rank's shard. Raises ValueError if they do not fit."""
        if len(shards) != geometry.world_size:
            raise ValueError(f"A block of this namespace has {geometry.world_size} shards, not {len(shards)}.")
        parts = []
        for rank, data in enumerate(shards):
            expected = geometry.shard_bytes(rank, group)
            if data.nbytes != expected:
                raise ValueError(f"The shard of rank {rank} has {expected} bytes, not {data.nbytes}.")
            parts.append(Shard(rank, geometry.shards[rank][group], data.reshape(-1).view(np.uint8)))
        return cls(geometry, group, key, tuple(parts), first_block)

    def matches(self, info: BlockInfo) -> bool:
        """Return whether the bytes match the daemon's checksums; True if a hole makes that impossible to check."""
        if info.first_block:
            return True
        known = [int.from_bytes(one, "big") for one in _cut(info.checksums, CHECKSUM_BYTES)]
        return all(not one or checksum_of(shard.data) == one for shard, one in zip(self.shards, known, strict=True))


class _Buffer(Closing):
    """Memory for a copy of one block of any group, a part for each rank, and an engine's sessions to make it.

    Raises DaemonUnavailable, RequestRefused.
    """

    def __init__(self, directory: str, geometry: Geometry) -> None:
        self.geometry = geometry
        per_key = {shard.blocks_per_key for of_rank in geometry.shards for shard in of_rank}
        if len(per_key) != 1:
            raise BlockUnavailable(
                "Blocks whose keys cover different numbers of engine blocks by group cannot be copied."
            )
        (self._per_key,) = per_key
        sizes = [geometry.block_bytes(group) for group in range(len(geometry.groups))]
        self._memory = SharedMemory(max(sizes), "kvoffd-blocks")
        self._layers: dict[tuple[int, int], list[Bytes]] = {}
        """Layers by rank and group: [engine block of the key, bytes of a page]."""
        self._scheduler = SchedulerClient(directory, geometry, name=NAME, options=OPTIONS)
        self._workers: list[WorkerClient] = []
        try:
            for rank in range(geometry.world_size):
                registration = self._registration(rank)
                self._workers.append(WorkerClient(directory, geometry, registration, name=NAME, options=OPTIONS))
            clients: list[SchedulerClient | WorkerClient] = [self._scheduler, *self._workers]
            for client in clients:
                if not client.wait_settled(CONNECT_S):
                    why = f"The kvoffd daemon in {directory} opened no session in time: {client.problem}"
                    raise client.refusal or DaemonUnavailable(why)
        except BaseException:
            self.close()
            raise

    def _registration(self, rank: int) -> Registration:
        """Lay out a rank's part of the memory, layer after layer."""
        tensors: list[TensorLayout] = []
        groups: list[tuple[PageRef, ...]] = []
        for group, shard in enumerate(self.geometry.shards[rank]):
            start = sum(self.geometry.shard_bytes(other, group) for other in range(rank))
            refs, layers = [], []
            for page in shard.pages:
                refs.append(PageRef(len(tensors), page.page_bytes, page.layer))
                tensors.append(TensorLayout(0, start, page.page_bytes, self._per_key))
                end = start + self._per_key * page.page_bytes
                layers.append(self._memory.view[start:end].reshape(self._per_key, page.page_bytes))
                start = end
            groups.append(tuple(refs))
            self._layers[rank, group] = layers
        return Registration(rank, self._per_key, (self._memory,), tuple(tensors), tuple(groups))

    def _copy(self, group: int, key: bytes, first_block: int, lease_id: int | None = None) -> list[JobResult]:
        """Store the block in the buffer, or load it there; return each rank's result.

        ``first_block``: engine blocks to skip at the start. Raises DaemonUnavailable, RequestTimeout; RequestRefused
        for errors that do not concern the block.
        """
        transfer = GroupTransfer.of([key], range(first_block, self._per_key), group, first_block)
        job = Job(1, [transfer], lease_id, keep_lease=lease_id is not None)
        for worker in self._workers:
            worker.submit([job])
        deadline, results = time.monotonic() + OPTIONS.request_timeout_s, list[JobResult]()
        for worker in self._workers:
            found = worker.wait_results(max(0.0, deadline - time.monotonic()))
            if not found:
                raise RequestTimeout("The kvoffd daemon did not copy the block in time; try again.")
            results += found
        for result in results:
            if result.error is ErrorCode.SESSION_ENDED:
                raise DaemonUnavailable(_INTERRUPTED)
            if not result.ok and result.error not in _OF_BLOCKS:
                raise RequestRefused(result.error or ErrorCode.INTERNAL, "")
        return results

    def read(self, group: int, key: bytes, first_block: int) -> Block | None:
        """Read a block; None if it has left the pool. Raises BlockDamaged if the daemon finds that it is."""
        lookup = self._scheduler.lookup([GroupKeys(group, key)], again=True)
        try:
            if not lookup.wait(OPTIONS.request_timeout_s) or lookup.failed:
                raise DaemonUnavailable(_INTERRUPTED)
            if not lookup.leading_ready():
                return None
            by_rank = [self._layers[rank, group] for rank in range(self.geometry.world_size)]
            for layer in chain.from_iterable(by_rank):
                layer[:first_block] = 0
            errors = {result.error for result in self._copy(group, key, first_block, lookup.lease_id)} - {None}
        finally:
            self._scheduler.release(lookup.lease_id)
        if ErrorCode.CHECKSUM in errors:
            raise _damaged(key)
        if errors:
            return None
        shards = [np.concatenate([NO_BYTES, *(layer.ravel() for layer in layers)]) for layers in by_rank]
        return Block.of_bytes(self.geometry, group, key, shards, first_block)

    def write(self, block: Block) -> bool | None:
        """Store a block; False if it was present or being written, None if it found no space."""
        for shard in block.shards:
            for layer, own in zip(self._layers[shard.rank, block.group], shard.layers, strict=True):
                layer.ravel()[:] = own.data
        results = self._copy(block.group, block.key, block.first_block)
        return any(result.bytes for result in results) if all(result.ok for result in results) else None

    def close(self) -> None:
        closing: list[Closing] = [self._scheduler, *self._workers, self._memory]
        for one in closing:
            one.close()


def _cut(joined: bytes, size: int) -> list[bytes]:
    return [joined[at : at + size] for at in range(0, len(joined), size)]


def _damaged(key: bytes) -> BlockDamaged:
    return BlockDamaged(f"Block {key.hex()} does not match its checksum; `kvoffd-cli scrub` compares all of them.")


class BlockClient(AdminClient):
    """An administrator's client that also reads and writes single blocks, as engines do.

    >>> with BlockClient("/run/kvoffd") as client:                                         # doctest: +SKIP
    ...     (info, *_) = client.list_blocks("tiny-llama")
    ...     block = client.get_block("tiny-llama", info.key)
    ...     block.shards[0].layers[0].array
    ...     client.put_block("tiny-llama", other_key, block)

    ``namespace`` is a fingerprint (bytes), or a label or the first hex digits of a fingerprint (str). Arguments, errors
    and threads are as for AdminClient.
    """

    def __init__(self, directory: str | os.PathLike[str], timeout_s: float = OPTIONS.request_timeout_s) -> None:
        super().__init__(directory, timeout_s)

    def find_namespace(self, namespace: str | bytes) -> bytes:
        """Return the fingerprint of an open namespace. Raises UnknownNamespace."""
        return namespace if isinstance(namespace, bytes) else self.namespace(namespace).namespace

    def geometry(self, namespace: str | bytes) -> Geometry:
        """Return the geometry of a namespace's blocks. Raises BlockUnavailable if the daemon does not know it."""
        fingerprint = self.find_namespace(namespace)
        return Geometry.of_reply(fingerprint, self.ask(DescribeNamespace, fingerprint))

    def list_blocks(self, namespace: str | bytes, group: int = 0, prefix: str = "") -> Iterator[BlockInfo]:
        """Yield the blocks of a group whose keys begin with hex digits, in no order."""
        if len(prefix) > MAX_KEY_DIGITS:
            raise KvoffdClientError(f"{quoted(prefix)} has {len(prefix)} digits; a key has {MAX_KEY_DIGITS} at most.")
        fingerprint, position = self.find_namespace(namespace), 0
        while True:
            page = self.ask(ListBlocks, fingerprint, group, position, BLOCKS_PER_LIST, prefix)
            yield from page.blocks
            position = page.next_position
            if not position:
                return

    def get_block(self, namespace: str | bytes, key: bytes, group: int = 0) -> Block:
        """Read one block.

        Raises:
            BlockUnavailable: it is not in the pool, or incomplete.
            BlockDamaged: its bytes differ from those that were stored.
        """
        geometry = self.geometry(namespace)
        for info in self.list_blocks(geometry.fingerprint, group, key.hex()):
            if info.state != READY:
                continue
            with _Buffer(self.directory, geometry) as buffer:
                block = buffer.read(group, key, info.first_block)
            # It may have been stored again since it was listed, with another checksum.
            if block is not None and not block.matches(info):
                again = self.list_blocks(geometry.fingerprint, group, key.hex())
                block = next((block for each in again if block.matches(each)), None)
                if block is None:
                    raise _damaged(key)
            if block is not None:
                return block
        raise BlockUnavailable(f"Block {key.hex()} of group {group} is not in the pool, or incomplete.")

    def put_block(self, namespace: str | bytes, key: bytes, block: Block) -> bool:
        """Store a block under ``key``; False if the pool already has a block of that key.

        Raises:
            ValueError: the block does not fit the namespace.
            BlockUnavailable: the pool has no space for it.
        """
        geometry = self.geometry(namespace)
        if why := geometry.mismatch(block.geometry):
            raise ValueError(f"The block does not fit the namespace {geometry.label!r}: {why}.")
        with _Buffer(self.directory, geometry) as buffer:
            stored = buffer.write(replace(block, key=key))
        if stored is None:
            raise BlockUnavailable("The pool has no space for the block: everything in it is pinned or being written.")
        return stored
