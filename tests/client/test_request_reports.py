"""What became of engines' requests, from the scheduler's client to an operator's terminal."""

from __future__ import annotations

import json
import time

import pytest

from kvoffd_client.cli import main
from kvoffd_client.testing import FakeEngine
from kvoffd_proto.messages import Outcome, PromptReport
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until


def report(name: str, outcome: str, missing: bytes = b"", reason: str = "") -> PromptReport:
    return PromptReport(name, time.time(), 128, 8, 2, 1, 0, outcome, 48, 0, missing, reason, 4)


def test_an_operator_sees_why_a_request_missed(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    def cli(*words: str, status: int = 0) -> str:
        assert main(["clients", "--requests", *words, "--directory", str(daemon.directory)]) == status
        return capsys.readouterr().out

    with FakeEngine(daemon.directory, "tiny") as engine:
        assert "No connected engine has reported a request." in cli()
        for name, outcome in (("cmpl-1", Outcome.LOADED), ("cmpl-2", Outcome.MISSED), ("\x1b[2J", "of the future")):
            engine.scheduler.report_prompt(report(name, outcome, b"\xab" * 32))
        engine.scheduler.report_prompt(report("cmpl-3", Outcome.TOO_SHORT))
        wait_until(lambda: cli().count("\n") == 5)
        head, first, second, third, _ = cli().splitlines()
        fingerprint = engine.namespace.fingerprint.hex()
        assert head == f"Engine fake engine, namespace tiny ({fingerprint[:12]}):"
        assert "cmpl-1 loaded 48 of 128 tokens. Of 8 keys 2 in the pool, 1 on a disk." in first
        assert "The first missing key, number 4, abababababab: never stored" in first
        assert "cmpl-2 loaded nothing of 128 tokens." in second
        assert "of the future" in third
        assert third.isprintable()
        assert cli("cmpl-2") == f"{head}\n{second}\n"
        assert "No engine has reported a request 'nobody'" in cli("nobody", status=1)
        (found,) = json.loads(cli("cmpl-3", "--json"))["requests"]
        assert found["report"]["request"] == "cmpl-3"
        assert found["namespace"] == engine.namespace.fingerprint.hex()
        for number in range(300):
            engine.scheduler.report_prompt(report(f"many-{number}", Outcome.MISSED))
        wait_until(lambda: cli().count(" many-") == 300)
        assert "many-299" in cli("many").splitlines()[-1]
        with FakeEngine(daemon.directory, "tiny", page_bytes=4096) as other:
            other.store([b"\xab" * 32], [0])
            said = cli("cmpl-2")
            assert f" Namespace {other.namespace.fingerprint.hex()[:12]} has this key, but differs: bytes" in said
            assert main(["namespaces", "--directory", str(daemon.directory)]) == 0
            assert " differ: bytes of a layer's block 16384 and 4096" in capsys.readouterr().out
    assert "No connected engine has reported a request." in cli()
    assert main(["clients", "cmpl-1", "--directory", str(daemon.directory)]) == 2
