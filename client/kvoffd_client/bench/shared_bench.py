"""``kvoffd-cli bench shared``: what blocks cost that go to a store which nodes share, and come from there."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import numpy as np

from kvoffd_client.admin_client import AdminClient
from kvoffd_client.bench import SHARED_BLOCK_BYTES, SHARED_BLOCKS, SHARED_KEYS
from kvoffd_client.bench.results import BenchFailed, CpuMeter, Progress, Report, Result
from kvoffd_client.bench.synthetic_engine import WAIT_S, SyntheticEngine, random_keys
from kvoffd_proto.stats import SharedStats

ROUNDS = 5
POLL_S = 0.005
"""At least between two looks. Each is work for the daemon's loop: 200 of them a second took a third of its CPU time."""
IDLE_S = 0.05
"""For so long after the last copy of an engine few blocks are written."""
ASKS = 40
"""The time that the daemon tells of is an average that has forgotten what was before so many."""
EXISTS_KEY_BYTES = 148
"""As long as the keys of blocks are in the store."""
FLOOR = (
    "of writes and reads a raw TCP stream over loopback of the same bytes, between two threads of this process; of "
    "asking, as the daemon times it, a bare pipelined EXISTS of as many keys, or asking for one key where the store is "
    "not a Redis that lets in without a password"
)


def bench_shared(directory: Path, progress: Progress, rounds: int = ROUNDS) -> Report:
    """Measure writes, reads and questions, through the daemon, of the first store that it shares.

    A round stores SHARED_BLOCKS blocks, waits until the store has them, clears them in the daemon alone, and looks them
    up until they are all up again. The speed of writes is that of what follows the first quarter: few blocks are
    written until engines have copied nothing for a moment. Leaves the blocks in the store, which forgets them. Raises
    BenchFailed, DaemonUnavailable.
    """
    nbytes = SHARED_BLOCKS * SHARED_BLOCK_BYTES
    written_s: list[float] = []
    read_s: list[float] = []
    raw = []
    with (
        AdminClient(directory) as admin,
        SyntheticEngine(directory, "shared", 1, SHARED_BLOCKS, SHARED_BLOCK_BYTES) as engine,
        CpuMeter(directory) as writing,
        CpuMeter(directory) as reading,
    ):
        name = _shared(admin).name
        fingerprint = engine.namespace.fingerprint
        ids = np.arange(SHARED_BLOCKS, dtype=np.int32)
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            raw.append(nbytes / _stream_s(nbytes) / 1e9)
            keys = random_keys(SHARED_BLOCKS)
            before = _shared(admin)
            engine.store(keys, ids)
            future, _ = engine.lookup(keys)  # what is used is written
            with writing.measure():
                engine.release_and_wait(future)
                written_s.append(_written_s(admin, before))
            admin.clear(fingerprint)
            with reading.measure():
                read_s.append(_looked_up_s(engine, keys, SHARED_BLOCKS))
            admin.clear(fingerprint)
        progress("asking")
        exists_s = _exists_s(name)
        one_s = _ask_s(admin, engine, 1) if exists_s is None else exists_s
        ask_s = _ask_s(admin, engine, SHARED_KEYS)
        admin.clear(fingerprint)
        gb = rounds * nbytes / 1e9
        costs = [writing.cost(gb, "GB"), reading.cost(gb, "GB")]
    floor = median(raw)
    size = f"{SHARED_BLOCKS} blocks of {SHARED_BLOCK_BYTES >> 20} MiB"
    results = [
        Result(f"write {size}", 0.75 * nbytes / median(written_s) / 1e9, "GB/s", floor, costs[0]),
        Result(f"read {size}", nbytes / median(read_s) / 1e9, "GB/s", floor, costs[1]),
        Result(f"ask for {SHARED_KEYS:,} keys", 1e6 * ask_s, "µs", 1e6 * one_s),
    ]
    return Report("shared", f"{FLOOR}; the store is {name}", results)


def _shared(admin: AdminClient) -> SharedStats:
    for found in admin.stats().shared:
        if found.reachable:
            return found
        raise BenchFailed(f"{found.name} is not reachable; see kvoffd-cli shared.")
    raise BenchFailed("The daemon shares no store; start it with --shared URL for this bench.")


def _written_s(admin: AdminClient, before: SharedStats) -> float:
    """Seconds that it takes from about the first quarter of the blocks until all are written."""
    began = time.perf_counter()
    since, first = began, 0
    time.sleep(IDLE_S)
    while True:
        now, at = _shared(admin), time.perf_counter()
        count = now.written_blocks - before.written_blocks
        if count == SHARED_BLOCKS:
            return (at - since) * 0.75 * SHARED_BLOCKS / (SHARED_BLOCKS - first)
        if not first and count > SHARED_BLOCKS // 4:
            since, first = at, count
        if now.dropped_writes > before.dropped_writes or at - began > WAIT_S:
            raise BenchFailed(
                "Not all blocks were written: the store is full or slow, or shared_write is neither reuse nor always."
            )
        _sleep(at - since if first else 0.0, count - first)


def _looked_up_s(engine: SyntheticEngine, keys: bytes, ready: int) -> float:
    """Seconds until lookups of the keys have nothing pending any more, and so many blocks."""
    began = time.perf_counter()
    while True:
        future, _ = engine.lookup(keys)
        pending, pinned = future.pending, future.pinned
        engine.release_and_wait(future)
        seconds = time.perf_counter() - began
        if not pending and pinned == ready:
            return seconds
        if (not pending and pinned > ready) or seconds > WAIT_S:
            raise BenchFailed(f"Only {pinned} of {ready} blocks came back from the store; see kvoffd-cli shared.")
        _sleep(seconds, pinned)


def _sleep(seconds: float, done: int) -> None:
    """Wait for half of the time that the other blocks will take, where ``done`` took ``seconds``; at most as long."""
    time.sleep(max(POLL_S, seconds * min(1.0, 0.5 * (SHARED_BLOCKS - done) / max(1, done))))


def _ask_s(admin: AdminClient, engine: SyntheticEngine, count: int) -> float:
    """Seconds that the daemon says asking takes, for so many keys that are not there."""
    for _ in range(ASKS):
        _looked_up_s(engine, random_keys(count), 0)
    return _shared(admin).ask_seconds


def _exists_s(url: str) -> float | None:
    """Seconds that a bare pipelined EXISTS of SHARED_KEYS keys takes; None where the store does not take it."""
    parts = urlsplit(url)
    if parts.scheme != "redis" or parts.hostname is None:
        return None
    times = []
    try:
        with socket.create_connection((parts.hostname, parts.port or 6379), WAIT_S) as server:
            for _ in range(ASKS):
                keys = [os.urandom(EXISTS_KEY_BYTES // 2).hex().encode() for _ in range(SHARED_KEYS)]
                began = time.perf_counter()
                server.sendall(b"".join(b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%s\r\n" % (len(key), key) for key in keys))
                answers = b""
                while answers.count(b"\n") < SHARED_KEYS and (part := server.recv(1 << 16)):
                    answers += part
                if answers.replace(b":0\r\n", b""):
                    return None
                times.append(time.perf_counter() - began)
    except OSError:
        return None
    return median(times)


def _stream_s(nbytes: int) -> float:
    """Seconds that so many bytes take over a TCP connection of this machine, a block at a time."""
    buffer = memoryview(bytearray(SHARED_BLOCK_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            thread = threading.Thread(target=_send, args=(sender, buffer, nbytes // len(buffer)))
            began, left = time.perf_counter(), nbytes
            thread.start()
            into = memoryview(bytearray(SHARED_BLOCK_BYTES))
            while left:
                left -= receiver.recv_into(into)
            thread.join()
            return time.perf_counter() - began


def _send(sender: socket.socket, buffer: memoryview, times: int) -> None:
    for _ in range(times):
        sender.sendall(buffer)
