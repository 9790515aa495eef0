"""A fleet of sixteen nodes under kills, clears and a partition."""

from __future__ import annotations

import os
import random

import pytest

from tests.chaos.fleet import run
from tests.kit.require import require_nixl

SECONDS = float(os.environ.get("TESTS_FLEET_SECONDS", "1800"))


@pytest.mark.nightly
@pytest.mark.timeout(2 * SECONDS + 900)
def test_a_fleet_loads_nothing_stale_and_is_soon_back(monkeypatch: pytest.MonkeyPatch) -> None:
    require_nixl()
    monkeypatch.setenv("UCX_TLS", "tcp")  # without the devices that UCX looks for
    seed = random.SystemRandom().getrandbits(31)
    print(f"seed {seed}")
    found = run(SECONDS, seed)
    print(found)
    assert found.problems == []
    assert min(found.counts[name] for name in ("read of peers", "read of Redis", "kills", "blocks loaded")) > 0
