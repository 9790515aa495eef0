"""``kvoffd simulate``: replays a trace with several policies and pool sizes, on several cores."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process
from typing import TYPE_CHECKING, Any, NamedTuple

from kvoffd.cache.policies import POLICY_NAMES
from kvoffd.errors import KvoffdError
from kvoffd.simulate.optimum import Uses, optimum_percent, uses_of
from kvoffd.simulate.replay import Replayed, replay
from kvoffd.simulate.trace import BadTrace, Trace, read_trace
from kvoffd_proto.units import format_size, parse_size

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

ALL = "all"
BAR_CELLS = 50
PROGRESS_S = 0.2
PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


class Result(NamedTuple):
    """What one policy made of the trace, and what could have been made of it."""

    replayed: Replayed
    optimum_percent: float


def simulate(given: argparse.Namespace) -> int:
    """Run ``kvoffd simulate``. Raises ValueError with a sentence, KeyboardInterrupt; OSError where it cannot print."""
    policies = _policies(given.policy)
    try:
        trace = read_trace(given.file)
    except OSError as error:
        raise BadTrace(f"{given.file} cannot be read ({error.strerror}).") from error
    if not trace.accesses:
        why = "ends before its first request" if trace.cut_off else "has no request"
        raise BadTrace(f"{given.file} {why}; there is nothing to replay.")
    if trace.cut_off:
        print(f"{given.file} ends in the middle: it is replayed as far as it goes.", file=sys.stderr)
    if trace.missing:
        print(
            f"{given.file} lacks {trace.missing:,} lines, which came faster than they were recorded: with them the "
            "hit ratios would be others.",
            file=sys.stderr,
        )
    if trace.others:
        print(_unequal(trace), file=sys.stderr)
    block_bytes = _block_bytes(given, trace)
    sizes = _sizes(given, trace, block_bytes)
    try:
        results = _run(trace, policies, sizes)
    except BrokenProcessPool as error:
        why = "A process that replays the trace was killed, mostly for want of memory; smaller pools take less."
        raise ValueError(why) from error
    if given.json:
        print(json.dumps(_as_json(trace, results)))
    else:
        print(_as_table(trace, results, block_bytes), end="")
    if given.plot:
        print(_as_plot(results), end="", file=sys.stderr if given.json else sys.stdout)
    sys.stdout.flush()
    return 0


def _unequal(trace: Trace) -> str:
    kinds = ", ".join(
        f"{tokens} tokens in {format_size(nbytes)} ({100 * part:.1f} %)" for tokens, nbytes, part in trace.others
    )
    return (
        f"Blocks of the trace are of several kinds: {kinds}. All are replayed as if each took their mean, "
        f"{format_size(trace.block_bytes)}; small ones take more of the simulated pool than of a real one."
    )


def _policies(text: str) -> list[str]:
    names = list(POLICY_NAMES) if text == ALL else [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in POLICY_NAMES]:
        raise ValueError(f"There is no policy {unknown[0]!r}; choose from {', '.join(POLICY_NAMES)}, or {ALL}.")
    return list(dict.fromkeys(names))


def _block_bytes(given: argparse.Namespace, trace: Trace) -> int:
    """Pool bytes of a block; 0 where neither the trace nor the user says."""
    if not given.block_size:
        return trace.block_bytes
    if not (block_bytes := _bytes_of("--block-size", given.block_size)):
        raise ValueError(f"--block-size {given.block_size}: a block has some bytes.")
    return block_bytes


def _sizes(given: argparse.Namespace, trace: Trace, block_bytes: int) -> list[int]:
    """Pool sizes in blocks, ascending."""
    sizes: set[int] = set()
    if given.blocks:
        try:
            sizes.update(int(part) for part in given.blocks.split(","))
        except ValueError:
            sizes.add(0)
        if min(sizes) < 1:
            raise ValueError(f"--blocks {given.blocks!r} is no list of numbers of blocks; give some as in 1000,2000.")
    if given.size:
        if not block_bytes:
            raise ValueError(
                f"The trace does not say how many bytes a block of {trace.tokens_per_block} tokens has, which --size "
                "needs; give --block-size, or --blocks instead."
            )
        for part in given.size.split(","):
            if (blocks := _bytes_of("--size", part) // block_bytes) < 1:
                raise ValueError(f"A pool of {part} does not hold one block of {format_size(block_bytes)}.")
            sizes.add(blocks)
    if not sizes:
        raise ValueError("Give sizes of the pool: --blocks 1000,2000 or --size 10GiB,20GiB.")
    return sorted(sizes)


def _bytes_of(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}.") from None


def _run(trace: Trace, policies: Sequence[str], sizes: Sequence[int]) -> list[Result]:
    """Replay all combinations on as many processes as there are cores; tell on a terminal how far they are."""
    context = get_context("fork")
    done = context.Value("Q", 0)
    others = set(active_children())
    with ProcessPoolExecutor(
        len(os.sched_getaffinity(0)), context, _begin_worker, (trace, uses_of(trace), done)
    ) as pool:
        try:
            # What Ctrl-C raises in a fork would be lost.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            runs = [pool.submit(_replay, policy, blocks) for blocks in reversed(sizes) for policy in policies]
            best = {blocks: pool.submit(_optimum, blocks) for blocks in sizes}
            left: set[Future[Any]] = {*runs, *best.values()}
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            while left:
                finished, left = wait(left, timeout=PROGRESS_S, return_when=FIRST_EXCEPTION)
                for one in finished:
                    one.result()
                _show_progress(done.value / (len(runs) + len(best)) / trace.accesses)
        except BaseException:  # the pool would wait for what runs and for what is to run
            for process in set(active_children()) - others:
                process.kill()
            raise
        replayed = {(run.result().blocks, run.result().policy): run.result() for run in runs}
        return [Result(replayed[blocks, name], best[blocks].result()) for blocks in sizes for name in policies]


class _Worker:
    """What a process replays."""

    trace: Trace
    uses: Uses
    done: Synchronized[int]
    """Accesses of all processes."""

    @classmethod
    def note(cls, accesses: int) -> None:
        with cls.done.get_lock():
            cls.done.value += accesses


def _begin_worker(trace: Trace, uses: Uses, done: Synchronized[int]) -> None:
    _Worker.trace, _Worker.uses, _Worker.done = trace, uses, done
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Else it would wait for work without end.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if (parent := parent_process()) is None or parent.pid != os.getppid():
        os._exit(1)  # it ended before that
    gc.disable()  # blocks are many and have no cycles


def _replay(policy: str, blocks: int) -> Replayed:
    try:
        return replay(_Worker.trace, policy, blocks, _Worker.note)
    except KvoffdError:
        raise
    except Exception as error:  # another package's policy may fail in any way
        raise ValueError(f"The policy {policy} failed: {type(error).__name__}: {error}.") from error


def _optimum(blocks: int) -> float:
    found = optimum_percent(_Worker.uses, blocks)
    _Worker.note(_Worker.trace.accesses)
    return found


def _show_progress(part: float) -> None:
    if sys.stderr.isatty():
        text = f"\r{100 * part:3.0f} % replayed" if part < 1 else "\r\033[K"
        print(text, end="", file=sys.stderr, flush=True)


def _as_json(trace: Trace, results: Sequence[Result]) -> dict[str, object]:
    return {
        "trace": trace.name,
        "accesses": trace.accesses,
        "results": [
            {
                "policy": result.replayed.policy,
                "blocks": result.replayed.blocks,
                "hit_percent": round(result.replayed.hit_percent, 3),
                "written_percent": round(result.replayed.written_percent, 3),
                "optimum_percent": round(result.optimum_percent, 3),
            }
            for result in results
        ],
    }


def _as_table(trace: Trace, results: Sequence[Result], block_bytes: int) -> str:
    sizes = [f"{trace.tokens_per_block} tokens"] * bool(trace.tokens_per_block)
    sizes += [format_size(block_bytes)] * bool(block_bytes)
    size = f" of {' and '.join(sizes)}" if sizes else ""
    lines = [
        f"{trace.name}: {len(trace.requests):,} requests, {trace.accesses:,} blocks{size}",
        f"{'blocks':>10}  {'policy':<12}{'hits %':>8}{'written %':>11}{'optimum %':>11}",
    ]
    lines += [
        f"{one.blocks:>10,}  {one.policy:<12}{one.hit_percent:>8.2f}{one.written_percent:>11.2f}{optimum:>11.2f}"
        for one, optimum in results
    ]
    return "\n".join(lines) + "\n"


def _as_plot(results: Sequence[Result]) -> str:
    """Bars of the hit ratios."""
    most = max(max(result.optimum_percent for result in results), 1e-9)
    lines = [f"{'blocks':>10}  {'policy':<12}hits %, | optimum"]
    for one, optimum in results:
        cells, mark = round(BAR_CELLS * one.hit_percent / most), round(BAR_CELLS * optimum / most)
        bar = "█" * cells + " " * (mark - cells) + "|"
        lines.append(f"{one.blocks:>10,}  {one.policy:<12}{bar} {one.hit_percent:.1f}")
    return "\n".join(lines) + "\n"
