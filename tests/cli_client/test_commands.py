"""The commands against a real daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvoffd_client.cli import main
from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess

Cli = Callable[..., tuple[int, str, str]]
KEYS = [bytes([number]) * 32 for number in range(1, 9)]


@pytest.fixture
def engine(shared_daemon: DaemonProcess) -> Iterator[FakeEngine]:
    """An engine that has stored eight blocks of 64 KiB and found six of them and two that are not there."""
    with FakeEngine(shared_daemon.directory, "tiny") as running:
        running.fill(range(8), seed=1)
        assert running.store(KEYS, list(range(8))).ok
        assert running.lookup([*KEYS[:6], b"x" * 32, b"y" * 32]) == 6
        yield running


@pytest.fixture
def cli(shared_daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command; returns (status, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main([*arguments, "--directory", str(shared_daemon.directory)])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_an_engine_is_one_row_with_its_scheduler_and_workers(engine: FakeEngine, cli: Cli) -> None:
    (row,) = json.loads(cli("sessions", "--engines", "--json")[1])["engines"]
    assert (row["schedulers"], row["workers"], row["pids"]) == (1, len(engine.workers), [os.getpid()])
    assert row["registered_bytes"] == len(engine.workers) * 512 * 4 * 16384
    head, line = cli("sessions", "--engines")[1].splitlines()
    assert head.split()[:4] == ["engine", "namespace", "schedulers", "workers"]
    assert line.startswith("fake engine  tiny (")


@pytest.mark.parametrize(
    "arguments",
    [
        ("stats", "--nonsense"),
        ("bench", "copy", "--threads", "0"),
        ("bench", "copy", "--memory", "disk"),
        ("bench", "copy", "--gpu", "1"),
        ("bench", "copy", "--compute"),
        ("bench", "copy", "--memory", "cuda", "--threads", "2"),
        ("bench", "copy", "--piece-size", "large"),
        ("bench", "copy", "--piece-size", "0"),
        ("bench", "copy", "--piece-size", "6000"),
        ("bench", "copy", "--piece-size", "64KiB", "--piece-size", "65MiB"),
        ("bench", "copy", "--plot", "speeds.jpg"),
        ("bench", "copy", "--plot", "/nowhere/speeds.png"),
        ("bench", "engine", "--tokens", "1"),
        ("bench", "engine", "--rounds", "0"),
        ("bench", "pool"),
        ("clear", "surplus"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvoffd-cli: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_what_is_wrong_with_a_directory_that_may_not_be_read_is_said_by_kvoffd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda *_, **__: False)  # as it is for users who are not root
    for words in (["stats", "--directory", str(tmp_path)], ["--directory", str(tmp_path), "stats"]):
        assert main(words) == 2
        assert "There is no kvoffd daemon in" in capsys.readouterr().err


def test_what_names_the_daemon_may_stand_before_the_command_or_behind_it(
    shared_daemon: DaemonProcess,
) -> None:
    where = str(shared_daemon.directory)
    for arguments in (["--directory", where, "namespaces"], ["namespaces", "--directory", where]):
        assert main(arguments) == 0


def test_short_help_and_completion(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["stats"], ["disk"], ["block", "ls"]):
        assert main([*command, "-h"]) == 0
        assert capsys.readouterr().out.startswith("Usage: ")
    asked = {"_KVOFFD_CLI_COMPLETE": "complete_bash", "COMP_WORDS": "kvoffd-cli na", "COMP_CWORD": "1"}
    command = [sys.executable, "-c", "from kvoffd_client.cli import main; main([])"]
    assert subprocess.run(command, env=os.environ | asked, capture_output=True, text=True).stdout.split() == [
        "namespaces",
        "namespace",
    ]


def test_a_pool_that_is_too_small_for_a_bench_is_told_before_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    with DaemonProcess("16MiB") as small:
        for bench, needed in (("lookup", "62.5 MiB"), ("copy", "32.0 MiB")):
            assert main(["bench", bench, "--directory", str(small.directory)]) == 2
            out, err = capsys.readouterr()
            assert (out, err.count("\n")) == ("", 1)
            assert f"this bench needs a pool of {needed}" in err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--json", "stats"], "--json is no option of all commands; write it behind one: kvoffd-cli stats --json."),
        (["--json"], "No such option: --json"),
        (["stats", "--jsn"], "No such option: --jsn"),
    ],
)
def test_an_option_in_a_wrong_place_is_told_its_place(
    capsys: pytest.CaptureFixture[str], given: list[str], told: str
) -> None:
    assert main(given) == 2
    assert capsys.readouterr().err.startswith(f"kvoffd-cli: {told}")
