"""Clients that connect and are killed leave nothing behind. ``python -m tests.chaos`` does it ten thousand times."""

from __future__ import annotations

import random

from tests.chaos.cycles import STAGES, measure_cycles

CYCLES = 60
ROOM_BYTES = 4 << 20
"""By which the daemon's own memory may differ between two looks: arenas that malloc keeps or gives back."""


def test_killed_clients_leave_nothing_in_the_daemon() -> None:
    seed = random.SystemRandom().getrandbits(31)
    print(f"seed {seed}")
    killed, before, after = measure_cycles(CYCLES, seed)
    print(killed, before, after)
    assert set(killed) == set(STAGES)
    assert after.descriptors == before.descriptors
    assert after.shared_files == before.shared_files
    assert after.threads == before.threads
    assert abs(after.mappings - before.mappings) <= 8
    assert abs(after.own_bytes - before.own_bytes) < ROOM_BYTES
