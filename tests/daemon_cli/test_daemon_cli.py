"""``kvoffd``: what it prints, what it refuses, how fast it starts."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvoffd.cli import main
from kvoffd.config import SETTINGS, Config, load_config


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in SETTINGS:
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.delenv("KVOFFD_CONFIG", raising=False)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[Config], int]], None]]:
    """Puts a function where the daemon's ``run`` is; gives logging back as it was."""

    def put(run: Callable[[Config], int]) -> None:
        module = types.ModuleType("kvoffd.server.daemon")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "kvoffd.server.daemon", module)

    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield put
    root.handlers[:], root.level = handlers, level


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code  # type: ignore[assignment]
    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert printed.err.startswith("kvoffd: ")
    assert printed.err.count("\n") == 1, "one sentence, one line"
    return printed.err


def test_serve_runs_the_daemon_with_the_configuration(stand_in: Callable[..., None]) -> None:
    given: list[Config] = []

    def run(config: Config) -> int:
        given.append(config)
        return 7

    stand_in(run)
    assert main(["serve", "--pool-size", "64MiB", "--http-address", "", "--log-level", "debug"]) == 7
    assert given == [load_config({"pool_size": "64MiB", "http_address": "", "log_level": "debug"}, {})]
    assert logging.getLogger().level == logging.DEBUG


def test_a_daemon_that_gets_no_threads_says_so(
    stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Config) -> int:
        raise RuntimeError("can't start new thread")

    stand_in(run)
    assert "pids.max" in refused(["serve"], capsys)


def test_a_crash_and_a_bad_flag_are_json_too(tmp_path: Path) -> None:
    environ = {**os.environ, "KVOFFD_LOG_FORMAT": "json"}
    bad = [sys.executable, "-m", "kvoffd", "serve", "--pool-siz", "1"]
    crash = [
        sys.executable,
        "-c",
        "import sys, threading, warnings; from kvoffd.server import daemon; from kvoffd.cli import main\n"
        "def broken():\n"
        "    warnings.warn('x', stacklevel=1); threading.Thread(target=lambda: 1 / 0).start(); raise LookupError\n"
        "daemon.native = broken\n"
        f"sys.exit(main(['serve', '--directory', '{tmp_path}']))",
    ]
    for command, levels in ((bad, ["error"]), (crash, ["critical", "critical", "warning"])):
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode != 0
        assert sorted(json.loads(line)["level"] for line in ended.stderr.splitlines()) == levels
