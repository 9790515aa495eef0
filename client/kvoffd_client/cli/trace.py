"""``kvoffd-cli trace``: records engines' lookups, anonymised, and replays them with other policies and pools.

The daemon opens no file: this process fetches the lookups and writes them with its own user's rights.
"""

from __future__ import annotations

import gzip
import json as json_text
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from kvoffd_client.admin_client import AdminClient
from kvoffd_client.cli.format import print_json, print_status, say
from kvoffd_client.cli.target import (
    CliError,
    Directory,
    Json,
    PlainJson,
    local_directory,
    parse_option,
)
from kvoffd_client.errors import DaemonUnavailable, KvoffdClientError
from kvoffd_proto.admin import CHAIN_BYTES, Trace, TraceChain
from kvoffd_proto.build import program
from kvoffd_proto.units import (
    count_blocks,
    format_count,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    plural,
)

FETCH_S = 0.5
"""Pause between two fetches."""
MUCH_BYTES = 256 << 10
"""Bytes of an answer's chains after which the next fetch is at once: the daemon gives 1 MiB at once, and keeps 8."""
POOL_ANSWER_S = 1.0
"""Time limit of the request for the pool's size, which is optional for a replay."""
ID_BITS = 53
"""Bits of a key's number, within which JSON's numbers are exact in every language."""

trace_app = typer.Typer(help="Record engines' lookups, and replay them.", rich_markup_mode=None)


@trace_app.command()
def record(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write, such as trace.jsonl.gz.")],
    duration: Annotated[
        str, typer.Option("--duration", metavar="TIME", help="End after this time, as 90s or 2h. [default: at Ctrl-C]")
    ] = "",
    max_size: Annotated[str, typer.Option("--max-size", metavar="SIZE", help="End at this size of FILE.")] = "1GiB",
    directory: Directory = None,
    json: Json = False,
) -> int:
    """Record engines' lookups, until Ctrl-C or for --duration.

    The file has a line for each prompt and KV cache group: its keys as numbers, hashed with a random salt that is not
    saved. It contains no text, tokens or names. client/README.md describes the format.

    Exit status: 0 done, 1 the daemon ended and the file has the part before, 2 an error.
    """
    seconds = parse_option("--duration", duration, parse_duration) if duration else float("inf")
    most_bytes = parse_option("--max-size", max_size, parse_size)
    if not seconds:
        raise CliError(f"--duration {duration} records nothing; give a longer one, or none and end with Ctrl-C.")
    with AdminClient(local_directory(directory)) as admin:
        admin.ask(Trace)
        try:
            opened = file.open("xb")
        except FileExistsError:
            raise CliError(f"{file} exists already; name another file, or remove it.") from None
        try:
            with opened, closing(TraceWriter(opened)) as writer:
                took_s, ended = _write(admin, writer, seconds, most_bytes)
            nbytes = file.stat().st_size
        except OSError as error:
            recorded = file.exists() and file.stat().st_size
            left = "Its contents can be replayed." if recorded else _removed(file)
            raise CliError(f"{file} cannot be written: {error.strerror}. {left}") from error
    if ended == "daemon" and not writer.chains and not writer.hints:
        raise CliError(_removed(file))
    if json:
        counts = {name: getattr(writer, name) for name in ("chains", "keys", "hints", "dropped")}
        print_json({"file": str(file), "seconds": took_s, **counts, "bytes": nbytes, "ended": ended})
    else:
        lost = f" {format_count(writer.dropped)} more came too fast and were lost." if writer.dropped else ""
        full = f" It ended because {file} reached --max-size." if ended == "size" else ""
        hints = f" and {format_count(writer.hints)} hint{plural(writer.hints)}" if writer.hints else ""
        say(
            f"{format_count(writer.chains)} lookup{plural(writer.chains)} for {count_blocks(writer.keys)}{hints} in "
            f"{format_duration(took_s)}; {file} has {format_size(nbytes)}.{lost}{full}"
        )
    return int(ended == "daemon")


def _removed(file: Path) -> str:
    file.unlink(missing_ok=True)
    return f"Nothing was recorded, and {file} was removed."


def _write(admin: AdminClient, writer: TraceWriter, seconds: float, most_bytes: int) -> tuple[float, str]:
    """Write what the daemon has, again and again. Return the duration and the reason of the end: duration, size,
    interrupt, or daemon (it ended).

    After the time or a signal it still fetches what the daemon has by then: until an answer is small.
    """
    began, session = time.monotonic(), admin.session_id
    until, ended, is_behind = began + seconds, "", False
    with _ended_by_signal() as signalled:
        while is_behind or not ended:  # an end may come while more is waiting
            if signalled.is_set():
                ended = "interrupt"
            elif time.monotonic() >= until:
                ended = "duration"
            try:
                fetched = admin.ask(Trace)
                if admin.session_id != session:
                    raise DaemonUnavailable("The kvoffd daemon was restarted, which ended the trace.")
            except KvoffdClientError as error:
                ended = "daemon"
                print(f"kvoffd-cli: {error}", file=sys.stderr)
                break
            writer.write(fetched.chains, fetched.dropped)
            if writer.file.tell() >= most_bytes:
                ended = "size"
                break
            passed = format_duration(time.monotonic() - began)
            print_status(f"{passed}: {format_count(writer.chains)} lookups; Ctrl-C ends the trace.")
            is_behind = sum(CHAIN_BYTES + len(chain.keys) for chain in fetched.chains) >= MUCH_BYTES
            if not is_behind and not ended:
                signalled.wait(max(0.0, min(FETCH_S, until - time.monotonic())))
        print_status()
    return time.monotonic() - began, ended


@contextmanager
def _ended_by_signal() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C and SIGTERM set, so that the file is completed."""
    end = threading.Event()
    before = {number: signal.signal(number, lambda *_: end.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield end
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class TraceWriter:
    """Writes a compressed file with a line for each chain: a prompt's, or a hint's, keys of one KV cache group."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.chains = self.keys = self.hints = self.dropped = 0
        self._packed = gzip.GzipFile("", "wb", fileobj=file, mtime=0)
        self._salt = secrets.token_bytes(32)
        self._namespaces: dict[bytes, int] = {}

    def write(self, chains: list[TraceChain], dropped: int) -> None:
        """Write a line for each chain. ``dropped``: number of chains lost after them."""
        for number, chain in enumerate(chains, 1):
            self._packed.write(self._line(chain, dropped if number == len(chains) else 0))
            if chain.hint is None:
                self.chains += 1
                self.keys += len(chain.keys) // chain.key_bytes
            else:
                self.hints += 1
        self.dropped += dropped
        self._packed.flush()  # nothing is lost if this process is killed
        self.file.flush()

    def close(self) -> None:
        """Write the end of the stream."""
        self._packed.close()
        self.file.flush()
        os.fsync(self.file.fileno())

    def _line(self, chain: TraceChain, dropped: int) -> bytes:
        """Return a chain in Mooncake's format, with further fields."""
        # Equal keys of two groups or namespaces are different blocks.
        namespace = self._namespaces.setdefault(chain.namespace, len(self._namespaces))
        whose = namespace.to_bytes(8, "big") + chain.group.to_bytes(8, "big")
        salted = blake2b(key=self._salt, person=whose, digest_size=8)
        ids = []
        for at in range(0, len(chain.keys), chain.key_bytes):
            one = salted.copy()
            one.update(chain.keys[at : at + chain.key_bytes])
            ids.append(int.from_bytes(one.digest(), "big") >> (64 - ID_BITS))
        fields = {
            "timestamp": chain.milliseconds,
            "input_length": len(ids) * chain.tokens_per_block,
            "hash_ids": ids,
            "namespace": namespace,
            "group": chain.group,
            "block_tokens": chain.tokens_per_block,
            "block_bytes": chain.block_bytes,
        }
        if chain.hint is not None:
            fields |= {"hint": chain.hint, "priority": chain.priority, "ttl_s": chain.ttl_s}
        if dropped:
            fields["dropped"] = dropped
        return json_text.dumps(fields, separators=(",", ":")).encode() + b"\n"


NODES_HELP = """Replay a trace over several nodes, with several routers.

Prints where the tokens of prompts come from, how many pools have a block, and the bytes over each link; for one pool
that all nodes have together (the most that there is to gain), and for each router without and with what nodes share.
Caches, policies, and what is written and read when are the daemon's own. The router, the store's eviction (least
recently used) and time are models: a request is over when the next one comes, reads are never late, and first tokens
take their bytes and tokens by --speeds. Without --policy it is learned.
"""


OF_BOTH = "policy", "size", "blocks", "block_size", "disk", "nodes", "json", "help"
"""Options of a replay that both helps show."""


def _show_nodes_help(context: typer.Context, is_wanted: bool) -> None:
    """Show the help of a replay over nodes, which would not fit a screen with that of one pool. Its options are the
    hidden ones, which take the places of those that are shown otherwise."""
    if is_wanted:
        context.command.help = NODES_HELP
        for option in context.command.params:
            if option.param_type_name == "option":  # not by its class: typer has a click of its own
                is_of_nodes = option.hidden or option.name in OF_BOTH  # type: ignore[attr-defined]
                option.hidden = not is_of_nodes  # type: ignore[attr-defined]
        typer.echo(context.get_help())
        raise typer.Exit


@trace_app.command()
def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Trace of trace record, or of other tools.")],
    policy: Annotated[str, typer.Option(metavar="NAMES", help="Policies, comma-separated. [default: all]")] = "",
    size: Annotated[
        str,
        typer.Option(metavar="SIZE,...", help="Sizes of the pool. [default: parts of FILE]"),
    ] = "",
    blocks: Annotated[str, typer.Option(metavar="N,...", help="Sizes of the pool, in blocks of FILE.")] = "",
    block_size: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of a block, if not in FILE.")] = "",
    disk: Annotated[
        str,
        typer.Option(metavar="SIZE,...", help="Sizes of a disk; 4x: four times the pool."),
    ] = "",
    disk_write: Annotated[str, typer.Option(metavar="MODES", help="As the daemon's disk_write. [default: auto]")] = "",
    disk_write_per_day: Annotated[
        str,
        typer.Option(metavar="SIZE", help="0: no limit. [default: the disk's size with --disk-write auto]"),
    ] = "",
    nodes: Annotated[str, typer.Option(metavar="N", help="Replay over this many nodes like this one.")] = "",
    route: Annotated[
        str,
        typer.Option(
            hidden=True,
            metavar="NAMES",
            help="Who gets a request: random, round_robin, prefix (who has the longest, by KV events), session (a hash "
            "of the session, or of the first 2 blocks if FILE has none). [default: all]",
        ),
    ] = "",
    busy_limit: Annotated[
        str,
        typer.Option(
            hidden=True,
            metavar="TIME",
            help="With prefix: the most that a prompt may wait longer than at the least busy node; none: no limit. "
            "[default: 5s]",
        ),
    ] = "",
    least_prefix: Annotated[
        str,
        typer.Option(
            hidden=True, metavar="PERCENT", help="With prefix: a shorter part of a prompt counts as none. [default: 0]"
        ),
    ] = "",
    staleness: Annotated[
        str,
        typer.Option(
            hidden=True, metavar="TIME", help="Age of what the router knows of the nodes' blocks. [default: 0s]"
        ),
    ] = "",
    peers: Annotated[
        str,
        typer.Option(
            hidden=True,
            metavar="N",
            help="Other nodes whose pools each node reads: the next N, all (a daemon takes 8), or named: the one that "
            "has the longest prefix by what the router knows. [default: 0]",
        ),
    ] = "",
    shared: Annotated[
        str,
        typer.Option(
            hidden=True, metavar="SIZE", help="Size of a store for all nodes, or unlimited; 4x: four times all pools."
        ),
    ] = "",
    shared_write: Annotated[
        str, typer.Option(hidden=True, metavar="MODE", help="As the daemon's. [default: auto]")
    ] = "",
    speeds: Annotated[
        str,
        typer.Option(
            hidden=True,
            metavar="NAME=N,...",
            help="Tokens that a node computes a second, bytes a second of the others. "
            "[default: compute=10000,memory=20GB,disk=3GB,network=3GB]",
        ),
    ] = "",
    help_nodes: Annotated[
        bool,
        typer.Option("--help-nodes", is_eager=True, callback=_show_nodes_help, help="Show the options of --nodes."),
    ] = False,
    directory: Directory = None,
    json: PlainJson = False,
) -> int:
    """Replay a trace with several policies, sizes of pool and disk, and nodes.

    Prints hits, writes and possible hits. One size is a running daemon's pool.
    """
    if (found := find_spec("kvoffd")) is None or found.origin is None:
        raise CliError("Replay needs the package kvoffd, which is not installed here.")
    words = program("kvoffd.simulate.command", Path(found.origin).parents[1])
    named = {"--policy": policy, "--size": size, "--blocks": blocks, "--block-size": block_size, "--disk": disk}
    named |= {"--disk-write": disk_write, "--disk-write-per-day": disk_write_per_day}
    named |= {"--nodes": nodes, "--route": route, "--busy-limit": busy_limit, "--least-prefix": least_prefix}
    named |= {"--staleness": staleness, "--peers": peers, "--shared": shared, "--shared-write": shared_write}
    named |= {"--speeds": speeds}
    words += [f"{option}={value}" for option, value in named.items() if value]
    if not size and not blocks:
        with suppress(KvoffdClientError), AdminClient(local_directory(directory), POOL_ANSWER_S) as admin:
            words.append(f"--pool={admin.stats().pool.size_bytes}")
    words += ["--json"] if json else []
    words += ["--", str(file)]
    status = subprocess.run(words, check=False).returncode
    if status < 0:
        print_status()  # what it showed last
        memory = ", as the kernel does when memory runs out; give smaller sizes or a part" * (status == -signal.SIGKILL)
        raise CliError(f"The replay was killed by signal {-status}{memory}.")
    return status
