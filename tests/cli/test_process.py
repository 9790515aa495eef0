"""``kvoffd-cli`` as a process: terminals, pipes, signals, locales; whatever is wrong is one sentence."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvoffd_client import AdminClient
from kvoffd_client.testing import FakeEngine
from tests.kit.command import CLI, CLIENTS, DAEMON, DEADLINE_S, Terminal, run_cli, run_cli_here, start_cli
from tests.kit.daemon import DaemonProcess
from tests.kit.interrupt import interrupted_import
from tests.kit.waiting import wait_until
from tests.kit.wire import keys, prompt_of, reported


def assert_one_sentence(done: subprocess.CompletedProcess[str], program: str = "kvoffd-cli") -> None:
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.startswith(f"{program}: "), done
    assert done.stderr.count("\n") == 1, done


# --- whatever is wrong -----------------------------------------------------------------------------


def test_a_daemon_that_stands_still_is_one_sentence(daemon: DaemonProcess) -> None:
    """Its process is stopped: the command says so at once, and how to let it go on. Probes are no exception."""
    os.kill(daemon.pid, signal.SIGSTOP)
    for command in (("stats",), ("health", "--live"), ("clear", "--all", "--yes")):
        end = run_cli_here(*command, "--directory", str(daemon.directory))
        assert_one_sentence(end)
        assert "does not answer" in end.stderr
        assert f"kill -CONT {daemon.pid}" in end.stderr, "this is looked at before the command's own deadline"
    os.kill(daemon.pid, signal.SIGCONT)
    wait_until(lambda: run_cli_here("health", "--directory", str(daemon.directory)).returncode == 0)


def test_closed_output_is_no_traceback(shared_daemon: DaemonProcess) -> None:
    where = f"--directory {shared_daemon.directory}"
    for redirection in (">&-", "<&- >&- 2>&-"):
        done = subprocess.run(
            ["sh", "-c", f"{CLI} stats {where} {redirection}"], capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert "Traceback" not in done.stdout + done.stderr, redirection
        assert done.stderr.count("\n") <= 1, done
        assert done.returncode in (0, 1, 2), done
    for command in (f"{CLI} stats {where}", f"{CLI} health {where}", f"{DAEMON} config"):
        done = subprocess.run(
            ["sh", "-c", f"{command} >/dev/full"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert_one_sentence(done, command.split()[0].rpartition("/")[2])
        assert "standard output: No space left on device." in done.stderr


def test_any_terminal_and_locale_will_do(shared_daemon: DaemonProcess) -> None:
    """A narrow one, one without colours, and labels that its locale cannot write."""
    where = ("--directory", str(shared_daemon.directory))
    with FakeEngine(shared_daemon.directory, "Qwen-\N{GREEK SMALL LETTER ALPHA}\x1b[2J") as engine:
        assert engine.store(keys(1), [0]).ok
        for command in (("stats",), CLIENTS):
            with Terminal(*command, *where, columns=20, LC_ALL="C", NO_COLOR="1") as terminal:
                assert terminal.end() == 0, terminal.seen
            assert "Traceback" not in terminal.seen
            assert "\x1b[2J" not in terminal.seen, "a label moves no cursor"
            assert terminal.seen.isascii()
            assert not any(f"\x1b[{colour}m" in terminal.seen for colour in range(30, 38))
        variables = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "KVOFFD_DIRECTORY": str(shared_daemon.directory)}
        done = run_cli("namespaces", **variables, PYTHONCOERCECLOCALE="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "Qwen-" in done.stdout


def test_a_terminal_that_tells_no_width_will_do(tmp_path: Path) -> None:
    """As a container's, or that of a program which drives another."""
    for command in ("health", "nonsense"):
        with Terminal(command, "--directory", str(tmp_path), columns=0) as terminal:
            assert terminal.end() == 2, terminal.seen
        assert terminal.seen.startswith("kvoffd-cli: "), terminal.seen


# --- what goes on until Ctrl-C ---------------------------------------------------------------------


@pytest.mark.parametrize("imported", ["typer", "rich.console"])
def test_ctrl_c_while_a_command_is_loaded_is_quiet(shared_daemon: DaemonProcess, imported: str) -> None:
    code = "import sys; from kvoffd_client.cli import main; sys.exit(main(sys.argv[1:]))"
    command = ["-c", code, "events", "--directory", str(shared_daemon.directory)]
    assert interrupted_import(command, imported, DEADLINE_S) == (130, [])


def store_until_heard(engine: FakeEngine, process: subprocess.Popen[str]) -> str:
    """Store pairs of new keys until ``process`` prints a line: a subscription takes a while to arrive."""
    assert process.stdout is not None
    deadline = time.monotonic() + DEADLINE_S
    number = 0
    while time.monotonic() < deadline:
        if select.select([process.stdout], [], [], 0.1)[0]:
            return process.stdout.readline()
        number += 2
        assert engine.store(keys(number, number + 1), [0, 1]).ok
    raise AssertionError("no event came")


def test_events_are_printed_as_they_happen(shared_daemon: DaemonProcess) -> None:
    where = ("--directory", str(shared_daemon.directory))
    with start_cli("events", *where) as human, start_cli("events", "--json", *where) as machine:
        with FakeEngine(shared_daemon.directory, "tiny") as engine:
            line = store_until_heard(engine, human)
            found = json.loads(store_until_heard(engine, machine))
        for process in (human, machine):
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 130
            assert process.stderr is not None
            assert process.stderr.read() == "", "Ctrl-C is quiet"
    assert all(word in line for word in ("tiny", "stored", "2 blocks"))
    assert found["label"] == "tiny"
    (event,) = found["events"]
    assert event["type"] == "stored"
    first, second = (int(key, 16) for key in event["block_hashes"])
    assert second == first + 1


def test_requests_are_printed_as_they_come(shared_daemon: DaemonProcess) -> None:
    """Those of before are not; each is printed once."""
    where = ("clients", "--requests", "--follow", "--directory", str(shared_daemon.directory))
    with FakeEngine(shared_daemon.directory, "tiny") as engine, AdminClient(shared_daemon.directory) as admin:

        def report(name: str) -> None:
            engine.scheduler.report_prompt(replace(prompt_of(300, own=84, loaded=180), request=name))
            wait_until(lambda: name in dict(reported(admin)))

        report("earlier")
        with start_cli(*where) as human, start_cli(*where, "--json") as machine:
            assert human.stdout is not None
            assert machine.stdout is not None
            lines, number = list[str](), 0
            while not select.select([human.stdout], [], [], 0.1)[0]:  # it takes a while to start
                number += 1
                report(f"request {number}")
            lines.append(human.stdout.readline())
            report("last")
            while "last" not in lines[-1]:
                lines.append(human.stdout.readline())
            found = json.loads(machine.stdout.readline())
            for process in (human, machine):
                process.send_signal(signal.SIGINT)
                assert process.wait(DEADLINE_S) == 130
    assert not any("earlier" in line for line in lines)
    assert len(set(lines)) == len(lines)
    assert "36 computed" in lines[-1]
    assert found["report"]["tokens"] == 300


def test_a_reader_that_goes_is_no_error(shared_daemon: DaemonProcess) -> None:
    with (
        start_cli("events", "--directory", str(shared_daemon.directory)) as process,
        FakeEngine(shared_daemon.directory, "read") as engine,
    ):
        store_until_heard(engine, process)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert engine.store(keys(1001), [0]).ok
        assert process.wait(DEADLINE_S) == 0
        assert process.stderr.read() == ""


def test_events_say_when_the_daemon_goes_and_is_back(daemon: DaemonProcess) -> None:
    with start_cli("events", "--directory", str(daemon.directory)) as process:
        with FakeEngine(daemon.directory, "tiny") as engine:
            assert "tiny" in store_until_heard(engine, process)
        daemon.kill()
        assert process.stderr is not None
        for state in ("has ended the connection.", "is back;"):
            assert f"The kvoffd daemon in {daemon.directory} {state}" in process.stderr.readline()
            if state != "is back;":
                daemon.start()
        with FakeEngine(daemon.directory, "tiny") as engine:
            line = store_until_heard(engine, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130
        number = line.split()[1]
        lost = f"{number} event message{'s' * (number != '1')} before number {number} did not arrive."
        assert process.stderr.read() == ("" if number == "0" else f"kvoffd-cli: {lost}\n")


# --- what asks -------------------------------------------------------------------------------------


def test_clear_asks_and_takes_no_for_an_answer(shared_daemon: DaemonProcess) -> None:
    where = ("--directory", str(shared_daemon.directory))
    with FakeEngine(shared_daemon.directory, "tiny") as engine:
        assert engine.store(keys(1), [0]).ok
        for answer, status, left in (("", 1, 1), ("y", 0, 0)):
            with Terminal("clear", "tiny", *where) as terminal:
                terminal.read_until(lambda seen: "[y/N]" in seen)
                assert "1 block (64.0 KiB)" in terminal.seen
                assert "tiny" in terminal.seen
                terminal.write(f"{answer}\n")
                assert terminal.end() == status
            assert engine.lookup(keys(1)) == left
            engine.release()
        assert engine.store(keys(1), [0]).ok
        done = run_cli_here("clear", "--all", *where)
        assert_one_sentence(done)
        assert "--yes" in done.stderr, "where nobody can answer nothing is dropped"
        assert engine.lookup(keys(1)) == 1


def test_clear_says_that_it_drops_what_is_on_disks(tmp_path: Path) -> None:
    with (
        DaemonProcess("8MiB", disk=f"{tmp_path}=64MiB", disk_write="always") as daemon,
        FakeEngine(daemon.directory, "tiny") as engine,
        AdminClient(daemon.directory) as admin,
    ):
        wait_until(lambda: admin.stats().disks[0].state == "serving")
        assert engine.store(keys(1), [0]).ok
        wait_until(lambda: admin.stats().disks[0].blocks == 1)
        (space,) = admin.stats().namespaces
        assert space.disk_bytes == space.ready_bytes == admin.stats().disks[0].used_bytes
        tiers = run_cli_here("stats", "tiers", "--directory", str(daemon.directory))
        assert (tiers.returncode, f"on disk: tiny ({space.id}) 64.0 KiB" in tiers.stdout) == (0, True)
        where = ("--directory", str(daemon.directory))
        with FakeEngine(daemon.directory, "other"), Terminal("clear", "other", *where) as terminal:
            terminal.read_until(lambda seen: "[y/N]" in seen)
            assert "Drop 0 blocks (0 B) from namespace other" in terminal.seen
            terminal.write("n\n")
            assert terminal.end() == 1
        with Terminal("clear", "tiny", *where) as terminal:
            terminal.read_until(lambda seen: "[y/N]" in seen)
            assert "Drop 1 block (64.0 KiB), and those on disks, from namespace tiny" in terminal.seen
            terminal.write("y\n")
            assert terminal.end() == 0
        assert admin.stats().disks[0].blocks == 0
