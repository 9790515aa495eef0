"""``kvoffd-cli`` on a daemon with an engine: what commands show and do, and what they print for programs."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kvoffd_client import NamespaceSpec, SchedulerClient
from kvoffd_client.cli import main
from kvoffd_client.testing import FakeEngine
from tests.kit.command import DEADLINE_S, KEYS, LABEL, READING, Cli, Done
from tests.kit.daemon import DaemonProcess
from tests.kit.redis_server import RedisServer
from tests.kit.waiting import wait_until
from tests.kit.wire import books

COMMANDS = (
    *READING,
    ("health", "--live"),
    ("health", "--ready"),
    ("doctor",),
    ("clear", "--all", "--yes"),
    ("scrub",),
    ("events",),
    ("bench", "lookup"),
    ("bench", "copy"),
)
"""What needs a daemon."""


def test_without_a_daemon_each_command_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        for more in ((), ("--json",)) if command in READING else ((),):
            status = main([*command, *more, "--directory", str(tmp_path)])
            assert str(tmp_path) in Done(status, *capsys.readouterr()).sentence, command
    assert gc.isenabled(), "health stops it while it imports"
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "missing", tmp_path / "file", tmp_path / ("long" * 40)):
        status = main(["stats", "--directory", str(place)])
        assert str(place) in Done(status, *capsys.readouterr()).sentence


def test_bad_arguments_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ("stats", "--interval"),
        ("stats", "tiers", "--misses"),
        ("nonsense",),
        ("stats", "nonsense"),
        ("top", "--interval", "soon"),
        ("top", "--interval", "1ms"),
        ("--json", "stats"),
        ("bench",),
        ("bench", "nonsense"),
        ("clear",),
        ("clear", "--all", LABEL),
        ("namespaces", "quota"),
    ):
        assert Done(main(arguments), *capsys.readouterr()).sentence, arguments
    assert main(("--directory", "/tmp", "namespaces", "diff")) == 2
    assert capsys.readouterr().err.endswith("kvoffd-cli namespaces diff --directory.\n")


def test_help_says_bytes_and_seconds_where_there_are_some(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (
        ("clear",),
        ("events",),
        ("health",),
        ("namespaces", "diff"),
        ("trace", "replay"),
        ("bench", "copy"),
    ):
        assert main([*command, "--help"]) == 0
        assert "in bytes and seconds" not in capsys.readouterr().out, command
    for command in (("stats",), ("clients",), ("scrub",), ("trace", "record"), ("verify",)):
        assert main([*command, "--help"]) == 0
        assert "in bytes and seconds" in capsys.readouterr().out, command


# --- what is shown ---------------------------------------------------------------------------------


def test_what_is_printed_for_programs_is_json(engine: FakeEngine, cli: Cli) -> None:
    assert engine.lookup([*KEYS[:6], b"x" * 32, b"y" * 32]) == 6
    for command in (*READING, ("scrub",)):
        status, out, err = cli(*command, "--json")
        assert (status, err) == (0, ""), command
        assert isinstance(json.loads(out), dict)
        assert "\x1b" not in out


def test_namespaces_that_differ_are_compared(shared_daemon: DaemonProcess, cli: Cli) -> None:
    with (
        FakeEngine(shared_daemon.directory, "one", name="vllm:a one") as first,
        FakeEngine(shared_daemon.directory, "two", page_bytes=4096, name="vllm:b two"),
    ):
        out = cli("namespaces").out
        assert ("one" in out, "two" in out) == (True, True)
        whose = f"{first.namespace.fingerprint.hex()[:12]} is open in vllm:a one, pid {os.getpid()}\n"
        assert whose in out
        assert whose in cli("stats", "namespaces").out
        by_engine = cli("namespaces", "diff", "vllm:a", "vllm:b two")
        assert by_engine == cli("namespaces", "diff", "one", "two")
        assert cli("namespaces", "diff", str(os.getpid()), "one").status == 2, "two engines have it"
        status, out, _ = cli("namespaces", "diff", "one", "two")
        assert (status, "4096" in out) == (1, True)
        assert cli("namespaces", "diff", "one", "one").status == 0
        assert json.loads(cli("namespaces", "diff", "one", "two", "--json").out)["differences"]


def test_what_a_client_made_up_keeps_no_listing_away(shared_daemon: DaemonProcess, cli: Cli) -> None:
    """Descriptions too deep for a parser, and names that would move the cursor."""
    texts = ('{"\\u001b[2J": "\\u001b]0;x\\u0007", "model": "a"}', '{"model": "a", "\\u202e": "\\u009b"}', "[" * 30_000)
    with ExitStack() as clients:
        for number, text in enumerate(texts):
            spec = replace(NamespaceSpec.named(f"made up {number}"), description=text)
            assert clients.enter_context(SchedulerClient(shared_daemon.directory, spec)).wait_ready(30.0)
        commands = [("namespaces", "diff", "made up 0", f"made up {other}") for other in (1, 2)]
        commands.append(("namespaces",))
        for command in commands:
            status, out, err = cli(*command)
            assert (status in (0, 1), err) == (True, ""), command
            assert out.replace("\n", "").isprintable()
        assert len(json.loads(cli("namespaces", "--json").out)["namespaces"]) >= len(texts)


# --- health, as probes run it -----------------------------------------------------------------------

PROBES = ((), ("--live",), ("--ready",))
HEAVY = {"asyncio", "numpy", "rich", "typer", "kvoffd_proto.messages", "kvoffd_client.admin_client"}
"""ZeroMQ is not among them: a probe asks as engines do, so that it proves what they need. It costs 16 ms of CPU."""


def test_a_healthy_daemon_is_status_0(cli: Cli) -> None:
    for probe in PROBES:
        status, out, err = cli("health", *probe)
        assert (status, err) == (0, "")
        assert out.startswith("ok")
    found = json.loads(cli("health", "--json").out)
    assert (found["level"], found["causes"]) == ("ok", [])
    assert cli("health", "--live", "--ready").status == 2, "one at a time"


def test_a_degraded_daemon_is_alive_and_ready(cli: Cli, tmp_path: Path) -> None:
    """It serves without its disk: neither a restart nor other nodes would help."""
    with DaemonProcess("8MiB", disk=f"{tmp_path / 'missing'}=64MiB", disk_start="optional") as daemon:
        wait_until(lambda: books(daemon.directory).health == "degraded")
        assert [cli("health", *probe, on=daemon).status for probe in PROBES] == [1, 0, 0]
        out = cli("health", on=daemon).out
        assert out.startswith("degraded")
        assert "missing" in out
        found = json.loads(cli("health", "--json", on=daemon).out)
        assert [cause["reason"] for cause in found["causes"]] == ["disk_failed"]
        for more in ((), ("--json",)):
            done = cli("stats", "tiers", *more, on=daemon)
            assert (done.status, f"{tmp_path}/missing" in done.out, "failed" in done.out, done.err) == (
                1,
                True,
                True,
                "",
            )


def test_a_probe_imports_nothing_heavy(shared_daemon: DaemonProcess) -> None:
    """Probes run every few seconds, beside engines."""
    script = (
        "import json, sys; from kvoffd_client.cli import main; "
        "status = main(sys.argv[1:]); print(json.dumps([status, sorted(sys.modules)]))"
    )
    for probe in ([], ["--live"], ["--json"]):
        command = [sys.executable, "-c", script, "health", *probe, "--directory", str(shared_daemon.directory)]
        said, imported = subprocess.check_output(command, text=True, timeout=DEADLINE_S).splitlines()
        status, modules = json.loads(imported)
        assert (said.startswith(("ok", '{"level": "ok"')), status) == (True, 0)
        assert HEAVY.isdisjoint(modules)


# --- what is done ----------------------------------------------------------------------------------


def test_clear_drops_what_is_named(engine: FakeEngine, cli: Cli, shared_daemon: DaemonProcess) -> None:
    fingerprint = engine.namespace.fingerprint.hex()
    for name in ((LABEL,), (fingerprint[:8],), ("--all",)):
        status, out, err = cli("clear", *name, "--yes", "--json")
        assert (status, json.loads(out)["cleared_blocks"], err) == (0, 8, "")
        assert books(shared_daemon.directory).ready_blocks == 0
        assert engine.store(KEYS, range(8)).ok
    for wrong in (("nobody", "--yes"), ("--all",)):
        assert cli("clear", *wrong).sentence
    assert books(shared_daemon.directory).ready_blocks == 8


def test_the_log_level_changes_without_a_restart(cli: Cli) -> None:
    with DaemonProcess("8MiB") as daemon:
        assert cli("log-level", "error", on=daemon).out == "The daemon logs error and above.\n"
        assert "set the log level: error." in daemon.log
        with FakeEngine(daemon.directory, "unheard"):
            pass
        assert cli("log-level", on=daemon).out == "The daemon logs error and above.\n", "as it is now"
        assert cli("log-level", "debug", on=daemon).status == 0
        with FakeEngine(daemon.directory, "heard"):
            pass
        assert cli("log-level", "loud", on=daemon).status == 2
        levels = [line.split()[1] for line in daemon.log.partition("set the log level: error")[2].splitlines()[1:]]
        assert levels[0] == "INFO", "nothing was logged until somebody changed it"
        assert daemon.log.count("set the log level") == 2


def test_the_protocol_is_printed_with_the_release(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    spoken = re.findall(r"^kvoffd-cli \S+ \(protocol (\d+)\)$", capsys.readouterr().out)
    daemon = re.findall(r"^kvoffd \S+ \(protocol (\d+)\), up", cli("stats").out)
    assert spoken == daemon == [str(json.loads(cli("stats", "--json").out)["protocol"])]


def test_clear_of_all_on_all_nodes_names_what_other_nodes_drop(cli: Cli) -> None:
    with RedisServer() as server, DaemonProcess("8MiB", shared=server.url) as daemon:
        wait_until(lambda: books(daemon.directory).shared[0].up)
        with FakeEngine(daemon.directory, "one"), FakeEngine(daemon.directory, "two"):
            done = cli("clear", "--all", "--all-nodes", "--yes", on=daemon)
            dropped = "Dropped 0 blocks from all namespaces, and the 2 that this daemon has from all nodes.\n"
            assert done.out.startswith(dropped)
            assert "Shared stores keep the bytes, which nobody reads" in done.out


def test_a_pool_that_is_too_small_for_a_bench_is_refused(shared_daemon: DaemonProcess, cli: Cli) -> None:
    assert "64.0 MiB" in cli("bench", "lookup").sentence
    wait_until(lambda: books(shared_daemon.directory).sessions == 0)  # the daemon hears of its end a moment later
