"""Processes that put load on the daemon, the echo or a GPU: many clients at once, as engines are.

Run as ``python -m tests.bench.daemon.load_generators ROLE DIRECTORY SIZE [NUMBER COUNT]``, process NUMBER of COUNT:
sets up and prints ``ready``; works from the first line on standard input to the second, or to its end; prints how often
it did its work and in how many seconds. Every two lines more start and stop it again.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zmq

from kvoffd_client.errors import KvoffdClientError
from kvoffd_client.session import Closing
from tests.bench.daemon import (
    COPIED_BLOCK_BYTES,
    JOBS_STEP_S,
    KEPT_TURNS,
)
from tests.bench.daemon.echo import ChildProcess, connect_dealer, echo_request
from tests.bench.daemon.gpu_device import compute_load
from tests.bench.daemon.synthetic_engine import KEY_BYTES, BlocksGone, SyntheticEngine, random_keys

COPY_LAYERS = 16
COPY_PAGE_BYTES = COPIED_BLOCK_BYTES // COPY_LAYERS
LOOKUP_PAGE_BYTES = 4096


def _lookups(directory: Path, keys: int, *place: int) -> Iterator[None]:
    """Looks ``keys`` ready keys up and releases them."""
    with SyntheticEngine(directory, "crowd of schedulers", 1, keys, LOOKUP_PAGE_BYTES) as engine:
        names = random_keys(keys)
        engine.store(names, np.arange(keys, dtype=np.int32))
        while True:
            yield
            future, _ = engine.lookup(names)
            engine.scheduler.release(future.lease_id)


def _copies(directory: Path, keys: int, *place: int) -> Iterator[None]:
    """Stores ``keys`` new keys of COPIED_BLOCK_BYTES each and loads them; every KEPT_TURNS times drops them."""
    with SyntheticEngine(directory, "crowd of engines", COPY_LAYERS, keys, COPY_PAGE_BYTES) as engine:
        ids = np.random.default_rng().permutation(keys).astype(np.int32)
        for turn in itertools.count(1):
            yield
            names = random_keys(keys)
            engine.store(names, ids)
            with suppress(BlocksGone):  # Beside engines in a full pool that is what happens.
                engine.load(names, ids)
            if turn % KEPT_TURNS == 0:
                engine.drop_blocks()


def _echoes(directory: Path, keys: int, *place: int) -> Iterator[None]:
    """Sends as many bytes as a lookup of ``keys`` and its release to the echo process in ``directory``."""
    with zmq.Context() as context, connect_dealer(context, directory) as dealer:
        request, release = echo_request(130 + 32 * keys, 60 + keys), echo_request(60, 20)
        while True:
            yield
            dealer.send(request)
            dealer.recv()
            dealer.send(release)
            dealer.recv()


def _steps(directory: Path, jobs: int, *place: int) -> Iterator[None]:
    """Is a rank of an engine that decodes: stores ``jobs`` new keys every JOBS_STEP_S, in one message."""
    rank, ranks = place
    with SyntheticEngine(directory, "decode", 1, jobs, LOOKUP_PAGE_BYTES, None, rank, ranks) as engine:
        step, due = 0, 0.0
        run = os.getppid()  # the same of all ranks
        while True:
            yield
            now = time.perf_counter()
            due = max(due, now - JOBS_STEP_S) + JOBS_STEP_S if due else now
            time.sleep(max(0.0, due - now))
            step += 1
            engine.store_step(np.random.default_rng((run, step)).bytes(jobs * KEY_BYTES))


def _computes(_: Path, ordinal: int, *place: int) -> Iterator[None]:
    with compute_load(ordinal) as step:
        while True:
            yield
            step()


ROLES = {
    "lookups": _lookups,
    "copies": _copies,
    "echoes": _echoes,
    "steps": _steps,
    "computes": _computes,
}


@dataclass(frozen=True)
class Work:
    """What one process did between ``start`` and ``stop``."""

    count: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.count / self.seconds


class LoadGenerators(Closing):
    """``count`` processes of one of ROLES, ready to work. Raises BenchFailed."""

    def __init__(self, role: str, directory: Path, size: int, count: int) -> None:
        self._processes = [
            ChildProcess("tests.bench.daemon.load_generators", role, str(directory), str(size), str(number), str(count))
            for number in range(count)
        ]
        try:
            for process in self._processes:
                process.read_line()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        for process in self._processes:
            process.write_line()

    def stop(self) -> list[Work]:
        for process in self._processes:
            process.write_line()
        return [Work(*json.loads(process.read_line())) for process in self._processes]

    def close(self) -> None:
        for process in self._processes:
            process.end_input()
        for process in self._processes:
            process.close()


def run(role: str, directory: Path, size: int, number: int = 0, count: int = 1) -> None:
    """Do the work of ``role`` whenever standard input says so, as one of ``count`` processes."""
    work = ROLES[role](directory, size, number, count)
    next(work)
    print("ready", flush=True)
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
    try:
        run(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6]))
    except KvoffdClientError as error:
        sys.exit(f"kvoffd-cli: {error}")
    except BrokenPipeError:
        os._exit(1)  # the bench has ended, and says why
