"""Daemon and engines are killed and stopped at random under traffic. ``python -m tests.chaos`` does it 500 times."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.cycles import STAGES, measure_cycles
from tests.chaos.engine import FENCE_TIMEOUT_S
from tests.chaos.rounds import run_rounds
from tests.chaos.supervisor import Supervisor
from tests.kit.amount import TIMES
from tests.kit.daemon import DaemonProcess

ROUNDS = 2 * TIMES
LONGEST_STEP_S = 5 * FENCE_TIMEOUT_S
"""Five times what is promised: other processes use the machine; the figure is printed."""

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("keeper", ["file", "systemd"])
def test_rounds_fail_no_request_and_lose_no_byte(keeper: str, pool_file: Path) -> None:
    seed = random.SystemRandom().getrandbits(31)
    print(f"seed {seed}")
    report = run_rounds(ROUNDS, seed, pool_file if keeper == "file" else None)
    print(report)
    assert report.problems == []
    assert report.counts["blocks compared"] > 30
    assert report.counts["stores"] > 10
    assert report.longest_step_s < LONGEST_STEP_S


def lying_daemon(*arguments: Any, **options: Any) -> DaemonProcess:
    """Make a daemon whose loads bring wrong bytes."""
    daemon = DaemonProcess(*arguments, faults=True, **options)
    (daemon.directory / "fault").write_text("load lies")
    return daemon


def test_rounds_find_a_daemon_that_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Supervisor, "make_daemon", staticmethod(lying_daemon))
    with pytest.raises(AssertionError, match=r"words of key .* are not what was stored"):
        run_rounds(5, 1, None)


ROOM_BYTES = 4 << 20
"""By which the daemon's own memory may differ between two looks: arenas that malloc keeps or gives back."""


def test_killed_clients_leave_nothing_in_the_daemon() -> None:
    seed = random.SystemRandom().getrandbits(31)
    print(f"seed {seed}")
    killed, before, after = measure_cycles(30 * TIMES, seed)
    print(killed, before, after)
    assert set(killed) == set(STAGES)
    assert after.descriptors == before.descriptors
    assert after.shared_files == before.shared_files
    assert after.threads == before.threads
    assert abs(after.mappings - before.mappings) <= 8
    assert abs(after.own_bytes - before.own_bytes) < ROOM_BYTES
