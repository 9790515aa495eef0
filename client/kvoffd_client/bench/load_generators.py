"""Many clients at once, each a process of its own, as engines are.

Run as ``python -m kvoffd_client.bench.load_generators ROLE DIRECTORY SIZE``: sets up and prints ``ready``; works from
the first line on standard input to the second, or to its end; prints how often it did its work and in how many
seconds. So again with every two lines more.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import zmq

from kvoffd_client.bench.compute import Compute
from kvoffd_client.bench.echo import connect_dealer, echo_request
from kvoffd_client.bench.engine import BenchEngine, random_keys
from kvoffd_client.bench.report import BenchFailed

STOP_S = 30.0
COPY_LAYERS, COPY_PAGE_BYTES = 16, 65536
LOOKUP_PAGE_BYTES = 4096


def _lookups(directory: Path, keys: int) -> Iterator[None]:
    """Looks so many ready keys up, and releases them."""
    with BenchEngine(directory, "crowd of schedulers", 1, keys, LOOKUP_PAGE_BYTES) as engine:
        names = random_keys(keys)
        engine.store(names, np.arange(keys, dtype=np.int32))
        while True:
            yield
            ticket, _ = engine.lookup(names)
            engine.scheduler.release(ticket.lease_id)


def _copies(directory: Path, keys: int) -> Iterator[None]:
    """Stores so many new keys of 1 MiB, and loads them."""
    with BenchEngine(directory, "crowd of engines", COPY_LAYERS, keys, COPY_PAGE_BYTES) as engine:
        ids = np.random.default_rng().permutation(keys).astype(np.int32)
        while True:
            yield
            names = random_keys(keys)
            engine.store(names, ids)
            engine.load(names, ids)


def _echoes(directory: Path, keys: int) -> Iterator[None]:
    """Sends a lookup's bytes to the echo process in ``directory``, and its release's, which is answered too."""
    with zmq.Context() as context, connect_dealer(context, directory) as dealer:
        request, release = echo_request(130 + 32 * keys, 60 + keys), echo_request(60, 20)
        while True:
            yield
            dealer.send(request)
            dealer.recv()
            dealer.send(release)
            dealer.recv()


def _computes(_: Path, ordinal: int) -> Iterator[None]:
    """Has this GPU compute."""
    with Compute(ordinal) as compute:
        while True:
            yield
            compute.step()


ROLES = {"lookups": _lookups, "copies": _copies, "echoes": _echoes, "computes": _computes}


@dataclass(frozen=True)
class Done:
    """What one member did."""

    count: int
    seconds: float


class Crowd:
    """``members`` processes of one role, ready to work. Raises BenchFailed."""

    def __init__(self, role: str, directory: Path, size: int, members: int) -> None:
        command = (sys.executable, "-m", "kvoffd_client.bench.load_generators", role, str(directory), str(size))
        self._children = ExitStack()
        self._members = [
            self._children.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for _ in range(members)
        ]
        try:
            for member in self._members:
                self._read(member)
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Have all of them begin."""
        self._tell()

    def stop(self) -> list[Done]:
        """Have all of them stop."""
        self._tell()
        return [Done(*json.loads(self._read(member))) for member in self._members]

    def _tell(self) -> None:
        for member in self._members:
            assert member.stdin is not None
            member.stdin.write(b"\n")
            member.stdin.flush()

    @staticmethod
    def _read(member: subprocess.Popen[bytes]) -> bytes:
        assert member.stdout is not None
        line = member.stdout.readline()
        if not line:
            raise BenchFailed("A process of the bench ended before its time; its error is above.")
        return line

    def close(self) -> None:
        """End all of them."""
        for member in self._members:
            assert member.stdin is not None
            member.stdin.close()
        for member in self._members:
            try:
                member.wait(STOP_S)
            except subprocess.TimeoutExpired:
                member.kill()
        self._children.close()

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def run(role: str, directory: Path, size: int) -> None:
    """Be one member."""
    work = ROLES[role](directory, size)
    next(work)
    print("ready", flush=True)
    # Between stretches, and until the parent has done with all, others may be at work in what closing clears.
    while sys.stdin.readline():
        reader = threading.Thread(target=sys.stdin.readline, daemon=True)
        reader.start()
        count, begin = 0, time.perf_counter()
        while reader.is_alive():
            next(work)
            count += 1
        print(json.dumps([count, time.perf_counter() - begin]), flush=True)
    work.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
