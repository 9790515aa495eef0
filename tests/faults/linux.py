"""What a test does to the machine below a daemon: file systems of its own, and groups of processes with limits.

All of it needs root. Where the kernel lacks something the test is skipped, or fails, as ``tests.kit.require`` says.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kit.require import missing, require
from tests.kit.waiting import wait_until

CGROUPS = Path("/sys/fs/cgroup")


def run(*command: str | Path) -> str:
    """Run a program; its output. Skips the test where it is not there or fails."""
    require("root", os.geteuid() == 0, f"{command[0]} needs root")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        missing("root", f"there is no {command[0]}")
    if done.returncode:
        missing("root", f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def tmpfs(place: Path, size: str) -> Iterator[Path]:
    """A file system in memory at ``place``, which is made."""
    place.mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", f"size={size}", "none", place)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=False)


class Ext4:
    """An ext4 of its own over a file, mounted at ``place``. An error in it makes it read-only, as most systems do."""

    def __init__(self, image: Path, place: Path, size_mib: int) -> None:
        self.image, self.place = image, place
        with image.open("wb") as file:
            file.truncate(size_mib << 20)
        place.mkdir(exist_ok=True)

    def __enter__(self) -> Ext4:
        run("mkfs.ext4", "-q", "-O", "^has_journal", self.image)
        self.mount()
        return self

    def __exit__(self, *error: object) -> None:
        self.unmount()

    def mount(self) -> None:
        run("mount", "-o", "loop,errors=remount-ro", self.image, self.place)

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", self.place], check=False, capture_output=True)

    def fail(self) -> None:
        """The file system finds an error in itself: from now on nothing can be written."""
        device = Path(run("findmnt", "-no", "SOURCE", self.place).strip()).name
        trigger = Path("/sys/fs/ext4", device, "trigger_fs_error")
        require("root", trigger.exists(), "this kernel has no trigger_fs_error")
        trigger.write_text("x")

    def mend(self) -> None:
        """Unmount, check and mount again. Nobody may have a file open in it."""
        run("umount", self.place)
        subprocess.run(["e2fsck", "-fy", self.image], capture_output=True, check=False)
        self.mount()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Every write waits meanwhile."""
        run("fsfreeze", "-f", self.place)
        try:
            yield
        finally:
            subprocess.run(["fsfreeze", "-u", self.place], check=False)


class Cgroup:
    """A group of processes with limits. Made by ``cgroup``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def command(self) -> list[str]:
        """What comes before a command that shall run in the group."""
        return ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs; exec "$@"', "sh"]

    def take(self, pid: int) -> None:
        """Move a process into the group."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def release(self, pid: int) -> None:
        """Move a process out of the group."""
        (self.path.parent / "cgroup.procs").write_text(str(pid))


@contextmanager
def cgroup(name: str, controller: str, limits: dict[str, str]) -> Iterator[Cgroup]:
    """A group with limits, of version 1 or 2 of cgroups. It must be empty at the end.

    Args:
        controller: ``memory`` or ``cpu``.
        limits: files to write, such as ``{"cpu.max": "3000 100000"}``; those that are not there are left out, but one
            has to be.
    """
    require("root", os.geteuid() == 0, "control groups need root")
    above = CGROUPS if (CGROUPS / "cgroup.controllers").exists() else CGROUPS / controller
    require("root", above.is_dir(), f"there is no cgroup controller {controller}")
    group = above / f"kvoffd-test-{os.getpid()}-{name}"
    group.mkdir()
    try:
        there = {file: value for file, value in limits.items() if (group / file).exists()}
        require("root", there, f"the cgroup controller {controller} is not ours")
        for file, value in there.items():
            (group / file).write_text(value)
        yield Cgroup(group)
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
