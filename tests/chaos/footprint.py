"""The resources that a daemon holds before and after many of its clients were killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.cycles import BATCH, KEYS, make_engine
from tests.chaos.rounds import held_resources
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import books

SETTLE_DEADLINE_S = 30.0
WARM_UP = 60
POOL = "4MiB"


@dataclass(frozen=True)
class Footprint:
    """The resources that one process holds."""

    descriptors: int
    anonymous_bytes: int
    """Resident memory that is its own: neither the pool nor engines' memory nor its program's files."""
    mappings: int
    threads: int
    shared_files: tuple[str, ...]
    """What lies in /dev/shm and is ours by its name, but for the pool files that other tests name."""

    @staticmethod
    def of(pid: int) -> Footprint:
        process = Path(f"/proc/{pid}")
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        return Footprint(
            len(os.listdir(process / "fd")),
            int(status["RssAnon"].split()[0]) * 1024,
            len((process / "maps").read_text().splitlines()),
            int(status["Threads"]),
            tuple(sorted(name for name in os.listdir("/dev/shm") if "kvoffd" in name and ".pool" not in name)),
        )

    def __str__(self) -> str:
        return (
            f"{self.descriptors} descriptors, {self.anonymous_bytes / 2**20:.1f} MiB of its own, "
            f"{self.mappings} mappings, {self.threads} threads, {len(self.shared_files)} files in /dev/shm"
        )


@dataclass(frozen=True)
class Cycles:
    """The footprints before and after clients were killed."""

    killed: Counter[str]
    before: Footprint
    after: Footprint
    seconds: float

    def __str__(self) -> str:
        stages = ", ".join(f"{number} {stage}" for stage, number in sorted(self.killed.items()))
        return (
            f"{sum(self.killed.values())} clients connected and were killed in {self.seconds:.0f} s ({stages}); "
            f"then pins 0, free + used = all\n  daemon before: {self.before}\n  daemon after:  {self.after}"
        )


def measure_cycles(count: int, seed: int) -> Cycles:
    """Kill ``count`` clients of a daemon. Raises AssertionError when it holds something for them afterwards."""
    with (
        DaemonProcess(POOL, limits={"partial_timeout_s": 0.5}) as daemon,
        make_engine(daemon.directory) as engine,
    ):
        engine.fill(range(BATCH), seed=1)
        assert engine.store(KEYS, range(BATCH)).ok
        _kill_clients(daemon.directory, WARM_UP, seed)
        before = _settled(daemon)
        started = time.monotonic()
        killed = _kill_clients(daemon.directory, count, seed + 1)
        seconds = time.monotonic() - started
        after = _settled(daemon)
        assert "Traceback" not in daemon.log, daemon.log[-4000:]
        return Cycles(killed, before, after, seconds)


def _kill_clients(directory: Path, count: int, seed: int) -> Counter[str]:
    root = Path(__file__).parents[2]
    made = subprocess.run(
        [sys.executable, "-m", "tests.chaos.cycles", str(directory), str(count), str(seed)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    return Counter(json.loads(made.stdout))


def _settled(daemon: DaemonProcess) -> Footprint:
    """The footprint once one engine is left and the books balance."""

    def reason() -> str:
        return held_resources(books(daemon.directory), sessions=2)

    wait_until(lambda: not reason(), SETTLE_DEADLINE_S, explain=reason)
    # ZeroMQ closes a connection in a thread of its own, some time after its peer has gone.
    measured: deque[Footprint] = deque(maxlen=10)

    def descriptors_are_steady() -> bool:
        measured.append(Footprint.of(daemon.pid))
        return len(measured) == 10 and len({footprint.descriptors for footprint in measured}) == 1

    wait_until(descriptors_are_steady, SETTLE_DEADLINE_S, explain=lambda: measured, interval_s=0.02)
    return measured[-1]
