"""What the commands have in common on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kvoffd_client.cli.failure import CliError
from kvoffd_client.cli.target import Remote, Where
from kvoffd_proto.sockets import default_directory

Action = Callable[[], int]
Directory = Annotated[
    Path | None,
    typer.Option(
        "--directory",
        metavar="DIRECTORY",
        help="Where the daemon's sockets are. [default: $KVOFFD_DIRECTORY, else where the daemon puts them]",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: bytes and seconds as numbers, fingerprints in hex.")]


def where_of(context: typer.Context, directory: Path | None) -> Where:
    """The daemon that is meant."""
    far: Remote | None = context.obj
    if far is None:
        return default_directory() if directory is None else directory
    if directory is not None:
        raise CliError("--address and --directory name two daemons; give one of them.")
    return far


def near_of(context: typer.Context, directory: Path | None) -> Path:
    """The same for commands that need the daemon's sockets."""
    where = where_of(context, directory)
    if not isinstance(where, Path):
        raise CliError(f"{context.command_path} needs the daemon's sockets; run it on the daemon's own machine.")
    return where
