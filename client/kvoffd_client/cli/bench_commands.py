"""``kvoffd-cli bench``: runs a bench and prints what it found."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from kvoffd_client.admin_client import AdminClient
from kvoffd_client.bench import (
    BLOCK_STEPS,
    BLOCK_TOKENS,
    DECODE_RANKS,
    DECODE_SEQUENCES,
    FLOOD_CONNECTIONS,
    FLOOD_JOBS,
    FLOOD_KEYS,
    FLOOD_LOOKUP_KEYS,
    GPU_JOB_BYTES,
    GPU_PIECES,
    HOST_JOB_BYTES,
    HOST_PIECES,
    JOBS_STEP_S,
    KIB,
    LANE_PIECES,
    LOOKUP_CLIENTS,
    LOOKUP_ENGINES,
    LOOKUP_KEY_COUNTS,
    MIB,
    NEW_PROMPT_TOKENS,
    POOL_BYTES,
    SHARED_BLOCK_BYTES,
    SHARED_BLOCKS,
    SHARED_KEYS,
)
from kvoffd_client.cli.console import Column, Listing, print_line, print_list
from kvoffd_client.cli.json_objects import BenchGpu
from kvoffd_client.cli.json_output import print_json
from kvoffd_client.cli.target import CliError, Directory, Json, local_directory
from kvoffd_proto.messages import BENCH_LABEL
from kvoffd_proto.units import UnitError, exact_size, format_duration, format_size, parse_size

if TYPE_CHECKING:
    # Each command imports its bench itself: the engine's side of the client would make other commands start slowly.
    from kvoffd_client.bench.results import Progress, Report, Result

Bench: TypeAlias = "Callable[[Path, Progress], Report]"
PIECE_STEP_BYTES = 4096


POOL_SLACK = 8
"""A pool must have this part more than what a bench stores: blocks of several sizes do not fill it."""
CASE_CELLS = 46
"""The name of a case is not cut below it: the longest of most benches."""


def _whole(size_bytes: int) -> str:
    return f"{size_bytes // MIB:,} MiB" if size_bytes % MIB == 0 else f"{size_bytes // KIB:,} KiB"


LOOKUP_HELP = f"""Measure lookups.

Round trips of {LOOKUP_KEY_COUNTS[0]:,}, {LOOKUP_KEY_COUNTS[1]:,} and {LOOKUP_KEY_COUNTS[2]:,} keys, also while
{LOOKUP_ENGINES} engines store and load, and of {LOOKUP_CLIENTS} clients at once, against a raw ZeroMQ echo of the same
bytes. Stores up to {_whole(POOL_BYTES["lookup"])} of blocks of its own, for which a full pool evicts others, and drops
them at the end.
"""
COPY_HELP = f"""Measure stores and loads.

Jobs of {_whole(HOST_JOB_BYTES)} in pieces of {_whole(HOST_PIECES[0])} to {_whole(HOST_PIECES[-1])}: in streams of each
direction and both at once, then one at a time, against memcpy of the same bytes. Stores
{_whole(POOL_BYTES["copy"])} of blocks of its own, or what the pool has room for. A full pool evicts others for them.
They are dropped at the end.

With --memory cuda the engine's memory lies on a GPU, jobs have {_whole(GPU_JOB_BYTES)},
{_whole(POOL_BYTES["copy --memory cuda"])} are stored, and the floor is one large copy from or to pinned memory. The
daemon's memory on the GPU (its context, its mappings, and what the driver keeps there about the pinned pool) is
measured where the daemon has no GPU in use yet.

With --lanes no memory is copied at all, and no daemon is asked: the daemon's copy threads for so many GPUs run over a
driver that only counts, which shows what their own work allows.
"""

FAIRNESS_HELP = f"""Measure an engine beside another one that floods the daemon.

Rates and times of lookups and small loads, some at a time, against half the rates and the times that they have without
the flood: {FLOOD_JOBS} loads of {FLOOD_KEYS} MiB at a time, again and again, and lookups of
{FLOOD_LOOKUP_KEYS:,} keys over {FLOOD_CONNECTIONS} connections.
"""
SHARED_HELP = f"""Measure the store that nodes share.

Writes and reads of {SHARED_BLOCKS} blocks of {_whole(SHARED_BLOCK_BYTES)} through the daemon, against a raw TCP stream
over loopback, and asking for {SHARED_KEYS:,} keys that are not there, against a bare pipelined EXISTS where the store
is a Redis without a password, else against asking for one key. The blocks are dropped in the daemon and stay in the
store, which forgets them when it wants their room.
"""
JOBS_HELP = f"""Measure small jobs.

Round trips one by one, many at once and in steps of one message, against raw ZeroMQ messages of the same bytes on the
same kinds of socket. Fences for stores that were just sent, with how many of these are stored, also while
{LOOKUP_ENGINES} engines store and load. Then an engine that decodes is played: workers that each store a block of every
sequence in {BLOCK_STEPS} steps of {JOBS_STEP_S * 1e3:.0f} ms, with the daemon's CPU time a second, and lookups
meanwhile.
"""

TOKENS_HELP = f"Tokens of the prompts; may be given repeatedly. {list(NEW_PROMPT_TOKENS)}"

BENCH_HELP = """Measure a running daemon.

Best one that serves nobody. Engines wait, and what they asked for may be evicted; the eviction policy learns of what
benches ask for as of any engine's requests. Disks are not written.
"""
bench_app = typer.Typer(help=BENCH_HELP, rich_markup_mode=None)


@bench_app.command(help=LOOKUP_HELP)
def lookup(context: typer.Context, directory: Directory = None, json: Json = False) -> int:
    from kvoffd_client.bench.message_bench import bench_lookup

    return run_bench(bench_lookup, local_directory(context, directory), POOL_BYTES["lookup"], as_json=json)


@bench_app.command(help=COPY_HELP)
def copy(
    context: typer.Context,
    directory: Directory = None,
    memory: Annotated[
        str,
        typer.Option("--memory", metavar="host|cuda", help="Where the engine's memory is: host, or cuda for a GPU."),
    ] = "host",
    piece_size: Annotated[
        list[str] | None,
        typer.Option(
            "--piece-size", metavar="SIZE", help="Size of the pieces, such as 64KiB; may be given repeatedly."
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option("--threads", min=1, max=64, help="The daemon's copy_threads; the floor uses as many threads.")
    ] = 1,
    gpu: Annotated[int, typer.Option("--gpu", min=0, max=1023, help="Number of the GPU, as CUDA counts here.")] = 0,
    compute: Annotated[
        bool, typer.Option("--compute", help="Measure also how much a process that computes on the GPU slows.")
    ] = False,
    lanes: Annotated[
        int, typer.Option("--lanes", min=0, max=64, help="Measure the ceiling for so many GPUs instead of copies.")
    ] = 0,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw throughput against piece size.")
    ] = None,
    json: Json = False,
) -> int:
    if lanes:
        from kvoffd_client.bench.lanes import bench_lanes

        if memory != "host" or gpu or compute or plot is not None:
            raise CliError("--lanes copies nothing; give --piece-size and --json only with it.")
        pieces = _parse_piece_sizes(piece_size or [], GPU_JOB_BYTES) or LANE_PIECES
        return _print_report(bench_lanes(_print_progress, lanes, pieces), as_json=json)
    bench = _copy_bench(memory, piece_size or [], threads, gpu, compute=compute)
    most_bytes = POOL_BYTES["copy" if memory == "host" else "copy --memory cuda"]
    return run_bench(bench, local_directory(context, directory), most_bytes, as_json=json, plot=plot, fits=True)


def _copy_bench(memory: str, piece_sizes: Sequence[str], threads: int, gpu: int, *, compute: bool) -> Bench:
    """Return the bench that the options of ``bench copy`` ask for. Raises CliError."""
    from kvoffd_client.bench.copy_bench import bench_copy, bench_copy_gpu

    if memory == "host":
        if gpu or compute:
            raise CliError("--gpu and --compute are about a GPU; add --memory cuda.")
        pieces = _parse_piece_sizes(piece_sizes, HOST_JOB_BYTES) or HOST_PIECES
        return partial(bench_copy, piece_sizes=pieces, threads=threads)
    if memory != "cuda":
        raise CliError(f"--memory {memory!r} is neither host nor cuda.")
    if threads > 1:
        raise CliError("--threads is about host memory; for a GPU the daemon has one copy thread in each direction.")
    pieces = _parse_piece_sizes(piece_sizes, GPU_JOB_BYTES) or GPU_PIECES
    return partial(bench_copy_gpu, piece_sizes=pieces, ordinal=gpu, compute=compute)


def _parse_piece_sizes(texts: Sequence[str], most: int) -> Sequence[int]:
    """Return the sizes in bytes, ascending, each once. Raises CliError."""
    try:
        sizes = sorted({parse_size(text) for text in texts})
    except UnitError as error:
        raise CliError(f"--piece-size: {error}.") from error
    for size in sizes:
        if not 0 < size <= most or size % PIECE_STEP_BYTES:
            raise CliError(
                f"--piece-size {exact_size(size)} is not a multiple of {exact_size(PIECE_STEP_BYTES)} of at most "
                f"{exact_size(most)}."
            )
    return sizes


@bench_app.command(help=FAIRNESS_HELP)
def fairness(context: typer.Context, directory: Directory = None, json: Json = False) -> int:
    from kvoffd_client.bench.fairness import bench_fairness

    return run_bench(bench_fairness, local_directory(context, directory), POOL_BYTES["fairness"], as_json=json)


@bench_app.command(help=SHARED_HELP)
def shared(context: typer.Context, directory: Directory = None, json: Json = False) -> int:
    from kvoffd_client.bench.shared_bench import bench_shared

    return run_bench(bench_shared, local_directory(context, directory), POOL_BYTES["shared"], as_json=json)


@bench_app.command(help=JOBS_HELP)
def jobs(
    context: typer.Context,
    directory: Directory = None,
    sequences: Annotated[
        int, typer.Option("--sequences", min=BLOCK_STEPS, max=16_384, help="Sequences that the played engine decodes.")
    ] = DECODE_SEQUENCES,
    ranks: Annotated[int, typer.Option("--ranks", min=1, max=64, help="Workers of that engine.")] = DECODE_RANKS,
    json: Json = False,
) -> int:
    from kvoffd_client.bench.message_bench import bench_jobs

    bench = partial(bench_jobs, sequences=sequences, ranks=ranks)
    return run_bench(bench, local_directory(context, directory), POOL_BYTES["jobs"], as_json=json)


@bench_app.command()
def engine(
    context: typer.Context,
    directory: Directory = None,
    tokens: Annotated[
        list[int] | None, typer.Option("--tokens", min=BLOCK_TOKENS, max=100_000, help=TOKENS_HELP)
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=1000, help="How often the engines take turns.")] = 8,
    prompts: Annotated[
        int, typer.Option("--prompts", min=1, max=1000, help="Prompts of each size in a turn, idle and under load.")
    ] = 8,
    model: Annotated[
        str | None, typer.Option("--model", help="Directory or name of the model, as vLLM takes it; else a tiny one.")
    ] = None,
    json: Json = False,
) -> int:
    """Measure what prompts that nobody has computed feel of kvoffd.

    Time to the first token in two vLLM engines that take turns, one with kvoffd and one with a connector that does
    nothing, while nothing else runs and while other requests do. Starts the engines itself; vLLM must be installed. A
    full pool evicts other blocks for what they compute, which is dropped at the end.
    """
    from kvoffd_client.bench.engine_bench import NewPrompts, bench_engine

    asked = NewPrompts(tuple(sorted(set(tokens or NEW_PROMPT_TOKENS))), rounds, prompts)
    bench = partial(bench_engine, asked=asked, model=model)
    return run_bench(bench, local_directory(context, directory), as_json=json)


@bench_app.command()
def pool(
    context: typer.Context,
    model: Annotated[str, typer.Option("--model", help="Directory or name of the model, as vLLM takes it.")],
    directory: Directory = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=64, max=1_000_000, help="Tokens of a prompt; the model must accept one more.")
    ] = 4096,
    json: Json = False,
) -> int:
    """Measure vLLM with and without blocks in the pool.

    Time to the first token of long prompts that nobody has computed before, against the same prompts after the engine
    lost its own cache. Starts a vLLM of its own; vLLM must be installed. A full pool evicts other blocks for what it
    computes, which is dropped at the end.
    """
    from kvoffd_client.bench.pool_bench import bench_pool

    bench = partial(bench_pool, model=model, tokens=tokens)
    return run_bench(bench, local_directory(context, directory), as_json=json)


def run_bench(
    bench: Bench, directory: Path, most_bytes: int = 0, *, as_json: bool, plot: Path | None = None, fits: bool = False
) -> int:
    """Run ``bench`` against the daemon in ``directory``, print its report, draw it into ``plot``; return 0.

    ``most_bytes`` is what it has in the pool at most; what that evicts is said on stderr before it begins. A smaller
    pool is refused, unless the bench ``fits`` itself to it. Drops what a bench that was killed left. Raises CliError.
    """
    from kvoffd_client.bench.results import check_plot, draw_plot

    if plot is not None:
        check_plot(plot)
    with AdminClient(directory) as admin:
        for one in admin.namespaces().namespaces:
            if one.label.startswith(BENCH_LABEL) and not one.sessions:
                admin.clear(one.namespace)
        pool = admin.stats().pool
        least_bytes = 0 if fits else most_bytes + most_bytes // POOL_SLACK
        if pool.pool_bytes < least_bytes:
            raise CliError(
                f"The pool has {format_size(pool.pool_bytes)}, and this bench needs {format_size(least_bytes)}; start "
                "a daemon with a larger one for it."
            )
        stored_bytes = min(most_bytes, pool.pool_bytes)
        if (evicted_bytes := stored_bytes - pool.free_bytes) > 0:
            print(
                f"kvoffd-cli: The bench stores up to {format_size(stored_bytes)} of its own in the pool; up to "
                f"{format_size(evicted_bytes)} of other blocks are evicted for it.",
                file=sys.stderr,
            )
    report = bench(directory, _print_progress)
    if plot is not None:
        draw_plot(report, plot)
    return _print_report(report, as_json=as_json)


def _print_report(report: Report, *, as_json: bool) -> int:
    if as_json:
        print_json(report.to_object())
    else:
        print_list(_report_table(report))
        print_line(f"\nfloor: {report.floor}")
        if report.gpu is not None:
            for line in (*_gpu_lines(report.gpu), *_core_lines(report.results)):
                print_line(line)
    return 0


def _print_progress(what: str) -> None:
    if sys.stderr.isatty():
        print(f"measuring: {what}", file=sys.stderr, flush=True)


def _core_lines(results: Sequence[Result]) -> Iterator[str]:
    """Yield a line for each case: what the daemon takes of the CPUs for a GPU that copies as fast as PCIe 5 lets it."""
    from kvoffd_client.bench.results import GPU_GB_PER_SECOND

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


def _report_table(report: Report) -> Listing:
    results = report.results
    costs = [result.cpu for result in results]
    columns = [
        Column(report.bench, [result.case for result in results], 0, CASE_CELLS),
        Column("value", [_format_value(result, result.value) for result in results], right=True),
        Column("floor", [_format_value(result, result.floor) for result in results], 2, right=True),
        Column("value/floor", [f"{result.ratio:.2f}" for result in results], 1, right=True),
        Column("daemon CPU", [f"{format_duration(c.seconds)}/{c.per}" if c else "" for c in costs], 3, right=True),
    ]
    checksums = [cost.checksums if cost else None for cost in costs]
    if any(one is not None for one in checksums):
        cells = ["" if one is None else format_duration(one) for one in checksums]
        columns.append(Column("of it checksums", cells, 4, right=True))
    return Listing(columns)


def _format_value(result: Result, value: float) -> str:
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} {result.unit}"
