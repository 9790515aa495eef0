"""Clients that connect and are killed, and what a daemon holds before and after."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter, deque
from pathlib import Path
from typing import NamedTuple

from kvoffd_client.testing import FakeEngine
from tests.chaos.rounds import held_resources
from tests.kit.daemon import DaemonProcess
from tests.kit.forked import Forked, fork_server
from tests.kit.waiting import wait_until
from tests.kit.wire import books, keys

STAGES = ("connecting", "registered", "leased", "storing")
"""A client is killed some time after one of them has begun; with the lease it loads."""
AT_ONCE = 3
BATCH = 4
CLIENT_DEADLINE_S = 30
SETTLE_DEADLINE_S = 30.0
WARM_UP = 60
KEYS = keys(*range(BATCH))
_SERVER = fork_server(__name__)


def make_engine(directory: Path) -> FakeEngine:
    """An engine like those that are killed, in the same namespace."""
    return FakeEngine(directory, "cycles", layers=2, blocks=2 * BATCH, page_bytes=4096)


def be_client(directory: Path, number: int, stage: str, after_s: float) -> int:
    """Connect, then store, look up and load, until killed ``after_s`` seconds after ``stage`` has begun."""

    def begin(name: str) -> None:
        if name == stage:
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.alarm(CLIENT_DEADLINE_S)  # whose end is another one
    begin("connecting")
    engine = make_engine(directory)
    begin("registered")
    while True:
        number += 1
        ready = engine.lookup(KEYS)
        begin("leased")
        engine.load(KEYS[:ready], range(ready))
        begin("storing")
        engine.store(keys(*(number << 40 | os.getpid() << 8 | at for at in range(BATCH))), range(BATCH))


def kill_clients(directory: Path, count: int, seed: int) -> Counter[str]:
    """Run and kill ``count`` clients. Returns how many were killed in each stage."""
    rng = random.Random(seed)
    killed: Counter[str] = Counter()
    while (number := killed.total()) < count:
        stages = [rng.choice(STAGES) for _ in range(min(AT_ONCE, count - number))]
        clients = [
            Forked(_SERVER, be_client, directory, number, stage, rng.choice((0.0, rng.uniform(0.0, 0.004))))
            for stage in stages
        ]
        for client, stage in zip(clients, stages, strict=True):
            status = client.wait()
            assert status == -signal.SIGKILL, f"a client that was to come to {stage!r}: {status}"
        killed.update(stages)
    return killed


# --- what the daemon holds ---------------------------------------------------------------------------


class Footprint(NamedTuple):
    """The resources that one process holds."""

    descriptors: int
    own_bytes: int
    """Resident memory that is neither shared nor its program's files."""
    mappings: int
    threads: int
    shared_files: frozenset[str]
    """What lies in /dev/shm and is ours by its name, but for the pool files that other tests name."""


def footprint(daemon: DaemonProcess) -> Footprint:
    process = Path(f"/proc/{daemon.pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return Footprint(
        len(os.listdir(process / "fd")),
        int(status["RssAnon"].split()[0]) * 1024,  # with the pool, if it is private: only differences count
        len((process / "maps").read_text().splitlines()),
        int(status["Threads"]),
        frozenset(name for name in os.listdir("/dev/shm") if "kvoffd" in name and ".pool" not in name),
    )


def measure_cycles(count: int, seed: int) -> tuple[Counter[str], Footprint, Footprint]:
    """Kill ``count`` clients of a daemon: in which stages, and the footprints before and after.

    Raises AssertionError when it holds something for them afterwards.
    """
    with DaemonProcess("4MiB", limits={"partial_timeout_s": 0.5}) as daemon, make_engine(daemon.directory) as engine:
        engine.fill(range(BATCH), seed=1)
        assert engine.store(KEYS, range(BATCH)).ok
        kill_clients(daemon.directory, WARM_UP, seed)
        before = _settled(daemon)
        killed = kill_clients(daemon.directory, count, seed + 1)
        after = _settled(daemon)
        assert "Traceback" not in daemon.log, daemon.log[-4000:]
        return killed, before, after


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
