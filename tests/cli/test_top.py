"""``kvoffd-cli top`` in a real terminal (tmux): its screens, its keys, a daemon that goes and comes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffd_client.testing import FakeEngine
from tests.cli.tmux import PROMPT, Tmux
from tests.kit.closing import Starting
from tests.kit.command import CLI, LABEL, run_cli_here
from tests.kit.daemon import DaemonProcess
from tests.kit.ports import free_port
from tests.kit.waiting import wait_until
from tests.kit.wire import keys

POOL = "16MiB"


class Load(Starting):
    """An engine that stores ten blocks and loads them again, until it is closed; what fails is tried again."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._engine = FakeEngine(daemon.directory, LABEL, layers=1, blocks=32, page_bytes=16384)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def start(self) -> Load:
        self._thread.start()
        return self

    def _work(self) -> None:
        chain = keys(*range(1, 11))
        while not self._ended.wait(0.02):
            ready = self._engine.lookup(chain)
            self._engine.load(chain[:ready], range(ready))
            self._engine.store(chain[ready:], range(ready, len(chain)))

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._engine.close()


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(POOL) as running:
        yield running


def row(screen: str, name: str) -> list[str]:
    return next(line.split() for line in screen.splitlines() if line.startswith(name))


def test_a_daemon_at_work_that_goes_and_comes_back(daemon: DaemonProcess) -> None:
    with Load(daemon), Tmux(80, 24) as terminal:
        terminal.run(CLI, "top", "--interval", "200ms", "--directory", str(daemon.directory))
        terminal.wait_for("4 policy", LABEL, "MiB")
        screen = terminal.screen()
        lines = screen.rstrip("\n").splitlines()
        assert len(lines) == 24
        assert max(map(len, lines)) <= 80
        assert "OK" in lines[0]
        assert lines[-1].startswith("1 all  2 clients  3 tiers  4 policy  s sort: tok/s  p pause  h help  q quit")
        wait_until(lambda: row(terminal.screen(), "Lookups")[1] not in ("0/s", "-/s"))
        assert row(screen, LABEL)[-1] in ("-", "stored")

        for key, words in (
            ("2", ("last heard", "fake engine", "1 worker, pid")),
            ("3", ("There is no disk and no shared store",)),
            ("4", ("Policy learned", "come back")),
            ("?", ("the hash of one block",)),
            ("h", ("Pool [",)),
        ):
            terminal.type(key)
            terminal.wait_for(*words)
        terminal.type("ä", "DC", "s")  # Delete is sent as ESC [ 3 ~
        terminal.wait_for("s sort: size", "Pool [")

        terminal.type("p")
        paused = terminal.wait_for("PAUSED").splitlines()[0]
        assert terminal.screen().splitlines()[0] == paused
        terminal.type("p")
        terminal.wait_for("4 policy", without="PAUSED")

        head = terminal.screen().splitlines()[0]
        wait_until(lambda: terminal.screen().splitlines()[0] != head)  # a sample for this view: it has no engines
        before = row(terminal.screen(), "Lookups")
        daemon.kill()
        wait_until(lambda: "has ended; start it again." in " ".join(terminal.screen().split()), explain=terminal.screen)
        away = terminal.wait_for("No answer since")
        assert row(away, "Lookups")[1] != "-/s", "the last sample stays"
        assert ("NO ANSWER" in away.splitlines()[0], " OK " in away.splitlines()[0]) == (True, False)
        terminal.type("2")
        terminal.wait_for("No answer since", "No answer yet.")
        terminal.type("1")
        daemon.start()
        back = terminal.wait_for("Pool [", without="No answer since")
        assert re.search(r"up [0-9.]+ (ms|s) ", back), "its counters begin anew"
        terminal.wait_for("MiB")
        wait_until(lambda: row(terminal.screen(), "Lookups")[1] not in ("0/s", "-/s"), explain=lambda: before)

        terminal.resize(120, 40)
        wide = wait_until(lambda: (lines := terminal.screen().rstrip("\n").splitlines())[39:] and lines)
        assert wide[-1].endswith("200ms")
        used = wait_until(lambda: [at for at, line in enumerate(terminal.screen().splitlines()) if "Engine " in line])
        assert used[0] > 30, "a high screen is used: higher charts, and more lines"
        terminal.resize(70, 24)
        narrow = wait_until(
            lambda: (lines := terminal.screen().rstrip("\n").splitlines())[-1].endswith("h help q quit") and lines
        )
        assert max(map(len, narrow)) <= 70
        titles = next(line.split() for line in narrow if line.startswith("NAMESPACE"))
        assert {"ID", "SIZE", "TOK/S", "COMPUTED", "LOADED"} <= set(titles)
        terminal.resize(60, 12)
        wait_until(lambda: len(terminal.screen().rstrip("\n").splitlines()) == 12)
        terminal.type("q")
        terminal.wait_for(PROMPT.strip(), without="4 policy")
        terminal.run("echo", "status is here")
        terminal.wait_for("status is here")
        terminal.run("stty", "-a")
        assert " icanon" in terminal.wait_for("icanon"), "the terminal is as before"


def test_signals_leave_the_terminal_as_it_was(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Ctrl-Z and ``fg``, a stop that no process sees, SIGTERM and SIGHUP."""
    pid = tmp_path / "pid"
    with Tmux() as terminal:

        def assert_restored() -> None:
            terminal.wait_for(PROMPT.strip(), without="4 policy")
            terminal.run("stty", "-a")
            seen = terminal.wait_for("echonl")
            assert not {"-icanon", "-echo"} & set(seen.split()), seen
            terminal.run("clear")
            terminal.wait_for(PROMPT.strip(), without="echonl")

        top = shlex.join((CLI, "top", "--directory", str(daemon.directory)))
        terminal.type(f"{top} & fg", "Enter")
        terminal.wait_for("4 policy")
        terminal.type("p")
        terminal.wait_for("PAUSED")
        for _ in range(2):
            terminal.type("C-z")
            terminal.wait_for("Stopped")
            assert_restored()
            terminal.run("fg")
            terminal.wait_for("4 policy", "PAUSED")
            terminal.type("2")
            terminal.wait_for("Paused.")
            terminal.type("1")
            terminal.wait_for("No namespace")
        terminal.type("q")
        assert_restored()
        for number in (signal.SIGTERM, signal.SIGHUP):
            terminal.run("sh", "-c", f"echo $$ >{pid}; exec {top}")
            terminal.wait_for("4 policy")
            os.kill(int(pid.read_text()), number)
            assert_restored()


def test_a_stopped_daemon_is_named_within_its_two_seconds(daemon: DaemonProcess) -> None:
    with Tmux() as terminal:
        terminal.run(CLI, "top", "--interval", "200ms", "--directory", str(daemon.directory))
        terminal.wait_for("No namespace: no engine has connected yet.")
        os.kill(daemon.pid, signal.SIGSTOP)
        terminal.wait_for("No answer since", "its process is stopped")
        os.kill(daemon.pid, signal.SIGCONT)
        terminal.wait_for("No namespace", without="No answer since")
        terminal.type("q")


def test_without_a_daemon_it_says_so_and_leaves_the_screen_alone(daemon: DaemonProcess) -> None:
    daemon.stop()
    with Tmux(120) as terminal:
        terminal.run(CLI, "top", "--directory", str(daemon.directory))
        terminal.wait_for("kvoffd-cli: There is no kvoffd daemon")


def test_without_a_terminal_it_names_what_prints(daemon: DaemonProcess) -> None:
    done = run_cli_here("top", "--directory", str(daemon.directory))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "`kvoffd-cli stats`" in done.stderr


def test_another_node_over_http() -> None:
    address = f"127.0.0.1:{free_port()}"
    with DaemonProcess(POOL, http_address=address) as daemon, Load(daemon), Tmux() as terminal:
        terminal.run(CLI, "top", "--interval", "200ms", "--url", f"http://{address}")
        terminal.wait_for(LABEL, "4 policy")
        terminal.type("2")
        terminal.wait_for("HTTP has statistics only")
        terminal.type("1")
        daemon.kill()
        terminal.wait_for("No answer since", "Connection refused", "Pool [")
        daemon.start()
        terminal.wait_for("Pool [", without="No answer since")
