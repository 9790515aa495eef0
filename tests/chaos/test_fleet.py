"""A fleet of sixteen nodes under kills, clears and a partition."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.chaos.fleet import BACK_S, PATIENCE_S, PORT, run
from tests.kit.daemon import DaemonProcess
from tests.kit.fleet_engine import FleetEngine
from tests.kit.network import Network
from tests.kit.require import require_nixl
from tests.kit.waiting import wait_until

SECONDS = float(os.environ.get("TESTS_FLEET_SECONDS", "1800"))
APART_S, TCP_TRIES_S = 27.0, 51.0
"""For how long a peer is cut off, and when TCP tries again what it sent at its beginning: 0.2 s, doubled 8 times."""
PROMPTS, BLOCKS = 400, 8


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


@pytest.mark.nightly
def test_blocks_of_a_peer_are_back_before_tcp_tries_its_old_connection_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    require_nixl()
    monkeypatch.setenv("UCX_TLS", "tcp")
    (tmp_path / "secret").write_text("the secret of two nodes\n")
    with Network(2) as network:
        at = [f"{network.address(number)}:{PORT}" for number in range(2)]
        flags = {"peer_secret_file": str(tmp_path / "secret")}
        lender = DaemonProcess(before=network.inside(0), peer_listen=at[0], peers=at[1], **flags)  # as nodes of a fleet
        reader = DaemonProcess(before=network.inside(1), peer_listen=at[1], peers=at[0], **flags)
        with (
            lender,
            reader,
            closing(FleetEngine(lender.directory)) as stores,
            closing(FleetEngine(reader.directory)) as finds,
        ):
            stores.start()
            finds.start()
            for prompt in range(PROMPTS):
                assert stores.serve(prompt, BLOCKS, 1, PATIENCE_S).stored

            def find(prompt: int) -> bool:
                return finds.find(prompt, BLOCKS, PATIENCE_S).loaded == BLOCKS

            wait_until(lambda: find(0), 5 * BACK_S)
            with ThreadPoolExecutor(1) as beside:  # reads are under way when the network goes
                found = beside.submit(lambda: next((one for one in range(1, PROMPTS) if not find(one)), None))
                time.sleep(0.3)
                network.apart = frozenset({0})
                time.sleep(APART_S)
                assert found.result() is not None, "all was read before"
            network.apart = frozenset()
            healed = time.monotonic()
            wait_until(lambda: find(PROMPTS - 1), 5 * BACK_S)
            assert time.monotonic() - healed < (TCP_TRIES_S - APART_S) / 2
