"""File systems and cgroups of a test's own.

They need root. Where the kernel lacks something the test is skipped, or fails, as ``tests.kit.require`` says.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .require import missing, require
from .waiting import wait_until


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


class Cgroup:
    """A cgroup, of version 1 or 2, of one controller: ``memory``, or ``hugetlb`` for pages of 2 MiB."""

    def __init__(self, path: Path, controller: str) -> None:
        self.path = path
        base = {"memory": "memory", "hugetlb": "hugetlb.2MB"}[controller]
        old, new = (f"{base}.limit_in_bytes", f"{base}.usage_in_bytes"), (f"{base}.max", f"{base}.current")
        self._limit, self._used = old if (path / old[0]).exists() else new
        self._controller = controller

    @property
    def used_bytes(self) -> int:
        return int((self.path / self._used).read_text())

    def limit(self, size_bytes: int) -> None:
        (self.path / self._limit).write_text(str(size_bytes))

    @contextmanager
    def below(self) -> Iterator[Cgroup]:
        """Yield a new one below this one, as of one container of a pod."""
        control = self.path / "cgroup.subtree_control"
        if control.exists():
            control.write_text(f"+{self._controller}")
        path = Path(tempfile.mkdtemp(prefix="kvoffd-test-", dir=self.path))
        try:
            yield Cgroup(path, self._controller)
        finally:
            wait_until(lambda: _removed(path), 10.0)

    @property
    def enter(self) -> tuple[str, ...]:
        """A command that runs what follows it in the cgroup."""
        return "sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh"


@contextmanager
def cgroup(controller: str) -> Iterator[Cgroup]:
    """A cgroup below the root of this controller; skips the test where there is none that can be made."""
    require("root", os.geteuid() == 0, "cgroups need root")
    with tempfile.TemporaryDirectory() as name:
        root, mounted = Path("/sys/fs/cgroup", controller), False
        if not root.is_dir():
            root = Path("/sys/fs/cgroup")
            controllers = root / "cgroup.controllers"
            if not controllers.exists() or controller not in controllers.read_text().split():
                command = ["mount", "-t", "cgroup", "-o", controller, "none", name]
                mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
                if not mounted:
                    pytest.skip(f"the kernel has no cgroups for {controller}")
                root = Path(name)
        try:
            with Cgroup(root, controller).below() as found:
                yield found
        except OSError as error:
            pytest.skip(f"no cgroup can be made below {root}: {error}")
        finally:
            if mounted:
                subprocess.run(["umount", "-l", name], check=False)


def _removed(path: Path) -> bool:
    """Remove a cgroup once its last process has gone."""
    try:
        path.rmdir()
    except OSError:
        return False
    return True
