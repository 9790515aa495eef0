"""Single blocks: listed, read and written by programs that are no engine, and copied as an engine's are."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, count
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffd_client.admin_client import AdminClient, matching_namespaces
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

OPTIONS = ClientOptions(request_timeout_s=60.0)
"""To copy a buffer of blocks takes a busy daemon longer than other requests."""
BUFFER_BYTES, BUFFER_BLOCKS = 64 << 20, 1024
"""Blocks are copied to and from a buffer of this size, at most so many at a time."""
BUFFERS_PER_POOL = 8
"""In a small pool the buffer is this part of it: more could not be leased, or stored, at once."""
BLOCKS_PER_LIST = 1024
PATIENCE_S = 1.0
"""For a session to open; then the daemon is asked whether it is there."""
_INTERRUPTED = "The daemon was restarted or ended the session in the middle; try again."
NAME = "kvoffd single blocks"
"""What operators see of the sessions."""

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

    @classmethod
    def of(cls, page: PageSpec, blocks_per_key: int) -> TensorSpec:
        """How to read pages of a layer: as the engine described them, if that fits their size, else as bytes."""
        layer = page.layer
        if layer is not None and layer.dtype in DTYPES and layer.shape:
            item_bytes = np.dtype(DTYPES[layer.dtype][0]).itemsize
            if math.prod(layer.shape) * item_bytes == page.page_bytes:
                return cls(layer.dtype, (blocks_per_key, *layer.shape), layer.layout)
        return cls("uint8", (blocks_per_key, page.page_bytes), "")


@dataclass(frozen=True)
class Layer(TensorSpec):
    """One layer of one shard.

    Attributes:
        name: as the engine calls it; empty if unknown.
        data: its bytes: uint8, flat.
    """

    name: str
    data: Bytes = field(repr=False, compare=False)

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
        layers: list[Layer] = []
        start, per_key = 0, self.spec.blocks_per_key
        for page in self.spec.pages:
            end = start + per_key * page.page_bytes
            spec = TensorSpec.of(page, per_key)
            name = page.layer.name if page.layer else ""
            layers.append(Layer(spec.dtype, spec.shape, spec.layout, name, self.data[start:end]))
            start = end
        return layers


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

    geometry: Geometry
    group: int
    key: bytes
    shards: tuple[Shard, ...]
    first_block: int = 0

    @classmethod
    def blank(cls, geometry: Geometry, group: int = 0, key: bytes = b"") -> Block:
        """A block of zeros to write into."""
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
            parts.append(Shard(rank, geometry.shards[rank][group], data.reshape(-1).view(np.uint8)))
        return cls(geometry, group, key, tuple(parts), first_block)

    @property
    def damaged_rank(self) -> int | None:
        """The first rank whose shard does not match its checksum; None where all match, or nothing is to compare."""
        for shard in self.shards:
            if shard.checksum and checksum_of(shard.data) != shard.checksum:
                return shard.rank
        return None

    def verify(self) -> None:
        """Compare all shards with their checksums. Raises BlockDamaged."""
        if (rank := self.damaged_rank) is not None:
            raise BlockDamaged(
                f"The shard of rank {rank} of block {self.key.hex()} does not match its checksum; `kvoffd-cli scrub` "
                "checks all of them."
            )

    def __repr__(self) -> str:
        return f"Block({self.key.hex()[:16]}, group {self.group}, {len(self.shards)} shards)"


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

    @property
    def count(self) -> int:
        """How many blocks these are."""
        return len(self.blocks) + len(self.damaged) + len(self.evicted)


@dataclass
class BlocksWritten:
    """How many of some blocks were stored, and what became of the others.

    Attributes:
        stored: now in the pool.
        present: there already, or being written.
        declined: not worth their room, as the eviction policy has it.
        no_room: the whole pool is pinned or being written.
    """

    stored: int = 0
    present: int = 0
    declined: int = 0
    no_room: int = 0


class _Buffer(Closing):
    """Memory that the daemon copies blocks of one namespace to and from, and an engine's sessions for that.

    Each rank has a part of the memory, with room for the same blocks. An engine block has all its layers there, one
    after the other; a shard has its engine blocks layer by layer.

    Raises:
        DaemonUnavailable, RequestRefused.
    """

    def __init__(
        self, admin: AdminClient, directory: str, geometry: Geometry, size_bytes: int, options: ClientOptions
    ) -> None:
        self.geometry = geometry
        self._directory = directory
        self._timeout_s = options.request_timeout_s
        self._job_ids = count(1)
        self._workers: list[WorkerClient] = []
        per_key = {shard.blocks_per_key for of_rank in geometry.shards for shard in of_rank}
        if len(per_key) != 1:
            raise BlockUnavailable("The blocks cannot be copied: their keys cover other engine blocks in other groups.")
        (self._per_key,) = per_key
        sizes = [geometry.block_bytes(group) for group in range(len(geometry.groups))]
        size_bytes = max(size_bytes, *sizes)
        self._capacities = [min(BUFFER_BLOCKS, size_bytes // max(1, nbytes)) for nbytes in sizes]
        self._memory = SharedMemory(size_bytes, "kvoffd-blocks")
        self._scheduler = SchedulerClient(directory, geometry, name=NAME, options=options)
        try:
            for rank in range(geometry.world_size):
                registration = self._registration(rank)
                self._workers.append(WorkerClient(directory, geometry, registration, name=NAME, options=options))
            self._connect(admin)
        except BaseException:
            self.close()
            raise

    def _registration(self, rank: int) -> Registration:
        tensors: list[TensorLayout] = []
        groups: list[tuple[PageRef, ...]] = []
        for group, shard in enumerate(self.geometry.shards[rank]):
            start, stride = self._start(rank, group), sum(page.page_bytes for page in shard.pages)
            groups.append(
                tuple(PageRef(at, page.page_bytes, page.layer) for at, page in enumerate(shard.pages, len(tensors)))
            )
            for page in shard.pages:
                tensors.append(TensorLayout(0, start, stride, self._capacities[group] * shard.blocks_per_key))
                start += page.page_bytes
        return Registration(rank, self._per_key, (self._memory,), tuple(tensors), tuple(groups))

    def _connect(self, admin: AdminClient) -> None:
        deadline = time.monotonic() + self._timeout_s
        clients: list[SchedulerClient | WorkerClient] = [self._scheduler, *self._workers]
        for client in clients:
            while not client.wait_settled(PATIENCE_S):
                if client.refusal is not None:
                    raise client.refusal
                admin.health()  # it raises where nothing listens any more
                if time.monotonic() >= deadline:
                    why = f"The kvoffd daemon in {self._directory} opened no session in time: {client.problem}"
                    raise DaemonUnavailable(why)

    def capacity(self, group: int) -> int:
        """How many blocks of a group it holds."""
        return self._capacities[group]

    def _start(self, rank: int, group: int) -> int:
        before = sum(self.geometry.shard_bytes(other, group) for other in range(rank))
        return self._capacities[group] * before

    def _layers(self, rank: int, group: int, place: int) -> list[Bytes]:
        """Of the block at a place, each layer's pages: [engine blocks of a key, bytes of a page].

        Where a key covers one engine block all layers are one array: they lie as they do in the shard.
        """
        nbytes = self.geometry.shard_bytes(rank, group)
        start = self._start(rank, group) + place * nbytes
        pages = self._memory.view[start : start + nbytes].reshape(self._per_key, -1)
        if self._per_key == 1:
            return [pages]
        ends = list(accumulate(page.page_bytes for page in self.geometry.shards[rank][group].pages))
        return np.split(pages, ends[:-1], axis=1)

    def _transfers(self, group: int, keys: Sequence[bytes], first_blocks: Sequence[int]) -> list[GroupTransfer]:
        """Copies of the blocks at the places from 0 on. Only the first key of a transfer may begin with a hole."""
        per_key, whole = self._per_key, [at for at, hole in enumerate(first_blocks) if not hole]
        found = []
        for places in ([whole] if whole else []) + [[at] for at, hole in enumerate(first_blocks) if hole]:
            hole = first_blocks[places[0]]
            ids = [at * per_key + number for at in places for number in range(per_key)]
            found.append(GroupTransfer.of([keys[at] for at in places], ids[hole:], group, hole))
        return found

    def _run(self, jobs: Sequence[Job]) -> list[list[JobResult]]:
        """Have all ranks do some jobs; returns, by job, the results by rank.

        Raises DaemonUnavailable, RequestTimeout; RequestRefused for what is wrong with more than some of the blocks.
        """
        deadline = time.monotonic() + self._timeout_s
        wanted = [job.job_id for job in jobs]
        for worker in self._workers:
            worker.submit(jobs)
        by_rank: list[dict[int, JobResult]] = []
        for worker in self._workers:
            found: dict[int, JobResult] = {}
            while len(found) < len(wanted):
                if (left := deadline - time.monotonic()) <= 0:
                    raise RequestTimeout(f"The kvoffd daemon in {self._directory} copied no blocks in time; try again.")
                found.update((result.job_id, result) for result in worker.wait_results(left))
            by_rank.append(found)
        results = [[found[job_id] for found in by_rank] for job_id in wanted]
        for result in chain.from_iterable(results):
            if result.error is ErrorCode.SESSION_ENDED:
                raise DaemonUnavailable(_INTERRUPTED)
            of_blocks = (ErrorCode.NOT_READY, ErrorCode.CHECKSUM, ErrorCode.NO_ROOM)
            if not result.ok and (result.error not in of_blocks or not result.failed):
                raise RequestRefused(result.error or ErrorCode.INTERNAL, "")
        return results

    def _keys_of(self, parts: Iterable[GroupKeys | GroupTransfer]) -> list[bytes]:
        size = self.geometry.key_bytes
        return [part.keys[at : at + size] for part in parts for at in range(0, len(part.keys), size)]

    def read(self, group: int, wanted: Sequence[BlockInfo]) -> BlocksRead:
        """Read blocks, as many as there is room for. They are not compared with their checksums yet."""
        read, left = BlocksRead(), {info.key: info for info in wanted}
        while left:  # more than the session may lease at once are called absent
            lookup = self._scheduler.lookup([GroupKeys(group, b"".join(left))], again=True)
            try:
                if not lookup.wait(self._timeout_s) or lookup.failed:
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
        """Load leased blocks. Those that are in neither list of ``read`` then are to be loaded again."""
        ranks = range(self.geometry.world_size)
        for place, info in enumerate(found):
            for pages in chain.from_iterable(self._layers(rank, group, place) for rank in ranks):
                pages[: info.first_block] = 0
        transfers = self._transfers(group, [info.key for info in found], [info.first_block for info in found])
        loads = [Job(next(self._job_ids), [transfer], lease_id, keep_lease=True) for transfer in transfers]
        not_loaded: set[bytes] = set()
        for transfer, results in zip(transfers, self._run(loads), strict=True):
            for result in results:
                if not result.ok:
                    not_loaded.update(self._keys_of([transfer]))
                    lost = read.damaged if result.error is ErrorCode.CHECKSUM else read.evicted
                    lost += set(self._keys_of(result.failed)).difference(read.damaged, read.evicted)
        for place, info in enumerate(found):
            if info.key not in not_loaded:
                data = [np.concatenate([p.reshape(-1) for p in self._layers(rank, group, place)]) for rank in ranks]
                block = Block.of_bytes(self.geometry, group, info.key, data, info.first_block)
                for shard in block.shards if not info.first_block else ():
                    at = shard.rank * CHECKSUM_BYTES
                    shard.checksum = int.from_bytes(info.checksums[at : at + CHECKSUM_BYTES], "big")
                read.blocks.append(block)

    def write(self, group: int, blocks: Sequence[Block]) -> BlocksWritten:
        """Store blocks, as many as there is room for."""
        for place, block in enumerate(blocks):
            for shard in block.shards:
                at = 0
                for pages in self._layers(shard.rank, group, place):
                    pages[...] = shard.data[at : at + pages.size].reshape(pages.shape)
                    at += pages.size
        transfers = self._transfers(group, [block.key for block in blocks], [block.first_block for block in blocks])
        stores = [Job(next(self._job_ids), [transfer]) for transfer in transfers]
        written, no_room, declined = BlocksWritten(), set[bytes](), set[bytes]()
        for transfer, results in zip(transfers, self._run(stores), strict=True):
            per_key = self._per_key - transfer.first_block
            sizes = [sum(page.page_bytes for page in shards[group].pages) for shards in self.geometry.shards]
            written.stored += min(result.bytes // (per_key * size) for result, size in zip(results, sizes, strict=True))
            no_room.update(self._keys_of(part for result in results for part in result.failed))
            declined.update(self._keys_of(part for result in results for part in result.declined))
        written.no_room, written.declined = len(no_room), len(declined - no_room)
        written.present = max(0, len(blocks) - written.stored - len(no_room | declined))
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
    All calls raise what AdminClient's do. The arguments are AdminClient's.
    """

    def __init__(self, directory: str | os.PathLike[str], options: ClientOptions = OPTIONS) -> None:
        super().__init__(directory, options.request_timeout_s)
        self._options = options
        self._buffer: _Buffer | None = None
        self._one_copy = threading.Lock()

    def find_namespace(self, namespace: str | bytes) -> bytes:
        """The fingerprint of an open namespace. Raises ValueError where none or several have the name."""
        if isinstance(namespace, bytes):
            return namespace
        found = matching_namespaces(self.namespaces().namespaces, namespace)
        if len(found) != 1:
            raise ValueError(
                f"{len(found) or 'No'} open namespaces have the label {namespace!r} or a fingerprint that begins with "
                "it; `kvoffd-cli namespaces` lists them."
            )
        return found[0].namespace

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
        geometry = self.geometry(namespace)
        infos = [info for info in self._ready_blocks(geometry, group, key.hex()) if info.key == key]
        with self._buffer_of(geometry) as buffer:
            read = buffer.read(group, infos)
        if read.damaged:
            raise BlockDamaged(f"Block {key.hex()} is damaged; the daemon has dropped it.")
        if not read.blocks:
            raise BlockUnavailable(f"Block {key.hex()} of group {group} is not in the pool, or not completely.")
        if verify:
            read.blocks[0].verify()
        return read.blocks[0]

    def read_blocks(self, namespace: str | bytes, blocks: Sequence[BlockInfo], group: int = 0) -> Iterator[BlocksRead]:
        """Read blocks that ``list_blocks`` has found, and compare them with their checksums; yields some at a time."""
        geometry = self.geometry(namespace)
        step = self.batch_blocks(geometry, group)
        for start in range(0, len(blocks), step):
            with self._buffer_of(geometry) as buffer:
                read = buffer.read(group, blocks[start : start + step])
            wrong = [block for block in read.blocks if block.damaged_rank is not None]
            if wrong:  # one that was stored anew since it was listed has another checksum
                listed = [info for block in wrong for info in self._ready_blocks(geometry, group, block.key.hex())]
                with self._buffer_of(geometry) as buffer:
                    again = buffer.read(group, listed)
                sound = [block for block in again.blocks if block.damaged_rank is None]
                read.blocks = [block for block in read.blocks if block not in wrong] + sound
                read.evicted += {block.key for block in wrong} - {info.key for info in listed} | set(again.evicted)
                read.damaged += [block.key for block in again.blocks if block not in sound] + again.damaged
            yield read

    def put_block(self, namespace: str | bytes, key: bytes, block: Block) -> bool:
        """Store a block under ``key``; False where a block of that key is there already.

        Raises:
            ValueError: the block is not made as those of the namespace are.
            BlockUnavailable: the pool has no room for it.
        """
        geometry = self.geometry(namespace)
        if why := geometry.mismatch(block.geometry):
            raise ValueError(f"The block does not fit the namespace {geometry.label!r}: {why}.")
        written = self.write_blocks(geometry, block.group, [replace(block, key=key)])
        if written.no_room:
            raise BlockUnavailable("The pool has no room for the block: everything in it is pinned or being written.")
        if written.declined:
            raise BlockUnavailable("The eviction policy keeps what is in the pool, and declines the block.")
        return written.stored > 0

    def batch_blocks(self, geometry: Geometry, group: int) -> int:
        """How many blocks are copied at once."""
        with self._buffer_of(geometry) as buffer:
            return buffer.capacity(group)

    def write_blocks(self, geometry: Geometry, group: int, blocks: Sequence[Block]) -> BlocksWritten:
        """Store blocks of a group, at most ``batch_blocks`` of them. Opens the namespace where no engine has."""
        with self._buffer_of(geometry) as buffer:
            return buffer.write(group, blocks)

    def _ready_blocks(self, geometry: Geometry, group: int, prefix: str) -> list[BlockInfo]:
        return [info for info in self.list_blocks(geometry.fingerprint, group, prefix) if info.state == READY]

    @contextmanager
    def _buffer_of(self, geometry: Geometry) -> Iterator[_Buffer]:
        """The buffer for a namespace's blocks, for one copy at a time; a new one after a copy that failed."""
        with self._one_copy:
            if self._buffer is not None and self._buffer.geometry != geometry:
                self._close_buffer()
            if self._buffer is None:
                size_bytes = min(BUFFER_BYTES, self.stats().pool.size_bytes // BUFFERS_PER_POOL)
                self._buffer = _Buffer(self, self.directory, geometry, size_bytes, self._options)
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
