"""Clients that connect and are killed, and what a daemon holds before and after.

``python -m tests.chaos.cycles DIRECTORY COUNT SEED`` makes and kills them and prints where they died. That process has
no thread and no socket of its own, so that each client is a fork of it, which costs milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvoffd_client.testing import FakeEngine
from tests.chaos.rounds import held_resources, run_module
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import books

STAGES = ("connecting", "registered", "leased", "loading", "storing")
"""Stages that a client reports; it is killed some time after one of them."""
AT_ONCE = 3
BATCH = 4
LAYERS, BLOCKS, PAGE_BYTES = 2, 2 * BATCH, 4096
CLIENT_DEADLINE_S = 30.0
SETTLE_DEADLINE_S = 30.0
WARM_UP = 60
POOL = "4MiB"
KEYS = [number.to_bytes(32, "big") for number in range(BATCH)]


def make_engine(directory: Path) -> FakeEngine:
    """An engine like those that are killed, in the same namespace."""
    return FakeEngine(directory, "cycles", 1, LAYERS, BLOCKS, PAGE_BYTES)


def be_client(directory: Path, report_pipe: int, number: int) -> None:
    """Connect, then store, look up and load until killed. Writes a byte to ``report_pipe`` for each stage."""
    os.write(report_pipe, bytes([STAGES.index("connecting")]))
    engine = make_engine(directory)
    os.write(report_pipe, bytes([STAGES.index("registered")]))
    while True:
        number += 1
        fresh = [(number << 40 | os.getpid() << 8 | at).to_bytes(32, "big") for at in range(BATCH)]
        ready = engine.lookup(KEYS)
        os.write(report_pipe, bytes([STAGES.index("leased")]))
        os.write(report_pipe, bytes([STAGES.index("loading")]))
        engine.load(KEYS[:ready], range(ready))
        os.write(report_pipe, bytes([STAGES.index("storing")]))
        engine.store(fresh, range(BATCH))


@dataclass
class Client:
    """A fork that lives until it is killed, ``after_s`` seconds after it has reported ``stage``."""

    pid: int
    pipe: int
    stage: int
    after_s: float
    seen: set[int]
    deadline: float

    @classmethod
    def fork(cls, directory: Path, number: int, stage: int, after_s: float) -> Client:
        pipe, report_pipe = os.pipe()
        pid = os.fork()
        if pid:
            os.close(report_pipe)
            return cls(pid, pipe, stage, after_s, set(), time.monotonic() + CLIENT_DEADLINE_S)
        try:
            os.close(pipe)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            be_client(directory, report_pipe, number)
        finally:
            os._exit(9)  # it must not go on as a second parent, whatever went wrong

    def read_stages(self) -> bool:
        """Read the stages that it reported. Returns whether it is to be killed now."""
        data = os.read(self.pipe, 64)
        self.seen.update(data)
        if not data or time.monotonic() > self.deadline:
            raise SystemExit(f"a client came to stages {sorted(self.seen)} and not to {self.stage}")
        return self.stage in self.seen

    def kill(self) -> None:
        time.sleep(self.after_s)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pipe)


def make_clients(directory: Path, count: int, seed: int) -> Counter[str]:
    """Run and kill ``count`` clients. Returns how many were killed in each stage."""
    rng = random.Random(seed)
    killed: Counter[str] = Counter()
    living: dict[int, Client] = {}
    made = 0
    while made < count or living:
        while made < count and len(living) < AT_ONCE:
            after_s = rng.choice((0.0, rng.uniform(0.0, 0.004)))
            client = Client.fork(directory, made, rng.randrange(len(STAGES)), after_s)
            living[client.pipe] = client
            made += 1
        readable, _, _ = select.select(list(living), [], [], CLIENT_DEADLINE_S)
        if not readable:
            raise SystemExit("no client reports anything")
        for pipe in readable:
            if living[pipe].read_stages():
                client = living.pop(pipe)
                client.kill()
                killed[STAGES[client.stage]] += 1
    return killed


# --- what the daemon holds ---------------------------------------------------------------------------


class Footprint(NamedTuple):
    """The resources that one process holds."""

    descriptors: int
    own_bytes: int
    """Resident memory that is neither the pool's, nor engines', nor its program's files."""
    mappings: int
    threads: int
    shared_files: frozenset[str]
    """What lies in /dev/shm and is ours by its name, but for the pool files that other tests name."""


def footprint(daemon: DaemonProcess) -> Footprint:
    process = Path(f"/proc/{daemon.pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return Footprint(
        len(os.listdir(process / "fd")),
        int(status["RssAnon"].split()[0]) * 1024,
        len((process / "maps").read_text().splitlines()),
        int(status["Threads"]),
        frozenset(name for name in os.listdir("/dev/shm") if "kvoffd" in name and ".pool" not in name),
    )


def measure_cycles(count: int, seed: int) -> tuple[Counter[str], Footprint, Footprint]:
    """Kill ``count`` clients of a daemon: in which stages, and the footprints before and after.

    Raises AssertionError when it holds something for them afterwards.
    """
    with (
        DaemonProcess(POOL, limits={"partial_timeout_s": 0.5}) as daemon,
        make_engine(daemon.directory) as engine,
    ):
        engine.fill(range(BATCH), seed=1)
        assert engine.store(KEYS, range(BATCH)).ok
        _kill_clients(daemon.directory, WARM_UP, seed)
        before = _settled(daemon)
        killed = _kill_clients(daemon.directory, count, seed + 1)
        after = _settled(daemon)
        assert "Traceback" not in daemon.log, daemon.log[-4000:]
        return killed, before, after


def _kill_clients(directory: Path, count: int, seed: int) -> Counter[str]:
    made = run_module("tests.chaos.cycles", str(directory), str(count), str(seed), stdout=subprocess.PIPE)
    said, _ = made.communicate()
    assert made.returncode == 0
    return Counter(json.loads(said))


def _settled(daemon: DaemonProcess) -> Footprint:
    """The footprint once one engine is left and the books balance."""

    def reason() -> str:
        return held_resources(books(daemon.directory), sessions=2)

    wait_until(lambda: not reason(), SETTLE_DEADLINE_S, explain=reason)
    # ZeroMQ closes a connection in a thread of its own, some time after its peer has gone.
    measured: deque[Footprint] = deque(maxlen=10)

    def descriptors_are_steady() -> bool:
        measured.append(footprint(daemon))
        return len(measured) == 10 and len({one.descriptors for one in measured}) == 1

    wait_until(descriptors_are_steady, SETTLE_DEADLINE_S, explain=lambda: measured, interval_s=0.02)
    return measured[-1]


if __name__ == "__main__":
    print(json.dumps(make_clients(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
