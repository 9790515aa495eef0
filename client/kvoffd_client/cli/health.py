"""``kvoffd-cli health``: what it says, and a short way to it for probes, which run it every few seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvoffd_client.admin_client import ask_health
from kvoffd_proto.admin import HealthLevel, HealthReply
from kvoffd_proto.paths import default_directory
from kvoffd_proto.units import printable

STATUS = {HealthLevel.OK: 0, HealthLevel.DEGRADED: 1, HealthLevel.DOWN: 2}
"""Exit status without an option; 2 also where no daemon answers."""
WORDS = {
    HealthLevel.OK: "ok: the daemon takes sessions and jobs",
    HealthLevel.DEGRADED: "degraded: the daemon takes sessions and jobs, and needs attention",
    HealthLevel.DOWN: "down: the daemon takes no sessions and jobs",
}


def health_lines(reply: HealthReply) -> Iterator[str]:
    yield WORDS[reply.level]
    yield from (f"- {printable(cause.reason)}: {printable(cause.sentence)}" for cause in reply.causes)


def health_status(reply: HealthReply, *, live: bool, ready: bool) -> int:
    """The exit status: with ``live`` 0 in any case, since the daemon answers; with ``ready`` 0 while it serves."""
    return 0 if live or (ready and reply.ready) else STATUS[reply.level]


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
