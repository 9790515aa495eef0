"""The administrator's command line: ``kvoffd-cli``."""

from __future__ import annotations

import codecs
import gc
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

PLAIN = dict(zip("µ…█▒░▁▂▃▄▅▆▇", "u~#+.,:-=+*%", strict=True))
"""What stands for a character where the locale has no such."""
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``kvoffd-cli`` with ``arguments`` (the process's own where None); return the exit status.

    See ``app.run``. Probes run ``health`` every few seconds: it imports nothing of the rest.
    """
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:  # also while modules are imported
        return EXIT_INTERRUPTED


def _run(given: list[str]) -> int:
    open_closed_streams()
    write_any_locale()
    if given[:1] == ["health"]:
        gc.disable()  # while modules are imported it finds nothing, and takes a tenth of a probe's time
        try:
            from kvoffd_client.cli.health import quick_health

            status = quick_health(given[1:])
        except OSError:
            status = None  # nobody reads what it prints: see app.run
        finally:
            gc.enable()  # for a program that calls this
        if status is not None:
            return status
    from kvoffd_client.cli.app import run

    return run(given)


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(PLAIN.get(character, "?") for character in text), error.end


def open_closed_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr one that reads and writes nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - stays open to the process's end


def write_any_locale() -> None:
    """Let stdout and stderr write a plain character for each that the locale does not have.

    Python takes LC_ALL=C for UTF-8; who sets it wants ASCII.
    """
    codecs.register_error("kvoffd", _plain)
    encoding = "ascii" if os.environ.get("LC_ALL") in ("C", "POSIX") else None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding=encoding, errors="kvoffd")
