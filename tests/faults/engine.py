"""An engine in a process of its own, to be stopped and killed: obeys one word a line on its standard input.

Usage: python -m tests.faults.engine DIRECTORY. It answers each word with a line:

* ``store FIRST COUNT VERSION``: stores keys, and says ``stored``
* ``loop FIRST COUNT VERSION``: says ``storing``, and stores these keys, a few at a time and in any order, for ever
* ``lookup FIRST COUNT``: how many leading keys are leased
* ``load FIRST COUNT``: loads what the last lookup leased: ``ok``, or what failed it
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Self

from tests.faults.checked import STEP, CheckedEngine, Truth
from tests.kit.closing import Starting
from tests.kit.daemon import DaemonProcess
from tests.kit.wire import keys

ROOT = Path(__file__).parents[2]


class EngineProcess(Starting):
    """The other end of the pipe."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._daemon = daemon
        self._process: subprocess.Popen[str] | None = None

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None, "the engine was never started"
        return self._process

    def start(self) -> Self:
        """Start it; ``wait_connected`` waits for it."""
        command = [sys.executable, "-m", "tests.faults.engine", str(self._daemon.directory)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=ROOT
        )
        return self

    def wait_connected(self) -> Self:
        assert self.answer() == "connected"
        return self

    def send(self, *words: object) -> None:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, *words: object) -> str:
        self.send(*words)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def close(self) -> None:
        if self._process is None:
            return
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass


class Worker:
    """What the process does."""

    def __init__(self, directory: Path) -> None:
        self.engine = CheckedEngine(directory, Truth())
        print("connected", flush=True)

    def run(self) -> None:
        for line in sys.stdin:
            word, *numbers = line.split()
            print(getattr(self, word)(*map(int, numbers)), flush=True)

    def store(self, first: int, count: int, version: int) -> str:
        self.engine.truth.version = version
        self.engine.put(range(first, first + count))
        return "stored"

    def loop(self, first: int, count: int, version: int) -> None:
        self.engine.truth.version = version
        print("storing", flush=True)
        chance = random.Random()
        while True:
            begin = first + chance.randrange(count - STEP // 2)
            self.engine.put(range(begin, begin + STEP // 2))

    def lookup(self, first: int, count: int) -> int:
        return self.engine.lookup(keys(*range(first, first + count)))

    def load(self, first: int, count: int) -> str:
        result = self.engine.load(keys(*range(first, first + count)), range(STEP, STEP + count))
        return "ok" if result.error is None else result.error.name


if __name__ == "__main__":
    Worker(Path(sys.argv[1])).run()
