"""An engine whose memory the daemon cannot have, through vLLM's own scheduler and a real daemon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvoffd_client.vllm.kv_memory import NotShareable
from kvoffd_client.vllm.spec import KvoffdSpec
from tests.kit.command import run_cli
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import prompt
from tests.kit.waiting import wait_until
from tests.vllm.engine_of_parts import EngineOfParts

WHY = "The driver cannot export the memory at 0x7f0000000000."
BLOCKS, RATE = 320, 1e9


def test_doctor_says_why_and_prompts_are_computed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise NotShareable(WHY)

    monkeypatch.setattr(KvoffdSpec, "_connect_worker", refuse)
    monkeypatch.setattr("kvoffd_client.vllm.manager.REPORT_EVERY_S", 0.0)
    with DaemonProcess("64MiB") as daemon, EngineOfParts(model, daemon.directory, BLOCKS, RATE) as engine:

        def said() -> list[str]:
            assert engine.generate([prompt(1, 900)]) in ([0], [896]), "computed, or in vLLM's own cache"
            report = json.loads(run_cli("doctor", "--json", "--directory", str(daemon.directory)).stdout)
            return [one["evidence"] for one in report["findings"] if one["check"] == "engine_refused"]

        (evidence,) = wait_until(said, interval_s=0.2)
    assert evidence.endswith(f"is not registered: worker 0: {WHY}")
