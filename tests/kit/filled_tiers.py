"""Disks and shared stores that have the blocks of prompts, for tests and measurements of how these come back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from kvoffd_client import AdminClient
from kvoffd_proto.stats import DaemonStats, DiskStats, SharedStats

from .engine import wait_books, wait_stored
from .waiting import wait_until
from .wire import Books

LOOKS = 10
MAX_USES = 10
MAX_WRITES_S = 120.0


class Generates(Protocol):
    """An engine, or what stands for one."""

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Any: ...

    def forget(self) -> None: ...


def tiers_of(stats: DaemonStats) -> list[DiskStats | SharedStats]:
    return [*stats.disks, *stats.shared]


def wait_serving(directory: Path) -> None:
    """Until the daemon's disks and stores serve."""
    with AdminClient(directory) as admin:

        def serve() -> bool:
            return all(one.up for one in tiers_of(admin.stats()))

        wait_until(serve)


def written_blocks(found: Books) -> int:
    """How many blocks were written to each disk and store, to that which has fewest."""
    return min(one.written_blocks for one in tiers_of(found.said))


def fill_tiers(directory: Path, engine: Generates, prompts: Sequence[list[int]], blocks: int) -> None:
    """Have an engine use these prompts, one after the other, until pool, disks and stores have all of their blocks.

    A slow tier is spared some writes; what is used again is offered again.
    """

    def no_write_waits(found: Books) -> bool:
        return not any(one.queued_writes for one in tiers_of(found.said))

    found = None
    for _ in range(MAX_USES):
        for prompt in prompts:
            engine.generate([prompt], max_tokens=2)
        found = wait_stored(directory, LOOKS)
        if found.said.disks or found.said.shared:
            found = wait_books(directory, no_write_waits, MAX_WRITES_S)
            have = min(found.ready_blocks, written_blocks(found))
        else:
            have = found.ready_blocks
        if have >= blocks:
            return
        engine.forget()
    raise AssertionError(f"{blocks} blocks were not all stored and written: {found}")
