"""Runs benches against a running daemon: ``python -m tests.bench.daemon lookup jobs --directory DIRECTORY``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from kvoffd_client import KvoffdClientError
from kvoffd_client.admin_client import AdminClient
from kvoffd_client.cli.format import print_line, print_table
from kvoffd_proto.paths import default_directory
from kvoffd_proto.units import format_duration, format_size, parse_size
from tests.bench.daemon import (
    DECODE_RANKS,
    DECODE_SEQUENCES,
    GPU_PIECES,
    HOST_PIECES,
    NEW_PROMPT_TOKENS,
    POOL_BYTES,
)
from tests.bench.daemon.copy_bench import bench_copy, bench_copy_gpu
from tests.bench.daemon.engine_bench import NewPrompts, bench_engine
from tests.bench.daemon.message_bench import bench_jobs, bench_lookup
from tests.bench.daemon.pool_bench import bench_pool
from tests.bench.daemon.results import (
    GPU_GB_PER_SECOND,
    BenchFailed,
    BenchGpu,
    Progress,
    Report,
    Result,
    check_plot,
    draw_plot,
)

Bench = Callable[[Path, Progress], Report]

POOL_SLACK = 8
"""A pool must have this part more than what a bench stores: blocks of several sizes do not fill it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named benches; print tables, or one JSON object a line. Status 2 where one could not measure."""
    parser = argparse.ArgumentParser("python -m tests.bench.daemon", description=__doc__)
    parser.add_argument("benches", nargs="+", choices=("lookup", "copy", "jobs", "engine", "pool"))
    parser.add_argument("--directory", type=Path, default=default_directory(), help="of the daemon's sockets")
    parser.add_argument("--json", action="store_true")
    copies = parser.add_argument_group("copy")
    copies.add_argument("--memory", choices=("host", "cuda"), default="host", help="where the engine's memory is")
    copies.add_argument("--piece-size", type=parse_size, action="append", help="may be given repeatedly")
    copies.add_argument("--threads", type=int, default=1, help="the daemon's copy_threads; the floor uses as many")
    copies.add_argument("--gpu", type=int, default=0, help="number of the GPU, as CUDA counts here")
    copies.add_argument("--compute", action="store_true", help="how much a process that computes on the GPU slows")
    copies.add_argument("--plot", type=Path, help="PNG of throughput by piece size")
    jobs = parser.add_argument_group("jobs")
    jobs.add_argument("--sequences", type=int, default=DECODE_SEQUENCES, help="that the played engine decodes")
    jobs.add_argument("--ranks", type=int, default=DECODE_RANKS, help="workers of that engine")
    engines = parser.add_argument_group("engine, pool (they start a vLLM)")
    engines.add_argument("--model", help="directory or name; engine: a tiny one by default")
    engines.add_argument("--tokens", type=int, action="append", help="of a prompt; engine: may be given repeatedly")
    engines.add_argument("--rounds", type=int, default=8, help="how often the engines take turns")
    engines.add_argument("--prompts", type=int, default=8, help="of each size in a turn, idle and under load")
    given = parser.parse_args(arguments)
    try:
        for name in given.benches:
            bench = _bench(name, given)
            most_bytes = POOL_BYTES.get("copy --memory cuda" if given.memory == "cuda" and name == "copy" else name, 0)
            plot = given.plot if name == "copy" else None
            run_bench(bench, given.directory, most_bytes, as_json=given.json, plot=plot, fits=name == "copy")
    except KvoffdClientError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


def _bench(name: str, given: argparse.Namespace) -> Bench:
    sizes = sorted(set(given.piece_size or ()))
    if name == "lookup":
        return bench_lookup
    if name == "jobs":
        return partial(bench_jobs, sequences=given.sequences, ranks=given.ranks)
    if name == "copy" and given.memory == "host":
        return partial(bench_copy, piece_sizes=sizes or HOST_PIECES, threads=given.threads)
    if name == "copy":
        return partial(bench_copy_gpu, piece_sizes=sizes or GPU_PIECES, ordinal=given.gpu, compute=given.compute)
    if name == "engine":
        asked = NewPrompts(tuple(sorted(set(given.tokens or NEW_PROMPT_TOKENS))), given.rounds, given.prompts)
        return partial(bench_engine, asked=asked, model=given.model)
    if given.model is None:
        raise BenchFailed("The bench pool needs --model.")
    return partial(bench_pool, model=given.model, tokens=(given.tokens or [4096])[0])


def run_bench(
    bench: Bench, directory: Path, most_bytes: int = 0, *, as_json: bool, plot: Path | None = None, fits: bool = False
) -> None:
    """Run ``bench`` against the daemon in ``directory``, print its report, draw it into ``plot``.

    ``most_bytes`` is what it has in the pool at most; what that evicts is said on stderr before it begins. A smaller
    pool is refused, unless the bench ``fits`` itself to it. Raises BenchFailed.
    """
    if plot is not None:
        check_plot(plot)
    with AdminClient(directory) as admin:
        pool = admin.stats().pool
        least_bytes = 0 if fits else most_bytes + most_bytes // POOL_SLACK
        if pool.size_bytes < least_bytes:
            raise BenchFailed(
                f"The pool has {format_size(pool.size_bytes)}, and this bench needs {format_size(least_bytes)}; start "
                "a daemon with a larger one for it."
            )
        stored_bytes = min(most_bytes, pool.size_bytes)
        if (evicted_bytes := stored_bytes - pool.of("free")) > 0:
            print(
                f"bench: Stores up to {format_size(stored_bytes)} of its own in the pool; up to "
                f"{format_size(evicted_bytes)} of other blocks are evicted for it.",
                file=sys.stderr,
            )
    report = bench(directory, _print_progress)
    if plot is not None:
        draw_plot(report, plot)
    if as_json:
        print_line(msgspec.json.encode(report.to_object()).decode())
        return
    print_table(*table_of(report))
    print_line(f"\nfloor: {report.floor}")
    if report.gpu is not None:
        for line in (*_gpu_lines(report.gpu), *core_lines(report.results)):
            print_line(line)


def _print_progress(what: str) -> None:
    if sys.stderr.isatty():
        print(f"measuring: {what}", file=sys.stderr, flush=True)


def core_lines(results: Sequence[Result]) -> Iterator[str]:
    """Yield a line for each case: what the daemon takes of the CPUs for a GPU that copies as fast as PCIe 5 lets it."""
    for result in results:
        if result.cpu is not None and result.cpu.checksums is not None:
            cores, checksums = result.cpu.cores_per_gpu()
            yield (
                f"cores for each GPU at {GPU_GB_PER_SECOND:.0f} GB/s: {cores:.2f}, checksums {checksums:.2f} of them: "
                f"{result.case}"
            )


def _gpu_lines(gpu: BenchGpu) -> Iterator[str]:
    yield f"GPU: {gpu.name}, {gpu.uuid}, driver {gpu.driver}"
    if gpu.daemon_bytes is None:
        yield "daemon's memory on the GPU: not measured, since the daemon had a GPU in use already"
    else:
        yield f"daemon's memory on the GPU: {format_size(gpu.daemon_bytes)}"
    if gpu.unlockable_bytes:
        yield f"not page-locked, so slow: {format_size(gpu.unlockable_bytes)} of the pool; see `kvoffd-cli health`"


def table_of(report: Report) -> tuple[list[str], list[list[str]]]:
    titles = [report.bench, ">value", ">floor", ">value/floor", ">daemon CPU"]
    checksums = any(one.cpu is not None and one.cpu.checksums is not None for one in report.results)
    rows = []
    for one in report.results:
        cpu = "" if one.cpu is None else f"{format_duration(one.cpu.seconds)}/{one.cpu.per}"
        row = [one.case, _format_value(one, one.value), _format_value(one, one.floor), f"{one.ratio:.2f}", cpu]
        part = None if one.cpu is None else one.cpu.checksums
        rows.append([*row, *([""] if part is None else [format_duration(part)]) * checksums])
    return [*titles, *[">of it checksums"] * checksums], rows


def _format_value(result: Result, value: float) -> str:
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} {result.unit}"


if __name__ == "__main__":
    sys.exit(main())
