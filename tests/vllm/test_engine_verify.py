"""``kvoffd-cli verify`` on ``vllm serve``: it passes a healthy engine, and finds what was planted."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvoffd_client import AdminClient
from tests.kit.amount import TIMES
from tests.kit.command import run_cli_here
from tests.kit.engine import BLOCK_TOKENS, wait_books, wait_stored
from tests.kit.stored_blocks import keys_of, loaded
from tests.kit.wire import KvSubscriber, books
from tests.vllm.engine_home import EngineHome
from tests.vllm.engine_server import MODEL, EngineServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TEXTS = [f"{number}: {' '.join(str(number * one * one) for one in range(60))}" for number in (3, 5, 7)]
"""Each character is a token, see ``add_tokenizer``."""
STORED = sum(len(text) // BLOCK_TOKENS for text in TEXTS)
"""Blocks of all prompts."""


class Verify:
    """The command, on the server and a daemon that has no blocks yet."""

    def __init__(self, home: EngineHome, server: EngineServer, directory: Path) -> None:
        self._home, self._server, self._file = home, server, directory / "prompts.jsonl"
        bodies = [{"prompt": TEXTS[0]}, {"messages": [{"role": "user", "content": TEXTS[1]}]}]
        self._file.write_text("\n".join([*map(json.dumps, bodies), TEXTS[2]]))

    def store(self) -> None:
        """Have the daemon store what the prompts compute, without the command."""
        for text in TEXTS:
            body = {"model": MODEL, "prompt": text, "max_tokens": 1}
            status, answer = self._server.ask("POST", "/v1/completions", body)
            assert status == 200, answer
        wait_books(self._home.directory, lambda found: found.ready_blocks == STORED)

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        url, directory = f"http://127.0.0.1:{self._server.port}/v1", str(self._home.directory)
        return run_cli_here("verify", url, "--prompts", str(self._file), "--directory", directory, *options)

    def report(self, status: int, *options: str) -> dict[str, Any]:
        done = self.run("--json", *options)
        assert done.returncode == status, (done.stdout, done.stderr)
        report: dict[str, Any] = json.loads(done.stdout)
        return report


@pytest.fixture
def verify(home: EngineHome, server: EngineServer, tmp_path: Path) -> Verify:
    home.ensure_no_daemon()
    home.ensure_daemon(home.engine, server)
    for one in (home.engine, server):
        one.forget()
    return Verify(home, server, tmp_path)


def loadable(text: str) -> int:
    return (len(text) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_healthy_engine_passes_every_time(verify: Verify, home: EngineHome) -> None:
    for _ in range(TIMES):  # and once more for the page
        report = verify.report(0)
        assert report["verdict"] == "PASS"
        assert [one["verdict"] for one in report["prompts"]] == ["same"] * 3
        assert [one["tokens"] for one in report["prompts"]] == list(map(len, TEXTS))
        assert [one["loaded_tokens"] for one in report["prompts"]] == list(map(loadable, TEXTS))
    (namespace,) = books(home.directory).namespaces.values()
    assert namespace.ready_blocks == STORED, "what was computed is not stored"
    page = verify.run().stdout
    # Whoever opened it first named it.
    assert re.search(r"^namespace: \S+ \([0-9a-f]{12}\)$", page, re.MULTILINE)
    assert "PASS: 3 of 3 prompts got the same answer loaded as computed.\n" in page
    assert max(map(len, page.splitlines())) <= 120


def test_a_wrong_block_is_found(verify: Verify, home: EngineHome) -> None:
    """One block has the bytes of another, under its own right checksum."""
    with KvSubscriber(home.directory) as heard:
        verify.store()
        (namespace,) = (one for one, found in books(home.directory).namespaces.items() if found.ready_blocks)
        keys = keys_of(heard, namespace)
    with loaded(home.directory, namespace, keys) as engine, AdminClient(home.directory) as admin:
        assert admin.clear(namespace) == len(keys)
        assert engine.store(keys, [1, *range(1, len(keys))]).ok
    report = verify.report(1)
    assert report["verdict"] == "FAIL"
    assert sorted(one["verdict"] for one in report["prompts"]) == ["fault", "same", "same"]


def test_a_namespace_of_two_models_is_found(verify: Verify, home: EngineHome, server: EngineServer) -> None:
    """Another engine has other weights under the same name: no method changed them that kvoffd can know."""
    status, answer = server.ask("POST", "/tokenize", {"model": "tiny", "prompt": TEXTS[0]})
    assert status == 200
    home.engine.call("flip_weights")
    try:
        home.engine.generate([json.loads(answer)["tokens"]])
        wait_stored(home.directory)
    finally:
        home.engine.call("flip_weights")
        home.engine.forget()
    report = verify.report(1)
    assert [one["verdict"] for one in report["prompts"]] == ["fault", "same", "same"]
