"""The administrator's command line: ``kvoffd-cli``."""

from __future__ import annotations

import codecs
import gc
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

PLAIN = dict(zip("µ…█▒░▁▂▃▄▅▆▇", "u~#+.,:-=+*%", strict=True))
"""ASCII replacements of characters that the locale may lack."""
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``kvoffd-cli`` with ``arguments``, by default the process's own; return the exit status.

    See ``app.run``. ``health`` imports none of the rest, because probes run it every few seconds.
    """
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:  # also during imports
        return EXIT_INTERRUPTED


def _run(given: list[str]) -> int:
    open_closed_streams()
    write_any_locale()
    if given[:1] == ["health"]:
        gc.disable()  # useless during imports, and a tenth of a probe's time
        try:
            from kvoffd_client.cli.health import quick_health

            status = quick_health(given[1:])
        except OSError:
            status = None  # the output has no reader: see app.run
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
    """Replace missing stdin, stdout and stderr by /dev/null."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - stays open to the process's end


def write_any_locale() -> None:
    """Make stdout and stderr replace characters that the locale lacks.

    LC_ALL=C means ASCII here, although Python treats it as UTF-8.
    """
    codecs.register_error("kvoffd", _plain)
    encoding = "ascii" if os.environ.get("LC_ALL") in ("C", "POSIX") else None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding=encoding, errors="kvoffd")
