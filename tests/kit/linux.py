"""What a test does to the machine below a daemon: file systems of its own.

All of it needs root. Where the kernel lacks something the test is skipped, or fails, as ``tests.kit.require`` says.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .require import missing, require


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
        """Every write waits until the end."""
        run("fsfreeze", "-f", self.place)
        try:
            yield
        finally:
            subprocess.run(["fsfreeze", "-u", self.place], check=False)
