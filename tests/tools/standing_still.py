"""Runs a command as a shared machine would: ``python -m tests.tools.standing_still --still 0.35 -- pytest tests``.

* ``--still 0.35`` freezes the command and all its children for 0.35 s of each second, as where a host takes the cores
  away. Clocks continue.
* ``--cores 0.5`` gives them half a core.
* ``--busy 4`` runs four busy loops next to them.

The first two need control groups that this user may write: root's of a machine, or of a container that has its own.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

MOUNTS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
"""The kernel's usual period of a share of the cores."""


class Control(NamedTuple):
    """A group that limits or freezes what is in it: its directory, the file to write, and what to write there."""

    group: Path
    file: str
    on: str
    off: str = ""

    def write(self, value: str) -> None:
        (self.group / self.file).write_text(value)

    def enter(self, pid: int) -> None:
        (self.group / "cgroup.procs").write_text(str(pid))


def freezer(name: str) -> Control:
    """The file that freezes a group, of control groups v1 or v2."""
    if (MOUNTS / "freezer").is_dir():
        return Control(MOUNTS / "freezer" / name, "freezer.state", "FROZEN", "THAWED")
    return Control(MOUNTS / name, "cgroup.freeze", "1", "0")


def quota(name: str, cores: float) -> Control:
    """The file that limits a group's share of the cores, of control groups v1 or v2."""
    quota_us = round(cores * PERIOD_US)
    if (MOUNTS / "cpu").is_dir():
        return Control(MOUNTS / "cpu" / name, "cpu.cfs_quota_us", f"{quota_us}")
    return Control(MOUNTS / name, "cpu.max", f"{quota_us} {PERIOD_US}")


@contextmanager
def entered(control: Control) -> Iterator[Control]:
    """Make the group and remove it at the end; what is in it then goes back to the group above it."""
    control.group.mkdir(exist_ok=True)
    try:
        yield control
    finally:
        if control.off:
            control.write(control.off)
        if control.group.is_dir():  # in v2 one group does both
            for pid in (control.group / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):  # it has just ended
                    (control.group.parent / "cgroup.procs").write_text(pid)
            control.group.rmdir()


@contextmanager
def frozen_at_times(control: Control, still_s: float) -> Iterator[None]:
    """Freeze the group for ``still_s`` of each second."""
    end = threading.Event()

    def work() -> None:
        while not end.wait(1.0 - still_s):
            control.write(control.on)
            end.wait(still_s)
            control.write(control.off)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep ``count`` processes computing; they end with this one, if it is killed too."""
    loop = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
    loops = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


def run(command: Sequence[str], controls: Sequence[Control], still_s: float) -> int:
    """Run the command in these groups and return its status, negative for a signal."""
    for control in controls:
        control.enter(os.getpid())
    try:
        process = subprocess.Popen(command)
    finally:
        for control in controls:
            (control.group.parent / "cgroup.procs").write_text(str(os.getpid()))
    # Ctrl-C reaches the command as well, which says how it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    with frozen_at_times(controls[-1], still_s) if still_s else nullcontext():
        return process.wait()


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its status, or 2 where this machine has no such groups."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.standing_still",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--still", type=float, default=0.0, metavar="S", help="seconds of each second without progress")
    parser.add_argument("--cores", type=float, default=0.0, metavar="N", help="cores that the command has, such as 0.5")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="busy loops next to it")
    parser.add_argument("command", nargs="+", help="the command, after --")
    given = parser.parse_args(arguments)
    if not 0.0 <= given.still < 1.0 or given.cores < 0.0 or given.busy < 0:
        parser.error("--still is from 0 to less than 1, --cores and --busy are not negative")
    name = f"standing-still-{os.getpid()}"
    with ExitStack() as stack:
        controls = []
        try:
            if given.cores:
                controls.append(stack.enter_context(entered(quota(name, given.cores))))
                controls[-1].write(controls[-1].on)
            if given.still:
                controls.append(stack.enter_context(entered(freezer(name))))
        except OSError as error:
            print(f"This machine lets you make no such control group: {error}", file=sys.stderr)
            return 2
        stack.enter_context(busy_loops(given.busy))
        return run(given.command, controls, given.still)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
