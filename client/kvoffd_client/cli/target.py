"""Which daemon and which namespace a command is for, and the options that say so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from kvoffd_client.admin_client import MIN_PREFIX_DIGITS, AdminClient, read_stats
from kvoffd_proto.paths import default_directory
from kvoffd_proto.stats import DaemonStats
from kvoffd_proto.units import UnitError

T = TypeVar("T")

OPERATOR_WAIT_S = 10.0
"""The machine may be busy, and an operator would rather wait than ask again."""
Directory = Annotated[
    Path | None,
    typer.Option(
        "--directory",
        metavar="DIRECTORY",
        readable=False,  # what is not for this user is said in a sentence of ours
        help="Directory of the daemon's sockets. [KVOFFD_DIRECTORY]",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")]
Url = Annotated[str, typer.Option("--url", metavar="URL", help="Ask http://NODE:9464, not this node's daemon.")]
NAMESPACE_HELP = f"A label, or the first digits ({MIN_PREFIX_DIGITS} or more) of a fingerprint."


class CliError(Exception):
    """The command cannot be done. The message is a sentence that says what to do next."""


def value_of(option: str, text: str, parse: Callable[[str], T]) -> T:
    """What an option was given, such as ``20GiB`` or ``1h``. Raises CliError."""
    try:
        return parse(text)
    except UnitError as error:
        raise CliError(f"{option}: {error}.") from None


def confirmed(question: str, done: str) -> bool:
    """Ask on stderr, so that stdout holds nothing but the result. Raises CliError where nobody can answer.

    ``done``: what would be done, a participle.
    """
    if not sys.stdin.isatty():
        raise CliError(f"Nothing was {done}, since there is no terminal to confirm it on; add --yes.")
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def local_directory(directory: Path | None) -> Path:
    """Return the directory of the daemon's sockets."""
    return directory or default_directory()


def open_admin(directory: Path | None) -> AdminClient:
    """Return a client of the daemon that the command line names. On a terminal it says when it waits."""
    admin = AdminClient(local_directory(directory), OPERATOR_WAIT_S)
    if sys.stderr.isatty():
        admin.on_silence = lambda: print(f"Waiting for the kvoffd daemon in {admin.directory} ...", file=sys.stderr)
    return admin


def check_names_one(directory: Path | None, url: str) -> None:
    """Raise CliError where the command line names two daemons."""
    if url and directory is not None:
        raise CliError("--url and --directory name two daemons; give one of them.")


def read_statistics(directory: Path | None, url: str) -> DaemonStats:
    """The statistics of the daemon that the command line names: over its sockets, or over HTTP from anywhere."""
    check_names_one(directory, url)
    if url:
        return read_stats(url)
    with open_admin(directory) as admin:
        return admin.stats()
