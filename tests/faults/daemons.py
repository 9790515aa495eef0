"""Daemons over a disk, and the command line, for tests of faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import books

Command = Callable[..., tuple[int, str]]
"""``command(daemon, "health")``: the exit status, and all that ``kvoffd-cli`` printed. A fixture."""


def over_disk(place: Path, pool_size: str = "16MiB", size: str = "32MiB", **flags: str) -> DaemonProcess:
    """A daemon with a disk that takes every block."""
    return DaemonProcess(pool_size, disk=f"{place}={size}", disk_write="always", **flags)


def wait_serving(daemon: DaemonProcess) -> None:
    """Until the disk serves."""
    wait_until(lambda: books(daemon.directory).disks[0].state == "serving", explain=lambda: daemon.log)


def wait_written(daemon: DaemonProcess, blocks: int) -> None:
    """Until so many blocks are on the disk, since the daemon's start."""
    wait_until(lambda: books(daemon.directory).tiers.demoted_blocks >= blocks, explain=lambda: daemon.log)
