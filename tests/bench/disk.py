"""Measures a disk tier beside fio on the same file: ``python -m tests.bench.disk DIRECTORY``.

Each round reads random blocks of the tier's file with fio (libaio, O_DIRECT, the same size and depth), then with the
tier into a pool, so that what else the machine does bears on both. Ratios are taken within a round; the median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from msgspec.structs import asdict

from kvoffd.pool.checksums import digest
from kvoffd.pool.memory import PoolMemory
from kvoffd.system.mappings import view_of
from kvoffd.tiers.disk import DiskOptions, open_disk
from kvoffd.tiers.disk_file import DISK_NAME
from kvoffd.tiers.tier import Block, Result, Space, Tier, make_space
from kvoffd_proto.units import format_size, parse_size
from tests.bench.daemon.results import machine

GIB = 1 << 30
MIB = 1 << 20
_REST_S, _FIO_START_S = 1.0, 0.5


class Cost(NamedTuple):
    """What moving so many bytes took."""

    nbytes: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """GiB per second."""
        return self.nbytes / GIB / self.seconds

    @property
    def cpu_per_gib(self) -> float:
        """CPU seconds, of user and kernel, per GiB."""
        return self.cpu_seconds / (self.nbytes / GIB)


class Silent:
    """A listener that raises on errors."""

    def stored(self, tier: Tier, space: Space, keys: Sequence[bytes]) -> None:
        pass

    def removed(self, tier: Tier, tag: int, keys: Sequence[bytes]) -> None:
        pass

    def answered(self, tier: Tier, space: Space, keys: Sequence[bytes], found: Sequence[bool]) -> None:
        pass

    def error(self, tier: Tier, kind: str, sentence: str) -> None:
        if kind != "not_direct":
            raise RuntimeError(sentence)


class Bench:
    """A tier full of blocks of one size, and a pool of twice the depth."""

    def __init__(self, directory: Path, total_bytes: int, block_bytes: int, depth: int) -> None:
        self.block_bytes = block_bytes
        self.depth = depth
        slots = max(2 * depth, 32 * MIB // block_bytes)
        self._memory = PoolMemory.create(slots * block_bytes, "kvoffd-bench-pool")
        self._memory.touch(0, lambda _: None)
        self.pool = view_of(self._memory.address, slots * block_bytes)
        self._offsets = [slot * block_bytes for slot in range(slots)]
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.tier = open_disk(
            directory,
            total_bytes + total_bytes // 8 + total_bytes // block_bytes * 8192 + 64 * MIB,
            pool=self.pool,
            clock=time.monotonic,
            post=self._posted.put,
            listener=Silent(),
            generation=lambda fingerprint: 0,
            options=DiskOptions(readers=depth),
        )
        self._space = make_space(b"b" * 32, 0, 0, [block_bytes])
        self.blocks = [self._block(number) for number in range(total_bytes // block_bytes)]

    def _block(self, number: int) -> Block:
        offset = self._offsets[number % len(self._offsets)]
        if number < len(self._offsets):
            self.pool[offset : offset + self.block_bytes] = random.Random(offset).randbytes(self.block_bytes)
        checksum = digest(self.pool[offset : offset + self.block_bytes])
        return Block(self._space, number.to_bytes(32, "big"), (0,), (checksum,))

    def write(self) -> Cost:
        """Every block, with as many under way as are taken."""

        def begin(block: Block, done: Callable[[Result], None]) -> bool:
            number = int.from_bytes(block.key, "big")
            return self.tier.write(block, [self._offsets[number % len(self._offsets)]], done)

        return self._run(self.blocks, begin, 16)

    def read(self, seed: int) -> Cost:
        """Every block once, in random order."""
        free = list(self._offsets)
        blocks = random.Random(seed).sample(self.blocks, len(self.blocks))

        def begin(block: Block, done: Callable[[Result], None]) -> bool:
            offset = free.pop()

            def ended(result: Result, found: Block | None) -> None:
                free.append(offset)
                done(result)

            return self.tier.read(block.space, block.key, [offset], float("inf"), ended)

        return self._run(blocks, begin, self.depth)

    def _run(
        self, blocks: Sequence[Block], begin: Callable[[Block, Callable[[Result], None]], bool], depth: int
    ) -> Cost:
        under_way = 0

        def done(result: Result) -> None:
            nonlocal under_way
            under_way -= 1
            if result is not Result.DONE:
                raise RuntimeError(f"A block ended by {result}.")

        left = list(reversed(blocks))
        cpu, began = _cpu_seconds(), time.perf_counter()
        while left or under_way:
            while left and under_way < depth and begin(left[-1], done):
                left.pop()
                under_way += 1
            if not under_way and self._posted.empty():
                raise RuntimeError("A block was not taken, and nothing is under way.")
            self._posted.get(timeout=60)()
        return Cost(len(blocks) * self.block_bytes, time.perf_counter() - began, _cpu_seconds() - cpu)

    def close(self) -> None:
        """Lets file and memory go."""
        if not self.tier.close(60):
            raise RuntimeError("The disk hangs.")
        self.pool.release()
        self._memory.close()


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def fio(path: Path, total_bytes: int, block_bytes: int, depth: int, seed: int) -> Cost:
    """Random reads of the file, each block once."""
    arguments = {
        "name": "read",
        "filename": str(path),
        "rw": "randread",
        "bs": block_bytes,
        "size": total_bytes,
        "offset": MIB,
        "direct": 1,
        "ioengine": "libaio",
        "iodepth": depth,
        "randseed": seed,
        "output-format": "json",
    }
    command = ["fio", *(f"--{name}={value}" for name, value in arguments.items()), "--thread"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)
    (job,) = found["jobs"]
    seconds = job["read"]["runtime"] / 1000
    return Cost(job["read"]["io_bytes"], seconds, (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds)


def measure(directory: Path, total_bytes: int, block_bytes: int, depth: int, rounds: int) -> str:
    """A row of the table."""
    costs: dict[str, list[Cost]] = {"write": [], "fio": [], "read": []}
    bench = Bench(directory, total_bytes, block_bytes, depth)
    try:
        costs["write"].append(bench.write())
        for seed in range(rounds):
            # Devices of clouds give bursts after a rest: neither may always be first, nor have rested longer.
            for who in ("fio", "read") if seed % 2 else ("read", "fio"):
                time.sleep(_REST_S if who == "read" else max(0.0, _REST_S - _FIO_START_S))
                if who == "fio":
                    costs["fio"].append(fio(directory / DISK_NAME, total_bytes, block_bytes, depth, seed))
                else:
                    costs["read"].append(bench.read(seed))
    finally:
        bench.close()
        remove_files(directory)
    ratios = [ours.rate / floor.rate for ours, floor in zip(costs["read"], costs["fio"], strict=True)]
    for name, found in costs.items():
        print(name, *(f"{cost.rate:.2f}" for cost in found), "GiB/s", file=sys.stderr)
    cells = [
        format_size(block_bytes),
        str(depth),
        *(f"{median(cost.rate for cost in costs[name]):.2f}" for name in ("fio", "read")),
        f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        *(f"{median(cost.cpu_per_gib for cost in costs[name]):.3f}" for name in ("read", "fio")),
        f"{costs['write'][0].rate:.2f}",
        f"{costs['write'][0].cpu_per_gib:.3f}",
    ]
    return "| " + " | ".join(cells) + " |"


HEADER = """\
| block | depth | fio GiB/s | tier GiB/s | tier : fio | CPU s/GiB | fio | write GiB/s | write CPU s/GiB |
|---|---|---|---|---|---|---|---|---|"""


def remove_files(directory: Path) -> None:
    """Of the disk, that it may be measured anew."""
    for path in directory.iterdir():
        os.unlink(path)


def rebuild(directory: Path, blocks: int) -> str:
    """How long it takes to find so many small blocks when a disk is opened."""
    bench = Bench(directory, blocks * 4096, 4096, 16)
    try:
        bench.write()
        bench.close()
        bench = Bench(directory, blocks * 4096, 4096, 16)
        tier = bench.tier
    finally:
        bench.close()
        remove_files(directory)
    per_million = tier.open_seconds / max(1, tier.found_blocks) * 1e6
    return f"{tier.found_blocks} blocks found in {tier.open_seconds:.2f} s: {per_million:.1f} s per million."


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "directory", type=Path, help="on the disk to be measured; a directory in it is made and removed"
    )
    parser.add_argument("--total", type=parse_size, default=GIB, help="bytes to read in a round (default 1GiB)")
    parser.add_argument("--blocks", type=parse_size, nargs="+", default=[2 * MIB, MIB, 256 << 10])
    parser.add_argument("--depth", type=int, nargs="+", default=[16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--index", type=int, default=0, help="also time the index of so many small blocks")
    options = parser.parse_args()
    print(" ".join(f"{name}: {value};" for name, value in asdict(machine()).items()), f"load: {os.getloadavg()}\n")
    print(HEADER)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for block_bytes in options.blocks:
            for depth in options.depth:
                print(measure(Path(directory), options.total, block_bytes, depth, options.rounds), flush=True)
        if options.index:
            print("\n" + rebuild(Path(directory), options.index))


if __name__ == "__main__":
    main()
