"""Implements ``kvoffd-cli trace replay``: a trace with several policies, sizes of pool and disk, and routers."""

from __future__ import annotations

import argparse
import ctypes
import errno
import gc
import json
import os
import sys
from collections.abc import Sequence
from itertools import groupby, product
from pathlib import Path
from typing import NamedTuple

from kvoffd.cache import DEFAULT_POLICY, POLICY_NAMES
from kvoffd.errors import KvoffdError
from kvoffd.simulate import fleet_command
from kvoffd.simulate.fleet import MEASURED_FROM_NODES, expected_bytes, replay_fleet
from kvoffd.simulate.optimum import optimum_percent, uses_of
from kvoffd.simulate.replay import Replayed, replay
from kvoffd.simulate.tiers import DiskPlan
from kvoffd.simulate.trace import BadTrace, RequestTrace, read_trace
from kvoffd.system.limits import memory_limit
from kvoffd.tiering import WriteMode
from kvoffd_proto.units import format_size, parse_size
from kvoffd_proto.verdict import MIN_LOOKUPS

ALL = "all"
DIVISORS, DIVISORS_OF_NODES = (8, 4, 2, 1), (4,)
"""Divisors of a trace's blocks that give the pool sizes unless others are given: of one pool, and of all together."""
EXIT_ERROR, EXIT_INTERRUPTED = 2, 130
AUTO = "auto"
M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES = -3, 128 << 10
"""A parameter of mallopt(3), and its value at first."""
PR_SET_THP_DISABLE = 41  # linux/prctl.h


class Size(NamedTuple):
    """Blocks of the pool and of the disk, if any, and the texts that gave them."""

    blocks: int
    pool: str
    is_now: bool = False
    """Whether it is the size of the running daemon's pool."""
    disk_blocks: int = 0
    disk: str = ""

    @property
    def text(self) -> str:
        return f"{self.pool} + {self.disk}" if self.disk else self.pool

    @property
    def label(self) -> str:
        """The text of a row of results."""
        return self._replace(pool=f"{self.pool} (now)").text if self.is_now else self.text


class Row(NamedTuple):
    size: Size
    replayed: Replayed
    possible: float
    """Hits of the optimum, in percent."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its status: 0, 2 after a sentence on stderr, 130 after Ctrl-C. Without ``arguments`` the
    process is the program's."""
    if arguments is None:
        _map_sparsely()
    parser = argparse.ArgumentParser("kvoffd-cli trace replay")
    parser.add_argument("file", type=Path)
    for option in ("--policy", "--size", "--blocks", "--block-size", "--disk", "--disk-write", "--disk-write-per-day"):
        parser.add_argument(option, default="")
    fleet_command.add_options(parser)
    parser.add_argument("--pool", type=int, default=0, help="bytes of the daemon's pool")
    parser.add_argument("--json", action="store_true")
    try:
        _print(_replay_file(parser.parse_args(arguments)))
        return 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _end_output()
        return 0
    except (MemoryError, OSError) as error:
        lacks_memory = isinstance(error, MemoryError) or error.errno == errno.ENOMEM  # the latter is mmap's
        why = "needs more memory than there is" if lacks_memory else f"failed ({error})"
        print(f"kvoffd-cli: The replay {why}; give smaller sizes or a part.", file=sys.stderr)
    except (ValueError, KvoffdError) as error:
        print(f"kvoffd-cli: {error}", file=sys.stderr)
    return EXIT_ERROR


def _map_sparsely() -> None:
    """Have tables take memory only for pages that are touched. Of many nodes' tables most never are."""
    libc, none = ctypes.CDLL(None), ctypes.c_ulong(0)
    # Else it grows with what is freed: glibc would take tables from its heap, and zero them.
    libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
    libc.prctl(PR_SET_THP_DISABLE, ctypes.c_ulong(1), none, none, none)  # a huge page is taken whole


def _end_output() -> None:
    """Discard further output after its reader has left: Python would report an error when it closes stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print(text: str) -> None:
    """Print the result. Raises BrokenPipeError, and ValueError with a sentence."""
    try:
        print(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _end_output()
        raise ValueError(f"The result cannot be printed ({error.strerror}).") from None


def _replay_file(given: argparse.Namespace) -> str:
    """Replay as the arguments say. Returns what is to be printed.

    Raises ValueError with a sentence; without enough memory MemoryError, or OSError by mmap.
    """
    nodes = fleet_command.node_count(given)
    policies = _policies(given.policy or (DEFAULT_POLICY if nodes else ALL))
    if not given.disk and (given.disk_write or given.disk_write_per_day):
        wrong = "--disk-write" if given.disk_write else "--disk-write-per-day"
        raise ValueError(f"{wrong} needs a disk; give --disk too.")
    try:
        trace = read_trace(given.file)
    except OSError as error:
        raise BadTrace(f"{given.file} cannot be read ({error.strerror}).") from error
    if not trace.accesses:
        why = "ends before its first request" if trace.cut_off else "has no request"
        raise BadTrace(f"{given.file} {why}; there is nothing to replay.")
    if trace.cut_off:
        print(f"{given.file} ends in the middle: it is replayed up to there.", file=sys.stderr)
    if trace.missing:
        print(f"{given.file} lacks {trace.missing:,} lines: with them, the hit ratios would differ.", file=sys.stderr)
    if trace.skipped:
        print(f"{given.file} has {trace.skipped:,} objects without hash_ids, which are left out.", file=sys.stderr)
    if trace.others:
        print(_kinds_of_blocks(trace), file=sys.stderr)
    try:
        return _replay_nodes(given, trace, nodes, policies) if nodes else _replay_one(given, trace, policies)
    finally:
        _show_progress("")  # before an error's sentence too


def _replay_one(given: argparse.Namespace, trace: RequestTrace, policies: Sequence[str]) -> str:
    """Replay over one pool. Returns what is to be printed."""
    block_bytes, uses = _block_bytes(given, trace), uses_of(trace)
    results = []
    for size in _sizes(given, trace, block_bytes, trace.distinct, DIVISORS):
        possible = optimum_percent(uses, size.blocks + size.disk_blocks)
        for disk in _disk_plans(given, trace, size.disk_blocks, block_bytes):
            for policy, hints in product(policies, (False, True) if trace.hints else (False,)):
                _show_progress(f"replaying: {policy}, {size.label}")
                results.append(Row(size, replay(trace, policy, size.blocks, disk, hints=hints), possible))
    return json.dumps(_as_json(trace, results)) if given.json else _as_table(trace, results, block_bytes)


def _replay_nodes(given: argparse.Namespace, trace: RequestTrace, nodes: int, policies: Sequence[str]) -> str:
    """Replay over several nodes. Returns what is to be printed."""
    if not (block_bytes := _block_bytes(given, trace)):
        raise ValueError("The trace does not give the bytes of a block, which --nodes needs; give --block-size.")
    if not trace.tokens_per_block:
        raise ValueError("The trace does not give the tokens of a block, which --nodes needs.")
    if trace.hints:
        print(f"The {len(trace.hints):,} hints in {given.file} are left out.", file=sys.stderr)
    to_replay = []
    """Size, policy, and plans that differ in the router's rule."""
    for size in _sizes(given, trace, block_bytes, max(1, trace.distinct // nodes), DIVISORS_OF_NODES):
        plans = fleet_command.make_plans(given, trace, nodes, size.blocks, block_bytes)
        for policy, disk in product(policies, _disk_plans(given, trace, size.disk_blocks, block_bytes)):
            to_replay.append((size, policy, [plan._replace(disk=disk) for plan in plans]))
    if nodes >= MEASURED_FROM_NODES:
        taken_bytes = 0
        for size, policy, plans in to_replay:
            taken_bytes = max(taken_bytes, expected_bytes(trace, policy, size.blocks, plans[0]))
            gc.collect()  # as after each replay
        limit = memory_limit()
        there = f"{format_size(limit.bytes)} are available ({limit.source})"
        taken = f"takes about {format_size(taken_bytes)} of memory"
        print(f"A replay over {nodes} nodes {taken}; {there}.", file=sys.stderr)
    rows = []
    for size, policy, plans in to_replay:
        for number, (plan, shares) in enumerate(fleet_command.compared(plans), 1):
            _show_progress(f"replaying: {policy}, {size.label}, {number}")
            rows.append((size.label, replay_fleet(trace, policy, size.blocks, plan, shares)))
            gc.collect()  # the nodes refer to each other, and most of their memory is not Python's
    return json.dumps(fleet_command.as_json(trace, rows)) if given.json else fleet_command.as_table(trace, rows)


def _show_progress(text: str) -> None:
    """Replace the text shown on a terminal's stderr."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _kinds_of_blocks(trace: RequestTrace) -> str:
    kinds = ", ".join(
        f"{tokens} tokens in {format_size(nbytes)} ({100 * part:.1f} %)" for tokens, nbytes, part in trace.others
    )
    return (
        f"Blocks of the trace are of several kinds: {kinds}. All are replayed with their mean size, "
        f"{format_size(trace.block_bytes)}; small ones take more of the simulated pool than of a real one."
    )


def _policies(text: str) -> list[str]:
    names = list(POLICY_NAMES) if text == ALL else [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in POLICY_NAMES]:
        raise ValueError(f"There is no policy {unknown[0]!r}; choose from {', '.join(POLICY_NAMES)}, or {ALL}.")
    return list(dict.fromkeys(names))


def _block_bytes(given: argparse.Namespace, trace: RequestTrace) -> int:
    """Return the pool bytes of a block; 0 if neither the trace nor the user gives them."""
    if not given.block_size:
        return trace.block_bytes
    if not (block_bytes := _bytes_of("--block-size", given.block_size)):
        raise ValueError(f"--block-size {given.block_size}: a block has at least one byte.")
    return block_bytes


def _sizes(
    given: argparse.Namespace, trace: RequestTrace, block_bytes: int, distinct: int, divisors: Sequence[int]
) -> list[Size]:
    """Return each size of the pool, ascending, with each disk; by default the ``distinct`` blocks over the ``divisors``
    are the pools'."""
    pools = _pools(given, trace, block_bytes, distinct, divisors)
    return [size for blocks in sorted(pools) for size in _with_disks(given, pools[blocks], block_bytes)]


def _pools(
    given: argparse.Namespace, trace: RequestTrace, block_bytes: int, distinct: int, divisors: Sequence[int]
) -> dict[int, Size]:
    """Return the sizes of the pool by their blocks."""
    found: dict[int, Size] = {}
    for part in filter(None, given.blocks.split(",")):
        if not part.strip().isdecimal() or not int(part):
            raise ValueError(f"--blocks {given.blocks!r} is not a list of block counts; give some as in 1000,2000.")
        found[int(part)] = Size(int(part), f"{int(part):,} blocks")
    if given.size and not block_bytes:
        raise ValueError(
            f"The trace does not give the bytes of a block of {trace.tokens_per_block} tokens, which --size needs; "
            "give --block-size, or --blocks instead."
        )
    for part in filter(None, given.size.split(",")):
        if (blocks := _bytes_of("--size", part) // block_bytes) < 1:
            raise ValueError(f"A pool of {part} does not hold one block of {format_size(block_bytes)}.")
        found[blocks] = Size(blocks, part.strip())
    if not found:
        for divisor in divisors:
            blocks = max(1, distinct // divisor)
            found[blocks] = Size(blocks, format_size(blocks * block_bytes) if block_bytes else f"{blocks:,} blocks")
        if block_bytes and given.pool >= block_bytes:
            blocks = given.pool // block_bytes
            found[blocks] = Size(blocks, format_size(given.pool), is_now=True)
    return found


def _with_disks(given: argparse.Namespace, size: Size, block_bytes: int) -> list[Size]:
    """Return the size of a pool with each disk, or as it is."""
    if not given.disk:
        return [size]
    found: dict[int, str] = {}
    for part in map(str.strip, given.disk.split(",")):
        times = part.removesuffix("x")
        if part.endswith("x") and times.isdecimal() and int(times):
            found[int(times) * size.blocks] = part
            continue
        disk_bytes = _bytes_of("--disk", part)
        if not block_bytes:
            raise ValueError(f"--disk {part}: the trace does not give the bytes of a block; give --block-size.")
        if disk_bytes < block_bytes:
            raise ValueError(f"A disk of {part} does not hold one block of {format_size(block_bytes)}.")
        found[disk_bytes // block_bytes] = part
    return [size._replace(disk_blocks=disk_blocks, disk=text) for disk_blocks, text in found.items()]


def _disk_plans(given: argparse.Namespace, trace: RequestTrace, blocks: int, block_bytes: int) -> list[DiskPlan | None]:
    """Return the disk of a size with each mode of writing; None if there is no disk.

    Unless given, the mode auto may write the disk's size per day, as in a daemon, and others have no limit. Nor has any
    in a trace without times.
    """
    if not blocks:
        return [None]
    per_day = given.disk_write_per_day or AUTO
    if per_day != AUTO and not block_bytes:
        raise ValueError("--disk-write-per-day: the trace does not give the bytes of a block; give --block-size.")
    plans: list[DiskPlan | None] = []
    for name in dict.fromkeys(map(str.strip, (given.disk_write or AUTO).split(","))):
        if name not in list(WriteMode):
            raise ValueError(f"--disk-write {name}: choose from {', '.join(WriteMode)}.")
        mode, most_blocks = WriteMode(name), 0
        if per_day != AUTO:
            most_blocks = -(-_bytes_of("--disk-write-per-day", per_day) // block_bytes)
        elif mode is WriteMode.AUTO:
            most_blocks = blocks
        plans.append(DiskPlan(blocks, mode, most_blocks if trace.seconds else 0))
    return plans


def _bytes_of(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}.") from None


def _as_json(trace: RequestTrace, results: Sequence[Row]) -> dict[str, object]:
    rows = []
    for size, replayed, possible in results:
        percents = {"hit": replayed.hit_percent, "written": replayed.percent(replayed.written), "optimum": possible}
        row: dict[str, object] = {"policy": replayed.policy, "size": size.label, "blocks": replayed.blocks}
        if (disk := replayed.disk) is not None:
            row |= {"disk_blocks": disk.blocks, "disk_write": disk.mode.value}
            row |= {"disk_write_per_day_blocks": disk.per_day_blocks}
            percents["disk_hit"] = replayed.percent(replayed.disk_hits)
            percents["disk_written"] = replayed.percent(replayed.disk_written)
        rows.append(row | {f"{name}_percent": round(percent, 3) for name, percent in percents.items()})
    return {"trace": trace.name, "accesses": trace.accesses, "results": rows}


def _as_table(trace: RequestTrace, results: Sequence[Row], block_bytes: int) -> str:
    facts = [f"{trace.tokens_per_block} tokens"] if trace.tokens_per_block else []
    facts += [format_size(block_bytes)] if block_bytes else []
    of_block = f" of {' and '.join(facts)}" if facts else ""
    width, with_disk = max(map(len, ("pool", *(one.size.label for one in results)))), bool(results[0].size.disk)
    lines = [
        f"{trace.name}: {len(trace.requests):,} requests, {trace.accesses:,} blocks{of_block}",
        f"{'pool':>{width}}  {'policy':<14}{'hits %':>8}{'written %':>11}{'possible %':>12}"
        + (f"  {'write':<8}{'of disk %':>10}{'to disk %':>11}" if with_disk else ""),
    ]
    results = [one for one in results if one.possible]
    if not results:
        return f"{lines[0]}\nNo block comes back: no pool would find anything."
    for size, replayed, possible in results:
        percents = f"{replayed.hit_percent:>8.2f}{replayed.percent(replayed.written):>11.2f}{possible:>12.2f}"
        if replayed.disk is not None:
            of_disk, to_disk = replayed.percent(replayed.disk_hits), replayed.percent(replayed.disk_written)
            percents += f"  {replayed.disk.mode.value:<8}{of_disk:>10.2f}{to_disk:>11.2f}"
        lines.append(f"{size.label:>{width}}  {replayed.policy:<14}{percents}")
    if len(trace.requests) < MIN_LOOKUPS:
        few = f"Too early to choose a policy or a size: {MIN_LOOKUPS} requests are needed. Record for longer."
        return "\n".join([*lines, "", few])
    return "\n".join([*lines, *_conclusion(results)])


def _conclusion(results: Sequence[Row]) -> list[str]:
    """Conclude which policy to choose: at the daemon's own size, and where the policies differ most."""
    rankings = [
        sorted(of_size, key=lambda one: -one.replayed.hit_percent)
        for _, of_size in groupby(results, lambda one: (one.size, one.replayed.disk))
    ]
    """Results by size and disk, the best policy first."""

    def spread(ranking: Sequence[Row]) -> float:
        return ranking[0].replayed.hit_percent - ranking[-1].replayed.hit_percent

    widest = max(rankings, key=spread)
    if len(widest) == 1:
        return []
    if spread(widest) < 1:
        return ["", "For this traffic the policies differ by less than a point."]
    lines = [""]
    for ranking in rankings:
        size = ranking[0].size
        if size.is_now and ranking is not widest:
            differ = "less than a point" if spread(ranking) < 1 else f"{spread(ranking):.1f} points"
            lines.append(f"In your pool of {size.text} the policies differ by {differ}.")
    best = widest[0]
    as_good = best.replayed.hit_percent - 1  # a point less
    names = [one.replayed.policy for one in widest if one.replayed.hit_percent > as_good]
    most = f"{' and '.join(names)} {'find' if len(names) > 1 else 'finds'} most"
    where = f"For this traffic {most} in a pool of {best.size.text}, where they differ most"
    if best.size.is_now:
        where = f"In your pool of {best.size.text} {most}"
    each = ", ".join(f"{one.replayed.policy} {one.replayed.hit_percent:.1f} %" for one in widest)
    return [*lines, f"{where}: {each}; {best.possible:.1f} % were possible."]


if __name__ == "__main__":
    sys.exit(main())
