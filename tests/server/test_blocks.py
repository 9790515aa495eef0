"""Single blocks over bare sockets: who may open them, what is read and written, and what is refused."""

from __future__ import annotations

import array
import mmap
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from kvoffd_client import SharedMemory
from kvoffd_proto import blocks as b
from kvoffd_proto import codec, lifeline
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.handles import LayerSpec, MemfdHandle, PageRef, TensorLayout
from kvoffd_proto.stats import PoolStats
from tests.kit.daemon import DaemonProcess, clear_daemon
from tests.kit.struct_wire import NAMESPACE, WireClient, ids, key, keys, stats

PAGE = 16384
KEYS = 6
OTHER = b"\x77" * 32
LAYER = LayerSpec("model.layers.0", "bfloat16", [2, 16, 4, 64], "kv tokens heads head_size")


def checksum(data: Any) -> bytes:
    return (xxhash.xxh3_64_intdigest(data) or 1).to_bytes(8, "big")


def open_pool(client: WireClient) -> tuple[lifeline.FromDaemon, list[int]]:
    """Ask for the pool; the answer and the descriptors that came with it."""
    client.stream.sendall(lifeline.encode_frame(lifeline.OpenPool()))
    data, ancillary, _, _ = client.stream.recvmsg(4096, socket.CMSG_SPACE(64))
    fds = array.array("i")
    for _, _, payload in ancillary:
        fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    (body,) = lifeline.FrameBuffer().feed(data)
    return lifeline.decode_from_daemon(body), list(fds)


class Desk(WireClient):
    """An operator's session."""

    def list(self, **fields: Any) -> b.BlocksListed:
        return self.ask(msgspec.structs.replace(self.request(b.ListBlocks, NAMESPACE, 0), **fields))

    def get(self, number: int, *wanted: int) -> list[list[b.HeldShard] | None]:
        return self.ask(b.GetBlocks, NAMESPACE, self.lease(number), 0, keys(*wanted)).blocks

    def put_request(self, memory: SharedMemory, segment: int, *wanted: int, **fields: Any) -> b.PutBlocks:
        """Blocks of one shard, end to end in ``memory``."""
        view = memory.view
        shards = [[b.PutShard(at * PAGE, checksum(view[at * PAGE : (at + 1) * PAGE]))] for at, _ in enumerate(wanted)]
        request = self.request(b.PutBlocks, NAMESPACE, segment, memory.size_bytes, 0, keys(*wanted), shards)
        return msgspec.structs.replace(request, **fields)


class Room:
    """A daemon with an engine that stored blocks 0 to KEYS - 1, and an operator."""

    def __init__(self, daemon: DaemonProcess, stack: ExitStack) -> None:
        self.daemon = daemon
        self.memory = stack.enter_context(SharedMemory(4 * KEYS * PAGE, "test"))
        self.content = np.random.default_rng(5).integers(0, 256, (KEYS, PAGE), dtype=np.uint8)
        self.memory.view[: KEYS * PAGE] = self.content.reshape(-1)
        self.worker = stack.enter_context(WireClient(daemon.directory))
        self.worker.open_namespace()
        assert isinstance(self.worker.attach(self.memory.fd, 1), lifeline.Attached)
        self.worker.ask(
            m.Register(
                *(self.worker.next_id(), self.worker.token, NAMESPACE, b"r" * 16, 0, 1),
                [MemfdHandle(1, self.memory.size_bytes)],
                [TensorLayout(0, 0, PAGE, 4 * KEYS)],
                [[PageRef(0, PAGE, LAYER)]],
            ),
            m.Registered,
        )
        self._job = 0
        assert self.store(*range(KEYS)).ok
        self.desk = stack.enter_context(Desk(daemon.directory, m.Role.ADMIN))
        self.staging = stack.enter_context(SharedMemory(KEYS * PAGE, "staging"))
        self.staging.view[:] = np.random.default_rng(6).integers(0, 256, KEYS * PAGE, dtype=np.uint8)

    def store(self, *numbers: int) -> m.JobResult:
        self._job += 1
        return self.worker.store(b"r" * 16, self._job, keys(*numbers), ids(*(number % KEYS for number in numbers)))


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess("8MiB", block_access="write", eviction_policy="lru") as running:
        yield running


@pytest.fixture
def own_room() -> Iterator[Room]:
    """A room on a daemon of its own, which counts from zero and has opened no namespace before."""
    with DaemonProcess("8MiB", block_access="write", leased_share="1") as daemon, ExitStack() as stack:
        yield Room(daemon, stack)
        assert "Traceback" not in daemon.log


@pytest.fixture
def room(daemon: DaemonProcess) -> Iterator[Room]:
    clear_daemon(daemon)
    with ExitStack() as stack:
        yield Room(daemon, stack)
        assert "Traceback" not in daemon.log


# --- who may ---------------------------------------------------------------------------------------


def requests_of(client: WireClient) -> list[m.AnyRequest]:
    head = (client.next_id(), client.token, NAMESPACE)
    group = m.GroupSpec("full", 16)
    shard = b.ShardSpec(1, [b.PageSpec(PAGE)])
    return [
        b.ListBlocks(*head, 0),
        b.GetBlocks(*head, client.lease(1), 0, key(0)),
        b.PutBlocks(*head, 1, PAGE, 0, key(0), [[b.PutShard(0, b"c" * 8)]]),
        b.RestoreNamespace(*head, "mine", 1, 32, [group], "{}", [[shard]]),
    ]


@pytest.mark.parametrize("role", [m.Role.WORKER, m.Role.SCHEDULER])
def test_engines_are_refused_whatever_block_access_says(room: Room, role: m.Role) -> None:
    with WireClient(room.daemon.directory, role) as engine:
        for request in requests_of(engine):
            assert engine.refused(request).code == ErrorCode.WRONG_ROLE
        answer, fds = open_pool(engine)
        assert isinstance(answer, lifeline.PoolRefused)
        assert answer.code == ErrorCode.WRONG_ROLE
        assert fds == []


def test_a_session_that_said_no_hello_gets_no_pool(room: Room) -> None:
    with WireClient(room.daemon.directory, None) as stranger:
        answer, fds = open_pool(stranger)
        assert isinstance(answer, lifeline.PoolRefused)
        assert fds == []


# --- reading ---------------------------------------------------------------------------------------


def test_a_namespace_tells_what_its_blocks_are_made_of(room: Room) -> None:
    desk = room.desk
    told = desk.ask(b.DescribeNamespace, NAMESPACE)
    assert (told.label, told.world_size, told.key_bytes, told.description) == ("test", 1, 32, "{}")
    assert told.shards == [[b.ShardSpec(1, [b.PageSpec(PAGE, LAYER)])]]
    assert desk.refused(b.DescribeNamespace, OTHER).code == ErrorCode.UNKNOWN_NAMESPACE


def test_blocks_are_listed_by_pages_and_prefix(room: Room) -> None:
    everything = room.desk.list()
    # Stores are committed tail first.
    assert sorted(info.key for info in everything.blocks) == [key(number) for number in range(KEYS)]
    assert {(info.state, info.pins) for info in everything.blocks} == {(m.READY, 0)}
    assert (everything.next_position, everything.total) == (0, KEYS)
    found: list[b.BlockInfo] = []
    position = 0
    while True:
        page = room.desk.list(position=position, limit=4)
        found += page.blocks
        assert page.total == KEYS
        if not (position := page.next_position):
            break
    assert found == everything.blocks
    assert room.desk.list(prefix=key(3).hex()).blocks == [info for info in found if info.key == key(3)]
    assert room.desk.list(prefix="0").total == KEYS, "half a byte"
    assert room.desk.list(prefix="1").total == 0
    assert room.desk.refused(b.ListBlocks, NAMESPACE, 0, 0, 1, "xy").code == ErrorCode.BAD_KEYS
    assert room.desk.refused(b.ListBlocks, NAMESPACE, 7).code == ErrorCode.BAD_ARGUMENT


def test_a_block_is_read_in_the_pool_itself_and_cannot_be_written_there(room: Room) -> None:
    answer, fds = open_pool(room.desk)
    assert isinstance(answer, lifeline.PoolOpened)
    (fd,) = fds
    try:
        assert answer.pool_bytes == 8 << 20
        with pytest.raises(PermissionError):
            mmap.mmap(fd, answer.pool_bytes)
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600, "or anybody could open it again for writing"
        pool = mmap.mmap(fd, answer.pool_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=answer.offset_bytes)
    finally:
        os.close(fd)
    held = room.desk.get(1, 0, 5, 99)
    assert held[2] is None
    for number, shards in zip((0, 5), held, strict=False):
        assert shards is not None
        (shard,) = shards
        found = pool[shard.offset_bytes : shard.offset_bytes + shard.length]
        assert found == room.content[number].tobytes()
        assert shard.checksum == checksum(found)
        assert shard.first_block == 0
    pool.close()


def test_a_lease_is_of_its_session_and_ends_with_it(room: Room) -> None:
    held = room.desk.get(1, 0)
    with Desk(room.daemon.directory, m.Role.ADMIN) as other:
        assert other.refused(b.GetBlocks, NAMESPACE, room.desk.lease(1), 0, key(0)).code == ErrorCode.UNKNOWN_LEASE
        assert other.ask(m.Release, [room.desk.lease(1)]).count == 0, "another session's pin"
        assert room.desk.get(1, 0) == held, "asking again tells the same"
        assert other.get(1, 0) == held
        assert stats(room.daemon.directory).leases == 2
    room.desk.close()
    for _ in range(1000):
        if not stats(room.daemon.directory).leases:
            return
    raise AssertionError("a lease outlived its session")


# --- writing ---------------------------------------------------------------------------------------


def held(room: Room) -> PoolStats:
    """What the pool has, without what its index takes: lists keep room for what was there."""
    return msgspec.structs.replace(stats(room.daemon.directory).pool, index_bytes=0, index_block_bytes=0.0)


def test_bytes_without_their_checksum_are_refused_and_change_nothing(room: Room) -> None:
    desk = room.desk
    desk.attach(room.staging.fd, 1)
    request = desk.put_request(room.staging, 1, 50, 51)
    room.staging.view[PAGE + 5] ^= 1
    before = held(room)
    refused = desk.refused(request)
    assert refused.code == ErrorCode.CHECKSUM
    assert key(51).hex() in refused.message
    assert desk.get(1, 50, 51) == [None, None]
    assert held(room) == before


WRONG_PUTS: list[tuple[dict[str, Any], ErrorCode]] = [
    ({"segment_id": 9}, ErrorCode.UNKNOWN_SEGMENT),
    ({"segment_bytes": 2**40}, ErrorCode.UNSAFE_SEGMENT),
    ({"group": 1}, ErrorCode.BAD_GEOMETRY),
    ({"keys": b""}, ErrorCode.BAD_KEYS),
    ({"keys": b"short"}, ErrorCode.BAD_KEYS),
    ({"keys": keys(1, 1)}, ErrorCode.BAD_KEYS),
    ({"shards": []}, ErrorCode.BAD_KEYS),
    ({"shards": [[]]}, ErrorCode.BAD_GEOMETRY),
    ({"shards": [[b.PutShard(0, b"c" * 8)] * 2]}, ErrorCode.BAD_GEOMETRY),
    ({"first_block": 1}, ErrorCode.BAD_GEOMETRY),
    ({"namespace": OTHER}, ErrorCode.UNKNOWN_NAMESPACE),
    ({"shards": [[b.PutShard(KEYS * PAGE - 1, b"c" * 8)]]}, ErrorCode.OUT_OF_BOUNDS),
    ({"shards": [[b.PutShard(2**63 - 1, b"c" * 8)]]}, ErrorCode.OUT_OF_BOUNDS),
    ({"shards": [[b.PutShard(0, bytes(8))]]}, ErrorCode.CHECKSUM),
    ({"segment_bytes": PAGE}, ErrorCode.BAD_GEOMETRY),
]


def test_a_put_that_does_not_fit_is_refused_whole(room: Room) -> None:
    desk = room.desk
    desk.attach(room.staging.fd, 1)
    before = held(room)
    for fields, code in WRONG_PUTS:
        request = msgspec.structs.replace(desk.put_request(room.staging, 1, 50), **fields)
        assert desk.refused(request).code == code, fields
        assert held(room) == before
    assert desk.ask(desk.put_request(room.staging, 1, 50)).states == bytes([b.PUT_STORED])


def test_a_client_that_dies_in_the_middle_leaves_nothing(room: Room) -> None:
    before = held(room)
    mapped = maps_of(room.daemon)
    for number in range(20):
        with Desk(room.daemon.directory, m.Role.ADMIN) as hasty:
            hasty.attach(room.staging.fd, 1)
            wanted = range(200 + number * KEYS, 200 + (number + 1) * KEYS)
            request = hasty.put_request(room.staging, 1, *wanted)
            hasty.send(msgspec.structs.replace(request, shards=[[b.PutShard(0, b"c" * 8)]] * KEYS))
            if number % 2:
                hasty.jobs.poll(20)
    for _ in range(1000):
        if held(room) == before and maps_of(room.daemon) == mapped:
            return
    raise AssertionError(f"{held(room)}, and there was {before}")


def maps_of(daemon: DaemonProcess) -> int:
    """Mappings of the operators' memory that the daemon holds."""
    with open(f"/proc/{daemon.pid}/maps") as maps:
        return sum("memfd:staging" in line for line in maps)


def test_a_namespace_is_restored_without_an_engine(own_room: Room) -> None:
    desk = own_room.desk
    groups = [m.GroupSpec("full", 16), m.GroupSpec("sliding", 16, 256)]
    shard, narrow = b.ShardSpec(2, [b.PageSpec(PAGE, LAYER)] * 3), b.ShardSpec(2, [b.PageSpec(4096)])
    ranks = [[shard, narrow], [shard, b.ShardSpec(2, [])]]
    request = b.RestoreNamespace(desk.next_id(), desk.token, OTHER, "restored", 2, 32, groups, '{"a":1}', ranks)
    assert desk.ask(request).created
    assert not desk.ask(request).created
    told = desk.ask(b.DescribeNamespace, OTHER)
    assert (told.label, told.groups, told.shards) == ("restored", groups, ranks)
    for wrong, code in (
        ({"shards": ranks[:1]}, ErrorCode.BAD_GEOMETRY),
        ({"shards": [[shard], [shard]]}, ErrorCode.BAD_GEOMETRY),
        ({"shards": [[shard, shard], [shard, narrow]]}, ErrorCode.BAD_GEOMETRY),
        ({"shards": [[b.ShardSpec(60000, [b.PageSpec(2**30)] * 9), narrow]] * 2}, ErrorCode.BAD_GEOMETRY),
        ({"key_bytes": 16}, ErrorCode.NAMESPACE_MISMATCH),
        ({"namespace": b"\x11" * 32, "shards": [[shard]] * 2}, ErrorCode.BAD_GEOMETRY),
    ):
        assert desk.refused(msgspec.structs.replace(request, **wrong)).code == code
    open_ones = desk.ask(m.Namespaces).namespaces
    assert [info.namespace for info in open_ones] == [NAMESPACE, OTHER], "a refused one was opened"


def test_all_shards_of_a_block_come_at_once(own_room: Room) -> None:
    desk = own_room.desk
    rank = [b.ShardSpec(1, [b.PageSpec(PAGE)])]
    nothing = [b.ShardSpec(1, [])]
    desk.ask(b.RestoreNamespace, OTHER, "two", 3, 32, [m.GroupSpec("full", 16)], "{}", [rank, rank, nothing])
    desk.attach(own_room.staging.fd, 1)
    view = own_room.staging.view
    shards = [b.PutShard(at * PAGE, checksum(view[at * PAGE : (at + 1) * PAGE])) for at in range(2)]
    empty = b.PutShard(0, checksum(b""))
    put = desk.put_request(own_room.staging, 1, 1, namespace=OTHER, shards=[[*shards, empty]])
    assert desk.ask(put).states == bytes([b.PUT_STORED])
    got = desk.ask(b.GetBlocks, OTHER, desk.lease(1), 0, key(1))
    (held,) = got.blocks
    assert held is not None
    assert [shard.length for shard in held] == [PAGE, PAGE, 0]
    assert [shard.checksum for shard in held] == [shards[0].checksum, shards[1].checksum, empty.checksum]


def test_the_probe_of_a_listing_that_is_gone_is_an_empty_page(room: Room) -> None:
    page = room.desk.list(position=4000)
    assert (page.blocks, page.next_position, page.total) == ([], 0, 0)


def test_every_block_request_has_a_test_of_who_may_send_it() -> None:
    class Paper:
        token = bytes(16)

        def next_id(self) -> int:
            return 1

        def lease(self, number: int) -> int:
            return (1 << 32) + number

    tested = {type(request) for request in requests_of(Paper())}  # type: ignore[arg-type]
    assert tested | {b.DescribeNamespace} == {request for request in m.EXCHANGES if request.__module__ == b.__name__}
    assert codec.decode_request(codec.encode(requests_of(Paper())[0]))  # type: ignore[arg-type]


def test_a_successor_knows_what_the_blocks_are_made_of(pool_file: Path) -> None:
    with DaemonProcess("8MiB", block_access="write", pool_file=str(pool_file)) as daemon:
        with ExitStack() as stack:
            room = Room(daemon, stack)
            content = room.content
        daemon.kill()
        daemon.start()
        with Desk(daemon.directory, m.Role.ADMIN) as desk:
            told = desk.ask(b.DescribeNamespace, NAMESPACE)
            assert told.shards == [[b.ShardSpec(1, [b.PageSpec(PAGE, LAYER)])]]
            answer, (fd,) = open_pool(desk)
            assert isinstance(answer, lifeline.PoolOpened)
            pool = mmap.mmap(fd, answer.pool_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=answer.offset_bytes)
            os.close(fd)
            for number, shards in enumerate(desk.get(1, *range(KEYS))):
                found = pool[shards[0].offset_bytes : shards[0].offset_bytes + PAGE]
                assert found == content[number].tobytes()
            pool.close()
