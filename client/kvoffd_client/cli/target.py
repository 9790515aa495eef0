"""Which daemon and which namespace a command is for, and the options that say so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from kvoffd_client.admin_client import MIN_PREFIX_DIGITS, AdminClient
from kvoffd_proto.paths import default_directory
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


def parse_option(option: str, text: str, parse: Callable[[str], T]) -> T:
    """What an option was given, such as ``20GiB`` or ``1h``. Raises CliError."""
    try:
        return parse(text)
    except UnitError as error:
        raise CliError(f"{option}: {error}.") from None


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
