"""``kvoffd-cli health``: what it says, and a short way to it for probes, which run it every few seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from kvoffd_client.health_request import ask_health
from kvoffd_proto.paths import default_directory

STATUS = {"ok": 0, "degraded": 1, "down": 2}
"""Exit status without an option; 2 also where no daemon answers."""
WORDS = {
    "ok": "ok: the daemon takes sessions and jobs",
    "degraded": "degraded: the daemon takes sessions and jobs, and needs attention",
    "down": "down: the daemon takes no sessions and jobs",
}
ANSWER_S = 9.0
"""Beside the second in which the daemon is asked without a session."""


def ask(directory: Path) -> tuple[str, list[tuple[str, str]]] | str:
    """A daemon's level, and reason and sentence of each cause; or why there is no answer, a sentence."""
    if (found := ask_health(directory)) is not None:
        return found.level, found.causes
    from kvoffd_client.admin_client import AdminClient
    from kvoffd_client.errors import KvoffdClientError
    from kvoffd_proto.admin import Health

    try:
        with AdminClient(directory, ANSWER_S) as admin:
            reply = admin.ask(Health)
    except KvoffdClientError as error:
        return str(error)
    return reply.level, [(cause.reason, cause.sentence) for cause in reply.causes]


def print_health(level: str, causes: Iterable[tuple[str, str]]) -> None:
    """Print a daemon's health, and reason and sentence of each cause."""
    lines = [WORDS[level]]
    for cause in causes:
        from kvoffd_proto.units import printable

        lines.append(fitted("- " + ": ".join(map(printable, cause)), sys.stdout, "  "))
    sys.stdout.write("\n".join([*lines, ""]))
    sys.stdout.flush()


def fitted(text: str, stream: TextIO, indent: str = "") -> str:
    """A sentence in lines that fit, where it goes to a terminal that tells its width."""
    width = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    if not width:
        return text
    from textwrap import fill

    return fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def status_of(level: str, *, live: bool, ready: bool) -> int:
    """The exit status. ``live``: 0 in any case, since the daemon answers; ``ready``: 0 while it serves."""
    return 0 if live or (ready and level != "down") else STATUS[level]


def quick_health(arguments: Sequence[str]) -> int | None:
    """Do ``health`` and return its exit status; None, with nothing done, for what needs the whole command line.

    That is another command, and an option but --live, --ready and --directory.
    """
    command, *options = arguments or [""]
    directory, flags = None, set()
    while options:
        option, *options = options
        if option == "--directory" and options and directory is None:
            directory, *options = options
        elif option in ("--live", "--ready"):
            flags.add(option)
        else:
            return None
    if command != "health" or len(flags) > 1:
        return None
    found = ask(default_directory() if directory is None else Path(directory))
    if isinstance(found, str):
        print(f"kvoffd-cli: {found}", file=sys.stderr)
        return STATUS["down"]
    print_health(*found)
    return status_of(found[0], live="--live" in flags, ready="--ready" in flags)
