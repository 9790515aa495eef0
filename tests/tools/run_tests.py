"""Run every test that needs no GPU, ``make test``: ``python -m tests.tools.run_tests MARKS [ARGUMENT OF PYTEST...]``.

First come those that need no vLLM, side by side. Then two rows run at the same time, so that both CPUs are busy. In
each the engines run one after the other; the second has the connector's tests before them, and its output comes at the
end.

vLLM takes 12 seconds of a CPU to be imported, and three times that the first time, when it is compiled. It is imported
once, beside the first tests, and both rows are forked from the process that has it, as their engines are. The second
row alone has engines of the second model runner, for which vLLM is imported once more.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tests.kit.fork_servers import server_with_vllm
from tests.kit.forked import Forked

TESTS = Path(__file__).resolve().parents[1]
VLLM = TESTS / "vllm"
WITHOUT_VLLM = "not vllm and not engine"
ROWS = "engine and not concurrent", "vllm and (not engine or concurrent)"
RUNNERS = False, True
# Two for a CPU: a test waits for its daemons now and then.
SIDE_BY_SIDE = "-n", str(min(2 * len(os.sched_getaffinity(0)), 6)), "--dist", "loadfile", "--no-loadscope-reorder"
NONE_SELECTED = 5
"""pytest's status where no test is selected."""


def files_of(arguments: Sequence[str]) -> list[Path]:
    """The files of tests that these arguments of pytest name; all where they name none."""
    named = {path.resolve() for path in (Path(each.partition("::")[0]) for each in arguments) if path.exists()}
    return [file for file in TESTS.rglob("test_*.py") if not named or named & {file, *file.parents}]


def run_row(arguments: list[str], environ: dict[str, str], servers: list[dict[str, Any]]) -> int:
    """Be a row's process: pytest, where vLLM is imported already."""
    import pytest

    out, err, *alive_fds = forkserver.get_inherited_fds()
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.environ.clear()
    os.environ.update(environ)
    for v2, lent, alive_fd in zip(RUNNERS, servers, alive_fds, strict=False):
        server_with_vllm(v2=v2).borrow(lent, alive_fd)
    # vLLM imports a plugin of pytest, whose assertions cannot be rewritten any more.
    status = pytest.main([*arguments, "-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"])
    sys.stdout.flush()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()  # pytest removes its directories there
    return int(status)


def lend_once_imported(v2: bool) -> tuple[dict[str, Any], int]:
    """``VllmServer.lend``, when it has imported vLLM: the next one finds what this one has compiled."""
    server = server_with_vllm(v2=v2)
    lent = server.lend()
    statuses_of(Forked(server, int))
    return lent


def statuses_of(*processes: subprocess.Popen[bytes] | Forked) -> list[int]:
    try:
        return [one.wait() for one in processes]
    except KeyboardInterrupt:  # which they get, too
        for one in processes:
            one.wait()
        raise


def run(marks: str, arguments: Sequence[str]) -> bool:
    """Run the tests that ``arguments`` select, and return whether none failed."""
    files = {file: file.read_text() for file in files_of(arguments)}
    runners: tuple[bool, ...] = ()
    if any("mark.engine" in text or file.parent == VLLM for file, text in files.items()):
        runners = RUNNERS[: 1 + any("mark.concurrent" in text for text in files.values())]
    first = []
    if any(file.parent != VLLM for file in files):  # pytest imports what is named, whatever is selected of it
        command = [sys.executable, "-m", "pytest", *SIDE_BY_SIDE, "-m", f"{WITHOUT_VLLM} and {marks}", *arguments]
        first = [subprocess.Popen(command)]
    lent = [lend_once_imported(v2) for v2 in runners]
    statuses = statuses_of(*first)
    if lent:
        given, alive_fds = zip(*lent, strict=True)
        with tempfile.TemporaryFile("w+") as second:
            rows = [
                Forked(
                    server_with_vllm(v2=False),
                    run_row,
                    ["-m", f"{row} and {marks}", *arguments],
                    dict(os.environ),
                    list(given),
                    fds=(*outputs, *alive_fds),
                )
                for row, outputs in zip(ROWS, ((1, 2), (second.fileno(), second.fileno())), strict=True)
            ]
            statuses += statuses_of(*rows)
            second.seek(0)
            sys.stdout.write(second.read())
    return all(status in (0, NONE_SELECTED) for status in statuses)


if __name__ == "__main__":
    # By its name: a process that is forked finds no function of a main module.
    from tests.tools import run_tests

    try:
        sys.exit(not run_tests.run(sys.argv[1], sys.argv[2:]))
    except KeyboardInterrupt:
        sys.exit(1)
