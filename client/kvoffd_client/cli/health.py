"""``kvoffd-cli health``, and a fast path for probes, which run it every few seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from getopt import GetoptError, getopt
from pathlib import Path
from typing import TextIO

from kvoffd_client.health_request import Causes, ask_health
from kvoffd_proto.paths import default_directory

STATUS = {"ok": 0, "degraded": 1, "down": 2}
"""Exit status without an option; 2 also if no daemon answers."""
WORDS = {
    "ok": "ok: the daemon accepts sessions and jobs",
    "degraded": "degraded: the daemon accepts sessions and jobs, but needs attention",
    "down": "down: the daemon accepts no sessions and jobs",
}
ANSWER_S = 9.0
"""Time limit of the second attempt, with a session, after the one second of the first."""


def ask(directory: Path | None, url: str) -> tuple[str, Causes] | str:
    """Return a daemon's level and causes, or a sentence that says why it did not answer."""
    directory = directory or default_directory()
    if not url and (found := ask_health(directory)) is not None:
        return found
    from kvoffd_client.admin_client import AdminClient, read_stats
    from kvoffd_client.errors import KvoffdClientError
    from kvoffd_proto.admin import Health

    try:
        if url:
            stats = read_stats(url)
            return str(stats.health), [(cause.reason, cause.sentence) for cause in stats.health_problems]
        with AdminClient(directory, ANSWER_S) as admin:
            reply = admin.ask(Health)
    except KvoffdClientError as error:
        return str(error)
    return str(reply.level), [(cause.reason, cause.sentence) for cause in reply.causes]


def tell_health(directory: Path | None, url: str, *, live: bool, ready: bool, as_json: bool) -> int:
    """Print a daemon's health; return the exit status.

    ``live``: 0 if the daemon answers, or starts; ``ready``: 0 if it accepts sessions and jobs.
    """
    found = ask(directory, url)
    if isinstance(found, str):
        print(fitted(f"kvoffd-cli: {found}", sys.stderr), file=sys.stderr)
        from kvoffd_client.errors import is_starting

        return 0 if live and not url and is_starting(directory or default_directory()) else STATUS["down"]
    level, causes = found
    if as_json:
        import json

        named = [{"reason": reason, "sentence": sentence} for reason, sentence in causes]
        lines = [json.dumps({"level": level, "causes": named})]
    else:
        lines = [WORDS[level]]
        for cause in causes:
            from kvoffd_proto.units import printable

            lines.append(fitted("- " + ": ".join(map(printable, cause)), sys.stdout, "  "))
    print("\n".join(lines), flush=True)
    return 0 if live or (ready and level != "down") else STATUS[level]


def fitted(text: str, stream: TextIO, indent: str = "") -> str:
    """Return a sentence wrapped to the width of the terminal; unchanged for other streams."""
    width = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    if not width:
        return text
    from textwrap import fill

    return fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def quick_health(arguments: Sequence[str]) -> int | None:
    """Run ``health`` with these options and return its exit status; do nothing and return None for other arguments.

    The full command line, with --help and errors about options, takes four times as long to import.
    """
    try:
        options, rest = getopt(list(arguments), "", ["live", "ready", "json", "directory=", "url="])
    except GetoptError:
        return None
    given = dict(options)
    excluding = {"--live", "--ready"} <= given.keys() or {"--directory", "--url"} <= given.keys()
    is_empty, is_repeated = "" in (given.get("--directory"), given.get("--url")), len(given) < len(options)
    if rest or excluding or is_empty or is_repeated:
        return None
    directory = Path(given["--directory"]) if "--directory" in given else None
    chosen = {name: f"--{name}" in given for name in ("live", "ready")}
    return tell_health(directory, given.get("--url", ""), **chosen, as_json="--json" in given)
