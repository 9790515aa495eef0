"""Three real nodes find what the simulation of a fleet says."""

from __future__ import annotations

import pytest

from tests.bench.fleet_replay import SHARED, compare, made_up_prompts, prompts_of
from tests.kit.open_traces import open_trace
from tests.kit.require import require_nixl

POINTS = 2.0
"""The most by which tokens by source may differ, in percent of all tokens."""
MADE_UP_REQUESTS = 1500

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("shared", SHARED)
def test_three_real_nodes_find_what_the_simulation_says(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an open trace if there is one: documents, of which a small store holds all."""
    require_nixl()
    monkeypatch.setenv("UCX_TLS", "tcp")  # without the devices that UCX looks for
    file = open_trace("synthetic")
    prompts = prompts_of(file) if file.exists() else made_up_prompts(MADE_UP_REQUESTS)
    peers, store = SHARED[shared]
    found = compare(prompts, peers=peers, store=store)
    print(found)
    assert found.points <= POINTS, found
