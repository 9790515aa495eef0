"""What a pool's pages cost on memory in pieces: private memory, which has huge pages, beside shared memory.

``python -m tests.bench.pages`` first breaks the machine's free memory into pieces, as weeks of other processes do: it
takes most of it in small pages and gives back every second one. Then it starts, in turns, a daemon whose pool is
private (the default), and one whose pool is shared as for systemd, with the kernel's ``shmem_enabled`` as it is. Of
each it prints how long the daemon takes until it serves, which share of the pool is in huge pages, how much longer
reading the pool takes than reading memory in huge pages, and how fast ``kvoffd-cli bench copy`` copies. ``--whole``
leaves the memory whole.
"""

from __future__ import annotations

import argparse
import json
import mmap
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from math import inf
from pathlib import Path
from statistics import median
from typing import NamedTuple

from kvoffd_client import AdminClient
from kvoffd_proto.units import format_size, parse_size
from tests.bench.report_file import markdown_table, number, print_report, run_facts
from tests.kit.command import CLI
from tests.kit.daemon import DaemonProcess
from tests.kit.service_manager import ServiceManager

TITLE = "Pages of the pool on memory in pieces"
PAGE_BYTES = mmap.PAGESIZE
LEFT_BYTES = 2 << 30
"""Memory that stays whole besides what the daemons need: the rest of the machine runs in it."""
KINDS = "private", "shared"
MADV_DONTNEED = 4


class Found(NamedTuple):
    """What one daemon did.

    Attributes:
        start_s: from its start until it serves.
        huge_share: share of its pool in huge pages.
        slowdown: time to read the pool in that of memory in huge pages, as the daemon measured it; 0 if it did not.
        speeds: GB/s of ``bench copy``, by case.
    """

    start_s: float
    huge_share: float
    slowdown: float
    speeds: dict[str, float]


@contextmanager
def pieces(kept_bytes: int) -> Iterator[int]:
    """Hold every second page of the machine's free memory but ``kept_bytes``; yield how many bytes are held.

    As many bytes as are held are free between them.
    """
    nbytes = (available_bytes() - kept_bytes - LEFT_BYTES) // (2 * PAGE_BYTES) * 2 * PAGE_BYTES
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for at in range(0, nbytes, PAGE_BYTES):
            memory[at] = 1
        for at in range(0, nbytes, 2 * PAGE_BYTES):
            memory.madvise(MADV_DONTNEED, at, PAGE_BYTES)
        yield nbytes // 2


def available_bytes() -> int:
    (line,) = [one for one in Path("/proc/meminfo").read_text().splitlines() if one.startswith("MemAvailable:")]
    return int(line.split()[1]) * 1024


def measure(kind: str, pool_size: str) -> Found:
    """Start a daemon of one kind, and copy with it."""
    with closing(ServiceManager()) as manager:
        daemon = DaemonProcess(pool_size, manager=manager if kind == "shared" else None, fork=False)
        began = time.monotonic()
        with daemon:
            start_s = time.monotonic() - began
            with AdminClient(daemon.directory) as admin:
                pool = admin.stats().pool
            assert pool.memory == kind
            bench = [CLI, "bench", "copy", "--json", "--directory", str(daemon.directory)]
            said = subprocess.run(bench, check=True, stdout=subprocess.PIPE).stdout
    speeds = {one["case"]: float(one["value"]) for one in json.loads(said)["results"]}
    return Found(start_s, pool.huge_page_bytes / pool.size_bytes, pool.page_slowdown, speeds)


def table(turns: list[dict[str, Found]]) -> str:
    """Return the table: a row for each figure, the median and all turns of each kind."""

    def row(name: str, figure: Callable[[Found], float], form: Callable[[float], str]) -> list[str]:
        found = {kind: [figure(turn[kind]) for turn in turns] for kind in KINDS}
        cells = [f"{form(median(of_kind))} ({', '.join(map(form, of_kind))})" for of_kind in found.values()]
        return [name, *cells, number(median(found["private"]) / (median(found["shared"]) or inf))]

    rows = [["", *KINDS, "private / shared"]]
    rows.append(row("seconds until it serves", lambda one: one.start_s, number))
    rows.append(row("share in huge pages", lambda one: one.huge_share, "{:.0%}".format))
    rows.append(row("time to read it, in that of huge pages", lambda one: one.slowdown, number))
    cases = turns[0]["private"].speeds
    rows += [row(f"{case}, GB/s", lambda one, case=case: one.speeds[case], number) for case in cases]  # type: ignore[misc]
    return markdown_table(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.pages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pool-size", default="4GiB", help="default 4GiB")
    parser.add_argument("--turns", type=int, default=3, help="default 3")
    parser.add_argument("--whole", action="store_true", help="do not break the memory into pieces")
    given = parser.parse_args()
    facts = run_facts(f"python -m tests.bench.pages {' '.join(sys.argv[1:])}".strip())
    nbytes = parse_size(given.pool_size)
    with nullcontext(0) if given.whole else pieces(2 * nbytes) as held_bytes:
        turns = [{kind: measure(kind, given.pool_size) for kind in KINDS} for _ in range(given.turns)]
    enabled = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text().strip()
    memory = "Memory as it was" if given.whole else f"{format_size(held_bytes)} held in every second page"
    text = f"""\
{memory}; a pool of {given.pool_size}; `shmem_enabled`: {enabled}. Medians, and each turn.

An engine's memory is shared and in small pages with both kinds, as always on a CPU. A slowdown of 0: nearly all of the
pool is in huge pages, or the kernel had none to compare with."""
    print_report(TITLE, facts, f"{text}\n\n{table(turns)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
