"""MLPerf Storage's KV cache benchmark with its own ``.npy`` files, and with a backend over kvoffd in their place.

The benchmark is the folder kv_cache_benchmark of https://github.com/mlcommons/storage (Apache-2.0); nothing of it is
here. It needs numpy and PyYAML:

    git clone https://github.com/mlcommons/storage
    python -m tests.bench.mlperf_kv_cache --checkout storage -- --num-users 4 --duration 60

What follows ``--`` goes to its ``kv-cache.py``, after the arguments of its README for submissions in a smaller size.
Each side gets the same arguments. The entries of the benchmark, which have a request's whole KV cache, are cut into
blocks, which are stored and loaded as by an engine. The other tiers of the benchmark are as they are.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from kvoffd_client import AdminClient, GroupKeys
from kvoffd_client.testing import FakeEngine
from tests.bench.report_file import ROOT, markdown_table, number, print_report, run_facts
from tests.kit.daemon import DaemonProcess

GIB = 1 << 30
NPY, NPY_MEMORY, KVOFFD, KVOFFD_ALONE = ".npy", ".npy below memory", "kvoffd", "kvoffd without waiting"
SIDES = (NPY, NPY_MEMORY, KVOFFD, KVOFFD_ALONE)
DEFAULTS = {
    "--model": "tiny-1b",
    "--num-users": "4",
    "--duration": "60",
    "--gpu-mem-gb": "0",
    "--cpu-mem-gb": "0",
    "--max-concurrent-allocs": "2",
    "--generation-mode": "none",
    "--seed": "42",
    "--storage-capacity-gb": "8",
}
"""Arguments of kv-cache.py, as its README has them for submissions, but for model, sizes and time: a request of the 8B
model takes 6 GiB of this process at most."""
TITLE = "MLPerf Storage's KV cache benchmark, with its files and with kvoffd"
TEXT = """\
* **{npy}**: the benchmark's own backend. A write ends after `fsync`; before a read the file leaves the page cache.
* **{npy_memory}**: the same, below `--cpu-mem-gb` of as many GiB as kvoffd's pool has.
* **{kvoffd}**: a daemon with a pool of {pool_gib:g} GiB and a disk in the same place (`disk_write` always, policy
  `lru`, `O_DIRECT`), blocks of {block_tokens} tokens. A write ends when the pool has the entry, and waits while half of
  the pool waits for the disk, so that nothing is lost; it does not wait for the disk to have it. A checksum is compared
  at each read.
* **{kvoffd_alone}**: without that wait, as engines are. What is evicted before the disk had its turn is lost: a failed
  read, which an engine would compute.
* Latencies are of whole entries, in the storage tier: those that `{npy_memory}` has in memory are not in its rows of
  storage. `request: storage` adds up what a request waited for all tiers.
* **failed reads, writes**: entries that the backend no longer had, or did not take. The benchmark counts such a read as
  a hit that took no time; where there are some, its own figures are too good.
* **really read, written**: what went through the storage backend, in whole entries.

Median of {trials}. The verdict is the benchmark's."""
STAGED = 16
"""Blocks of an entry that are copied at once."""
WAITING_SHARE = 2
"""Half of the pool may wait to be written to the disk."""
PAUSE_S = 0.005
TIMEOUT_S = 120.0
RUN_DEADLINE_S = 3600.0

Array = npt.NDArray[Any]


class Timing(NamedTuple):
    """Seconds of an operation: all, those in calls of the storage, and the rest. The benchmark's ``IOTiming``."""

    total: float
    device: float
    host: float


class Backend(Protocol):
    """A tier of the benchmark: the methods that its ``MultiTierCache`` calls. ``read`` raises KeyError."""

    base_path: Path

    def write(self, key: str, data: Array) -> Any: ...

    def read(self, key: str) -> tuple[Array, Any]: ...

    def delete(self, key: str) -> None: ...

    def clear(self) -> None: ...


class Geometry(NamedTuple):
    """Shape of the benchmark's entries, which are [layers, 2, tokens, heads, size], or [layers, tokens, size] for MLA.

    Attributes:
        shape: of a block, that is of an entry of as many tokens.
        axis: of the tokens.
        dtype: of all.
    """

    shape: tuple[int, ...]
    axis: int
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, data: Array, block_tokens: int) -> Geometry:
        """Return the geometry of an entry. Raises ValueError if it is a part of one, as with tensor parallelism."""
        if data.ndim not in (3, 5):
            raise ValueError(f"An entry has three or five dimensions, not {data.ndim}.")
        axis = data.ndim // 2
        return cls((*data.shape[:axis], block_tokens, *data.shape[axis + 1 :]), axis, data.dtype)

    @property
    def page_bytes(self) -> int:
        """Bytes of a layer of a block."""
        return int(np.prod(self.shape[1:])) * self.dtype.itemsize

    def block_of(self, data: Array, at: int) -> Array:
        """Return a view of an entry's block, whose tokens may be fewer."""
        tokens = self.shape[self.axis]
        where = [slice(None)] * data.ndim
        where[self.axis] = slice(at * tokens, (at + 1) * tokens)
        return data[tuple(where)]


class Entry(NamedTuple):
    shape: tuple[int, ...]
    keys: list[bytes]
    """Of its blocks."""


class KvoffdBackend:
    """A storage tier of the benchmark over a kvoffd daemon, which is used as by engines: blocks are copied from and to
    memory that is shared with it, STAGED of an entry at once. For several threads.

    Args:
        directory: of the daemon's sockets.
        block_tokens: tokens of a block.
        pool_bytes: of the daemon.
        clients: number of engines, and so of entries that are read or written at once.
        waits: writes wait for the disk.
    """

    def __init__(
        self, directory: Path, block_tokens: int, pool_bytes: int, clients: int, *, waits: bool = True
    ) -> None:
        self.base_path = directory
        self._block_tokens, self._pool_bytes, self._count = block_tokens, pool_bytes, clients
        self._waits = waits
        self._entries: dict[str, Entry] = {}
        self._numbers = itertools.count()
        self._geometry: Geometry | None = None
        self._engines: queue.LifoQueue[FakeEngine] = queue.LifoQueue()
        self._opened, self._lock = ExitStack(), threading.Lock()
        self._admin = self._opened.enter_context(AdminClient(directory))
        self._unwritten = 0
        """Largest number of blocks that may wait for the disk now."""

    def write(self, key: str, data: Array) -> Timing:
        """Store an entry. Raises ValueError for another geometry than the first one's, RuntimeError if the daemon does
        not store it."""
        began, device = time.perf_counter(), 0.0
        geometry = self._open(data)
        self.delete(key)
        blocks = -(-data.shape[geometry.axis] // self._block_tokens)
        of_entry = next(self._numbers)  # a key that is written again has other blocks: no block ever changes
        keys = [hashlib.sha256(f"{of_entry}/{at}/{key}".encode()).digest() for at in range(blocks)]
        with self._engine() as (engine, staged):
            for begin in range(0, blocks, STAGED):
                batch = keys[begin : begin + STAGED]
                for at in range(len(batch)):
                    part = geometry.block_of(data, begin + at)
                    staged[:, at][tuple(map(slice, part.shape))] = part
                inside = time.perf_counter()
                if self._waits:
                    self._wait_for_disk(geometry, len(batch))
                result = engine.store(batch, range(len(batch)), TIMEOUT_S)
                device += time.perf_counter() - inside
                if not result.ok or result.failed_keys:
                    raise RuntimeError(f"{len(result.failed_keys)} blocks were not stored: {result.error}")
        self._entries[key] = Entry(data.shape, keys)
        total = time.perf_counter() - began
        return Timing(total, device, total - device)

    def read(self, key: str) -> tuple[Array, Timing]:
        """Load an entry. Raises KeyError if it was not written, or a block of it is gone."""
        began, device = time.perf_counter(), 0.0
        entry, geometry = self._entries[key], self._geometry
        assert geometry is not None, "an entry was written"
        data = np.empty(entry.shape, geometry.dtype)
        with self._engine() as (engine, staged):
            for begin in range(0, len(entry.keys), STAGED):
                batch = entry.keys[begin : begin + STAGED]
                inside = time.perf_counter()
                found = engine.lookup(batch, TIMEOUT_S)
                if found < len(batch) or not engine.load(batch, range(len(batch)), TIMEOUT_S).ok:
                    raise KeyError(f"Block {begin + found} of {len(entry.keys)} of {key} is gone.")
                device += time.perf_counter() - inside
                for at in range(len(batch)):
                    part = geometry.block_of(data, begin + at)
                    part[:] = staged[:, at][tuple(map(slice, part.shape))]
        total = time.perf_counter() - began
        return data, Timing(total, device, total - device)

    def delete(self, key: str) -> None:
        """Drop an entry, in the pool and on the disk."""
        if (entry := self._entries.pop(key, None)) is not None:
            with self._engine() as (engine, _):
                engine.scheduler.invalidate([GroupKeys(0, b"".join(entry.keys))])

    def clear(self) -> None:
        for key in list(self._entries):
            self.delete(key)

    def close(self) -> None:
        self._opened.close()

    def _open(self, data: Array) -> Geometry:
        """Open engines with the first entry. Raises ValueError if an entry has another geometry."""
        with self._lock:
            geometry = Geometry.of(data, self._block_tokens)
            if self._geometry is None:
                for _ in range(self._count):
                    engine = FakeEngine(
                        self.base_path,
                        "mlperf",
                        layers=geometry.shape[0],
                        blocks=STAGED,
                        page_bytes=geometry.page_bytes,
                    )
                    self._engines.put(self._opened.enter_context(engine))
                self._geometry = geometry
            if geometry != self._geometry:
                raise ValueError(f"An entry has blocks of {geometry}, not {self._geometry}.")
        return geometry

    @contextmanager
    def _engine(self) -> Iterator[tuple[FakeEngine, Array]]:
        """Yield an engine, and its memory as [layers, STAGED, shape of a layer of a block]."""
        geometry = self._geometry
        assert geometry is not None, "an entry was written"
        engine = self._engines.get()
        try:
            (pages,) = engine._pages
            yield engine, pages.view(geometry.dtype).reshape(geometry.shape[0], STAGED, *geometry.shape[1:])
        finally:
            self._engines.put(engine)

    def _wait_for_disk(self, geometry: Geometry, blocks: int) -> None:
        """Wait until at most half of the pool waits to be written: what is evicted unwritten is lost."""
        block_bytes, deadline = geometry.page_bytes * geometry.shape[0], time.monotonic() + TIMEOUT_S
        under_way = STAGED * self._count
        most = max(2 * under_way, self._pool_bytes // WAITING_SHARE // block_bytes)
        with self._lock:
            self._unwritten += blocks
            while self._unwritten > most:
                tiers = self._admin.stats().tiers
                assert tiers is not None, "the daemon has no disk"
                assert time.monotonic() < deadline, "the disk does not keep up"
                self._unwritten = tiers.writes_waiting + under_way
                if self._unwritten > most:
                    time.sleep(PAUSE_S)


class Counted:
    """A backend, and what goes through it."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._lock = backend, threading.Lock()
        self.base_path = backend.base_path
        self.counts = {"read_bytes": 0, "written_bytes": 0, "failed_reads": 0, "failed_writes": 0}
        self.failures: list[str] = []
        """The first sentence of each kind of failure."""

    def write(self, key: str, data: Array) -> Any:
        timing = self._counted("writes", lambda: self._backend.write(key, data))
        self._add("written_bytes", data.nbytes)
        return timing

    def read(self, key: str) -> tuple[Array, Any]:
        data, timing = self._counted("reads", lambda: self._backend.read(key))
        self._add("read_bytes", data.nbytes)
        return data, timing

    def delete(self, key: str) -> None:
        self._backend.delete(key)

    def clear(self) -> None:
        self._backend.clear()

    def _counted(self, kind: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            if not self.counts[f"failed_{kind}"]:
                self.failures.append(f"{kind}: {type(error).__name__}: {error}")
            self._add(f"failed_{kind}", 1)
            raise

    def _add(self, name: str, count: int) -> None:
        with self._lock:
            self.counts[name] += count


class Side(NamedTuple):
    """What a process that runs the benchmark once is told."""

    name: str
    checkout: str
    arguments: list[str]
    """Of kv-cache.py."""
    counts: str
    """File for what went through the storage backend."""
    directory: str
    """Of the daemon's sockets; empty for the benchmark's own backend."""
    block_tokens: int
    pool_bytes: int
    clients: int


def run_in_this_process(side: Side) -> None:
    """Run the benchmark with a storage backend that counts."""
    sys.path.insert(0, str(Path(side.checkout) / "kv_cache_benchmark"))
    cache, cli = import_module("kv_cache.cache"), import_module("kv_cache.cli")
    theirs, made = cache.NVMeBackend, list[Counted]()

    def make(base_path: str | None = None) -> Counted:
        own = (Path(side.directory), side.block_tokens, side.pool_bytes, side.clients)
        waits = side.name == KVOFFD
        made.append(Counted(KvoffdBackend(*own, waits=waits) if side.directory else theirs(base_path=base_path)))
        return made[-1]

    with patch.object(cache, "NVMeBackend", make), patch.object(sys, "argv", ["kv-cache.py", *side.arguments]):
        cli.main()
    (backend,) = made
    Path(side.counts).write_text(json.dumps(backend.counts | {"failures": backend.failures}))
    sys.stdout.flush()
    os._exit(0)  # its threads may still wait for storage


class Bench:
    """Runs the benchmark, each time from an empty directory on the disk that is measured."""

    def __init__(
        self, checkout: Path, place: Path, arguments: Sequence[str], block_tokens: int, pool_gib: float, clients: int
    ) -> None:
        self._checkout, self._place = checkout, place
        self._config = ["--config", str(checkout / "kv_cache_benchmark" / "config.yaml")]
        self._arguments = [*self._config, *itertools.chain(*DEFAULTS.items()), *arguments]
        self._block_tokens, self._pool_gib, self._clients = block_tokens, pool_gib, clients

    def run(self, name: str) -> dict[str, Any]:
        """Return a side's results: the benchmark's summary, and what went through its storage backend."""
        with TemporaryDirectory(dir=self._place) as own, ExitStack() as stack:
            directory, disk = Path(own), Path(own) / "disk"
            disk.mkdir()
            results, counts = directory / "results.json", directory / "counts.json"
            arguments = [*self._arguments, "--cache-dir", str(disk), "--output", str(results)]
            pool_bytes = int(self._pool_gib * GIB)
            if name == NPY_MEMORY:
                arguments += ["--cpu-mem-gb", str(self._pool_gib)]
            daemon = None
            if name in (KVOFFD, KVOFFD_ALONE):
                disk_bytes = int(1.25 * self._storage_gib() * GIB) + 2 * pool_bytes
                daemon = DaemonProcess(
                    str(pool_bytes), disk=f"{disk}={disk_bytes}", disk_write="always", eviction_policy="lru"
                )
                stack.enter_context(daemon)
            side = Side(
                name,
                str(self._checkout),
                arguments,
                str(counts),
                str(daemon.directory) if daemon is not None else "",
                self._block_tokens,
                pool_bytes,
                self._clients,
            )
            self._run_child(side)
            found: dict[str, Any] = {
                "summary": json.loads(results.read_text())["summary"],
                **json.loads(counts.read_text()),
            }
            if daemon is not None:
                with AdminClient(daemon.directory) as admin:
                    stats = admin.stats()
                assert stats.tiers is not None, "the daemon has a disk"
                (of_disk,) = stats.disks
                found |= {"disk_read_bytes": of_disk.read_bytes, "disk_written_bytes": of_disk.written_bytes}
                found["not_written"] = sum(stats.tiers.not_written.values())
            return found

    def _storage_gib(self) -> float:
        parser = argparse.ArgumentParser()
        parser.add_argument("--storage-capacity-gb", type=float)
        return float(parser.parse_known_args(self._arguments)[0].storage_capacity_gb)

    def _run_child(self, side: Side) -> None:
        command = [sys.executable, "-m", "tests.bench.mlperf_kv_cache", "--side", json.dumps(side._asdict())]
        ran = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_DEADLINE_S
        )
        if ran.returncode:
            raise RuntimeError(f"The benchmark ended with {ran.returncode}:\n{ran.stdout[-4000:]}")


def rows_of(found: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """Return the table's rows, with a column for each side: the medians of its trials."""
    rows = [["", *found]]

    def add(name: str, *path: str, scale: float = 1.0) -> None:
        """Add the number at this path of each side's results, ``-`` where a side has none."""
        cells = [name]
        for trials in found.values():
            values: list[Any] = trials
            for part in path:
                values = [one[part] for one in values if part in one]
            cells.append(number(scale * statistics.median(values)) if values else "-")
        rows.append(cells)

    add("requests", "summary", "total_requests")
    add("tokens/s, wall clock", "summary", "avg_throughput_tokens_per_sec")
    add("tokens/s, storage I/O", "summary", "storage_throughput_tokens_per_sec")
    for percentile in ("p50", "p95", "p99"):
        add(f"request: storage {percentile}, ms", "summary", "storage_io_latency_ms", percentile)
    for operation in ("read", "write"):
        for percentile in ("p50", "p95", "p99"):
            name = f"storage_{operation}_{percentile}_ms"
            add(f"storage {operation} {percentile}, ms", "summary", "cache_stats", name)
        add(f"storage {operation} device p95, ms", "summary", "cache_stats", f"storage_{operation}_device_p95_ms")
    for operation in ("read", "write"):
        name = f"tier_storage_{operation}_bandwidth_gbps"
        add(f"storage {operation}, GiB/s", "summary", "cache_stats", name)
    add("hit rate, %", "summary", "cache_stats", "cache_hit_rate", scale=100)
    verdicts = [
        [one["summary"]["cache_stats"]["storage_health"]["overall_status"] for one in of] for of in found.values()
    ]
    rows.append(["verdict", *(" and ".join(sorted({*each})) for each in verdicts)])
    for operation in ("read", "written"):
        add(f"really {operation}, GiB", f"{operation}_bytes", scale=1 / GIB)
    for operation in ("reads", "writes"):
        add(f"failed {operation}", f"failed_{operation}")
    for operation in ("read", "written"):
        add(f"daemon's disk {operation}, GiB", f"disk_{operation}_bytes", scale=1 / GIB)
    add("blocks that the disk did not get", "not_written")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.mlperf_kv_cache",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkout", type=Path, help="directory of a checkout of mlcommons/storage")
    parser.add_argument("--place", type=Path, default=Path("/var/tmp"), help="directory on the disk (/var/tmp)")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"default {','.join(SIDES)}")
    parser.add_argument("--trials", type=int, default=1, help="runs of each side, in turns (default 1)")
    parser.add_argument("--pool-gib", type=float, default=2.0, help="kvoffd's pool (default 2)")
    parser.add_argument("--block-tokens", type=int, default=256, help="tokens of a block (default 256)")
    parser.add_argument("--clients", type=int, default=4, help="entries that go to kvoffd at once (default 4)")
    parser.add_argument("--json", type=Path, help="file for all results")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help="of kv-cache.py, after --")
    given = parser.parse_args()
    if given.side:
        run_in_this_process(Side(**json.loads(given.side)))
    if given.checkout is None or not (given.checkout / "kv_cache_benchmark" / "kv_cache").is_dir():
        parser.error("--checkout needs a checkout of https://github.com/mlcommons/storage with kv_cache_benchmark")
    sides = given.sides.split(",")
    if unknown := set(sides) - set(SIDES):
        parser.error(f"--sides has {', '.join(sorted(unknown))}; it may have {', '.join(SIDES)}")
    facts = run_facts(f"python -m tests.bench.mlperf_kv_cache {' '.join(sys.argv[1:])}")
    facts["arguments"] = " ".join([*itertools.chain(*DEFAULTS.items()), *given.arguments])
    bench = Bench(
        given.checkout.resolve(), given.place, given.arguments, given.block_tokens, given.pool_gib, given.clients
    )
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for trial in range(given.trials):
        for side in sides:
            print(f"measuring: {side}, trial {trial + 1}", file=sys.stderr, flush=True)
            found[side].append(bench.run(side))
            for failure in found[side][-1]["failures"]:
                print(f"failed {failure}", file=sys.stderr, flush=True)
    if given.json:
        given.json.write_text(json.dumps(facts | {"sides": found}))
    text = TEXT.format(
        npy=NPY,
        npy_memory=NPY_MEMORY,
        kvoffd=KVOFFD,
        kvoffd_alone=KVOFFD_ALONE,
        pool_gib=given.pool_gib,
        block_tokens=given.block_tokens,
        trials=f"{given.trials} trials" if given.trials > 1 else "one trial",
    )
    print_report(TITLE, facts, f"{text}\n\n{markdown_table(rows_of(found))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
