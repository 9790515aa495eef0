"""What became of engines' requests, from the scheduler's client to an operator's terminal."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from msgspec import structs

from kvoffd_client import AdminClient, GroupKeys
from kvoffd_client.cli import main
from kvoffd_client.testing import FakeEngine
from kvoffd_proto.admin import LoggedPrompt
from kvoffd_proto.messages import MAX_REQUEST_CHARACTERS, Outcome, PromptReport
from kvoffd_proto.prompts import request_sentence
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import books, keys, prompt_of, reported


def report(name: str, outcome: str, missing: bytes = b"", reason: str = "") -> PromptReport:
    counts = {"after_gap": 3 if outcome == Outcome.MISSED else 0}
    return PromptReport(name, time.time(), 128, 8, 2, 1, 0, outcome, 48, 0, missing, reason, 4, **counts)


def test_a_line_has_the_tokens_by_source_and_what_a_store_said() -> None:
    def line(**changes: Any) -> str:
        made = structs.replace(report("r", Outcome.MISSED, b"\xab" * 32, "unknown"), after_gap=0, **changes)
        return request_sentence(LoggedPrompt(1, bytes(32), made, tokens, down))

    down = list[str]()
    tokens = {"computed": 1000, "engine": 20, "pool": 30, "disk": 4, "redis://cache": 5, "peer://node:1": 6}
    expected = (
        "1,000 computed, 20 from its own cache, 30 from the pool, 4 from a disk, 5 from redis://cache, 6 from peer:"
    )
    assert f" loaded nothing of 128 tokens. {expected}" in line()
    tokens = {"computed": 128}
    assert "computed" not in line(), "that is all of them"
    assert "A store" not in line()
    asked = {"found_pool": 0, "found_disk": 0, "asked_shared": 8}
    none = "A store was asked for 8 and has none."
    assert f"Of 8 keys kvoffd had none. {none} The first key missing" in line(**asked)
    assert "Of 1 key kvoffd had none." in line(keys=1, found_pool=0, found_disk=0)
    assert "A store was asked for 8 and had not answered." in line(**asked, unanswered=8)
    assert "had 3 in a store. A store was asked for 8 and has 3." in line(**asked, found_shared=3)
    assert "A store was asked" not in line(**asked, found_shared=8)
    down = ["redis://cache:6379", "disk:/mnt"]
    failed = line(**asked | {"reason": "tier_down"})
    assert "A store was asked for 8 and did not answer." in failed
    assert failed.endswith(" was not asked after failures (tier down: redis://cache:6379, disk:/mnt).")


@pytest.mark.parametrize(
    ("reason", "marks", "expected"),
    [
        ("unknown", ["cache_salt"], "Its keys contain its cache_salt: only prompts with the same share them."),
        ("forgotten", ["lora", "multimodal"], "its LoRA adapter and images, audio or video: only prompts with the"),
        ("evicted", ["cache_salt"], "abababababab: evicted to make space for other blocks (evicted)."),
        (
            "excluded",
            ["kv_load_tiers"],
            "on a disk or in a shared store, which the request's kv_load_tiers exclude (excluded).",
        ),
        ("unknown", ["of the future"], "in this namespace since the daemon's start (never stored)."),
    ],
)
def test_a_line_says_what_limits_the_sharing_of_its_request(reason: str, marks: list[str], expected: str) -> None:
    made = structs.replace(report("r", Outcome.LOADED, b"\xab" * 32, reason), marks=marks)
    sentence = request_sentence(LoggedPrompt(1, bytes(32), made))
    assert expected in sentence
    assert ("Its keys contain" in sentence) is ("contain" in expected or "LoRA" in expected)


def test_an_operator_finds_a_request_whose_id_is_longer_than_a_report_has(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "".join(f"{number:04d}-" for number in range(40))

    def has(name: str) -> bool:
        status = main(["clients", "--requests", name, "--directory", str(daemon.directory)])
        assert status == int("loaded 48 of 128" not in capsys.readouterr().out)
        return status == 0

    with FakeEngine(daemon.directory, "tiny") as engine:
        engine.scheduler.report_prompt(report(f"chatcmpl-{asked}"[:MAX_REQUEST_CHARACTERS], Outcome.LOADED))
        wait_until(lambda: has(asked))
        assert has(asked[5:90])
        assert has(f"{asked[:119]}x"), "it may be this one"
        assert not has(f"{asked[:118]}x")


def test_an_operator_sees_why_a_request_missed(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    def cli(*words: str, status: int = 0) -> str:
        assert main(["clients", "--requests", *words, "--directory", str(daemon.directory)]) == status
        return capsys.readouterr().out

    with FakeEngine(daemon.directory, "tiny") as engine:
        assert "No connected engine has reported a request." in cli()
        for name, outcome in (
            ("cmpl-1", Outcome.LOADED),
            ("cmpl-2", Outcome.MISSED),
            ("\x1b[2J", "of {the} future"),
        ):
            engine.scheduler.report_prompt(report(name, outcome, b"\xab" * 32))
        engine.scheduler.report_prompt(report("cmpl-3", Outcome.TOO_SHORT))
        wait_until(lambda: cli().count("\n") == 5)
        head, first, second, third, _ = cli().splitlines()
        fingerprint = engine.namespace.fingerprint.hex()
        assert head == f"Engine fake engine, namespace tiny ({fingerprint[:12]}):"
        assert (
            "cmpl-1 loaded 48 of 128 tokens. 80 computed, 48 from the pool. Of 8 keys kvoffd had 2 in the pool, 1 on a"
            in first
        )
        assert "The first key missing, number 4, abababababab: never stored in this namespace" in first
        assert "cmpl-2 loaded nothing of 128 tokens." in second
        assert second.endswith(" Without it 3 keys found after it cannot be loaded.")
        assert "Without it" not in first
        assert "of {the} future" in third
        assert third.isprintable()
        assert cli("cmpl-2") == f"{head}\n{second}\n"
        assert "No engine has reported a request 'nobody'" in cli("nobody", status=1)
        (found,) = json.loads(cli("cmpl-3", "--json"))["requests"]
        assert found["report"]["request"] == "cmpl-3"
        assert found["namespace"] == engine.namespace.fingerprint.hex()
        for number in range(300):
            engine.scheduler.report_prompt(report(f"many-{number}", Outcome.MISSED))
        wait_until(lambda: cli("--all").count(" many-") == 300)
        assert "many-299" in cli("many").splitlines()[-1]
        *_, last, earlier = cli().splitlines()
        assert "many-299" in last
        assert earlier == "and 284 earlier: kvoffd-cli clients --requests --all"
        with FakeEngine(daemon.directory, "tiny", page_bytes=4096) as other:
            other.store([b"\xab" * 32], [0])
            said = cli("cmpl-2")
            assert f" Namespace {other.namespace.fingerprint.hex()[:12]} has this key, but differs: bytes" in said
            assert main(["namespaces", "--directory", str(daemon.directory)]) == 0
            assert " differ: bytes of a layer's block 16384 and 4096" in capsys.readouterr().out
    assert "No connected engine has reported a request." in cli()
    assert main(["clients", "cmpl-1", "--directory", str(daemon.directory)]) == 2


def test_prompts_of_the_time_before_a_daemon_are_shown_and_not_counted(daemon: DaemonProcess) -> None:
    """What they loaded was another one's."""
    with FakeEngine(daemon.directory, "tiny") as engine:
        engine.scheduler.report_prompt(prompt_of(100, loaded=80, request="first"))
        with AdminClient(daemon.directory) as admin:
            wait_until(lambda: reported(admin) == [("first", {"computed": 20, "pool": 80})])
        daemon.kill()
        wait_until(lambda: not engine.scheduler.ready)
        engine.scheduler.report_prompt(prompt_of(100, loaded=70, request="between"))
        daemon.start()
        wait_until(lambda: engine.scheduler.ready)
        engine.scheduler.report_prompt(prompt_of(100, loaded=60, request="after"))
        with AdminClient(daemon.directory) as admin:
            wait_until(lambda: reported(admin) == [("between", {}), ("after", {"computed": 40, "pool": 60})])
            assert books(daemon.directory).namespaces[engine.namespace.fingerprint].all_prompt_tokens == 100


def test_keys_that_are_shown_as_used_are_counted_at_once(daemon: DaemonProcess) -> None:
    """No report follows: what waits for one takes the memory of prompts that do."""
    with FakeEngine(daemon.directory, "tiny") as engine:
        assert engine.store(keys(1, 2), range(2)).ok
        engine.scheduler.show_used([GroupKeys(0, b"".join(keys(1, 2)))])
        wait_until(lambda: books(daemon.directory).namespaces[engine.namespace.fingerprint].not_needed_keys == 2)
        assert not books(daemon.directory).leases
