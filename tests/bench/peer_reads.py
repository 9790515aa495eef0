"""Speed of blocks read from another node's pool, beside what NIXL alone moves: ``python -m tests.bench.peer_reads``.

Both ends run on this machine, over UCX's TCP. Takes turns, and prints GB/s of each turn and the ratio of the medians.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import msgspec
import numpy as np

from kvoffd.pool.checksums import digest
from kvoffd.pool.memory import PoolMemory
from kvoffd.tiers.header import BlockGroup, make_block_group
from kvoffd.tiers.peer_messages import PIN, HelperSettings, Pin, Pinned
from kvoffd.tiers.peer_process import HelperProcess
from kvoffd.tiers.peer_store import PeerStore
from kvoffd.tiers.store import GetRequest
from tests.kit.ports import free_port

POOL_BYTES, MOVED_BYTES, TURNS = 256 << 20, 256 << 20, 5
SIZES = (16 << 10, 256 << 10, 2 << 20)
SECRET = b"0123456789abcdef"


def lend(port: int, size: int, ready: Connection) -> None:
    """Serve a pool whose n-th key is its n-th block."""
    memory = PoolMemory.create(POOL_BYTES, "bench")
    memory.buffer[:] = np.random.default_rng(1).integers(0, 256, POOL_BYTES, np.uint8).tobytes()
    sums = [digest(memory.buffer[at : at + size]) for at in range(0, POOL_BYTES, size)]

    def answer(route: bytes, ident: int, kind: int, payload: bytes) -> None:
        if kind != PIN:
            return
        keys = msgspec.msgpack.decode(payload, type=Pin).wanted.keys
        numbers = np.frombuffer(keys, ">u8").astype(np.int64)
        there = Pinned(
            10.0,
            bytes([1]) * len(numbers),
            (numbers * size).astype("<u8").tobytes(),
            np.array([sums[one] for one in numbers], "<u8").tobytes(),
            bytes(2 * len(numbers)),
        )
        helper.reply(route, ident, msgspec.msgpack.encode(there))

    settings = HelperSettings([], f"127.0.0.1:{port}", SECRET)
    helper = HelperProcess(settings, (memory.fd, 0, POOL_BYTES), answer, lambda: None)
    helper.check()
    ready.send(None)
    ready.recv()
    helper.close(5.0)


def by_kvoffd(helper: HelperProcess, pool: memoryview, group: BlockGroup, size: int) -> float:
    """Read all blocks with two threads, as a shared tier does; return bytes per second."""
    blocks = POOL_BYTES // size
    at_once = max(1, min(PeerStore.blocks_at_once, PeerStore.bytes_at_once // size))
    batches, lock = iter(range(0, blocks, at_once)), threading.Lock()
    wrong: list[object] = []

    def work() -> None:
        store = PeerStore(helper, 0)
        while True:
            with lock:
                at = next(batches, None)
            if at is None:
                return
            some = range(at, min(at + at_once, blocks))
            requests = [GetRequest(group, n.to_bytes(8, "big"), [pool[n * size : (n + 1) * size]]) for n in some]
            found = store.get(requests, 10.0)
            wrong.extend(
                one for one in found if not (one and one.block and tuple(one.checksums) == one.block.checksums)
            )

    began, threads = time.perf_counter(), [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:1]
    return POOL_BYTES / (time.perf_counter() - began)


def nixl_lends(ready: Connection) -> None:
    agent, address = _agent("lender")
    ready.send((agent.get_agent_metadata(), address))
    while ready.recv():  # it takes no CPU from the others' turns
        while not ready.poll(0):
            agent.get_new_notifs()
            time.sleep(0.00005)
        ready.recv()


def _agent(name: str) -> tuple[Any, int]:
    import nixl_cu12

    memory = PoolMemory.create(POOL_BYTES, "bench")
    memory.touch(1)
    agent = nixl_cu12.nixl_agent(name, nixl_cu12.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(memory.mapping.address, POOL_BYTES, 0, "")], "DRAM")
    return agent, memory.mapping.address


def by_nixl(agent: Any, here: int, name: str, there: int, size: int) -> float:
    """Read the same with two reads of 4 MiB in flight; return bytes per second."""
    at_once = (4 << 20) // size
    starts = iter(range(0, POOL_BYTES, at_once * size))
    running: list[Any] = []
    began = time.perf_counter()
    while True:
        while len(running) < 2 and (at := next(starts, None)) is not None:
            offsets = np.arange(at_once, dtype=np.uint64) * np.uint64(size) + np.uint64(at)
            sizes, none = np.full(at_once, size, np.uint64), np.zeros(at_once, np.uint64)
            both = [np.stack([offsets + np.uint64(begin), sizes, none], axis=1) for begin in (here, there)]
            handle = agent.initialize_xfer("READ", *(agent.get_xfer_descs(one, "DRAM") for one in both), name)
            agent.transfer(handle)
            running.append(handle)
        if not running:
            return POOL_BYTES / (time.perf_counter() - began)
        for handle in list(running):
            if agent.check_xfer_state(handle) == "DONE":
                agent.release_xfer_handle(handle)
                running.remove(handle)
        time.sleep(0.00005)


def main() -> None:
    os.environ.setdefault("UCX_TLS", "tcp")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    spawn = multiprocessing.get_context("spawn")
    sizes = [int(one) << 10 for one in sys.argv[1:]] or SIZES
    ours, theirs = spawn.Pipe()
    spawn.Process(target=nixl_lends, args=(theirs,), daemon=True).start()
    metadata, there = ours.recv()
    agent, here = _agent("reader")
    name = agent.add_remote_agent(metadata)
    name = name.decode() if isinstance(name, bytes) else name
    memory = PoolMemory.create(POOL_BYTES, "bench")
    memory.touch(1)
    for size in sizes:
        port, (left, right) = free_port(), spawn.Pipe()
        spawn.Process(target=lend, args=(port, size, right), daemon=True).start()
        left.recv()
        settings = HelperSettings([f"127.0.0.1:{port}"], "", SECRET)
        helper = HelperProcess(settings, (-1, 0, 0), lambda *_: None, lambda: None)
        helper.check()
        PeerStore(helper, 0)
        time.sleep(1.0)
        group = make_block_group(b"f" * 32, 0, 0, (size,))
        turns = []
        for _ in range(TURNS):
            speed = by_kvoffd(helper, memory.buffer, group, size)
            ours.send(True)
            turns.append((speed, by_nixl(agent, here, name, there, size)))
            ours.send(True)
            print(
                f"{size >> 10} KiB: kvoffd {turns[-1][0] / 1e9:.2f} GB/s, NIXL alone {turns[-1][1] / 1e9:.2f}",
                flush=True,
            )
        kvoffd, alone = (median(column) for column in zip(*turns, strict=True))
        print(f"{size >> 10} KiB: {kvoffd / 1e9:.2f} of {alone / 1e9:.2f} GB/s: {kvoffd / alone:.2f}", flush=True)
        left.send(None)
        helper.close(5.0)
    ours.send(False)
    sys.stdout.flush()
    os._exit(0)  # NIXL 1.5.1 crashes when its agent ends after the other one


if __name__ == "__main__":
    main()
