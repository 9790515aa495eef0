"""Options of commands that select the daemon and the namespace."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from kvoffd_client.admin_client import MIN_PREFIX_DIGITS, AdminClient
from kvoffd_proto.messages import BENCH_LABEL, EVICTING_LABEL
from kvoffd_proto.paths import default_directory
from kvoffd_proto.units import UnitError, format_size

if TYPE_CHECKING:
    from kvoffd_client.fake_engine import FakeEngine  # slow to import

T = TypeVar("T")
TEST_WAIT_S = 30.0

Directory = Annotated[
    Path | None,
    typer.Option(
        "--directory",
        metavar="DIRECTORY",
        readable=False,  # errors of access get a sentence of ours
        help="Directory of the daemon's sockets. [KVOFFD_DIRECTORY]",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")]
PlainJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
"""The same where it has neither sizes nor durations."""
Url = Annotated[str, typer.Option("--url", metavar="URL", help="Ask http://NODE:9464, not this node's daemon.")]
Evict = Annotated[bool, typer.Option("--evict", help="Evict blocks of engines if the pool is full.")]
NAMESPACE_HELP = f"A label, or the first digits ({MIN_PREFIX_DIGITS} or more) of a fingerprint."


class CliError(Exception):
    """A command failed. The message says what to do next."""


def parse_option(option: str, text: str, parse: Callable[[str], T]) -> T:
    """Return the parsed value of an option, such as ``20GiB`` or ``1h``. Raises CliError."""
    try:
        return parse(text)
    except UnitError as error:
        raise CliError(f"{option}: {error}.") from None


def local_directory(directory: Path | None) -> Path:
    """Return the directory of the daemon's sockets."""
    return directory or default_directory()


def open_admin(directory: Path | None, *, subscribe_events: bool = False) -> AdminClient:
    """Return a client of the selected daemon. On a terminal it reports waiting."""
    admin = AdminClient(local_directory(directory), subscribe_events=subscribe_events)
    if sys.stderr.isatty():
        admin.on_silence = lambda: print(f"Waiting for the kvoffd daemon in {admin.directory} ...", file=sys.stderr)
    return admin


@contextmanager
def bench_engine(
    directory: Path, command: str, evicts: bool, layers: int, blocks: int, page_bytes: int
) -> Iterator[FakeEngine]:
    """Yield an engine in a new namespace, which is reset at the end. By its label the daemon knows what it may do."""
    from kvoffd_client.fake_engine import FakeEngine
    from kvoffd_client.namespace import NamespaceSpec
    from kvoffd_client.session import ClientOptions

    label = (EVICTING_LABEL if evicts else BENCH_LABEL) + command.split()[-1].lstrip("-")
    namespace = NamespaceSpec.named(label, layers=layers, page_bytes=page_bytes, process=os.getpid())
    shape, options = (1, layers, blocks, page_bytes), ClientOptions(request_timeout_s=TEST_WAIT_S)
    with FakeEngine(directory, namespace, *shape, options=options, name=f"kvoffd-cli {command}") as engine:
        try:
            yield engine
        finally:
            with AdminClient(directory) as admin:
                admin.clear(namespace.fingerprint)


def announce(what: str, nbytes: int, free_bytes: int, *, evicts: bool) -> None:
    """Say on stderr how much of the pool a test takes, and whether it evicts blocks of engines. Raises CliError."""
    if free_bytes < nbytes and not evicts:
        raise CliError(
            f"The {what} was not run: it needs {format_size(nbytes)} of the pool, {format_size(free_bytes)} are free, "
            "and it evicts nothing unless --evict is given."
        )
    will = "may evict blocks of engines" if evicts else "evicts nothing"
    print(f"kvoffd-cli: The {what} takes {format_size(nbytes)} of the pool and {will}.", file=sys.stderr)


def check_one_daemon(directory: Path | None, url: str) -> None:
    """Raise CliError if the command line selects two daemons."""
    if url and directory is not None:
        raise CliError("--url and --directory exclude each other; give one of them.")
