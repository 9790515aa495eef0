"""``kvoffd-cli curve``: over a daemon, and what it draws."""

from __future__ import annotations

import json

import pytest

from kvoffd_client.cli import main
from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess

KEYS = [bytes([number]) * 32 for number in range(1, 9)]


def test_it_tells_what_requests_found_and_had_found(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        DaemonProcess("32MiB") as daemon,
        FakeEngine(daemon.directory, "tiny", blocks=32, page_bytes=4096) as engine,
    ):

        def cli(*words: str) -> str:
            assert main([*words, "--directory", str(daemon.directory)]) == 0
            return capsys.readouterr().out

        assert cli("curve").startswith("No request has asked")
        assert engine.store(KEYS[:4], range(4)).ok
        for _ in range(4):
            assert engine.lookup(KEYS[:8]) == 4
            engine.release()
        told = json.loads(cli("curve", "--json"))
        assert [one["label"] for one in told["curves"]] == [None, "tiny"]
        for one in told["curves"]:
            assert one["hit_percent"] == 50
            assert [point["lru_hit_percent"] for point in one["points"]] == [75] * 13
            assert one["points"][0]["pool_bytes"] == pytest.approx(told["pool_bytes"] / 10, abs=1)
        lines = cli("curve").splitlines()
        assert lines[0].startswith("All namespaces: ")
        assert max(map(len, lines)) <= 80
        assert next(line for line in lines if "measured" in line).endswith("50.0 % measured")
        assert lines[-1].startswith("Only 128 KiB of")
        assert "tiny (" in cli("curve", "--namespace", "tiny")
        assert "Tokens     50.0 % found; lru: half the pool 75.0 %, this 75.0 %" in cli("stats")
        assert main(["curve", "--namespace", "", "--directory", str(daemon.directory)]) == 2
        assert "has the label ''" in capsys.readouterr().err
