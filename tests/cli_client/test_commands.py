"""The commands against a real daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kvoffd_client import SchedulerClient
from kvoffd_client.cli import main
from kvoffd_client.namespace_spec import NamespaceSpec
from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.open_files import files_of_at_most

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


def test_stats_show_what_the_engine_did(engine: FakeEngine, cli: Cli) -> None:
    status, out, err = cli("stats")
    assert (status, err) == (0, "")
    (line,) = (line for line in out.splitlines() if line.startswith("tiny"))
    for expected in ("8", "512 KiB", "75.0 %"):
        assert expected in line
    assert "512 KiB of 64.0 MiB" in out
    assert "pinned 6 blocks" in out
    assert "\x1b" not in out
    assert not any(line.endswith(" ") for line in out.splitlines())


def test_stats_json_has_named_fields(engine: FakeEngine, cli: Cli) -> None:
    status, out, _ = cli("stats", "--json")
    assert status == 0
    found = json.loads(out)
    (namespace,) = found["namespaces"]
    assert (namespace["label"], namespace["ready_blocks"], namespace["stored_bytes"]) == ("tiny", 8, 8 * 4 * 16384)
    assert (namespace["keys_asked"], namespace["keys_ready"], namespace["prefix_keys_ready"]) == (8, 6, 6)
    assert len(bytes.fromhex(namespace["namespace"])) == 32
    assert found["pool"]["pool_bytes"] == 64 * 2**20
    assert found["store"]["bytes"] >= 8 * 4 * 16384
    assert (found["pinned_blocks"], found["leases"]) == (6, 1)


def test_health_is_told_and_in_the_status(cli: Cli) -> None:
    assert cli("health") == (0, "ok: the daemon takes sessions and jobs\n", "")
    status, out, _ = cli("health", "--json")
    assert status == 0
    assert {"level": "ok", "causes": []}.items() <= json.loads(out).items()


def test_sessions_are_listed(engine: FakeEngine, cli: Cli) -> None:
    _, out, _ = cli("sessions")
    rows = [line.split() for line in out.splitlines()]
    assert {"scheduler", "worker", "admin"} <= {row[1] for row in rows[1:]}
    assert all(str(os.getpid()) in row for row in rows[1:])
    _, out, _ = cli("sessions", "--json")
    worker = next(item for item in json.loads(out)["sessions"] if item["role"] == "worker")
    assert worker["registered_bytes"] == 512 * 4 * 16384


def test_an_engine_is_one_row_with_its_scheduler_and_workers(engine: FakeEngine, cli: Cli) -> None:
    (row,) = json.loads(cli("sessions", "--engines", "--json")[1])["engines"]
    assert (row["schedulers"], row["workers"], row["pids"]) == (1, len(engine.workers), [os.getpid()])
    assert row["registered_bytes"] == len(engine.workers) * 512 * 4 * 16384
    head, line = cli("sessions", "--engines")[1].splitlines()
    assert head.split()[:4] == ["engine", "namespace", "schedulers", "workers"]
    assert line.startswith("fake engine  tiny (")


def test_namespaces_are_listed(engine: FakeEngine, cli: Cli) -> None:
    _, out, _ = cli("namespaces")
    assert out.splitlines()[1].startswith("tiny")
    assert "64.0 KiB" in out
    _, out, _ = cli("namespaces", "--json")
    (found,) = json.loads(out)["namespaces"]
    assert found["shard_bytes"] == [[4 * 16384]]


def test_clear_drops_the_blocks(engine: FakeEngine, cli: Cli) -> None:
    engine.release()
    assert cli("clear", "--namespace", "tiny", "--yes")[0] == 0
    assert engine.lookup(KEYS) == 0


def test_clear_all_counts_the_blocks(engine: FakeEngine, cli: Cli) -> None:
    engine.release()
    status, out, _ = cli("clear", "--all", "--yes", "--json")
    assert (status, json.loads(out)) == (0, {"namespace": None, "cleared_blocks": 8})


def test_clear_by_fingerprint(engine: FakeEngine, cli: Cli) -> None:
    fingerprint = json.loads(cli("namespaces", "--json")[1])["namespaces"][0]["namespace"]
    _, out, _ = cli("clear", "--namespace", fingerprint[:8], "--yes")
    assert out == f"8 blocks were dropped from namespace tiny ({fingerprint[:8]}).\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "either --namespace"),
        (("--all", "--namespace", "tiny"), "either --namespace"),
        (("--namespace", "nobody", "--yes"), "kvoffd-cli namespaces"),
        (("--all",), "add --yes"),
    ],
)
def test_clear_refuses_what_is_not_clear(engine: FakeEngine, cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    status, out, err = cli("clear", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("kvoffd-cli: ")
    assert words in err
    assert err.count("\n") == 1
    assert engine.lookup(KEYS) == 8


@pytest.mark.parametrize(
    "command",
    [
        ("stats",),
        ("stats", "--watch"),
        ("health",),
        ("sessions",),
        ("namespaces", "--json"),
        ("clear", "--all", "--yes"),
        ("events",),
        ("bench", "lookup"),
        ("bench", "copy", "--json"),
        ("bench", "jobs"),
        ("bench", "engine"),
        ("bench", "pool", "--model", "none"),
    ],
)
def test_without_a_daemon_one_sentence_names_the_directory(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--directory", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvoffd-cli: ")
    assert err.count("\n") == 1
    assert str(tmp_path) in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("stats", "--nonsense"),
        ("stats", "--interval"),
        ("stats", "--interval", "soon"),
        ("stats", "--interval", "1ms"),
        ("bench",),
        ("bench", "nonsense"),
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


def test_the_directory_may_come_from_the_environment(
    shared_daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVOFFD_DIRECTORY", str(shared_daemon.directory))
    assert main(["health"]) == 0


def test_namespaces_that_differ_are_compared(shared_daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    def cli_at(where: Path, *arguments: str) -> tuple[int, str, str]:
        status = main([*arguments, "--directory", str(where)])
        return status, *capsys.readouterr()

    where = shared_daemon.directory
    with FakeEngine(where, "tiny"), FakeEngine(where, "other", page_bytes=4096):
        status, out, _ = cli_at(where, "namespaces", "diff", "tiny", "other")
        assert status == 1
        rows = [line.split() for line in out.splitlines()]
        assert ["name", "tiny", "other"] in rows
        assert any(row[0] == "fields" and "4096" in " ".join(row) for row in rows)
        status, out, _ = cli_at(where, "namespaces", "diff", "tiny", "other", "--json")
        assert {"field": "name", "a": "tiny", "b": "other"} in json.loads(out)["differences"]
        status, out, _ = cli_at(where, "namespaces", "diff", "tiny", "tiny")
        assert (status, out.split()[-3:]) == (0, ["is", "one", "namespace."])
        status, out, _ = cli_at(where, "namespaces", "--json")
        assert [one["description"]["name"] for one in json.loads(out)["namespaces"]] == ["tiny", "other"]


@pytest.mark.parametrize("nested", ["[" * 30_000 + "]" * 30_000, '{"a":' * 900 + "1" + "}" * 900, '{"model": NaN}'])
def test_a_description_that_a_client_made_up_keeps_no_listing_away(
    nested: str, shared_daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    where = shared_daemon.directory
    texts = ('{"\\u001b[2J": "\\u001b]0;x\\u0007", "model": "a"}', '{"model": "a", "\\u202e": "\\u009b"}', nested)
    specs = [
        replace(NamespaceSpec.named(name), label=name, description=text)
        for name, text in zip(("one", "two", "three"), texts, strict=True)
    ]
    with ExitStack() as clients:
        for spec in specs:
            assert clients.enter_context(SchedulerClient(where, spec)).wait_ready(10)
        for words in ("namespaces", "namespaces diff one two", "namespaces diff one three", "advise"):
            assert main([*words.split(), "--directory", str(where)]) in (0, 1)
            assert capsys.readouterr().out.replace("\n", "").isprintable()
        assert main(["namespaces", "--json", "--directory", str(where)]) == 0
        found = {one["label"]: one["description"] for one in json.loads(capsys.readouterr().out)["namespaces"]}
        assert (found["two"]["model"], found["three"]) == ("a", nested)


def test_what_names_the_daemon_may_stand_before_the_command_or_behind_it(
    shared_daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(shared_daemon.directory)
    for arguments in (["--directory", where, "namespaces"], ["namespaces", "--directory", where]):
        assert main(arguments) == 0
    key_file = tmp_path / "key"
    assert main(["keygen", str(key_file)]) == 0
    remote = ["--address", "127.0.0.1:1", "--key", str(tmp_path / "none"), "--server-key", "k" * 40]
    capsys.readouterr()
    said = set()
    for arguments in ([*remote, "namespaces"], ["namespaces", *remote], [*remote[:2], "namespaces", *remote[2:]]):
        assert main(arguments) == 2
        said.add(capsys.readouterr().err)
    assert len(said) == 1
    assert str(tmp_path / "none") in said.pop()
    assert main(["--directory", where, "namespaces", "--address", "h:1", "--server-key=k", "--key=f"]) == 2
    assert "two daemons" in capsys.readouterr().err


def test_keygen_says_which_file_it_cannot_write_and_leaves_none_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "admin.key"
    with files_of_at_most(0):
        assert main(["keygen", str(file)]) == 2
    assert capsys.readouterr().err == f"kvoffd-cli: {file} cannot be written: File too large.\n"
    assert not file.exists()
    assert main(["keygen", str(tmp_path / "none" / "key")]) == 2
    assert "none/key cannot be written: No such file or directory.\n" in capsys.readouterr().err


def test_help_says_of_each_command_what_it_does_in_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    commands = capsys.readouterr().out.partition("Commands:")[2]
    assert commands.count("\n  ") > 15
    assert "..." not in commands


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


@pytest.mark.parametrize(("bench", "needed"), [("lookup", "192 MiB"), ("fairness", "144 MiB"), ("jobs", "153 MiB")])
def test_a_pool_that_is_too_small_for_a_bench_is_told_before_it_begins(
    shared_daemon: DaemonProcess, capsys: pytest.CaptureFixture[str], bench: str, needed: str
) -> None:
    assert main(["bench", bench, "--directory", str(shared_daemon.directory)]) == 2
    told = (
        f"kvoffd-cli: The pool has 64.0 MiB, and this bench needs {needed}; start a daemon with a larger one for it.\n"
    )
    assert capsys.readouterr() == ("", told)


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


def test_scrub_tells_what_was_compared(engine: FakeEngine, cli: Cli) -> None:
    status, out, err = cli("scrub", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["slots"], found["checked_slots"], found["mismatches"], found["running"]) == (8, 8, 0, False)
    assert found["checked_bytes"] == 8 * 4 * 16384
    status, out, _ = cli("scrub")
    assert status == 0
    assert out.startswith("8 slots (512 KiB) were compared with their checksums in ")
    assert out.endswith("all match.\n")
