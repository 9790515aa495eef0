"""What an idle daemon takes of a core, beside a thread that only wakes: ``python -m tests.bench.idle``.

Other work on the host makes the same wake-ups cost up to three times as much: the bare thread shows how much.
"""

from __future__ import annotations

import time
from pathlib import Path

from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess

WATCHED_S, WAKES, TURNS = 4.0, 80, 5


def share_of_waking() -> float:
    """Wake ``WAKES`` times in ``WATCHED_S``; return the share of a core that this takes."""
    used, began = time.thread_time(), time.monotonic()
    for _ in range(WAKES):
        time.sleep(WATCHED_S / WAKES)
    return (time.thread_time() - used) / (time.monotonic() - began)


def cpu_s(pid: int) -> float:
    """Seconds that all threads of a process had a CPU."""
    tasks = Path("/proc", str(pid), "task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def main() -> None:
    """Print the shares of each turn."""
    with DaemonProcess() as daemon, FakeEngine(daemon.directory) as engine:
        engine.fill([0], seed=1)
        assert engine.store([bytes(32)], [0]).ok
        print("| turn | daemon, % of a core | a thread that wakes 20 times a second, % |\n|---|---|---|")
        for turn in range(1, TURNS + 1):
            before, began = cpu_s(daemon.pid), time.monotonic()
            bare = share_of_waking()
            share = (cpu_s(daemon.pid) - before) / (time.monotonic() - began)
            print(f"| {turn} | {100 * share:.2f} | {100 * bare:.2f} |", flush=True)


if __name__ == "__main__":
    main()
