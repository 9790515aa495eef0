"""vLLM's OpenAI server in a process that is forked from one that has imported vLLM; ``server_main`` begins anew."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence

from . import engine_main, runner_v2


def serve(flags: Sequence[str], environ: Mapping[str, str], log: str) -> int:
    """Be the server's process, in a session of its own."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for output in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), output)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [runner_v2.SERVER, *flags]
    engine_main.fork_workers()
    engine_main.without_tiles()
    runpy.run_module(runner_v2.SERVER, run_name="__main__")
    return 0
