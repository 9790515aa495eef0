"""What the daemon says to its page: the hour before it was opened, prompts with reasons, engines, and findings."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.ports import free_port, http_get
from tests.kit.waiting import wait_until
from tests.kit.wire import keys, prompt_of

PEOPLE = 3
"""Tabs that are opened one after the other."""


@pytest.fixture
def port() -> int:
    return free_port()


def page(port: int) -> Any:
    status, body = http_get(port, "/page.json")
    assert status == 200
    return json.loads(body)


def summed(found: Any, source: str) -> int:
    return sum(step.get("prompt_tokens", {}).get(source, 0) for step in found["steps"])


def test_a_tab_that_is_opened_anew_has_the_hour_before_it_and_all_tabs_agree(port: int) -> None:
    with (
        DaemonProcess(http_address=f"127.0.0.1:{port}") as daemon,
        FakeEngine(daemon.directory, "llama", name="vllm pod-7") as engine,
    ):
        began = time.monotonic()
        assert engine.store(keys(1, 2), [0, 1]).ok
        assert engine.lookup(keys(1, 2, 3, 4)) == 2
        assert engine.load(keys(1, 2), [2, 3]).ok
        engine.release()
        engine.scheduler.report_prompt(prompt_of(100, own=20, loaded=50))
        # Until a step of ten seconds has ended, and the answer of a second ago is out of the cache.
        wait_until(lambda: len(page(port)["steps"]) > 1 and summed(page(port), "pool"))
        for found in [page(port) for _ in range(PEOPLE)]:
            assert {name: summed(found, name) for name in ("computed", "engine", "pool")} == {
                "computed": 30, "engine": 20, "pool": 50,
            }  # fmt: skip
            assert sum(step.get("lookups", 0) for step in found["steps"]) == 1
            assert sum(step.get("stored_bytes", 0) for step in found["steps"]) > 0
            elapsed = time.monotonic() - began
            assert all(0 <= step["ago"] <= elapsed + 60 for step in found["steps"])
        (row,) = found["engines"]
        assert (row["name"], row["workers"], row["namespaces"][0].split()[0]) == ("vllm pod-7", 1, "llama")
        assert found["lookups"]["count"] == 1
        assert found["lookups"]["p99_seconds"] is None, "of one lookup there is none"
        assert found["lookups"]["summary"].startswith("1, each within ")
        assert found["stats"]["since_start"]["prompt_tokens"] == {"computed": 30, "engine": 20, "pool": 50}


def test_prompts_have_their_tokens_by_source_and_the_reason_as_the_command_says_it(port: int) -> None:
    with DaemonProcess(http_address=f"127.0.0.1:{port}") as daemon, FakeEngine(daemon.directory, "llama") as engine:
        for number in range(60):
            missing = {"missing_key": keys(number + 1)[0], "missing_number": 1, "keys": 8}
            engine.scheduler.report_prompt(prompt_of(100, own=20, request=f"cmpl-{number}", **missing))
        prompts = wait_until(lambda: (found := page(port)["prompts"])[0:1] and len(found) == 50 and found)
        assert {one["namespace"] for one in prompts} == {engine.namespace.fingerprint.hex()[:12]}
        latest = prompts[0]
        assert latest["request"] == "cmpl-59", "the newest first"
        assert (latest["all_tokens"], latest["tokens"]) == (100, {"computed": 80, "engine": 20})
        assert latest["why"].startswith("never stored in this namespace")
        assert latest["sentence"].startswith("loaded 0 of 100 tokens. 80 computed, 20 from its own cache. Of 8 keys")


def test_findings_are_those_of_doctor_with_the_command_to_copy(port: int) -> None:
    with DaemonProcess(http_address=f"127.0.0.1:{port}") as daemon:
        (found,) = wait_until(lambda: page(port)["findings"])
        assert (found["check"], found["level"]) == ("no_engine", "info")
        assert found["command"].startswith("vllm serve MODEL --kv-transfer-config ")
        assert page(port)["engines"] == page(port)["prompts"] == []
        assert daemon.running
