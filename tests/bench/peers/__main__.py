"""kvoffd and LMCache's multiprocess server, the same work on the same machine: ``make bench-peers``.

README.md in the folder above says what is measured and how.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from kvoffd_client.cli.bench import echo_process, memcpy_of
from kvoffd_client.testing import end_process
from tests.bench.report_file import ROOT, markdown_table, number, print_report, run_facts
from tests.kit.daemon import DaemonProcess
from tests.kit.ports import free_port
from tests.kit.waiting import wait_until

PYTHON = ROOT / ".venv-lmcache" / "bin" / "python"
POOL_GIB = 1
TOKENS, BLOCK_TOKENS = 16_384, 16
JOB_BYTES, LAYERS = 64 << 20, 16
JOB_GB = JOB_BYTES / 1e9
PIECES = (64 << 10, 256 << 10)
CASES = ((16, "NHD"), (256, "NHD"), (256, "HND"))
"""Tokens of LMCache's chunks (256 is its default), and its name for the order of heads and tokens in a page."""
WARM_UP_JOBS = 15 * (POOL_GIB << 30) // (16 * JOB_BYTES)
"""As many as fit in 15/16 of the pool: LMCache's client maps it anew for each engine, and a page at its first touch."""
WARM_UP_ROUNDS = 3
STOP_S = 20.0
HEAD = ["case", "unit", "kvoffd", "LMCache", "times better (min to max)", "floor (min to max)"]
Player = Callable[..., Any]
Row = dict[str, Any]


@contextmanager
def player(command: Sequence[str], environ: dict[str, str]) -> Iterator[Player]:
    """A client process of one side: has it run a method, and returns its answer."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, env=environ) as process:

        def call(method: str, *arguments: object) -> Any:
            print(json.dumps([method, *arguments]), file=process.stdin, flush=True)
            line = process.stdout.readline()  # type: ignore[union-attr]
            if not line:
                raise SystemExit(f"{command[2]} failed; its error is above.")
            return json.loads(line)

        try:
            yield call
        finally:
            process.stdin.close()  # its end
            process.wait(STOP_S)


@contextmanager
def kvoffd() -> Iterator[Player]:
    """``kvoffd serve`` with its defaults, its HTTP page included, and a client of it."""
    with DaemonProcess(f"{POOL_GIB}GiB", http_address=f"127.0.0.1:{free_port()}", log_level="warning") as daemon:
        command = [sys.executable, "-m", "tests.bench.peers.play_kvoffd", str(daemon.pid), str(daemon.directory)]
        with player(command, dict(os.environ)) as call:
            yield call


@contextmanager
def lmcache(python: Path, chunk_tokens: int, layout: str) -> Iterator[Player]:
    """``lmcache server`` in its shared-memory mode for engines on CPU, all else its default, and a client of it."""
    port = free_port()
    memory = f"kvoffd-peers-{port}"
    options = (
        f"--port {port} --http-port {free_port()} --l1-size-gb {POOL_GIB} --eviction-policy LRU"
        f" --chunk-size {chunk_tokens} --supported-transfer-mode engine_driven --shm-name {memory}"
    )
    # No reports to its makers, and no logs of single requests, which would slow it down.
    environ = dict(os.environ, LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="WARNING")
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [str(python.parent / "lmcache"), "server", *options.split()], stdout=log, stderr=log, env=environ
        )
        try:

            def serves() -> bool:
                assert server.poll() is None, "LMCache's server ended"
                with socket.socket() as probe:
                    return probe.connect_ex(("127.0.0.1", port)) == 0

            wait_until(serves, 60.0)
            # It copies through temporary tensors of up to a chunk's size. vLLM on CPU preloads tcmalloc, which keeps
            # their memory; glibc's malloc does so by these, or LMCache loses up to two thirds of its speed.
            environ |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**32)}
            module = "tests.bench.peers.play_lmcache"
            with player(
                [str(python), "-m", module, str(server.pid), f"tcp://localhost:{port}", layout], environ
            ) as call:
                yield call
        finally:
            end_process(server)
            Path("/dev/shm", memory).unlink(missing_ok=True)


def in_turns(rounds: int, *turns: Callable[[], Any]) -> Iterator[list[Any]]:
    """What each returned, one a round; who begins changes, and the first rounds warm up."""
    found = []
    for count in range(WARM_UP_ROUNDS + rounds):
        order = turns if count % 2 else turns[::-1]
        results = {turn: turn() for turn in order}
        found.append([results[turn] for turn in turns])
    return map(list, zip(*found[WARM_UP_ROUNDS:], strict=True))


def row(case: str, unit: str, ours: list[float], theirs: list[float], floor: list[float], *, speed: bool) -> Row:
    """One line of the table; the ratios are kvoffd's advantage, round by round."""
    pairs = zip(ours, theirs, strict=True)
    ratios = [own / other if speed else other / own for own, other in pairs]
    return {"case": case, "unit": unit, "kvoffd": ours, "lmcache": theirs, "ratios": ratios, "floor": floor}


def lookups(sides: list[Player], chunk_tokens: int, rounds: int, samples: int) -> Iterator[Row]:
    keys = TOKENS // chunk_tokens
    for call in sides:
        # Block 0 is nobody's: LMCache takes it for no block, as vLLM does.
        call("open", 1, 1 + TOKENS // BLOCK_TOKENS, 4096)
        call("fill", TOKENS, keys)
    with echo_process() as echo:
        for hit in (False, True):
            ours, theirs, floor = in_turns(
                rounds,
                *(lambda call=call: call("lookups", TOKENS, keys, hit, samples) for call in sides),  # type: ignore[misc]  # noqa: B023
                lambda: [echo(96 + 32 * keys, 64 + keys) for _ in range(samples)],
            )
            in_ms = [[1000 * median(seconds) for seconds in side] for side in (ours, theirs, floor)]
            case = f"lookup of {TOKENS:,} tokens, {keys:,} keys, {'hit' if hit else 'miss'}"
            yield row(case, "ms", *in_ms, speed=False)


def copies(sides: list[Player], chunks: str, piece: int, rounds: int) -> Iterator[Row]:
    blocks = JOB_BYTES // (LAYERS * piece)
    for call in sides:
        call("open", LAYERS, 1 + 2 * blocks, piece)
        call("verify", blocks)
        call("warm", list(range(1, 1 + blocks)), WARM_UP_JOBS)
    orders = [random.Random(1) for _ in sides]  # scattered blocks, the same for both

    def copy(side: int) -> list[dict[str, float]]:
        found: list[dict[str, float]] = sides[side]("copies", orders[side].sample(range(1, 1 + 2 * blocks), blocks))
        return found

    with memcpy_of(JOB_BYTES) as memcpy:
        ours, theirs, floor = in_turns(rounds, lambda: copy(0), lambda: copy(1), lambda: JOB_GB / memcpy())
    for index, what in enumerate(("store", "load")):
        case = f"{what} of {JOB_BYTES >> 20} MiB, pieces of {piece >> 10} KiB, {chunks}"
        speeds = [[JOB_GB / one[index]["seconds"] for one in side] for side in (ours, theirs)]
        yield row(case, "GB/s", *speeds, floor, speed=True)
        cpu = [[one[index]["cpu_s"] / JOB_GB for one in side] for side in (ours, theirs)]
        yield row("... CPU of client and server", "s/GB", *cpu, [], speed=False)


def page(rows: list[Row]) -> str:
    def spread(values: list[float]) -> str:
        return f"{number(median(values))} ({number(min(values))} to {number(max(values))})" if values else ""

    lines = [HEAD]
    for one in rows:
        medians = [number(median(one[side])) for side in ("kvoffd", "lmcache")]
        lines.append([one["case"], one["unit"], *medians, spread(one["ratios"]), spread(one["floor"])])
    return markdown_table(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description=__doc__)
    parser.add_argument("--lmcache-python", type=Path, default=PYTHON, help="Python of LMCache's environment")
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds")
    parser.add_argument("--samples", type=int, default=20, help="lookups in a round")
    options = parser.parse_args()
    if not (options.lmcache_python.parent / "lmcache").exists():
        parser.error(f"there is no LMCache in {options.lmcache_python.parent}; `make bench-peers` builds it")
    rows: list[Row] = []
    facts = run_facts(f"python -m tests.bench.peers {' '.join(sys.argv[1:])}")
    for chunk_tokens, layout in CASES:
        chunks = f"{chunk_tokens}-token chunks" + ", heads before tokens" * (layout == "HND")
        print(f"{chunks} ...", file=sys.stderr)
        with ExitStack() as stack:
            rival = lmcache(options.lmcache_python, chunk_tokens, layout)
            sides = [stack.enter_context(side) for side in (kvoffd(), rival)]
            facts["sides"] = [side("facts") for side in sides]
            if layout == "NHD":
                rows += lookups(sides, chunk_tokens, options.rounds, options.samples)
            for piece in PIECES:
                rows += copies(sides, chunks, piece, options.rounds)
    print_report("kvoffd and LMCache's multiprocess server", facts, page(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
