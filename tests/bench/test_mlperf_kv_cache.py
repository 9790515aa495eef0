"""A backend for MLPerf Storage's KV cache benchmark over a real daemon, and a run of a benchmark that stands for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvoffd_client import AdminClient
from tests.bench.mlperf_kv_cache import SIDES, Bench, Counted, KvoffdBackend, rows_of
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until

POOL_BYTES = 16 << 20
BLOCK_TOKENS = 4
STAND_IN_CACHE = """
import json, pathlib
import numpy as np

class NVMeBackend:
    def __init__(self, base_path=None):
        self.base_path = pathlib.Path(base_path)
    def write(self, key, data):
        np.save(self.base_path / key, data)
    def read(self, key):
        return np.load(self.base_path / f"{key}.npy"), None
    def delete(self, key):
        (self.base_path / f"{key}.npy").unlink()
"""
STAND_IN_CLI = """
import argparse, json
import numpy as np
from kv_cache import cache

def main():
    parser = argparse.ArgumentParser()
    for option in ("--cache-dir", "--output", "--cpu-mem-gb", "--seed"):
        parser.add_argument(option)
    given, _ = parser.parse_known_args()
    backend = cache.NVMeBackend(base_path=given.cache_dir)
    data = np.random.default_rng(int(given.seed)).random((2, 2, 9, 2, 8)).astype(np.float16)
    backend.write("one", data)
    assert (backend.read("one")[0] == data).all()
    backend.delete("one")
    try:
        backend.read("one")
    except (KeyError, OSError):
        pass
    latencies = {"p50": 1.0, "p95": 2.0, "p99": 3.0}
    stats = {"cache_hit_rate": 0.5, "storage_health": {"overall_status": "PASS"}}
    summary = {"total_requests": float(given.cpu_mem_gb), "avg_throughput_tokens_per_sec": 1.0}
    summary |= {"storage_throughput_tokens_per_sec": 1.0, "storage_io_latency_ms": latencies, "cache_stats": stats}
    with open(given.output, "w") as file:
        json.dump({"summary": summary}, file)
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    disk = f"{tmp_path}=128MiB"
    with DaemonProcess(str(POOL_BYTES), disk=disk, disk_write="always", eviction_policy="lru") as running:
        yield running


@pytest.fixture
def backend(daemon: DaemonProcess) -> Iterator[KvoffdBackend]:
    made = KvoffdBackend(daemon.directory, BLOCK_TOKENS, POOL_BYTES, clients=2)
    yield made
    made.close()


def entry(tokens: int, seed: int = 0, *, shape: tuple[int, ...] = (3, 2, 4, 32)) -> np.ndarray:
    layers, *of_token = shape
    lead, rest = (of_token[:1], of_token[1:]) if len(of_token) == 3 else ([], of_token)
    return np.random.default_rng(seed).random((layers, *lead, tokens, *rest)).astype(np.float16)


@pytest.mark.parametrize("shape", [(3, 2, 4, 32), (3, 64)], ids=["heads", "mla"])
def test_an_entry_is_read_as_it_was_written(backend: KvoffdBackend, shape: tuple[int, ...]) -> None:
    """Of whole blocks, of a part of one, and one of a token."""
    written = {str(tokens): entry(tokens, tokens, shape=shape) for tokens in (8, 11, 1)}
    for key, data in written.items():
        timing = backend.write(key, data)
        assert timing.total == pytest.approx(timing.device + timing.host)
    for key, data in written.items():
        found, _ = backend.read(key)
        assert (found.shape, found.dtype) == (data.shape, data.dtype)
        assert found.tobytes() == data.tobytes()


def test_a_key_that_is_written_again_has_the_new_entry(backend: KvoffdBackend) -> None:
    backend.write("one", entry(8))
    backend.write("one", entry(5, 1))
    assert backend.read("one")[0].tobytes() == entry(5, 1).tobytes()


def test_a_deleted_entry_is_dropped_everywhere(backend: KvoffdBackend, daemon: DaemonProcess) -> None:
    backend.write("one", entry(8))
    backend.write("two", entry(8, 1))
    backend.delete("one")
    with pytest.raises(KeyError):
        backend.read("one")
    with AdminClient(daemon.directory) as admin:
        wait_until(lambda: [one.ready_blocks for one in admin.stats().namespaces] == [2])
        wait_until(lambda: admin.stats().disks[0].blocks == 2)
    backend.clear()
    with pytest.raises(KeyError):
        backend.read("two")


def test_entries_larger_than_the_pool_together_come_from_the_disk(
    backend: KvoffdBackend, daemon: DaemonProcess
) -> None:
    """Writes wait for the disk, so none is lost."""
    written = [entry(64, seed, shape=(3, 2, 4, 512)) for seed in range(32)]  # 48 MiB
    for at, data in enumerate(written):
        backend.write(str(at), data)
    for at, data in enumerate(written):
        assert backend.read(str(at))[0].tobytes() == data.tobytes()
    with AdminClient(daemon.directory) as admin:
        stats = admin.stats()
    assert stats.disks[0].read_blocks > 0
    assert stats.tiers is not None
    assert sum(stats.tiers.not_written.values()) == 0


def test_failures_are_counted(backend: KvoffdBackend) -> None:
    counted = Counted(backend)
    with pytest.raises(ValueError, match="three or five dimensions"):
        counted.write("part", np.zeros(8, np.float16))
    counted.write("one", data := entry(8))
    counted.read("one")
    with pytest.raises(ValueError, match="has blocks of"):
        counted.write("other", entry(8, shape=(4, 2, 4, 32)))
    for _ in range(3):
        with pytest.raises(KeyError):
            counted.read("two")
    assert counted.counts == {
        "read_bytes": data.nbytes, "written_bytes": data.nbytes, "failed_reads": 3, "failed_writes": 2
    }  # fmt: skip
    assert [sentence.partition(":")[0] for sentence in counted.failures] == ["writes", "reads"]


def test_each_side_runs_the_same_benchmark(tmp_path: Path) -> None:
    package = tmp_path / "checkout" / "kv_cache_benchmark" / "kv_cache"
    package.mkdir(parents=True)
    for name, text in {"__init__": "", "cache": STAND_IN_CACHE, "cli": STAND_IN_CLI}.items():
        (package / f"{name}.py").write_text(text)
    arguments = ["--storage-capacity-gb", "0.05"]
    bench = Bench(tmp_path / "checkout", tmp_path, arguments, BLOCK_TOKENS, POOL_BYTES / 2**30, clients=1)
    found = {side: [bench.run(side)] for side in SIDES}
    nbytes = 2 * 2 * 9 * 2 * 8 * 2
    for (one,) in found.values():
        assert (one["read_bytes"], one["written_bytes"]) == (nbytes, nbytes)
        assert (one["failed_reads"], one["failed_writes"]) == (1, 0)
    assert [one["summary"]["total_requests"] for (one,) in found.values()] == [0.0, POOL_BYTES / 2**30, 0.0, 0.0]
    assert json.loads(json.dumps(found)) == found
    rows = {name: cells for name, *cells in rows_of(found)}
    assert rows[""] == list(SIDES)
    assert rows["verdict"] == ["PASS"] * 4
    assert rows["failed reads"] == ["1.00"] * 4
    assert rows["daemon's disk read, GiB"] == ["-", "-", "0.000", "0.000"]
