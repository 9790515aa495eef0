"""Clients that connect and are killed: ``python -m tests.chaos.cycles DIRECTORY COUNT SEED``; prints where they died.

This process has no thread and no socket of its own, so that each client is a fork of it, which costs milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kvoffd_client.testing import FakeEngine

STAGES = ("connecting", "registered", "leased", "loading", "storing")
"""Stages that a client reports; it is killed some time after one of them."""
AT_ONCE = 3
BATCH = 4
LAYERS, BLOCKS, PAGE_BYTES = 2, 2 * BATCH, 4096
CLIENT_DEADLINE_S = 30.0
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


if __name__ == "__main__":
    print(json.dumps(make_clients(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
