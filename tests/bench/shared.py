"""What the shared tier costs beside its floors: ``python -m tests.bench.shared`` (needs a redis-server; a minute).

In one run over loopback: a raw TCP stream, a bare pipelined EXISTS, and the tier's own writes, reads and questions,
with the CPU time of this process, which has the tier's threads. A round has ``BATCH`` blocks; the median of the rounds
counts.
"""

from __future__ import annotations

import mmap
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from kvoffd.pool.checksums import digest
from kvoffd.tiers.redis_cluster import slot_of
from kvoffd.tiers.redis_store import Redis
from kvoffd.tiers.shared import SharedTier
from kvoffd.tiers.store import Credentials, object_key, open_store
from kvoffd.tiers.tier import ASKED, Block, Result, Space, Tier, make_space
from tests.kit.redis_server import Authority, RedisCluster, RedisServer

MIB = 1 << 20
BATCH, ROUNDS = 32, 10
SIZES = (MIB // 4, MIB, 2 * MIB)
FINGERPRINT = b"b" * 32
FULL_BYTES = 300 * MIB
LRU = ("--maxmemory-policy", "allkeys-lru")
TAGS = [next(tag for tag in range(99) if slot_of(b"%d" % tag) * 3 // 16384 == third) for third in range(3)]
"""Of keys that lie at each master of a cluster of three."""


class Figure:
    """Speeds and CPU times of rounds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.speeds: list[float] = []
        self.cpu: list[float] = []

    def round(self, move: Callable[[], int]) -> None:
        """Time a call that returns how many bytes it moved."""
        started, used = time.perf_counter(), time.process_time()
        nbytes = move()
        self.speeds.append(nbytes / (time.perf_counter() - started) / 1e9)
        self.cpu.append((time.process_time() - used) / (nbytes / 2**30))

    def line(self, floor: float = 0.0, what: str = "raw TCP") -> str:
        speed = median(self.speeds)
        share = f" {speed / floor:.2f} of {what}," if floor else ""
        return f"{self.name}: {speed:.2f} GB/s,{share} {median(self.cpu):.2f} s/GiB CPU"


class Node:
    """The tier over a pool of ``BATCH`` slots; its ends are delivered here."""

    def __init__(self, url: str, credentials: Credentials = Credentials()) -> None:  # noqa: B008
        mapped = mmap.mmap(-1, 2 * BATCH * MIB)  # slots begin with a page, as the pool's do
        mapped[:] = os.urandom(MIB) * (2 * BATCH)
        self.pool = memoryview(mapped)
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.tier = SharedTier(
            url, open_store(url, credentials), pool=self.pool, clock=time.monotonic,
            post=self._posted.put, listener=self, ask_deadline_s=5.0,
        )  # fmt: skip
        self.until(self.tier.available)

    def stored(self, tier: Tier, space: Space, keys: Sequence[bytes]) -> None: ...

    def removed(self, tier: Tier, tag: int, keys: Sequence[bytes]) -> None: ...

    def answered(self, tier: Tier, space: Space, keys: Sequence[bytes], found: Sequence[bool]) -> None: ...

    def error(self, tier: Tier, kind: str, sentence: str) -> None:
        print(kind, sentence)

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            try:
                self._posted.get(timeout=0.05)()
            except queue.Empty:
                pass

    def move(self, begin: Callable[[Block, int, Callable[[Result], None]], bool], blocks: list[Block]) -> int:
        """Write or read blocks; returns how many bytes were. The servers' LRU evicts something new at times."""
        ended: list[Result] = []
        begun = [begin(block, slot * block.space.nbytes, ended.append) for slot, block in enumerate(blocks)]
        self.until(lambda: len(ended) == sum(begun))
        assert set(ended) <= {Result.DONE, Result.GONE}
        assert ended.count(Result.DONE) >= len(blocks) // 2
        return ended.count(Result.DONE) * blocks[0].space.nbytes

    def write(self, block: Block, at: int, done: Callable[[Result], None]) -> bool:
        return self.tier.write(block, [at], done)

    def read(self, block: Block, at: int, done: Callable[[Result], None]) -> bool:
        return self.tier.read(block.space, block.key, [at], time.monotonic() + 60, lambda result, found: done(result))

    def round(self, number: int, size: int, writes: Figure, reads: Figure) -> None:
        """Write blocks of new keys, find them, and read them back."""
        views = [self.pool[at : at + size] for at in range(0, min(BATCH * size, len(self.pool)), size)]
        space, sums = make_space(FINGERPRINT, 0, 0, [size]), list(map(digest, views))
        keys = [(size + BATCH * number + slot).to_bytes(32, "big") for slot in range(len(views))]
        blocks = [Block(space, key, (0,), (checksum,)) for key, checksum in zip(keys, sums, strict=True)]
        writes.round(lambda: self.move(self.write, blocks))
        self.ask(keys, size)
        reads.round(lambda: self.move(self.read, blocks))

    def ask(self, keys: list[bytes], length: int) -> None:
        space = make_space(FINGERPRINT, 0, 0, [length])
        self.tier.remove_all(FINGERPRINT)
        self.tier.find(space, keys, prefix=True)
        self.until(lambda: self.tier.find(space, keys[-1:], prefix=True)[0] != ASKED)


def raw_tcp(write: bool, size: int) -> float:
    """GB/s of a stream between this process and a thread of a child, in the direction of a write or a read."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = os.fork()
        if not child:
            with socket.create_connection(server.getsockname()) as peer:
                _stream(peer, not write, size)
            os._exit(0)
        with server.accept()[0] as peer:
            started = time.perf_counter()
            _stream(peer, write, size)
            seconds = time.perf_counter() - started
        os.waitpid(child, 0)
    return ROUNDS * BATCH * size / seconds / 1e9


def _stream(peer: socket.socket, send: bool, size: int) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(size))
    for _ in range(ROUNDS * BATCH):
        if send:
            peer.sendall(buffer)
        else:
            done = 0
            while done < size:
                done += peer.recv_into(buffer[done:])


def measure(url: str, size: int) -> Iterator[str]:
    floors = {write: raw_tcp(write, size) for write in (True, False)}
    yield f"{size // 1024} KiB: raw TCP {floors[True]:.2f} GB/s out, {floors[False]:.2f} in"
    node = Node(url)
    writes, reads = Figure("  write"), Figure("  read")
    for number in range(ROUNDS):
        node.round(number, size, writes, reads)
    assert node.tier.close(5.0)
    yield writes.line(floors[True])
    yield reads.line(floors[False])


def warm(servers: Sequence[RedisServer], size: int) -> None:
    """Fill servers, so that they evict as they do in use: to get memory from the kernel makes writes half as fast."""
    value = memoryview(bytearray(size))
    for place, server in enumerate(servers):
        assert server.command("FLUSHALL", "SYNC") == b"+OK\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as connected:
            for number in range(FULL_BYTES // len(servers) // size):
                tag = b"{%d}%d" % (TAGS[place if len(servers) > 1 else 0], number)
                head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(tag), tag, size + 200)
                connected.sendall(head + value + bytes(200) + b"\r\n")
                assert connected.recv(100) == b"+OK\r\n"


def asking(url: str, port: int) -> str:
    keys = [number.to_bytes(32, "big") for number in range(1000)]
    bare = Redis("127.0.0.1", port, 0, Credentials(), tls=False)
    bare.connect()
    names = [object_key(make_space(FINGERPRINT, 0, 0, ()), key) for key in keys]
    node = Node(url)
    floors, own = [], []
    for _ in range(50):
        started = time.perf_counter()
        bare.send_questions(names, time.monotonic() + 5)
        bare.answers(len(names), time.monotonic() + 5)
        floors.append(time.perf_counter() - started)
        started = time.perf_counter()
        node.ask(keys, MIB)
        own.append(time.perf_counter() - started)
    bare.close()
    assert node.tier.close(5.0)
    floor, cost = median(floors), median(own)
    return f"1,000 keys: {1e3 * cost:.2f} ms, {cost / floor:.2f} of {1e3 * floor:.2f} ms of a pipelined EXISTS"


def main() -> None:
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {threading.active_count()} thread")
    with RedisServer("--maxmemory", f"{FULL_BYTES}", *LRU) as server:
        print("one server", asking(server.url, server.port), sep="\n")
        for size in SIZES:
            warm([server], size)
            print(*measure(server.url, size), sep="\n")
    with TemporaryDirectory() as place:
        certificate = Authority(Path(place)).sign("localhost")
        os.environ["SSL_CERT_FILE"] = certificate.authority
        with RedisServer("--maxmemory", f"{FULL_BYTES}", *LRU, certificate=certificate) as server:
            print("one server, over TLS")
            warm([server], MIB)
            print(*measure(server.url, MIB), sep="\n")
    with RedisCluster("--maxmemory", f"{FULL_BYTES // 3}", *LRU) as cluster:
        print("a cluster of three")
        for size in SIZES:
            warm(cluster.servers, size)
            print(*measure(cluster.url, size), sep="\n")


if __name__ == "__main__":
    main()
