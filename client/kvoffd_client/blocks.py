"""Single blocks: listed, read and written by programs that are no engine, and copied as an engine's are."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, count
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffd_client.admin_client import AdminClient
from kvoffd_client.errors import BlockDamaged, BlockUnavailable, DaemonUnavailable, RequestRefused, RequestTimeout
from kvoffd_client.jobs import GroupTransfer, Job
from kvoffd_client.memory import Registration, SharedMemory
from kvoffd_client.namespace import Geometry
from kvoffd_client.scheduler_client import SchedulerClient
from kvoffd_client.session import ClientOptions, Closing
from kvoffd_client.worker_client import WorkerClient
from kvoffd_proto.admin import CHECKSUM_BYTES, BlockInfo, DescribeNamespace, ListBlocks, PageSpec, ShardSpec
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import READY, GroupKeys, JobResult, PageRef, TensorLayout

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]
NO_BYTES: Bytes = np.empty(0, np.uint8)

OPTIONS = ClientOptions(request_timeout_s=60.0, operator=True)
"""To copy a buffer of blocks takes a busy daemon longer than other requests."""
BUFFER_BYTES, BUFFER_BLOCKS = 64 << 20, 1024
"""Blocks are copied to and from a buffer of this size, at most so many at a time."""
BUFFERS_PER_POOL = 8
"""In a small pool the buffer is this part of it: more could not be leased, or stored, at once."""
BLOCKS_PER_LIST = 1024
CONNECT_S = 10.0
NAME = "kvoffd single blocks"
"""What operators see of the sessions."""
_INTERRUPTED = "The daemon was restarted or ended the session in the middle; try again."
_OF_BLOCKS = (ErrorCode.NOT_READY, ErrorCode.CHECKSUM, ErrorCode.NO_ROOM)
"""Errors of a job that are about some of its blocks."""

# By torch's name of a dtype: numpy's name, or that of an unsigned integer of its size; safetensors' name.
DTYPES = {
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


def checksum_of(data: memoryview | bytes | Bytes) -> int:
    """The checksum of a shard's bytes as the daemon takes it: XXH3 of 64 bits, never 0."""
    return xxhash.xxh3_64_intdigest(data) or 1  # type: ignore[arg-type]


@dataclass(frozen=True)
class Layer:
    """One layer of one shard.

    Attributes:
        name: as the engine calls it; empty if unknown.
        dtype: as torch names it; ``uint8`` where the engine did not say, or where it does not fit the bytes.
        shape: ``(engine blocks of a key, *shape of a page)``.
        layout: names of a page's dimensions, with blanks between; empty if unknown.
        data: its bytes: uint8, flat.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str
    data: Bytes = field(repr=False, compare=False)

    @classmethod
    def of(cls, page: PageSpec, blocks_per_key: int, data: Bytes) -> Layer:
        """The layer as the engine described it, if that fits the size of its pages, else as bytes."""
        layer = page.layer
        name = layer.name if layer else ""
        if layer is not None and layer.dtype in DTYPES and layer.shape:
            item_bytes = np.dtype(DTYPES[layer.dtype][0]).itemsize
            if math.prod(layer.shape) * item_bytes == page.page_bytes:
                return cls(name, layer.dtype, (blocks_per_key, *layer.shape), layer.layout, data)
        return cls(name, "uint8", (blocks_per_key, page.page_bytes), "", data)

    @property
    def array(self) -> npt.NDArray[np.generic]:
        """An array of ``shape`` over the bytes. A dtype that numpy lacks comes as unsigned integers of its size."""
        return self.data.view(DTYPES[self.dtype][0]).reshape(self.shape)

    def tensor(self) -> torch.Tensor:
        """A torch tensor of ``shape`` over the bytes."""
        import torch

        return torch.from_numpy(self.data).view(getattr(torch, self.dtype)).reshape(self.shape)


@dataclass(eq=False)
class Shard:
    """One rank's part of a block.

    Attributes:
        rank: the worker's rank.
        spec: its layers' pages.
        data: the bytes, layer after layer: uint8, flat.
        checksum: what the daemon says of them; 0 where it says nothing, or they are not from there.
    """

    rank: int
    spec: ShardSpec
    data: Bytes = field(repr=False)
    checksum: int = 0

    @property
    def layers(self) -> list[Layer]:
        """The shard's layers, in the order of the slot."""
        pages, per_key = self.spec.pages, self.spec.blocks_per_key
        ends = accumulate(per_key * page.page_bytes for page in pages)
        parts = np.split(self.data, list(ends)[:-1]) if pages else []
        return [Layer.of(page, per_key, data) for page, data in zip(pages, parts, strict=True)]


@dataclass(eq=False)
class Block:
    """What one key names: one shard for each rank, in memory of its own.

    Attributes:
        geometry: of its namespace.
        group: its KV cache group.
        key: its hash.
        shards: by rank.
        first_block: engine blocks at the start of each layer that were not stored; zeros where it was read.
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
        """A block over the caller's memory: the bytes of each rank's shard. Raises ValueError where they do not fit."""
        if len(shards) != geometry.world_size:
            raise ValueError(f"A block of this namespace has {geometry.world_size} shards, not {len(shards)}.")
        parts = []
        for rank, data in enumerate(shards):
            expected = geometry.shard_bytes(rank, group)
            if data.nbytes != expected:
                raise ValueError(f"The shard of rank {rank} has {expected} bytes, not {data.nbytes}.")
            parts.append(Shard(rank, geometry.shards[rank][group], data.reshape(-1).view(np.uint8)))
        return cls(geometry, group, key, tuple(parts), first_block)

    @property
    def damaged_rank(self) -> int | None:
        """The first rank whose shard does not match its checksum; None where all match, or nothing is to compare."""
        for shard in self.shards:
            if shard.checksum and checksum_of(shard.data) != shard.checksum:
                return shard.rank
        return None

    def take_checksums(self, info: BlockInfo) -> None:
        """Take over what the daemon says of the shards' checksums; nothing where a hole's bytes are in the sum."""
        for shard in self.shards if not info.first_block else ():
            at = shard.rank * CHECKSUM_BYTES
            shard.checksum = int.from_bytes(info.checksums[at : at + CHECKSUM_BYTES], "big")


@dataclass
class BlocksRead:
    """What came of reading some blocks.

    Attributes:
        blocks: those that were read, compared with their checksums.
        damaged: keys of those that do not match theirs.
        evicted: keys of those that left the pool before they were read.
    """

    blocks: list[Block] = field(default_factory=list)
    damaged: list[bytes] = field(default_factory=list)
    evicted: list[bytes] = field(default_factory=list)


@dataclass
class BlocksWritten:
    """How many of some blocks were stored, and what became of the others.

    Attributes:
        stored: now in the pool.
        present: there already, or being written.
        no_space: the whole pool is pinned or being written, or the namespace's quota is.
    """

    stored: int = 0
    present: int = 0
    no_space: int = 0


class _Buffer(Closing):
    """Memory that the daemon copies blocks of one namespace to and from, and an engine's sessions for that.

    Each rank has a part of the memory, with space for the same blocks.

    Raises:
        DaemonUnavailable, RequestRefused.
    """

    def __init__(self, directory: str, geometry: Geometry, size_bytes: int) -> None:
        self.geometry = geometry
        self._job_ids = count(1)
        per_key = {shard.blocks_per_key for of_rank in geometry.shards for shard in of_rank}
        if len(per_key) != 1:
            raise BlockUnavailable("The blocks cannot be copied: their keys cover other engine blocks in other groups.")
        (self._per_key,) = per_key
        sizes = [geometry.block_bytes(group) for group in range(len(geometry.groups))]
        size_bytes = max(size_bytes, *sizes)
        self.capacities = [min(BUFFER_BLOCKS, size_bytes // max(1, nbytes)) for nbytes in sizes]
        """How many blocks of each group it holds."""
        self._memory = SharedMemory(size_bytes, "kvoffd-blocks")
        self._scheduler = SchedulerClient(directory, geometry, name=NAME, options=OPTIONS)
        self._workers: list[WorkerClient] = []
        self._layers: dict[tuple[int, int], list[Bytes]] = {}
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
        """Lay a rank's part of the memory out, and note where each layer's pages are: [block, bytes of its layer]."""
        tensors: list[TensorLayout] = []
        groups: list[tuple[PageRef, ...]] = []
        for group, shard in enumerate(self.geometry.shards[rank]):
            capacity, per_key = self.capacities[group], shard.blocks_per_key
            start = capacity * sum(self.geometry.shard_bytes(other, group) for other in range(rank))
            refs, views = [], []
            for page in shard.pages:
                refs.append(PageRef(len(tensors), page.page_bytes, page.layer))
                tensors.append(TensorLayout(0, start, page.page_bytes, capacity * per_key))
                end = start + capacity * per_key * page.page_bytes
                views.append(self._memory.view[start:end].reshape(capacity, per_key * page.page_bytes))
                start = end
            groups.append(tuple(refs))
            self._layers[rank, group] = views
        return Registration(rank, self._per_key, (self._memory,), tuple(tensors), tuple(groups))

    def _run(
        self, group: int, keys: Sequence[bytes], holes: Sequence[int], lease_id: int | None = None
    ) -> list[tuple[list[bytes], list[JobResult]]]:
        """Have all ranks store the blocks at the places from 0 on, or load them; returns the jobs' keys and results.

        ``holes``: engine blocks that are left out at the start of each. Only a job's first key may begin with a hole.
        Raises DaemonUnavailable, RequestTimeout; RequestRefused for what is wrong with more than some of the blocks.
        """
        deadline, per_key = time.monotonic() + OPTIONS.request_timeout_s, self._per_key
        places = [[at for at, hole in enumerate(holes) if not hole], *([at] for at, hole in enumerate(holes) if hole)]
        jobs: dict[int, list[bytes]] = {}
        wanted: list[Job] = []
        for some in filter(None, places):
            ids = [at * per_key + number for at in some for number in range(per_key)][holes[some[0]] :]
            jobs[job_id := next(self._job_ids)] = [keys[at] for at in some]
            transfer = GroupTransfer.of(jobs[job_id], ids, group, holes[some[0]])
            wanted.append(Job(job_id, [transfer], lease_id, keep_lease=lease_id is not None))
        for worker in self._workers:
            worker.submit(wanted)
        found: dict[int, list[JobResult]] = {job_id: [] for job_id in jobs}
        for worker in self._workers:
            missing = set(jobs)
            while missing:
                if (left := deadline - time.monotonic()) <= 0:
                    raise RequestTimeout("The kvoffd daemon copied no blocks in time; try again.")
                for result in worker.wait_results(left):
                    if result.error is ErrorCode.SESSION_ENDED:
                        raise DaemonUnavailable(_INTERRUPTED)
                    if not result.ok and (result.error not in _OF_BLOCKS or not result.failed):
                        raise RequestRefused(result.error or ErrorCode.INTERNAL, "")
                    missing.discard(result.job_id)
                    found[result.job_id].append(result)
        return [(names, found[job_id]) for job_id, names in jobs.items()]

    def _failed(self, result: JobResult) -> set[bytes]:
        size = self.geometry.key_bytes
        return {part.keys[at : at + size] for part in result.failed for at in range(0, len(part.keys), size)}

    def read(self, group: int, wanted: Sequence[BlockInfo]) -> BlocksRead:
        """Read blocks, as many as there is room for. They are not compared with their checksums yet."""
        read, left = BlocksRead(), {info.key: info for info in wanted}
        while left:  # more than the session may lease at once are called absent
            lookup = self._scheduler.lookup([GroupKeys(group, b"".join(left))], again=True)
            try:
                if not lookup.wait(OPTIONS.request_timeout_s) or lookup.failed:
                    raise DaemonUnavailable(_INTERRUPTED)
                found = [info for info, state in zip(left.values(), lookup.states[0], strict=True) if state == READY]
                if not found:
                    break
                self._load(lookup.lease_id, group, found, read)
            finally:
                self._scheduler.release(lookup.lease_id)
            for key in (*(block.key for block in read.blocks), *read.damaged, *read.evicted):
                left.pop(key, None)
        read.evicted += left
        return read

    def _load(self, lease_id: int, group: int, found: Sequence[BlockInfo], read: BlocksRead) -> None:
        """Load leased blocks. Those that are in no list of ``read`` then are to be loaded again."""
        ranks = range(self.geometry.world_size)
        for place, info in enumerate(found):
            for layer in chain.from_iterable(self._layers[rank, group] for rank in ranks):
                layer[place, : info.first_block * layer.shape[1] // self._per_key] = 0
        again: set[bytes] = set()
        for keys, results in self._run(
            group, [info.key for info in found], [info.first_block for info in found], lease_id
        ):
            for result in results:
                if not result.ok:
                    again.update(keys)
                    lost = read.damaged if result.error is ErrorCode.CHECKSUM else read.evicted
                    lost += self._failed(result).difference(read.damaged, read.evicted)
        for place, info in enumerate(found):
            if info.key not in again:
                data = [
                    np.concatenate([NO_BYTES, *(one[place] for one in self._layers[rank, group])]) for rank in ranks
                ]
                block = Block.of_bytes(self.geometry, group, info.key, data, info.first_block)
                block.take_checksums(info)
                read.blocks.append(block)

    def write(self, group: int, blocks: Sequence[Block]) -> BlocksWritten:
        """Store blocks, as many as there is room for."""
        for place, block in enumerate(blocks):
            for shard in block.shards:
                for layer, own in zip(self._layers[shard.rank, group], shard.layers, strict=True):
                    layer[place] = own.data
        holes = {block.key: block.first_block for block in blocks}
        written, no_space = BlocksWritten(), set[bytes]()
        sizes = [sum(page.page_bytes for page in shards[group].pages) for shards in self.geometry.shards]
        for keys, results in self._run(group, list(holes), list(holes.values())):
            per_key = self._per_key - holes[keys[0]]
            by_rank = zip(results, sizes, strict=True)
            written.stored += min(result.bytes // (per_key * size) for result, size in by_rank if size)
            no_space.update(*map(self._failed, results))
        written.no_space = len(no_space)
        written.present = max(0, len(blocks) - written.stored - written.no_space)
        return written

    def close(self) -> None:
        closing: list[Closing] = [self._scheduler, *self._workers, self._memory]
        for one in closing:
            one.close()


class BlockClient(AdminClient):
    """An administrator's client that reads and writes single blocks, as any engine may.

    >>> with BlockClient("/run/kvoffd") as client:                                         # doctest: +SKIP
    ...     (info, *_) = client.list_blocks("tiny-llama")
    ...     block = client.get_block("tiny-llama", info.key)
    ...     block.shards[0].layers[0].array
    ...     client.put_block("tiny-llama", other_key, block)

    A namespace is named by its fingerprint (bytes), or by its label or the first hex digits of the fingerprint (str).
    All calls raise what AdminClient's do. For one thread. The arguments are AdminClient's.
    """

    def __init__(self, directory: str | os.PathLike[str], timeout_s: float = OPTIONS.request_timeout_s) -> None:
        super().__init__(directory, timeout_s)
        self._buffer: _Buffer | None = None

    def find_namespace(self, namespace: str | bytes) -> bytes:
        """The fingerprint of an open namespace. Raises UnknownNamespace where none or several have the name."""
        return namespace if isinstance(namespace, bytes) else self.namespace(namespace).namespace

    def geometry(self, namespace: str | bytes) -> Geometry:
        """The geometry of a namespace's blocks. Raises BlockUnavailable where the daemon does not know it yet."""
        fingerprint = self.find_namespace(namespace)
        return Geometry.of_reply(fingerprint, self.ask(DescribeNamespace, fingerprint))

    def list_blocks(self, namespace: str | bytes, group: int = 0, prefix: str = "") -> Iterator[BlockInfo]:
        """Yield the blocks of a group whose keys begin with some hex digits, in no order."""
        fingerprint, position = self.find_namespace(namespace), 0
        while True:
            page = self.ask(ListBlocks, fingerprint, group, position, BLOCKS_PER_LIST, prefix)
            yield from page.blocks
            position = page.next_position
            if not position:
                return

    def get_block(self, namespace: str | bytes, key: bytes, group: int = 0, *, verify: bool = True) -> Block:
        """Read one block.

        Args:
            verify: compare the bytes with their checksums.

        Raises:
            BlockUnavailable: it is not in the pool, or not completely.
            BlockDamaged: its bytes are not those that were stored.
        """
        listed = [info for info in self.list_blocks(namespace, group, key.hex()) if info.state == READY]
        read = next(self.read_blocks(namespace, listed, group, verify=verify), BlocksRead())
        if read.damaged:
            raise BlockDamaged(
                f"Block {key.hex()} does not match its checksum; `kvoffd-cli scrub` compares all of them."
            )
        if not read.blocks:
            raise BlockUnavailable(f"Block {key.hex()} of group {group} is not in the pool, or not completely.")
        return read.blocks[0]

    def read_blocks(
        self, namespace: str | bytes, blocks: Sequence[BlockInfo], group: int = 0, *, verify: bool = True
    ) -> Iterator[BlocksRead]:
        """Read blocks that ``list_blocks`` has found, and compare them with their checksums; yields some at a time."""
        geometry = self.geometry(namespace)
        step = self.batch_blocks(geometry, group)
        for start in range(0, len(blocks), step):
            with self._buffer_of(geometry) as buffer:
                read = buffer.read(group, blocks[start : start + step])
            for block in [block for block in read.blocks if verify and block.damaged_rank is not None]:
                # One that was stored anew since it was listed has another checksum.
                for info in self.list_blocks(geometry.fingerprint, group, block.key.hex()):
                    block.take_checksums(info)
                if block.damaged_rank is not None:
                    read.blocks.remove(block)
                    read.damaged.append(block.key)
            yield read

    def put_block(self, namespace: str | bytes, key: bytes, block: Block) -> bool:
        """Store a block under ``key``; False where a block of that key is there already.

        Raises:
            ValueError: the block is not made as those of the namespace are.
            BlockUnavailable: the pool has no space for it.
        """
        geometry = self.geometry(namespace)
        if why := geometry.mismatch(block.geometry):
            raise ValueError(f"The block does not fit the namespace {geometry.label!r}: {why}.")
        written = self.write_blocks(geometry, block.group, [replace(block, key=key)])
        if written.no_space:
            raise BlockUnavailable("The pool has no space for the block: everything in it is pinned or being written.")
        return written.stored > 0

    def batch_blocks(self, geometry: Geometry, group: int) -> int:
        """How many blocks are copied at once. Opens the namespace where no engine has."""
        with self._buffer_of(geometry) as buffer:
            return buffer.capacities[group]

    def write_blocks(self, geometry: Geometry, group: int, blocks: Sequence[Block]) -> BlocksWritten:
        """Store blocks of a group, at most ``batch_blocks`` of them."""
        with self._buffer_of(geometry) as buffer:
            return buffer.write(group, blocks)

    @contextmanager
    def _buffer_of(self, geometry: Geometry) -> Iterator[_Buffer]:
        """The buffer for a namespace's blocks; a new one after a copy that failed."""
        if self._buffer is not None and self._buffer.geometry != geometry:
            self._close_buffer()
        if self._buffer is None:
            size_bytes = min(BUFFER_BYTES, self.stats().pool.size_bytes // BUFFERS_PER_POOL)
            self._buffer = _Buffer(self.directory, geometry, size_bytes)
        try:
            yield self._buffer
        except BaseException:
            self._close_buffer()  # the daemon may copy into it still
            raise

    def _close_buffer(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.close()

    def close(self) -> None:
        """End all sessions. Repeatable."""
        super().close()
        self._close_buffer()
