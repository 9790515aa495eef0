"""Ctrl-C while a program is still being loaded."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence


def interrupted_import(arguments: Sequence[str], module: str, deadline_s: float) -> tuple[int, list[str]]:
    """Run Python with these arguments and interrupt it once it has imported a module; return its exit status, and what
    it printed on stderr from then on."""
    command = [sys.executable, "-X", "importtime", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.split("|")[-1].strip() == module:
                process.send_signal(signal.SIGINT)
                break
        said = [line for line in process.stderr if not line.startswith("import time:")]
        return process.wait(deadline_s), said
