"""What a shared server that fails costs: ``python -m tests.bench.shared_faults`` (needs a redis-server; five minutes).

For each fault, or those whose names have one of the words that are given, two daemons with the server and one without:
what one stored the other loads, then the fault, lookups of keys that nobody has, the fault's end, and the load again.
Lookups of the daemon whose server is dark and of the one without a server take turns, so that both see the same
machine. Prints a row for each fault; the ratio of the 99th percentiles has its interval of 95 %.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from kvoffd_client import AdminClient
from kvoffd_client.testing import FakeEngine
from kvoffd_proto.stats import SharedStats
from tests.bench.intervals import Floats, interval
from tests.kit import s3_server
from tests.kit.daemon import DaemonProcess
from tests.kit.faulty_bucket import FaultyBucket
from tests.kit.redis_server import RedisCluster, RedisServer
from tests.kit.waiting import wait_until

PAGE, BLOCKS, KEYS_A_LOOKUP = 65536, 32, 64
FIRST_LOOKUPS, LOOKUPS = 40, 10_000
PARTS = 40
"""For the interval of a ratio so many parts of the lookups, one after another in time, are drawn anew."""
DARK_S = 3.0
"""How long after a fault a daemon may take to give its server up, where it does."""
numbers = count(10**6)


def fresh_keys() -> list[bytes]:
    """Keys that nobody has, or asked for before."""
    return [next(numbers).to_bytes(32, "big") for _ in range(KEYS_A_LOOKUP)]


KEYS = [number.to_bytes(32, "big") for number in range(BLOCKS)]


class Node:
    """A daemon and an engine of it; without a URL it shares nothing."""

    def __init__(self, running: ExitStack, url: str = "") -> None:
        flags = {"shared": url, "shared_write": "always"} if url else {}
        self.daemon = running.enter_context(DaemonProcess("32MiB", **flags))
        self.engine = FakeEngine(self.daemon.directory, page_bytes=PAGE, blocks=128)
        running.callback(self.engine.close)
        self.admin = running.enter_context(AdminClient(self.daemon.directory))
        if url:
            wait_until(lambda: self.shared.up, 20.0)

    @property
    def shared(self) -> SharedStats:
        return self.admin.stats().shared[0]

    @property
    def peak_mib(self) -> float:
        """The most memory that the daemon had, its pool and shared libraries included."""
        status = Path(f"/proc/{self.daemon.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def lookup_s(self) -> float:
        keys = fresh_keys()
        started = time.perf_counter()
        assert self.engine.lookup(keys) == 0
        return time.perf_counter() - started

    def load(self, wait_s: float) -> list[int] | None:
        """Load the blocks, once they are there; their checksums. None where they do not come."""
        until = time.monotonic() + wait_s
        while self.engine.lookup(KEYS) < BLOCKS:
            if time.monotonic() > until:
                return None
        assert self.engine.load(KEYS, range(64, 64 + BLOCKS)).ok
        return self.engine.checksums(range(64, 64 + BLOCKS))


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[int(share * (len(times) - 1))]


def p99_ratio(ours: list[float], others: list[float]) -> tuple[float, float, float]:
    """The ratio of the 99th percentiles, between the ends of its interval of 95 %."""

    def ratio(parts: Floats) -> float:
        return float(np.percentile(parts[:, 0], 99) / np.percentile(parts[:, 1], 99))

    size = len(ours) // PARTS
    both = np.array([ours[: PARTS * size], others[: PARTS * size]]).reshape(2, PARTS, size)
    parts = both.swapaxes(0, 1)  # [PARTS, 2, size]
    low, high = interval(parts, ratio)
    return low, ratio(parts), high


def row(name: str, url: str, begin: Callable[[], None], end: Callable[[], None], *, lost: bool) -> str:
    """Play one fault; ``lost``: the server has nothing afterwards."""
    with ExitStack() as running:
        first, second, without = Node(running, url), Node(running, url), Node(running)
        first.engine.fill(range(BLOCKS), seed=3)
        assert first.engine.store(KEYS, range(BLOCKS)).ok
        wait_until(lambda: first.shared.written_blocks == BLOCKS, 20.0)
        sums = first.engine.checksums(range(BLOCKS))
        healthy = [second.lookup_s() for _ in range(200)]
        begin()
        early = [second.lookup_s() for _ in range(FIRST_LOOKUPS)]
        until = time.monotonic() + DARK_S
        while second.shared.up and time.monotonic() < until:
            early.append(second.lookup_s())
        dark, alone = [], []
        for number in range(LOOKUPS):
            turns = [(second, dark), (without, alone)]
            for node, times in turns if number % 2 else reversed(turns):
                times.append(node.lookup_s())
        gave_up = not second.shared.up
        end()
        started = time.monotonic()
        wait_until(lambda: second.shared.up, 20.0)
        back_s = time.monotonic() - started
        loaded = second.load(0.2 if lost else 10.0)
        assert loaded == (None if lost else sums), name
        assert second.shared.mismatches == 0
        low, ratio, high = p99_ratio(dark, alone)
        interval = f"{ratio:.2f} ({low:.2f} to {high:.2f})"
        return (
            f"| {name} | {1e3 * percentile(healthy, 0.5):.1f} | {1e3 * max(early):.0f} | "
            f"{1e3 * percentile(dark, 0.5):.2f}; {1e3 * percentile(dark, 0.99):.2f} | {interval} | "
            f"{f'yes | {back_s:.1f}' if gave_up else 'no | '} | {second.peak_mib - without.peak_mib:.0f} |"
        )


def cut(port: int, action: str) -> None:
    """Drop (``-I``) or let through again (``-D``) all packets from and to a port of this machine."""
    for end in ("--dport", "--sport"):
        rule = ["INPUT", "-i", "lo", "-p", "tcp", end, str(port), "-j", "DROP"]
        subprocess.run(["iptables", action, *rule], check=True)


def unlock(server: RedisServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 5.0) as connected:
        connected.sendall(b"AUTH another\r\nCONFIG SET requirepass ''\r\n")
        assert connected.recv(100)


def lock(server: RedisServer) -> None:
    server.command("CONFIG", "SET", "requirepass", "another")
    with socket.create_connection(("127.0.0.1", server.port), 5.0) as connected:
        connected.sendall(b"AUTH another\r\nCLIENT KILL TYPE normal\r\n")
        assert connected.recv(100)


def fill(server: RedisServer) -> None:
    server.command("CONFIG", "SET", "maxmemory", "1")


def make_room(server: RedisServer) -> None:
    server.command("CONFIG", "SET", "maxmemory", "0")


def emptied(server: RedisServer) -> None:
    server.command("FLUSHALL")


Act = Callable[[Any], object]
FAULTS: dict[str, tuple[Act, Act, bool]] = {
    "killed, back empty": (lambda server: server.kill(), lambda server: server.start(), True),
    "stopped (SIGSTOP)": (
        lambda server: server.signal(signal.SIGSTOP),
        lambda server: server.signal(signal.SIGCONT),
        False,
    ),
    "emptied": (emptied, emptied, True),
    "full": (fill, make_room, False),
    "another password": (lock, unlock, False),
    "cut off (iptables)": (lambda server: cut(server.port, "-I"), lambda server: cut(server.port, "-D"), False),
}
"""What begins and ends each, and whether the server has nothing afterwards."""
GONE = ("killed, back empty", "stopped (SIGSTOP)")
"""Those that are played with moto's server too."""


S3_FAULTS: dict[str, tuple[str, object]] = {
    "S3: a quota": ("errors", {"PUT": (403, "QuotaExceeded")}),
    "S3: a clock off by an hour": ("error", (403, "RequestTimeTooSkewed")),
    "S3: no key is right": ("error", (403, "InvalidAccessKeyId")),
    "S3: an error each time": ("error", (500, "InternalError")),
}
"""Which error a bucket is told to answer with, and to what."""


def main() -> None:
    only = sys.argv[1:]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {KEYS_A_LOOKUP} keys a lookup, times in ms")
    print(
        "| fault | healthy, median | longest at first | dark, median; p99 | p99 to without | given up | back, s | MiB |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name, (begin, end, lost) in FAULTS.items():
        if only and not any(word in name for word in only):
            continue
        if "iptables" in name and (os.geteuid() or shutil.which("iptables") is None):
            continue
        with RedisServer() as server:
            print(row(name, server.url, partial(begin, server), partial(end, server), lost=lost), flush=True)
    os.environ |= {"AWS_ACCESS_KEY_ID": "user", "AWS_SECRET_ACCESS_KEY": "secret"}
    for name in GONE if s3_server.PROGRAM is not None else ():
        begin, end, lost = FAULTS[name]
        if not only or any(word in f"S3: {name}" for word in only):
            with s3_server.S3Server() as moto:
                print(row(f"S3: {name}", moto.url, partial(begin, moto), partial(end, moto), lost=lost), flush=True)
    for name, (kind, error) in S3_FAULTS.items():
        if not only or any(word in name for word in only):
            with FaultyBucket() as bucket:
                end = partial(setattr, bucket, kind, getattr(bucket, kind))
                print(row(name, bucket.url, partial(setattr, bucket, kind, error), end, lost=False), flush=True)
    if only and "masters" not in only:
        return
    with RedisCluster() as cluster:
        victim = cluster.servers[1]
        print(row("one of three masters killed", cluster.url, victim.kill, lambda: None, lost=True), flush=True)


if __name__ == "__main__":
    main()
