"""``kvoffd-cli namespaces quota`` with a real daemon: what is set holds, is shown, and outlives the daemon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvoffd_client.cli import main
from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess

PAGE = 16384
KEYS = [number.to_bytes(32, "big") for number in range(350)]


def test_a_quota_holds_is_shown_and_outlives_the_daemon(pool_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with DaemonProcess("16MiB", pool_file=str(pool_file), eviction_policy="lru") as daemon:

        def cli(*words: str, status: int = 0) -> str:
            assert main([*words, "--directory", str(daemon.directory)]) == status
            printed = capsys.readouterr()
            return printed.err if status else printed.out

        def listed(label: str) -> dict[str, object]:
            found = json.loads(cli("namespaces", "--json"))["namespaces"]
            return next(one for one in found if one["label"] == label)

        def store(label: str, first: int, count: int) -> None:
            with FakeEngine(daemon.directory, label, blocks=count, page_bytes=PAGE) as engine:
                for start in range(first, first + count, 50):
                    end = min(start + 50, first + count)
                    engine.fill(range(end - start), seed=1)
                    engine.store(KEYS[start:end], range(end - start))

        store("polite", 0, 200)
        store("flood", 0, 10)
        assert "at most" not in cli("namespaces")
        assert "'lots' is not a size" in cli("namespaces", "quota", "flood", "--max", "lots", status=2)
        assert "No open namespace" in cli("namespaces", "quota", "other", "--max", "1MiB", status=2)
        assert listed("flood")["quota_bytes"] is None
        assert "at most 2.00 MiB." in cli("namespaces", "quota", "flood", "--max", "2MiB")
        assert "set the quota of the namespace" in daemon.log
        store("flood", 10, 300)
        assert (listed("flood")["ready_bytes"], listed("polite")["ready_bytes"]) == (2 << 20, 200 * 4 * PAGE)
        page = cli("namespaces")
        assert all(word in page for word in ("at most", "2.00 MiB"))
        daemon.kill()
        daemon.start()
        assert [listed(label)["quota_bytes"] for label in ("polite", "flood")] == [None, 2 << 20]
        assert "quotas of namespaces" not in daemon.log.rpartition("takes a pool")[2]
        (found,) = [one for one in json.loads(cli("stats", "--json"))["namespaces"] if one["model"] == "flood"]
        assert found["quota_bytes"] == 2 << 20
        assert "no quota." in cli("namespaces", "quota", "flood", "--max", "none")
        daemon.stop()
        daemon.start()
        assert listed("flood")["quota_bytes"] is None
