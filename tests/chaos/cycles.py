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
"""How far a client has come; it is killed at any time after."""
AT_ONCE = 3
BATCH = 4
LAYERS, BLOCKS, PAGE_BYTES = 2, 2 * BATCH, 4096
CLIENT_DEADLINE_S = 30.0
KEYS = [number.to_bytes(32, "big") for number in range(BATCH)]


def make_engine(directory: Path) -> FakeEngine:
    """An engine like those that are killed; it shares their blocks."""
    return FakeEngine(directory, "cycles", 1, LAYERS, BLOCKS, PAGE_BYTES)


def be_client(directory: Path, tell: int, number: int) -> None:
    """Connect, store, look up, load, over and over until killed. A byte down the pipe for each stage."""
    os.write(tell, bytes([STAGES.index("connecting")]))
    engine = make_engine(directory)
    os.write(tell, bytes([STAGES.index("registered")]))
    while True:
        number += 1
        fresh = [(number << 40 | os.getpid() << 8 | at).to_bytes(32, "big") for at in range(BATCH)]
        ready = engine.lookup(KEYS)
        os.write(tell, bytes([STAGES.index("leased")]))
        os.write(tell, bytes([STAGES.index("loading")]))
        engine.load(KEYS[:ready], range(ready))
        os.write(tell, bytes([STAGES.index("storing")]))
        engine.store(fresh, range(BATCH))


@dataclass
class Client:
    """A fork that lives until it is killed, ``after_s`` seconds after it has told ``stage``."""

    pid: int
    told: int
    stage: int
    after_s: float
    seen: set[int]
    deadline: float

    @classmethod
    def fork(cls, directory: Path, number: int, stage: int, after_s: float) -> Client:
        told, tell = os.pipe()
        pid = os.fork()
        if pid:
            os.close(tell)
            return cls(pid, told, stage, after_s, set(), time.monotonic() + CLIENT_DEADLINE_S)
        try:
            os.close(told)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            be_client(directory, tell, number)
        finally:
            os._exit(9)  # it must not go on as a second parent, whatever went wrong

    def hear(self) -> bool:
        """Take in what it told; True when it is to be killed."""
        data = os.read(self.told, 64)
        self.seen.update(data)
        if not data or time.monotonic() > self.deadline:
            raise SystemExit(f"a client came to stages {sorted(self.seen)} and not to {self.stage}")
        return self.stage in self.seen

    def kill(self) -> None:
        time.sleep(self.after_s)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.told)


def make_clients(directory: Path, count: int, seed: int) -> Counter[str]:
    """Run and kill so many; by stage, how many were killed there."""
    dice = random.Random(seed)
    killed: Counter[str] = Counter()
    living: dict[int, Client] = {}
    made = 0
    while made < count or living:
        while made < count and len(living) < AT_ONCE:
            after_s = dice.choice((0.0, dice.uniform(0.0, 0.004)))
            client = Client.fork(directory, made, dice.randrange(len(STAGES)), after_s)
            living[client.told] = client
            made += 1
        heard, _, _ = select.select(list(living), [], [], CLIENT_DEADLINE_S)
        if not heard:
            raise SystemExit("no client says anything")
        for told in heard:
            if living[told].hear():
                client = living.pop(told)
                client.kill()
                killed[STAGES[client.stage]] += 1
    return killed


if __name__ == "__main__":
    print(json.dumps(make_clients(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
