"""How soon long prompts are back after a restart, beside the device's own time and beside computing them.

The engine was restarted (the daemon's pool has the prompts), the daemon was restarted (its pool file has them), the
node was rebooted (its disk has them), or another node is asked (the shared store has them). Engine, scheduler,
connector, daemon, disk and Redis are real, and the connector has its defaults. The model is a double that computes
nothing and takes as long as its tokens do at ``--rate``. ``python -m tests.bench.restarts`` prints Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvoffd_client.cli.bench import memcpy_of
from kvoffd_client.session import Closing
from tests.bench.report_file import ROOT, markdown_table, number, print_report, run_facts
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import EngineProcess, wait_connected, wait_stored
from tests.kit.filled_tiers import fill_tiers, wait_serving
from tests.kit.model_double import BLOCK_TOKENS, DOUBLE, LAYER_BYTES, LAYERS, RATE, llama_8b
from tests.kit.redis_server import RedisServer

ROWS = {
    "engine": "engine restarted, from the pool",
    "daemon": "daemon restarted, from its pool file",
    "node": "node rebooted, from its disk",
    "other": "other node, from the store",
}
TOKENS, COUNTS = "1024,8192,32768,131072", "1,8"
TEXT = """\
* **loaded in**: from the moment at which vLLM's scheduler gets the first of the prompts to the moment at which it has
  begun the last one's first step: what is loaded is there then.
* **loaded**: part of the tokens that were not computed, of those that the pool, disk or store has.
* **first token**: until all prompts have theirs; what was not loaded is computed.
* **device**: the same bytes by one thread's memcpy in shared memory (pool), by O_DIRECT reads of the daemon's own file
  (disk), over one TCP connection of loopback (store). The faster of one before and one after.
* **of device**: loaded in / device, where all is loaded. The aim is at most 1.15 from 8k tokens on.
* **computed in**: all tokens at {rate:,.0f} a second, by arithmetic. Where the device alone takes longer, marked *,
  kvoffd had better compute.

Times are in seconds, of the median of {rounds} rounds. Blocks have {block_tokens} tokens. Prompts of an 8B model have
128 KiB a token; where those of a row would not fit into {most_gib:.2g} GiB the model has fewer layers."""
HEADER = ["prompts", "KiB a token", "row", "loaded in", "loaded", "first token", "device", "of device", "computed in"]

STEP_TOKENS = 8192
"""Tokens that the engine computes in a step."""
WARM_UP = (1000, 1000, 1000)
"""Prompts that each engine computes first, as one that serves has: its connector then knows how fast it computes."""
VOCABULARY = 100_000
LOOKS = 15
"""Writes have ended when the same blocks are there at this many looks, 20 ms apart."""
CONNECT_S = 60.0
PIECE_BYTES, READERS = 2 << 20, 16
"""The disk's own time is taken with reads of this size by this many threads."""
SAMPLE_BYTES = 1 << 30
"""Most bytes that are copied or sent for the device's own time. A larger case is taken to be as fast."""
MARGIN_BYTES = 64 << 20
KEPT_BYTES = 2 << 30
"""Memory that a run leaves to others."""
SEND = "import socket,sys\ns=socket.create_connection(('127.0.0.1',int(sys.argv[1])))\nb=bytes(1<<21)\n"
SEND += "for _ in range(int(sys.argv[2])): s.sendall(b)"


@dataclass(frozen=True)
class Case:
    """Prompts that are sent at once, and how many layers their model has."""

    tokens: int
    count: int
    layers: int

    @classmethod
    def within(cls, most_bytes: int, tokens: int, count: int) -> Self:
        """Return a case with as many layers as these bytes allow, a power of two."""
        layers = LAYERS
        while layers > 1 and tokens * count * layers * LAYER_BYTES > most_bytes:
            layers //= 2
        return cls(tokens, count, layers)

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * self.layers * LAYER_BYTES

    @property
    def blocks(self) -> int:
        return self.tokens // BLOCK_TOKENS * self.count

    @property
    def nbytes(self) -> int:
        return self.blocks * self.block_bytes


@dataclass(frozen=True)
class Found:
    """What one round found.

    Attributes:
        loaded_s: seconds until all that is loaded was there.
        first_token_s: seconds until all prompts had their first token.
        loaded: tokens that were not computed.
        device_s: the device's own time for the same bytes, the faster of one before and one after.
    """

    loaded_s: float
    first_token_s: float
    loaded: int
    device_s: float


class Bench(Closing):
    """One case: its model and prompts, their daemons and engines.

    ``place`` is a directory on the disk that is measured, ``rate`` how many tokens are computed in a second.
    ``plain_gets_s`` has how long the store takes to answer GETs of the same bytes, once that was measured.
    """

    def __init__(self, case: Case, place: Path, rate: float, rounds: int) -> None:
        self._case, self._rate, self._rounds = case, rate, rounds
        self._place = Path(tempfile.mkdtemp(prefix="kvoffd-restarts-", dir=place))
        self._memory = Path(tempfile.mkdtemp(prefix="kvoffd-restarts-", dir="/dev/shm"))
        self._disk = self._place / "disk"
        self._disk.mkdir()
        self._model = llama_8b(self._place / "model", case.layers)
        self._random = random.Random(case.tokens)
        # One token more than is loaded: vLLM computes the last one in any case.
        self._prompts = [self._new_prompt(case.tokens + 1) for _ in range(case.count)]
        warm_up_blocks = (len(ROWS) + 1) * sum(WARM_UP) // BLOCK_TOKENS
        self.plain_gets_s = 0.0
        self._pool_bytes = (case.blocks + warm_up_blocks) * case.block_bytes * 33 // 32 + MARGIN_BYTES

    def close(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)
        shutil.rmtree(self._memory, ignore_errors=True)

    def run(self, rows: Collection[str]) -> dict[str, Found]:
        """Have the prompts computed once, then measure each row."""
        found: dict[str, Found] = {}
        tiers, disk = {}, {"disk": f"{self._disk}={2 * self._pool_bytes}"}
        with RedisServer() as store:
            # Only what is there can come back: everything is written.
            if "node" in rows:
                tiers |= {**disk, "disk_write": "always"}
            if "other" in rows:
                tiers |= {"shared": store.url, "shared_write": "always"}
            with self._daemon(pool_file=str(self._memory / "pool"), **tiers) as first:
                with self._engine(first, rate=None) as engine:
                    wait_serving(first.directory)
                    fill_tiers(first.directory, engine, self._prompts, self._case.blocks)
                if "engine" in rows:
                    found["engine"] = self._measure(first, memcpy_seconds, restarts=False)
                if "daemon" in rows:
                    found["daemon"] = self._measure(first, memcpy_seconds)
            shutil.rmtree(self._memory)
            if "node" in rows:
                with self._daemon(**disk) as node:
                    found["node"] = self._measure(node, self._disk_seconds)
            if "other" in rows:
                with self._daemon(shared=store.url) as other:
                    found["other"] = self._measure(other, tcp_seconds)
                self.plain_gets_s = redis_seconds(store, self._case)
        return found

    def _measure(self, daemon: DaemonProcess, device: Callable[[int], float], *, restarts: bool = True) -> Found:
        """Send the prompts in rounds to a new engine, each time to a daemon that was restarted; the median round.

        The engine's own cache is empty then.
        """
        rounds, before_s = [], device(self._case.nbytes)
        with self._engine(daemon, self._rate) as engine:
            for _ in range(self._rounds):
                if restarts:
                    daemon.stop()
                    daemon.start()
                    wait_connected(daemon.directory, 1, CONNECT_S, lambda: engine.pids)
                engine.forget()
                wait_serving(daemon.directory)
                answers = engine.generate(self._prompts, max_tokens=1)
                began, after_s = min(one.queued_at for one in answers), device(self._case.nbytes)
                loaded_s = max(one.scheduled_at for one in answers) - began
                first_token_s = max(one.first_token_at for one in answers) - began
                loaded = sum(one.cached for one in answers)
                rounds.append(Found(loaded_s, first_token_s, loaded, min(before_s, after_s)))
                before_s = after_s
        return sorted(rounds, key=lambda one: one.first_token_s / one.device_s)[len(rounds) // 2]

    def _daemon(self, **settings: str) -> DaemonProcess:
        return DaemonProcess(str(self._pool_bytes), **settings)

    @contextmanager
    def _engine(self, daemon: DaemonProcess, rate: float | None) -> Iterator[EngineProcess]:
        """Start an engine; it is connected and warm then. Without a ``rate`` computing takes no time."""
        case, environ = self._case, {"PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
        with EngineProcess(
            self._model,
            daemon.directory,
            num_blocks=case.blocks + 2 * case.count + 2 * STEP_TOKENS // BLOCK_TOKENS,
            patient=False,
            max_model_len=case.tokens + STEP_TOKENS,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=max(8, case.count),
            environ=environ | ({RATE: str(rate)} if rate else {}),
            **DOUBLE,
        ) as engine:
            wait_connected(daemon.directory, 1, CONNECT_S, lambda: engine.pids)
            if rate:
                for tokens in WARM_UP:
                    engine.generate([self._new_prompt(tokens)], max_tokens=1)
                wait_stored(daemon.directory, LOOKS)
            yield engine

    def _new_prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(3, VOCABULARY), k=tokens)

    def _disk_seconds(self, nbytes: int) -> float:
        """Return how many seconds the disk takes to read this number of bytes that the daemon has written there."""
        file = max(self._disk.iterdir(), key=lambda one: one.stat().st_size)
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
        places = list(itertools.islice(written_pieces(descriptor), max(1, nbytes // PIECE_BYTES)))

        def read(first: int) -> None:
            with mmap.mmap(-1, PIECE_BYTES) as buffer:
                for place in places[first::READERS]:
                    os.preadv(descriptor, [buffer], place)

        try:
            with ThreadPoolExecutor(READERS) as readers:
                began = time.perf_counter()
                list(readers.map(read, range(READERS)))
                return (time.perf_counter() - began) * nbytes / (len(places) * PIECE_BYTES)
        finally:
            os.close(descriptor)


def written_pieces(descriptor: int) -> Iterator[int]:
    """Yield where the whole pieces of a file begin that were written: others, which are only allocated, read as zeros.

    The kernel reads nothing from the device for those.
    """
    end, data, hole = os.fstat(descriptor).st_size, 0, 0
    while hole < end:
        try:
            data = os.lseek(descriptor, hole, os.SEEK_DATA)
        except OSError:
            return
        hole = os.lseek(descriptor, data, os.SEEK_HOLE)
        yield from range(-(-data // PIECE_BYTES) * PIECE_BYTES, hole - PIECE_BYTES + 1, PIECE_BYTES)


def memcpy_seconds(nbytes: int) -> float:
    """Return how many seconds one thread takes to copy this number of bytes in shared memory."""
    size = min(nbytes, SAMPLE_BYTES)
    with memcpy_of(size) as memcpy:
        return min(memcpy() for _ in range(3)) * nbytes / size


def tcp_seconds(nbytes: int) -> float:
    """Return how many seconds another process takes to send this number of bytes over loopback."""
    pieces = max(1, min(nbytes, SAMPLE_BYTES) // PIECE_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = subprocess.Popen([sys.executable, "-c", SEND, str(listener.getsockname()[1]), str(pieces)])
        connection, _ = listener.accept()
        with connection:
            seconds = receive(connection, pieces * PIECE_BYTES)
        sender.wait()
    return seconds * nbytes / (pieces * PIECE_BYTES)


def redis_seconds(store: RedisServer, case: Case) -> float:
    """Return how many seconds the store takes to answer GETs of all blocks, sent ahead over one connection."""
    count = max(1, min(case.nbytes, SAMPLE_BYTES) // case.block_bytes)
    with socket.create_connection(("127.0.0.1", store.port)) as connection:
        size = case.block_bytes
        connection.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nx\r\n$%d\r\n%s\r\n" % (size, os.urandom(size)))
        receive(connection, len(b"+OK\r\n"))
        connection.sendall(b"GET x\r\n" * count)
        seconds = receive(connection, count * (len(b"$%d\r\n" % size) + size + len(b"\r\n")))
    return seconds * case.nbytes / (count * size)


def receive(connection: socket.socket, nbytes: int) -> float:
    """Receive this number of bytes; return how many seconds it takes."""
    buffer, began = memoryview(bytearray(PIECE_BYTES)), time.perf_counter()
    while nbytes:
        count = connection.recv_into(buffer[: min(nbytes, PIECE_BYTES)])
        assert count, "the other end closed the connection"
        nbytes -= count
    return time.perf_counter() - began


def most_bytes(place: Path) -> int:
    """Return how many bytes of prompts this machine has memory and disk for.

    Engine, pool and store have all of them at once; the store wastes up to a quarter, and the disk has twice as much.
    """
    with open("/proc/meminfo", encoding="ascii") as lines:
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min(int((free - KEPT_BYTES) / 3.5), shutil.disk_usage(place).free // 3)


def table(results: dict[Case, dict[str, Found]], rate: float) -> str:
    rows = [HEADER]
    for case, found in results.items():
        tokens = case.blocks * BLOCK_TOKENS
        for row, one in found.items():
            rows.append(
                [
                    f"{case.count} of {case.tokens:,}",
                    f"{case.layers * LAYER_BYTES // 1024}",
                    ROWS[row],
                    number(one.loaded_s) if one.loaded else "-",
                    f"{one.loaded / tokens:.0%}",
                    number(one.first_token_s),
                    number(one.device_s) + ("*" if one.device_s > tokens / rate else ""),
                    f"{one.loaded_s / one.device_s:.2f}" if one.loaded >= tokens else "-",
                    number(tokens / rate),
                ]
            )
    return markdown_table(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.restarts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", default=",".join(ROWS), help=f"which restarts (default {','.join(ROWS)})")
    parser.add_argument("--tokens", default=TOKENS, help=f"lengths of the prompts (default {TOKENS})")
    parser.add_argument("--counts", default=COUNTS, help=f"how many are sent at once (default {COUNTS})")
    parser.add_argument("--rate", type=float, default=12_000.0, help="tokens computed in a second (default 12000)")
    parser.add_argument("--rounds", type=int, default=3, help="of each row (default 3)")
    parser.add_argument("--gib", type=float, default=4.0, help="most GiB of prompts at once (default 4)")
    parser.add_argument("--place", type=Path, default=Path("/var/tmp"), help="directory on the disk (/var/tmp)")
    given = parser.parse_args()
    rows, limit = given.rows.split(","), min(int(given.gib * 2**30), most_bytes(given.place))
    if unknown := set(rows) - set(ROWS):
        parser.error(f"--rows has {', '.join(sorted(unknown))}; it may have {', '.join(ROWS)}")
    facts = run_facts(f"python -m tests.bench.restarts {' '.join(sys.argv[1:])}".strip())
    results, plain = {}, list[str]()
    for tokens in map(int, given.tokens.split(",")):
        for count in map(int, given.counts.split(",")):
            case = Case.within(limit, tokens, count)
            print(f"measuring: {count} of {tokens}", file=sys.stderr, flush=True)
            with Bench(case, given.place, given.rate, given.rounds) as bench:
                results[case] = bench.run(rows)
                print(table({case: results[case]}, given.rate), file=sys.stderr, flush=True)
                if bench.plain_gets_s:
                    plain.append(f"{count} of {tokens:,}: {number(bench.plain_gets_s)}")
    text = TEXT.format(rate=given.rate, rounds=given.rounds, block_tokens=BLOCK_TOKENS, most_gib=limit / 2**30)
    notes = [f"The store alone, GETs of as many bytes over one connection, seconds: {'; '.join(plain)}."] * bool(plain)
    print_report("Long prompts after restarts", facts, "\n\n".join([text, table(results, given.rate), *notes]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
