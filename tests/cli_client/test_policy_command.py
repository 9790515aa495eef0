"""``kvoffd-cli policy``, and what ``block show`` says of why a block is kept."""

from __future__ import annotations

import json

import pytest
from support.daemon import DaemonProcess

from kvoffd_client.cli import main
from kvoffd_client.testing import FakeEngine

KEYS = [bytes([16 * n + n]) * 32 for n in range(1, 9)]


def test_it_shows_what_was_learned(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        DaemonProcess("32MiB", block_access="read", eviction_policy="learned") as daemon,
        FakeEngine(daemon.directory, "tiny", blocks=32, page_bytes=4096) as engine,
    ):

        def cli(*words: str) -> str:
            assert main([*words, "--directory", str(daemon.directory)]) == 0
            return capsys.readouterr().out

        assert "learned nothing so far" in cli("policy")
        for _ in range(2):
            assert engine.lookup(KEYS[:4]) in (0, 4)
            engine.fill(range(4), seed=1)
            assert engine.store(KEYS[:4], range(4)).ok
            engine.release()
        told = cli("policy")
        assert "Policy learned: 2 requests, 4 keys known, 0 of them without a block" in told
        found = json.loads(cli("policy", "--json"))
        assert (found["policy"], found["requests"], found["known_keys"], found["key"]) == ("learned", 2, 4, None)
        assert found["hit_bytes"] == found["lru_hit_bytes"] > 0
        assert sum(one["accessed_share"] for one in found["classes"]) == pytest.approx(1)
        assert sum(one["kept_bytes"] for one in found["classes"]) == found["hit_bytes"]
        assert {one["name"] for one in found["classes"]} >= {"the end of a prompt"}
        assert found["policy_bytes"] == json.loads(cli("stats", "--json"))["policy_bytes"] > 0
        assert "; asked for by 2 requests, " in cli("block", "show", "11", "--namespace", "tiny")
        kept = json.loads(cli("block", "show", "11", "--namespace", "tiny", "--json"))["kept"]
        assert (kept["requests"], kept["worth"] > 0) == (2, True)


def test_a_policy_that_does_not_learn_has_nothing_to_tell(capsys: pytest.CaptureFixture[str]) -> None:
    with DaemonProcess("16MiB", eviction_policy="lru") as daemon:
        assert main(["policy", "--directory", str(daemon.directory)]) == 0
    assert capsys.readouterr().out.startswith("Policy lru. It has learned nothing so far, or does not learn.")
