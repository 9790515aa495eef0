"""What the shared tier costs over S3, beside a bare client: ``python -m tests.bench.shared_s3`` (a minute).

In one run over loopback: objects of 1 and 8 MiB written and read by obstore alone, as many at a time as the tier's
threads have, and by the tier, with the CPU time of this process; and how long it takes to find how far a prefix of
1,000 keys reaches, in HEADs. Of a double in a process of its own that does nothing but keep bytes, and waits 5 ms for
the prefix; and of moto, where there is one, whose own CPU time is most of it and which answers one request at a time.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import obstore
import uvloop

from kvoffd.pool.checksums import digest
from kvoffd.tiers.s3_store import S3, open_bucket
from kvoffd.tiers.shared import READERS
from kvoffd.tiers.store import Credentials
from kvoffd.tiers.tier import Block, make_space
from tests.bench.shared import BATCH, FINGERPRINT, MIB, Figure, Node
from tests.kit.faulty_bucket import FaultyBucket
from tests.kit.s3_server import PROGRAM, S3Server

ROUNDS = 6
SIZES = (MIB, 8 * MIB)
HEADS = 50
PREFIXES = (0, 137, 500, 731, 1000)
DELAY_S = 0.005
SECRETS = Credentials("testing", "testing")


@contextmanager
def double(delay_s: float) -> Iterator[str]:
    """The URL of a ``FaultyBucket`` in a process of its own."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        with FaultyBucket() as bucket:
            bucket.delay_s = delay_s
            os.write(theirs, bucket.url.encode())
            signal.pause()
    assert select.select([ours], [], [], 10.0)[0]
    try:
        yield os.read(ours, 4096).decode()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours)
        os.close(theirs)


async def at_once(count: int, calls: Sequence[Callable[[], Any]]) -> None:
    """Make calls, so many at a time."""
    free = asyncio.Semaphore(count)

    async def one(call: Callable[[], Any]) -> None:
        async with free:
            await call()

    await asyncio.gather(*map(one, calls))


def throughput(url: str, size: int) -> Iterator[str]:
    client = open_bucket(url, SECRETS).client
    node = Node(url, SECRETS)
    figures = [Figure(f"  {name}") for name in ("bare write", "bare read", "write", "read")]
    views = [node.pool[at : at + size] for at in range(0, min(BATCH * size, len(node.pool)), size)]

    async def get(path: str, view: memoryview) -> None:
        view[:] = memoryview(await (await obstore.get_async(client, path)).bytes_async())

    def bare(calls: Sequence[Callable[[], Any]], count: int) -> int:
        uvloop.run(at_once(count, calls))
        return len(views) * size

    for number in range(ROUNDS):
        paths = [f"bare/{size}/{number}/{slot}" for slot in range(len(views))]
        puts = [partial(obstore.put_async, client, *one, use_multipart=False) for one in zip(paths, views, strict=True)]
        figures[0].round(partial(bare, puts, S3.writers * S3.blocks_at_once))
        gets = [partial(get, *one) for one in zip(paths, views, strict=True)]
        figures[1].round(partial(bare, gets, READERS * S3.blocks_at_once))
        node.round(number, size, *figures[2:])
    assert node.tier.close(5.0)
    for own, floor in ((figures[2], figures[0]), (figures[3], figures[1])):
        yield floor.line()
        yield own.line(median(floor.speeds), "the bare client")


def prefix(url: str) -> Iterator[str]:
    client = open_bucket(url, SECRETS).client

    async def head() -> None:
        try:
            await obstore.head_async(client, "absent")
        except FileNotFoundError:
            pass

    async def heads() -> list[float]:
        times = []
        for _ in range(HEADS):
            started = time.perf_counter()
            await head()
            times.append(time.perf_counter() - started)
        return times

    one_s = median(asyncio.run(heads()))
    node = Node(url, SECRETS)
    keys = [number.to_bytes(32, "big") for number in range(1000)]
    written = 0
    space, checksum = make_space(FINGERPRINT, 0, 0, [1024]), digest(node.pool[:1024])
    for count in PREFIXES:
        blocks = [Block(space, key, (0,), (checksum,)) for key in keys[written:count]]
        for at in range(0, len(blocks), BATCH):
            node.move(lambda block, _, done: node.write(block, 0, done), blocks[at : at + BATCH])
        written = count
        times = []
        for _ in range(9):
            started = time.perf_counter()
            node.ask(keys, 1024)
            times.append(time.perf_counter() - started)
        asked_s = median(times)
        yield f"  {count} of 1,000 keys: {1e3 * asked_s:.1f} ms, {asked_s / one_s:.1f} HEADs of {1e3 * one_s:.1f} ms"
    assert node.tier.close(5.0)


def main() -> None:
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with double(DELAY_S) as slow, double(0.0) as quick:
        for size in SIZES:
            print(f"a double, {size >> 20} MiB", *throughput(quick, size), sep="\n", flush=True)
        print(f"a double that waits {1e3 * DELAY_S:.0f} ms", *prefix(slow), sep="\n", flush=True)
    if PROGRAM is not None:
        with S3Server() as server:
            for size in SIZES:
                print(f"moto, {size >> 20} MiB", *throughput(server.url, size), sep="\n", flush=True)


if __name__ == "__main__":
    main()
