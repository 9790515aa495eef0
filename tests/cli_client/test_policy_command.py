"""``kvoffd-cli policy``, and what ``block show`` says of why a block is kept."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from kvoffd.cache.policies.learned import SHORT_NAMES
from kvoffd_client.cli import main, policy_command
from kvoffd_client.testing import FakeEngine
from kvoffd_proto.admin import PolicyClass, PolicyDescribed
from tests.kit.daemon import DaemonProcess

KEYS = [bytes([16 * n + n]) * 32 for n in range(1, 9)]


def test_it_shows_what_was_learned(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        DaemonProcess("32MiB", eviction_policy="learned") as daemon,
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
    assert capsys.readouterr().out.startswith("Policy lru. It does not learn.")


def test_of_a_policy_that_does_not_learn_it_says_what_it_remembers() -> None:
    found = PolicyDescribed(1, 1, "arc", 0, 0, 1500, 300_000, 0, 0, as_lru=False, classes=[])
    (line,) = policy_command._sentences(found)
    assert line == "Policy arc. It does not learn. It remembers 1,500 keys without a block, in 293 KiB."


def test_all_numbers_are_shown_on_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffd_client.cli.console.PIPE_LIST_CELLS", 80)
    names = ["of a conversation, a later turn after a pause of a pool lifetime, up to 1,536 new tokens", "rare"]
    classes = [
        PolicyClass(name, share, 0.483, 1.5, 400 << 30, 0.345, max(SHORT_NAMES, key=len))
        for name, share in zip(names, (0.995, 0.005), strict=True)
    ]
    described = PolicyDescribed(
        request_id=1,
        policy="learned",
        requests=9,
        known_keys=9,
        ghost_keys=0,
        policy_bytes=9,
        hit_bytes=9,
        lru_hit_bytes=9,
        as_lru=False,
        classes=classes,
    )
    policy_command._print_classes(described)
    head, first, *legend, last = capsys.readouterr().out.splitlines()
    assert " ".join(head.split()) == "asked for come back half by kept worth keys"
    assert "; worth: most hits of a block in one; " in " ".join(legend)
    assert " ".join(first.split()) == "99.5 % 48.3 % 1.5 400 GiB 0.345 old turn 2-3 pause 0.5-2 +1,536"
    assert "pause: since its last turn, in pool lifetimes" in " ".join(legend)
    assert last == "And 1 rare kind: 0.5 % of what is asked for, 400 GiB kept."


def test_the_name_of_a_policy_writes_nothing_else_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    described = PolicyDescribed(1, 1, "\x1b[2J", 0, 0, 0, 0, 0, 0, False, [])
    admin = SimpleNamespace(describe_policy=lambda: described)
    monkeypatch.setattr(policy_command, "open_admin", lambda *_: nullcontext(admin))
    main(["policy"])
    assert capsys.readouterr().out == "Policy ?[2J. It does not learn.\n"
