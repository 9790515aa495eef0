"""``kvoffd-cli bench shared``: what blocks cost that go to a store which nodes share, and come from there."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from statistics import median

import numpy as np

from kvoffd_client.admin_client import AdminClient
from kvoffd_client.bench import SHARED_BLOCK_BYTES, SHARED_BLOCKS, SHARED_KEYS
from kvoffd_client.bench.results import BenchFailed, CpuMeter, Progress, Report, Result
from kvoffd_client.bench.synthetic_engine import WAIT_S, BlockIds, SyntheticEngine, random_keys
from kvoffd_proto.messages import SharedStats

ROUNDS = 5
POLL_S, ASK_POLL_S = 0.005, 0.001
"""Between two looks whether blocks are there, and whether keys are answered: each look is work for the daemon's loop,
and a thousand of them a second took a third of the speed that was measured."""
FLOOR = (
    "of writes and reads a raw TCP stream over loopback of the same bytes, between two threads of this process; of "
    "asking a lookup of the same keys while the answers are known"
)


def bench_shared(directory: Path, progress: Progress, rounds: int = ROUNDS) -> Report:
    """Measure writes, reads and questions, through the daemon, of the first store that it shares.

    A round stores SHARED_BLOCKS blocks, waits until the store has them, clears them in the daemon alone, and looks them
    up until they are all up again. Leaves the blocks in the store, which forgets them. Raises BenchFailed,
    DaemonUnavailable.
    """
    nbytes = SHARED_BLOCKS * SHARED_BLOCK_BYTES
    writes, reads, asks, known, raw = [], [], [], [], []
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
            with writing.measure():
                writes.append(nbytes / _written_s(admin, engine, keys, ids) / 1e9)
            admin.clear(fingerprint)
            with reading.measure():
                reads.append(nbytes / _looked_up_s(engine, keys, SHARED_BLOCKS, POLL_S) / 1e9)
            unknown = random_keys(SHARED_KEYS)
            asks.append(1e6 * _looked_up_s(engine, unknown, 0, ASK_POLL_S))
            known.append(1e6 * engine.lookup(unknown)[1])
            admin.clear(fingerprint)
        gb = rounds * nbytes / 1e9
        costs = [writing.cost(gb, "GB"), reading.cost(gb, "GB")]
    floor = median(raw)
    size = f"{SHARED_BLOCKS} blocks of {SHARED_BLOCK_BYTES >> 20} MiB"
    results = [
        Result(f"write {size}", median(writes), "GB/s", floor, costs[0]),
        Result(f"read {size}", median(reads), "GB/s", floor, costs[1]),
        Result(f"ask for {SHARED_KEYS:,} keys", median(asks), "µs", median(known)),
    ]
    return Report("shared", f"{FLOOR}; the store is {name}", results)


def _shared(admin: AdminClient) -> SharedStats:
    for found in admin.stats().shared:
        if found.reachable:
            return found
        raise BenchFailed(f"{found.name} is not reachable; see kvoffd-cli shared.")
    raise BenchFailed("The daemon shares no store; start it with --shared URL for this bench.")


def _written_s(admin: AdminClient, engine: SyntheticEngine, keys: bytes, ids: BlockIds) -> float:
    """Seconds that it takes to store blocks and use them, which has them written, until they are."""
    before = _shared(admin)
    began = time.perf_counter()
    engine.store(keys, ids)
    future, _ = engine.lookup(keys)
    engine.release_and_wait(future)
    while (now := _shared(admin)).written_blocks < before.written_blocks + SHARED_BLOCKS:
        if now.dropped_writes > before.dropped_writes or time.perf_counter() - began > WAIT_S:
            raise BenchFailed(
                "Not all blocks were written: the store is full or slow, or shared_write is neither reuse nor always."
            )
        time.sleep(POLL_S)
    return time.perf_counter() - began


def _looked_up_s(engine: SyntheticEngine, keys: bytes, ready: int, poll_s: float) -> float:
    """Seconds until lookups of the keys have nothing pending any more, and so many blocks."""
    began = time.perf_counter()
    while True:
        future, _ = engine.lookup(keys)
        pending, pinned = future.pending, future.pinned
        engine.release_and_wait(future)
        if not pending and pinned == ready:
            return time.perf_counter() - began
        if (not pending and pinned > ready) or time.perf_counter() - began > WAIT_S:
            raise BenchFailed(f"Only {pinned} of {ready} blocks came back from the store; see kvoffd-cli shared.")
        time.sleep(poll_s)


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
