"""What leaves the command line as text: names that cannot move the cursor, on terminals of any encoding."""

from __future__ import annotations

import codecs
import os
import sys
from io import TextIOWrapper

PLAIN = {"µ": "u", "…": ".", "█": "#", "▒": "+", "░": ".", "━": "-", "╸": "-", "╺": "-"}
"""What stands for a character where the locale has no such."""


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
