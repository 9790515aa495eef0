"""What stores and loads of the pool lose while the disk writes: ``python -m tests.tools.disk_cost DIRECTORY``.

Two daemons, one with a disk in DIRECTORY that takes every block, are used in turn by engines of the same shape. Before
the measured stores and loads of the one with the disk so much is stored that it writes all the while; what it wrote
meanwhile is printed too. Says the least and the median of the times of both, and their ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

from kvoffd_client import AdminClient
from kvoffd_client.bench.copy_bench import CopyJobs
from kvoffd_client.bench.synthetic_engine import SyntheticEngine
from tests.support.daemon import DaemonProcess

MIB = 2**20
LAYERS = 16
PIECE = 64 * 1024
KEYS = 32
BEFORE = 8
"""Stores that give the disk something to write before the measured ones."""
MEASURED = 4


def wait_idle(admin: AdminClient) -> None:
    """Wait until the disk has written everything."""
    while True:
        stats = admin.stats()
        busy = sum(disk.queued_writes + disk.running_writes for disk in stats.disks)
        if not busy and (stats.below is None or not stats.below.waiting_writes):
            return
        time.sleep(0.05)


class Side:
    """One daemon with its engine."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self.engine = SyntheticEngine(daemon.directory, "disk cost", LAYERS, 2 * KEYS, PIECE)
        self.engine.__enter__()
        self.copies = CopyJobs(self.engine, KEYS, 1)
        self.admin = AdminClient(daemon.directory)
        self.stores: list[float] = []
        self.loads: list[float] = []
        self.written_bytes = 0
        self.seconds = 0.0

    def measure(self, measured: bool) -> None:
        """A burst of stores to keep the disk busy, and then the measured ones."""
        for _ in range(BEFORE):
            self.copies.store()
        begin, before = time.monotonic(), self._written()
        for _ in range(MEASURED):
            store, load = self.copies.store(), self.copies.load()
            if measured:
                self.stores.append(store)
                self.loads.append(load)
        if measured:
            self.written_bytes += self._written() - before
            self.seconds += time.monotonic() - begin
        wait_idle(self.admin)

    def _written(self) -> int:
        return sum(disk.written_bytes for disk in self.admin.stats().disks)

    def close(self) -> None:
        self.admin.close()
        self.engine.__exit__(None, None, None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--write", default="always", help="the setting disk_write; never shows what noise there is")
    given = parser.parse_args()
    disk = {"disk": f"{given.directory}=4GiB", "disk_write": given.write}
    with DaemonProcess("512MiB") as without_disk, DaemonProcess("512MiB", **disk) as with_disk:
        without, having = Side(without_disk), Side(with_disk)
        try:
            while not any(one.state == "serving" for one in having.admin.stats().disks):
                time.sleep(0.05)
            for number in range(given.rounds + 1):
                for side in (without, having) if number % 2 else (having, without):
                    side.measure(measured=number > 0)
            tell(without, having)
        finally:
            without.close()
            having.close()
    return 0


def tell(without: Side, having: Side) -> None:
    """Print what was found."""
    nbytes = KEYS * LAYERS * PIECE
    print(f"{nbytes // MIB} MiB a copy, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    speed = having.written_bytes / having.seconds / 1e6
    print(f"meanwhile the disk wrote {having.written_bytes // MIB} MiB, {speed:.0f} MB/s")
    for name, before, after in (("store", without.stores, having.stores), ("load", without.loads, having.loads)):
        for kind, value in (("least", min), ("median", statistics.median)):
            plain, writing = value(before), value(after)
            speeds = [nbytes / seconds / 1e9 for seconds in (plain, writing)]
            print("{}, {}: {:.2f} GB/s without a disk, {:.2f} while it writes".format(name, kind, *speeds), end="")
            print(f": {plain / writing:.3f}")


if __name__ == "__main__":
    sys.exit(main())
