"""``kvoffd-cli clients``, ``namespaces`` and ``events``: nothing is lost on 80 columns, and their help is short."""

from __future__ import annotations

import json
import os
import re

import pytest

from kvoffd_client.cli import main
from kvoffd_client.testing import FakeEngine
from tests.kit.command import BLOCK_BYTES, Cli, Terminal, run_cli_here
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import keys

HEARD = r"[0-9.]+ m?s ago"
LONG = "meta-llama/Llama-3.1-405B-Instruct with eight ranks and fp8 weights"


def test_nothing_is_lost_on_80_columns(shared_daemon: DaemonProcess) -> None:
    where = ("--directory", str(shared_daemon.directory))
    with FakeEngine(shared_daemon.directory, LONG) as first, FakeEngine(shared_daemon.directory, "tiny") as second:
        assert first.store(keys(1), [0]).ok
        found = [one.namespace.fingerprint.hex()[:12] for one in (first, second)]
        for command in (("clients",), ("clients", "--all"), ("namespaces",)):
            wide = re.sub(HEARD, "ago", run_cli_here(*command, *where).stdout)
            with Terminal(*command, *where, NO_COLOR="1") as terminal:
                assert terminal.end() == 0
            seen = re.sub(HEARD, "ago", re.sub(r"\x1b\[[0-9;]*m", "", terminal.seen))
            assert max(map(len, seen.splitlines())) <= 80, command
            assert "…" not in seen
            if command == ("clients",):  # with labels where there is room
                for one in (first, second):
                    digits = one.namespace.fingerprint.hex()[:12]
                    assert f"{one.namespace.label} ({digits})" in wide
                    wide = wide.replace(f"{one.namespace.label} ({digits})", digits)
            if "--all" in command:  # each time it is idle for another time
                assert all(title in seen.split() for title in wide.splitlines()[0].split())
            else:
                assert sorted("".join(seen.split())) == sorted("".join(wide.split())), "the same, on more lines"
            assert all(fingerprint in wide for fingerprint in found)


def test_engines_have_a_row_each_and_the_command_none(shared_daemon: DaemonProcess, cli: Cli) -> None:
    with FakeEngine(shared_daemon.directory, "one") as engine, FakeEngine(shared_daemon.directory, "one"):
        assert engine.store(keys(1, 2), [0, 1]).ok
        assert engine.lookup(keys(1)) == 1
        assert engine.load(keys(1), [2]).ok
        rows = json.loads(cli("clients", "--json").out)["engines"]
        assert [(row["schedulers"], row["workers"]) for row in rows] == [(1, 1), (1, 1)], "of one name, and two engines"
        moved = [(row["stored_bytes"], row["loaded_bytes"]) for row in rows]
        assert sorted(moved) == [(0, 0), (2 * BLOCK_BYTES, BLOCK_BYTES)]
        assert "with 2 engines" in cli("doctor").out
        assert engine.namespace.fingerprint.hex() in rows[0]["namespaces"]
        assert 0 <= rows[0]["idle_seconds"] < 60
        sessions = json.loads(cli("clients", "--all", "--json").out)["sessions"]
        assert {one["role"] for one in sessions} == {"scheduler", "worker"}
        worker = next(one for one in sessions if one["role"] == "worker")
        assert (worker["pid"], worker["registered_bytes"]) == (os.getpid(), 512 * BLOCK_BYTES)
        assert "admin" not in cli("clients", "--all").out
    assert cli("clients").out == "No engine is connected.\n"


def test_the_problem_of_an_engine_is_its_own(shared_daemon: DaemonProcess, cli: Cli) -> None:
    """Also where another one has the same name."""
    with (
        FakeEngine(shared_daemon.directory, "one", name="vllm") as engine,
        FakeEngine(shared_daemon.directory, "two", name="vllm"),
    ):
        engine.scheduler.report(0.0, 0, 0, problem="its memory cannot be shared")

        def problems() -> list[tuple[str, str]]:
            rows = json.loads(cli("clients", "--json").out)["engines"]
            return sorted((row["problem"], row["labels"][0]) for row in rows)

        expected = [("", "two"), ("its memory cannot be shared", "one")]
        wait_until(lambda: problems() == expected, explain=problems)
        assert cli("clients").out.count("vllm stores and loads nothing: its memory cannot be shared\n") == 1


def test_a_quota_that_limits_nothing_says_so_and_one_below_a_block_is_refused(engine: FakeEngine, cli: Cli) -> None:
    assert "the pool has 64.0 MiB" in cli("namespaces", "quota", "tiny", "--max", "2TiB").out
    out = cli("namespaces", "quota", "tiny", "--max", "64KiB").out
    assert "at most 64.0 KiB." in out
    assert "It has 512 KiB now" in out
    refused = cli("namespaces", "quota", "tiny", "--max", "64")
    assert refused.status == 2
    assert "64 is less than a block of 64.0 KiB; plain numbers are bytes: write 1MiB" in refused.err
    assert "at most 64.0 KiB." in cli("namespaces", "quota", "tiny", "--max", "64KiB").out
    assert cli("namespaces", "quota", "tiny", "--max", "none").out.endswith(": no quota.\n")


COMMANDS = ("", "top", "stats", "health", "doctor", "verify", "clients", "clear", "scrub", "log-level", "events")
GROUPS = {"namespaces": ("diff", "quota", "reuse"), "trace": ("record", "replay"), "bench": ("lookup", "copy")}


def test_help_names_every_command_and_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert all(f"\n  {command} " in page for command in (*COMMANDS[1:], *GROUPS))
    assert "..." not in page.partition("Commands:")[2], "each is said in whole"
    for command in (*COMMANDS, *GROUPS, *(f"{group} {name}" for group, names in GROUPS.items() for name in names)):
        assert main([*command.split(), "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("Usage: ")
        assert len(lines) <= 24, command
        assert max(map(len, lines)) <= 80, command


def test_options_of_a_replay_over_nodes_have_a_help_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """One page for all options would not fit a screen."""
    shown = {}
    for option in ("--help", "--help-nodes"):
        assert main(["trace", "replay", option]) == 0
        shown[option] = capsys.readouterr().out
    assert "--help-nodes" in shown["--help"]
    assert "--route" not in shown["--help"]
    assert all(name in shown["--help-nodes"] for name in ("--nodes", "--route", "--peers", "--speeds", "--policy"))
