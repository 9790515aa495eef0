"""Reads the command line. Every command parses to an action, which ``main`` runs where errors become sentences."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvoffd_client.cli import block_app, commands
from kvoffd_client.cli.arguments import Action, Directory, Json, near_of, where_of
from kvoffd_client.cli.failure import CliError
from kvoffd_client.cli.json_output import describe
from kvoffd_client.cli.target import remote
from kvoffd_client.errors import KvoffdClientError
from kvoffd_proto.messages import StatsReply
from kvoffd_proto.units import UnitError, parse_duration

if TYPE_CHECKING:
    from kvoffd_client.cli.bench import Bench

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
MIN_INTERVAL_S = 0.1
"""More often would show the watching itself."""

app = typer.Typer(
    name="kvoffd-cli",
    help="Shows and administers the kvoffd daemon of this node.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Measure a running daemon.", rich_markup_mode=None)
app.add_typer(bench_app, name="bench")
disk_app = typer.Typer(help="Show and change the disk tier.", rich_markup_mode=None)
app.add_typer(disk_app, name="disk")
block_app.add_to(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``kvoffd-cli`` with ``arguments`` (the process's own where None); return the exit status.

    0 is success, 2 an error with one sentence on stderr, 130 Ctrl-C; what else there is, the command's help says.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        parsed = typer.main.get_command(app).main(args=given, prog_name="kvoffd-cli", standalone_mode=False)
        status = parsed() if callable(parsed) else int(parsed or 0)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader, such as head, has seen enough. Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (CliError, KvoffdClientError, OSError) as error:
        return _refuse(str(error))
    except Exception as error:
        # Typer has its own copy of click or uses the installed one, depending on its release: known by what it can do.
        if (words := getattr(error, "format_message", None)) is None:
            raise
        return _refuse(f"{str(words()).rstrip('.')}; add --help to see what can be given.")


def _refuse(sentence: str) -> int:
    print(f"kvoffd-cli: {sentence}", file=sys.stderr)
    return EXIT_REFUSED


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kvoffd-cli {version('kvoffd')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the release.", callback=_show_version, is_eager=True)
    ] = False,
    address: Annotated[
        str | None, typer.Option("--address", metavar="HOST:PORT", help="A daemon elsewhere: its admin_address.")
    ] = None,
    server_key: Annotated[
        str | None, typer.Option("--server-key", metavar="KEY", help="That daemon's public key, or a file with it.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="File of your secret key, which keygen made.")
    ] = None,
) -> None:
    """Show and administer the kvoffd daemon of this node, or one elsewhere over TCP."""
    if address is None and (server_key or key):
        raise CliError("--server-key and --key are for a daemon elsewhere; name it with --address.")
    context.obj = None if address is None else remote(address, server_key, key)
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(epilog="\b\nKeys of --json:\n" + "\n".join(f"  {key}: {text}" for key, text in describe(StatsReply)))
def stats(
    context: typer.Context,
    directory: Directory = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, with speeds in between.")] = False,
    interval: Annotated[
        str, typer.Option("--interval", metavar="DURATION", help="Time between two looks, such as 500ms or 5s.")
    ] = "1s",
    json: Json = False,
) -> Action:
    """Show everything the daemon counts.

    Pool use, copies, lookups and their latency, hit ratios by namespace, errors. Without --watch, speeds are averages
    of the daemon's last ten seconds. With --watch and --json, one line per look.
    """
    interval_s = _interval(interval)
    if watch:
        return partial(commands.watch_stats, where_of(context, directory), interval_s, as_json=json)
    return partial(commands.stats, where_of(context, directory), as_json=json)


def _interval(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except UnitError as error:
        raise CliError(f"--interval: {error}.") from error
    if seconds < MIN_INTERVAL_S:
        raise CliError(f"--interval {text} is too short; give at least {MIN_INTERVAL_S:g} seconds.")
    return seconds


@app.command()
def health(context: typer.Context, directory: Directory = None, json: Json = False) -> Action:
    """Ask whether the daemon works.

    The answer comes through the loop that serves engines: green means that it works.

    Exit status: 0 healthy and ready, 1 unhealthy or not ready yet, 2 not reachable.
    """
    return partial(commands.health, where_of(context, directory), as_json=json)


@app.command()
def sessions(context: typer.Context, directory: Directory = None, json: Json = False) -> Action:
    """List the connected clients, oldest first."""
    return partial(commands.sessions, where_of(context, directory), as_json=json)


@app.command()
def namespaces(context: typer.Context, directory: Directory = None, json: Json = False) -> Action:
    """List what is cached, by namespace."""
    return partial(commands.namespaces, where_of(context, directory), as_json=json)


@app.command()
def clear(
    context: typer.Context,
    directory: Directory = None,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", metavar="NAME", help="A label, or the first digits (4 or more) of a fingerprint."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every namespace.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: Json = False,
) -> Action:
    """Drop the blocks of one namespace or of all.

    They are gone from the index at once; the bytes of blocks in use go when their last user is done.

    Exit status: 0 done, 1 not confirmed, 2 an error.
    """
    if (namespace is None) != everything:
        raise CliError("Say what to clear: either --namespace with a label or fingerprint, or --all.")
    return partial(commands.clear, where_of(context, directory), namespace, yes=yes, as_json=json)


@app.command()
def scrub(context: typer.Context, directory: Directory = None, json: Json = False) -> Action:
    """Compare every block in the pool with its checksum.

    The daemon reads in the background, with pauses, while it serves. A block whose bytes are not those that were
    stored is dropped, and its slot is not used any more until a restart.

    Exit status: 0 all are as they were stored, 1 some are not, 2 an error. Ctrl-C ends the waiting, not the scrub.
    """
    from kvoffd_client.cli.scrub import run_scrub

    return partial(run_scrub, where_of(context, directory), as_json=json)


@disk_app.callback(invoke_without_command=True)
def disk(context: typer.Context, directory: Directory = None, json: Json = False) -> Action | None:
    """Show the disk tier's directories: use, age, what was written, errors.

    Exit status: 0 all serve, 1 one has failed or hangs, 2 an error.
    """
    from kvoffd_client.cli.disk import disks

    if context.invoked_subcommand is not None:
        return None
    return partial(disks, where_of(context, directory), as_json=json)


@disk_app.command("attach")
def disk_attach(
    context: typer.Context,
    disk: Annotated[str, typer.Argument(metavar="DIRECTORY=SIZE", help="Such as /mnt/nvme0/kvoffd=500GiB.")],
    directory: Directory = None,
) -> Action:
    """Use one more directory, until the daemon ends.

    Name it in the daemon's configuration to have it used after that. Blocks that are there already are found.

    Exit status: 0 it serves, 1 it cannot be used, 2 an error.
    """
    from kvoffd_client.cli.disk import attach

    return partial(attach, where_of(context, directory), disk)


@disk_app.command("drain")
def disk_drain(
    context: typer.Context,
    disk: Annotated[str, typer.Argument(metavar="DISK", help="The directory.")],
    directory: Directory = None,
) -> Action:
    """Write nothing more to a directory. What is there is still read."""
    from kvoffd_client.cli.disk import drain

    return partial(drain, where_of(context, directory), disk)


@disk_app.command("detach")
def disk_detach(
    context: typer.Context,
    disk: Annotated[str, typer.Argument(metavar="DISK", help="The directory.")],
    directory: Directory = None,
) -> Action:
    """Give a directory up. Its blocks stay in its file, for when it is attached again."""
    from kvoffd_client.cli.disk import detach

    return partial(detach, where_of(context, directory), disk)


@app.command()
def events(context: typer.Context, directory: Directory = None, json: Json = False) -> Action:
    """Print KV cache events as they happen.

    Until Ctrl-C. With --json, one object per line; messages that did not arrive are told on stderr.
    """
    return partial(commands.events, near_of(context, directory), as_json=json)


@app.command()
def keygen(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Where the secret key goes; FILE.pub is its public half.")
    ],
) -> Action:
    """Make a pair of keys for administration over TCP.

    Each daemon has one, and each administrator. FILE stays where it was made; FILE.pub is for the other end.
    """
    from kvoffd_client.cli.keygen import run_keygen

    return partial(run_keygen, file)


@bench_app.command()
def lookup(context: typer.Context, directory: Directory = None, json: Json = False) -> Action:
    """Measure lookups.

    Round trips of 64, 1,000 and 10,000 keys, also while 8 engines store and load, and of 4 clients at once, against a
    raw ZeroMQ echo of the same bytes. Fills the pool with blocks of its own, for which others go, and drops them at
    the end.
    """
    from kvoffd_client.bench.lookup import bench_lookup

    return _bench(context, bench_lookup, directory, json)


@bench_app.command()
def copy(
    context: typer.Context,
    directory: Directory = None,
    memory: Annotated[
        str, typer.Option("--memory", metavar="host|cuda", help="Where the engine's memory lies: host, or cuda, a GPU.")
    ] = "host",
    piece_size: Annotated[
        list[str] | None,
        typer.Option("--piece-size", metavar="SIZE", help="A size of pieces, such as 64KiB; may be given repeatedly."),
    ] = None,
    threads: Annotated[
        int, typer.Option("--threads", min=1, max=64, help="The daemon's copy_threads; the floor takes as many.")
    ] = 1,
    gpu: Annotated[int, typer.Option("--gpu", min=0, max=1023, help="Which GPU, as CUDA counts them here.")] = 0,
    compute: Annotated[
        bool, typer.Option("--compute", help="Measure too what another process that computes on the GPU feels.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw throughput against piece size.")
    ] = None,
    json: Json = False,
) -> Action:
    """Measure stores and loads.

    Jobs of 64 MiB in pieces of 16 KiB to 1 MiB: in streams of each direction and both at once, then one at a time,
    against memcpy of the same bytes. Stores 576 MiB of blocks of its own, for which a full pool
    evicts others, and drops them at the end.

    With --memory cuda the engine's memory lies on a GPU, jobs have 128 MiB, 1,152 MiB are stored, and the floor
    is one large copy from or to pinned memory. The daemon's memory on the GPU is measured where it has no GPU in use
    yet: its context, its mappings, and what the driver keeps there about the pinned pool.
    """
    from kvoffd_client.cli.bench import choose_copy

    bench = choose_copy(memory, piece_size or [], threads, gpu, compute=compute)
    return _bench(context, bench, directory, json, plot)


@bench_app.command()
def jobs(context: typer.Context, directory: Directory = None, json: Json = False) -> Action:
    """Measure small jobs.

    Round trips one by one and many at once, against raw ZeroMQ messages of the same bytes on the same kinds of socket.
    """
    from kvoffd_client.bench.jobs import bench_jobs

    return _bench(context, bench_jobs, directory, json)


@bench_app.command()
def engine(
    context: typer.Context,
    model: Annotated[str, typer.Option("--model", help="Directory or name of the model, as vLLM takes it.")],
    directory: Directory = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=64, max=1_000_000, help="Tokens of a prompt; the model must take one more.")
    ] = 4096,
    json: Json = False,
) -> Action:
    """Measure vLLM with and without blocks in the pool.

    Time to the first token of long prompts that nobody has computed before, against the same prompts after the engine
    lost its own cache. Starts a vLLM of its own, in this process; vLLM must be installed.
    """
    from kvoffd_client.bench.ttft import bench_engine

    return _bench(context, partial(bench_engine, model=model, tokens=tokens), directory, json)


def _bench(
    context: typer.Context, bench: Bench, directory: Path | None, json: bool, plot: Path | None = None
) -> Action:
    # Benches need numpy and the engine's side of the client, which no other command does.
    from kvoffd_client.cli.bench import run_bench

    return partial(run_bench, bench, near_of(context, directory), as_json=json, plot=plot)
