"""Lists, reads and writes single blocks for programs other than engines, with an engine's copies."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, count, islice, pairwise
from typing import TYPE_CHECKING, TypeVar

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

T = TypeVar("T")
BlockT = TypeVar("BlockT", bound="BlockInfo | Block")
Bytes = npt.NDArray[np.uint8]
NO_BYTES: Bytes = np.empty(0, np.uint8)

OPTIONS = ClientOptions(request_timeout_s=60.0, operator=True)
"""The long timeout is for copies of a whole buffer by a busy daemon."""
BUFFER_BYTES, BUFFER_BLOCKS = 64 << 20, 1024
"""Largest buffer for copies, in bytes and in blocks."""
BUFFERS_PER_POOL = 8
"""The buffer is at most this part of the pool: more could not be leased or stored at once."""
BLOCKS_PER_LIST = 1024
CONNECT_S = 10.0
NAME = "kvoffd single blocks"
"""Name of the sessions, for operators."""
_INTERRUPTED = "The daemon was restarted, or ended the session during the copy; try again."
_OF_BLOCKS = (ErrorCode.NOT_READY, ErrorCode.CHECKSUM, ErrorCode.NO_SPACE)
"""Errors that concern only some blocks of a job."""

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


@dataclass
class BlocksRead:
    """Blocks that were read, keys of damaged ones, and keys of blocks that had left the pool."""

    blocks: list[Block] = field(default_factory=list)
    damaged: list[bytes] = field(default_factory=list)
    evicted: list[bytes] = field(default_factory=list)


@dataclass
class BlocksWritten:
    """Numbers of blocks that were stored, that were present or being written, and that found no space."""

    stored: int = 0
    present: int = 0
    no_space: int = 0


class _Buffer(Closing):
    """Memory for copies of one namespace's blocks, and an engine's sessions to make them.

    Each rank has a part of the memory, with space for the same blocks. Raises DaemonUnavailable, RequestRefused.
    """

    def __init__(self, directory: str, geometry: Geometry, size_bytes: int) -> None:
        self.geometry = geometry
        self._job_ids = count(1)
        per_key = {shard.blocks_per_key for of_rank in geometry.shards for shard in of_rank}
        if len(per_key) != 1:
            raise BlockUnavailable(
                "Blocks whose keys cover different numbers of engine blocks by group cannot be copied."
            )
        (self._per_key,) = per_key
        sizes = [geometry.block_bytes(group) for group in range(len(geometry.groups))]
        size_bytes = max(size_bytes, *sizes)
        self.capacities = [min(BUFFER_BLOCKS, size_bytes // max(1, nbytes)) for nbytes in sizes]
        """Blocks of each group that fit, one group at a time."""
        self._memory = SharedMemory(size_bytes, "kvoffd-blocks")
        self._layers: dict[tuple[int, int], list[Bytes]] = {}
        """Layers by rank and group: [slot in the buffer, engine block of the key, bytes of a page]."""
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
            capacity = self.capacities[group]
            start = capacity * sum(self.geometry.shard_bytes(other, group) for other in range(rank))
            refs, layers = [], []
            for page in shard.pages:
                refs.append(PageRef(len(tensors), page.page_bytes, page.layer))
                tensors.append(TensorLayout(0, start, page.page_bytes, capacity * self._per_key))
                end = start + capacity * self._per_key * page.page_bytes
                layers.append(self._memory.view[start:end].reshape(capacity, self._per_key, page.page_bytes))
                start = end
            groups.append(tuple(refs))
            self._layers[rank, group] = layers
        return Registration(rank, self._per_key, (self._memory,), tuple(tensors), tuple(groups))

    def _copy(
        self, group: int, keys: Sequence[bytes], first_block: int, lease_id: int | None = None
    ) -> list[tuple[JobResult, set[bytes]]]:
        """Store the blocks in the buffer's first slots, or load them there; return each rank's result and lost keys.

        ``first_block``: engine blocks to skip at the start, if there is one block only. Raises DaemonUnavailable,
        RequestTimeout; RequestRefused for errors that do not concern some of the blocks only.
        """
        transfer = GroupTransfer.of(keys, range(first_block, len(keys) * self._per_key), group, first_block)
        job = Job(next(self._job_ids), [transfer], lease_id, keep_lease=lease_id is not None)
        for worker in self._workers:
            worker.submit([job])
        deadline, size = time.monotonic() + OPTIONS.request_timeout_s, self.geometry.key_bytes
        ended = []
        for worker in self._workers:
            found = worker.wait_results(max(0.0, deadline - time.monotonic()))
            if not found:
                raise RequestTimeout("The kvoffd daemon copied no blocks in time; try again.")
            (result,) = found
            lost = {key for part in result.failed for key in _cut(part.keys, size)}
            if result.error is ErrorCode.SESSION_ENDED:
                raise DaemonUnavailable(_INTERRUPTED)
            if not result.ok and (result.error not in _OF_BLOCKS or not lost):
                raise RequestRefused(result.error or ErrorCode.INTERNAL, "")
            ended.append((result, lost))
        return ended

    def read(self, group: int, wanted: Sequence[BlockInfo]) -> BlocksRead:
        """Read blocks, at most as many as fit. Their checksums are not compared yet."""
        read, left = BlocksRead(), {info.key: info for info in wanted}
        while left:  # keys beyond the session's limit of leases are reported as absent
            lookup = self._scheduler.lookup([GroupKeys(group, b"".join(left))], again=True)
            try:
                if not lookup.wait(OPTIONS.request_timeout_s) or lookup.failed:
                    raise DaemonUnavailable(_INTERRUPTED)
                found = [info for info, state in zip(left.values(), lookup.states[0], strict=True) if state == READY]
                if not found:
                    break
                for job in _in_jobs(found):
                    self._load(lookup.lease_id, group, job, read)
            finally:
                self._scheduler.release(lookup.lease_id)
            for key in (*(block.key for block in read.blocks), *read.damaged, *read.evicted):
                left.pop(key, None)
        read.evicted += left
        return read

    def _load(self, lease_id: int, group: int, found: Sequence[BlockInfo], read: BlocksRead) -> None:
        """Load leased blocks by one job into ``read``. Blocks in none of its lists must be loaded again."""
        by_rank = [self._layers[rank, group] for rank in range(self.geometry.world_size)]
        first_block = found[0].first_block
        for layer in chain.from_iterable(by_rank):
            layer[0, :first_block] = 0
        ended = self._copy(group, [info.key for info in found], first_block, lease_id)
        for result, lost in ended:
            known = read.damaged if result.error is ErrorCode.CHECKSUM else read.evicted
            known += lost.difference(read.damaged, read.evicted)
        if all(result.ok for result, _ in ended):
            for slot, info in enumerate(found):
                shards = [np.concatenate([NO_BYTES, *(one[slot].ravel() for one in layers)]) for layers in by_rank]
                read.blocks.append(Block.of_bytes(self.geometry, group, info.key, shards, first_block))

    def write(self, group: int, blocks: Sequence[Block]) -> BlocksWritten:
        """Store blocks, at most as many as fit."""
        written = BlocksWritten()
        sizes = [sum(page.page_bytes for page in shards[group].pages) for shards in self.geometry.shards]
        for job in _in_jobs(blocks):
            for slot, block in enumerate(job):
                for shard in block.shards:
                    for layer, own in zip(self._layers[shard.rank, group], shard.layers, strict=True):
                        layer[slot].ravel()[:] = own.data
            first_block = job[0].first_block
            ended = self._copy(group, [block.key for block in job], first_block)
            copied = zip(ended, sizes, strict=True)
            stored = min(result.bytes // (self._per_key - first_block) // size for (result, _), size in copied if size)
            no_space = len(set().union(*(lost for _, lost in ended)))
            written.stored += stored
            written.no_space += no_space
            written.present += max(0, len(job) - stored - no_space)
        return written

    def close(self) -> None:
        closing: list[Closing] = [self._scheduler, *self._workers, self._memory]
        for one in closing:
            one.close()


def _cut(joined: bytes, size: int) -> list[bytes]:
    return [joined[at : at + size] for at in range(0, len(joined), size)]


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    left = iter(items)
    while batch := list(islice(left, size)):
        yield batch


def _in_jobs(blocks: Sequence[BlockT]) -> list[list[BlockT]]:
    """Group blocks into jobs: all complete ones in one, each with a hole alone, because a hole is at a job's start."""
    whole: list[BlockT] = []
    holed: list[list[BlockT]] = []
    for block in blocks:
        if block.first_block:
            holed.append([block])
        else:
            whole.append(block)
    return [whole, *holed] if whole else holed


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

    def generation(self, fingerprint: bytes) -> int:
        """Return the time of a namespace's last reset or clear, in microseconds since 1970; 0 for never."""
        return self.ask(DescribeNamespace, fingerprint).generation

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
        listed = [info for info in self.list_blocks(namespace, group, key.hex()) if info.state == READY]
        for read in self.read_blocks(namespace, listed, group):
            if read.blocks:
                return read.blocks[0]
            if read.damaged:
                raise BlockDamaged(
                    f"Block {key.hex()} does not match its checksum; `kvoffd-cli scrub` compares all of them."
                )
        raise BlockUnavailable(f"Block {key.hex()} of group {group} is not in the pool, or incomplete.")

    def read_blocks(self, namespace: str | bytes, blocks: Sequence[BlockInfo], group: int = 0) -> Iterator[BlocksRead]:
        """Read blocks from ``list_blocks`` and compare them with their checksums, a batch at a time."""
        geometry = self.geometry(namespace)
        with self._buffer(geometry, group, len(blocks)) as buffer:
            for batch in _batches(blocks, buffer.capacities[group]):
                read, listed = buffer.read(group, batch), {info.key: info for info in batch}
                for block in [block for block in read.blocks if not block.matches(listed[block.key])]:
                    # It may have been stored again since it was listed, with another checksum.
                    again = self.list_blocks(geometry.fingerprint, group, block.key.hex())
                    if not any(block.matches(info) for info in again):
                        read.blocks.remove(block)
                        read.damaged.append(block.key)
                yield read

    def put_block(self, namespace: str | bytes, key: bytes, block: Block) -> bool:
        """Store a block under ``key``; False if the pool already has a block of that key.

        Raises:
            ValueError: the block does not fit the namespace.
            BlockUnavailable: the pool has no space for it.
        """
        geometry = self.geometry(namespace)
        if why := geometry.mismatch(block.geometry):
            raise ValueError(f"The block does not fit the namespace {geometry.label!r}: {why}.")
        (written,) = self.write_blocks(geometry, block.group, [replace(block, key=key)], 1)
        if written.no_space:
            raise BlockUnavailable("The pool has no space for the block: everything in it is pinned or being written.")
        return written.stored > 0

    def write_blocks(
        self, geometry: Geometry, group: int, blocks: Iterable[Block], count: int, generation: int | None = None
    ) -> Iterator[BlocksWritten]:
        """Store ``count`` blocks of a group, a batch at a time. Opens the namespace if no engine has.

        ``generation``: that of the blocks, if known. Raises BlockUnavailable if they were reset or cleared since.
        """
        with self._buffer(geometry, group, count) as buffer:
            for batch in _batches(blocks, buffer.capacities[group]):
                if generation is not None and generation < self.generation(geometry.fingerprint):
                    raise BlockUnavailable(
                        f"The namespace {geometry.label!r} was reset or cleared here after the export, so the blocks "
                        "may be stale. Add --stale to import them all the same."
                    )
                yield buffer.write(group, batch)

    def _buffer(self, geometry: Geometry, group: int, count: int) -> _Buffer:
        """Return a buffer for at most ``count`` blocks."""
        pool_bytes = self.stats().pool.size_bytes
        needed = geometry.block_bytes(group) * count
        return _Buffer(self.directory, geometry, min(BUFFER_BYTES, pool_bytes // BUFFERS_PER_POOL, needed))
