"""Reads and writes single blocks of a daemon."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar

import numpy as np

from kvoffd_client.admin_client import AdminClient, AdminSession, matching_namespaces
from kvoffd_client.blocks.block import Block, Bytes, Shard, checksum_of, not_held
from kvoffd_client.blocks.block_session import BlockSession, Lease, OpenedPool
from kvoffd_client.client_options import ClientOptions
from kvoffd_client.errors import BlockUnavailable, DaemonUnavailable, KvoffdClientError
from kvoffd_client.namespace_spec import Geometry
from kvoffd_client.shared_memory import SharedMemory
from kvoffd_proto import blocks as b
from kvoffd_proto.messages import Release

OPTIONS = ClientOptions(request_timeout_s=60.0)
"""Putting many blocks takes as long as copying them."""
STAGING_BYTES = 32 << 20
BLOCKS_PER_LIST = 4096
_INTERRUPTED = "The daemon was restarted or ended the session in the middle; try again."


class BlockClient(AdminClient):
    """An administrator's client that opens blocks, as far as the daemon's setting ``block_access`` allows it.

    >>> with BlockClient("/run/kvoffd") as client:                                         # doctest: +SKIP
    ...     (info, *_) = client.list_blocks("tiny-llama")
    ...     with client.get_block("tiny-llama", info.key) as block:
    ...         block.shards[0].layers[0].array      # over the pool itself, read-only
    ...         mine = block.copy()
    ...     client.put_block("tiny-llama", other_key, mine)

    A namespace is named by its fingerprint (bytes), or by its label or the first hex digits of the fingerprint (str).
    All calls raise what AdminClient's do, RequestRefused also where the daemon does not allow it. The arguments are
    AdminClient's.
    """

    _SESSION: ClassVar[type[AdminSession]] = BlockSession

    def __init__(self, directory: str | os.PathLike[str], options: ClientOptions = OPTIONS) -> None:
        super().__init__(directory, options)
        # Both begin with the generation of the connection; then the mapping, or the segment's id and its memory.
        self._pool: tuple[int, Bytes] | None = None
        self._staging: tuple[int, int, SharedMemory] | None = None
        self._geometries: dict[bytes, Geometry] = {}

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
        known = self._geometries.get(fingerprint)
        if known is None:
            reply = self.ask(b.DescribeNamespace, fingerprint)
            known = self._geometries[fingerprint] = Geometry.of_reply(fingerprint, reply)
        return known

    def restore_namespace(self, geometry: Geometry) -> bool:
        """Open a namespace without an engine, as before an import; True where it was not open."""
        shards = [list(of_rank) for of_rank in geometry.shards]
        return self.ask(b.RestoreNamespace, *geometry.wire_fields(), shards).created

    def list_blocks(self, namespace: str | bytes, group: int = 0, prefix: str = "") -> Iterator[b.BlockInfo]:
        """Yield the blocks of a group, in the order in which they came.

        Args:
            prefix: first hex digits of the keys wanted.
        """
        fingerprint = self.find_namespace(namespace)
        position = 0
        while True:
            page = self.ask(b.ListBlocks, fingerprint, group, position, BLOCKS_PER_LIST, prefix)
            yield from page.blocks
            position = page.next_position
            if not position:
                return

    def get_block(self, namespace: str | bytes, key: bytes, group: int = 0, *, verify: bool = True) -> Block:
        """Open one block. It is pinned in the pool until it is closed, and its arrays lie in the pool itself.

        Args:
            verify: compare the bytes with their checksums first.

        Raises:
            BlockUnavailable: it is not in the pool, or not completely.
            BlockDamaged: its bytes are not those that were stored.
        """
        (block,) = self.get_blocks(namespace, [key], group)
        if block is None:
            raise BlockUnavailable(f"Block {key.hex()} of group {group} is not in the pool, or not completely.")
        if verify:
            try:
                block.verify()
            except BaseException:
                block.close()
                raise
        return block

    def get_blocks(self, namespace: str | bytes, keys: Sequence[bytes], group: int = 0) -> list[Block | None]:
        """Open several blocks under one lease, which ends when the last of them is closed; None for what is not there.

        Nothing is compared with its checksum: see ``Block.verify``. The daemon takes ``max_keys_per_job`` keys at once.
        """
        geometry = self.geometry(namespace)
        generation, pool = self._mapped_pool()
        made: list[Lease] = []

        def request(request_id: int, token: bytes) -> b.GetBlocks:
            # Made with the lock held: no heartbeat may come between the id and its renewal.
            session = self._session
            if session.generation != generation:  # the offsets would be of another pool
                raise DaemonUnavailable(_INTERRUPTED)
            made.append(session.new_lease())
            made[0].ends_at = time.monotonic()
            session.leases[made[0].id] = made[0]
            return b.GetBlocks(request_id, token, geometry.fingerprint, made[0].id, group, b"".join(keys))

        try:
            reply = self._ask(b.GetBlocks, request)
        except KvoffdClientError:
            for lease in made:
                self._release(lease)
            raise
        (lease,) = made
        lease.ends_at += reply.ttl_ms / 1000
        lease.open_blocks = sum(shards is not None for shards in reply.blocks)
        if not lease.open_blocks:
            self._release(lease)
        return [
            None if shards is None else self._block(geometry, group, key, shards, pool, lease)
            for key, shards in zip(keys, reply.blocks, strict=True)
        ]

    def _block(
        self, geometry: Geometry, group: int, key: bytes, held: Sequence[b.HeldShard], pool: Bytes, lease: Lease
    ) -> Block:
        block: Block

        def reader(shard: b.HeldShard) -> Callable[[], Bytes]:
            def read() -> Bytes:
                if block.closed or not lease.holds:
                    raise not_held(key)
                return pool[shard.offset_bytes : shard.offset_bytes + shard.length]

            return read

        shards = tuple(
            Shard(rank, geometry.shards[rank][group], reader(shard), int.from_bytes(shard.checksum, "big"))
            for rank, shard in enumerate(held)
        )
        first_block = max((shard.first_block for shard in held), default=0)
        block = Block(geometry, group, key, shards, first_block, partial(self._block_closed, lease))
        return block

    def _block_closed(self, lease: Lease) -> None:
        lease.open_blocks -= 1
        if not lease.open_blocks:
            self._release(lease)

    def _mapped_pool(self) -> tuple[int, Bytes]:
        """The connection's generation and the daemon's pool, mapped for reading only, once for each connection."""
        if self._pool is not None and self._pool[0] == self._generation():
            return self._pool
        generation = 0

        def start(outcome: list[OpenedPool | KvoffdClientError], now: float, timeout_s: float) -> None:
            nonlocal generation
            generation = self._session.generation
            self._session.open_pool(outcome)

        file, opened = self._wait_for(start)
        size, offset = opened.pool_bytes, opened.offset_bytes
        try:
            with file:
                mapping = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset)
        except (OSError, ValueError) as error:
            raise DaemonUnavailable(f"The daemon's pool cannot be mapped here: {error}.") from error
        self._pool = (generation, np.frombuffer(mapping, dtype=np.uint8))
        return self._pool

    def _release(self, lease: Lease) -> None:
        """End a lease. Where the daemon is away it has ended already; one that is silent is not waited for."""
        connection = self._connection
        if connection is None:
            return
        with connection.lock:
            was_alive = self._session.leases.pop(lease.id, None) is not None and self._session.usable
            lease.alive = False
        if was_alive and not self._closed:
            try:
                self.ask(Release, [lease.id])
            except KvoffdClientError:
                pass  # the session's end is the lease's too

    def put_block(self, namespace: str | bytes, key: bytes, block: Block) -> bool:
        """Put a block's bytes into the pool under ``key``; False where a block of that key is there already.

        Raises:
            ValueError: the block is not made as those of the namespace are.
            BlockUnavailable: the pool has no room for it.
        """
        geometry = self.geometry(namespace)
        if geometry.fingerprint != block.geometry.fingerprint and (why := geometry.mismatch(block.geometry)):
            raise ValueError(f"The block does not fit the namespace {geometry.label!r}: {why}.")
        lengths = [geometry.shard_bytes(rank, block.group) for rank in range(geometry.world_size)]
        sizes = [shard.data.nbytes for shard in block.shards]
        if lengths != sizes:
            raise ValueError(f"The shards of the namespace have {lengths} bytes by rank, the block's have {sizes}.")
        memory = self.staging(sum(lengths))
        at = 0
        shards: list[b.PutShard] = []
        for shard in block.shards:
            end = at + shard.data.nbytes
            memory.view[at:end] = shard.data
            shards.append(put_shard(at, checksum_of(memory.view[at:end].data)))
            at = end
        (state,) = self.put_staged(geometry, block.group, [key], [shards], block.first_block)
        if state == b.PUT_NO_ROOM:
            raise BlockUnavailable("The pool has no room for the block: everything in it is pinned or being written.")
        return state == b.PUT_STORED

    def staging(self, nbytes: int) -> SharedMemory:
        """Memory of at least ``nbytes`` that blocks are put from, attached to the daemon."""
        generation = self._generation()
        if self._staging is not None and self._staging[0] == generation and self._staging[2].size_bytes >= nbytes:
            return self._staging[2]
        memory = SharedMemory(max(nbytes, STAGING_BYTES), "kvoffd-put")

        def start(outcome: list[int | KvoffdClientError], now: float, timeout_s: float) -> None:
            self._session.attach(memory.fd, outcome)

        segment = self._wait_for(start)
        self._staging = (self._generation(), segment, memory)
        return memory

    def put_staged(
        self,
        geometry: Geometry,
        group: int,
        keys: Sequence[bytes],
        shards: Sequence[Sequence[b.PutShard]],
        first_block: int = 0,
    ) -> bytes:
        """Put blocks whose bytes are in ``staging()`` already; returns a state for each key, see BlocksPut."""
        if self._staging is None or self._staging[0] != self._generation():
            raise DaemonUnavailable(_INTERRUPTED)
        _, segment, memory = self._staging
        return self.ask(
            b.PutBlocks,
            geometry.fingerprint,
            segment,
            memory.size_bytes,
            group,
            b"".join(keys),
            [list(of_key) for of_key in shards],
            first_block,
        ).states

    @property
    def _session(self) -> BlockSession:
        session = super()._session
        assert isinstance(session, BlockSession)
        return session

    def _generation(self) -> int:
        """The generation of the connection; 0 where none is up."""
        connection = self._connection
        return connection.session.generation if connection is not None and connection.session.usable else 0

    def close(self) -> None:
        """End the session: blocks that are open cannot be read any more. Repeatable."""
        super().close()
        self._pool = None
        if self._staging is not None:
            self._staging[2].close()
            self._staging = None


def put_shard(offset_bytes: int, checksum: int) -> b.PutShard:
    """A shard's place in the staging memory and its checksum, as the wire has them."""
    return b.PutShard(offset_bytes, checksum.to_bytes(b.CHECKSUM_BYTES, "big"))
