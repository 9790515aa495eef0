"""``kvoffd-cli health``: what it says, and a short way to it for probes, which run it every few seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvoffd_client.cli.text import printable
from kvoffd_client.health_request import ask_health
from kvoffd_proto.messages import HealthReply
from kvoffd_proto.sockets import default_directory

UNHEALTHY = 1


def health_lines(reply: HealthReply) -> Iterator[str]:
    """What people read."""
    if reply.healthy and reply.ready:
        yield "healthy: the daemon takes sessions and jobs"
    else:
        yield "not ready yet" if reply.healthy else "unhealthy"
    yield from (f"- {printable(problem)}" for problem in reply.problems)


def health_status(reply: HealthReply, *, live: bool, ready: bool) -> int:
    """The exit status: with ``live`` 0 in any case, since the daemon answers; with ``ready`` 0 while it serves."""
    good = live or (reply.ready and (ready or reply.healthy))
    return 0 if good else UNHEALTHY


def quick_health(arguments: Sequence[str]) -> int | None:
    """Do ``health`` and return its exit status; None, with nothing done, for what needs the whole command line.

    That is another command, an option but --live, --ready and --directory, or a daemon that does not answer at once.
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
    reply = ask_health(default_directory() if directory is None else Path(directory))
    if reply is None:
        return None
    sys.stdout.write("".join(f"{line}\n" for line in health_lines(reply)))
    sys.stdout.flush()
    return health_status(reply, live="--live" in flags, ready="--ready" in flags)
