"""``kvoffd-cli health``: what it says, and a short way to it for probes, which run it every few seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvoffd_client.admin_client import AdminClient, read_stats
from kvoffd_client.errors import KvoffdClientError
from kvoffd_proto.admin import HealthLevel, HealthProblem, HealthReply
from kvoffd_proto.paths import default_directory
from kvoffd_proto.units import printable

STATUS = {HealthLevel.OK: 0, HealthLevel.DEGRADED: 1, HealthLevel.DOWN: 2}
"""Exit status without an option; 2 also where no daemon answers."""
WORDS = {
    HealthLevel.OK: "ok: the daemon takes sessions and jobs",
    HealthLevel.DEGRADED: "degraded: the daemon takes sessions and jobs, and needs attention",
    HealthLevel.DOWN: "down: the daemon takes no sessions and jobs",
}
ANSWER_S = 9.0
"""Beside the second in which the daemon is asked without a session."""


def show_health(
    directory: Path, *, live: bool, ready: bool, url: str = "", show: Callable[[HealthReply], object] | None = None
) -> int:
    """Print a daemon's health, or ``show`` it, and return the exit status. Raises KvoffdClientError.

    ``live``: 0 in any case, since the daemon answers; ``ready``: 0 while it serves. ``url``: ask there.
    """
    if url:
        stats = read_stats(url)
        causes = [HealthProblem(one.reason, one.sentence) for one in stats.health_problems]
        reply = HealthReply(0, stats.health, causes)
    else:
        with AdminClient(directory, ANSWER_S) as admin:
            reply = admin.health()
    if show is not None:
        show(reply)
    else:
        lines = [f"- {printable(cause.reason)}: {printable(cause.sentence)}" for cause in reply.causes]
        sys.stdout.write("\n".join([WORDS[reply.level], *lines, ""]))
        sys.stdout.flush()
    return 0 if live or (ready and reply.ready) else STATUS[reply.level]


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
    where = default_directory() if directory is None else Path(directory)
    try:
        return show_health(where, live="--live" in flags, ready="--ready" in flags)
    except KvoffdClientError as error:
        print(f"kvoffd-cli: {error}", file=sys.stderr)
        return 2
