"""kvoffd-cli as a process: terminals, pipes, signals."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable

import pytest

from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until

COMMAND = (sys.executable, "-c", "import sys; from kvoffd_client.cli import main; sys.exit(main())")
DEADLINE_S = 20.0


def start(daemon: DaemonProcess, *arguments: str) -> subprocess.Popen[str]:
    command = (*COMMAND, *arguments, "--directory", str(daemon.directory))
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, daemon: DaemonProcess, *arguments: str, columns: int = 80, **environ: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        plain = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
        self.process = subprocess.Popen(
            (*COMMAND, *arguments, "--directory", str(daemon.directory)),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=plain | {"TERM": "xterm-256color", "LANG": "C.UTF-8"} | environ,
        )
        os.close(theirs)
        self.seen = ""

    def read_until(self, enough: Callable[[str], bool]) -> str:
        """Collect output until ``enough`` says so, or the process ends."""
        deadline = time.monotonic() + DEADLINE_S
        while not enough(self.seen):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._ours], [], [], left)[0]:
                raise AssertionError(f"this did not come: {self.seen!r}")
            try:
                self.seen += os.read(self._ours, 65536).decode(errors="replace")
            except OSError:  # EIO: the other side is closed
                break
        return self.seen

    def write(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def end(self) -> int:
        """Wait for its end; the exit status."""
        self.read_until(lambda _: False)
        return self.process.wait(DEADLINE_S)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._ours)
        self.process.kill()
        self.process.wait(DEADLINE_S)


@pytest.mark.parametrize("arguments", [("stats", "--watch", "--interval", "200ms"), ("events",)])
def test_ctrl_c_is_quiet(daemon: DaemonProcess, arguments: tuple[str, ...]) -> None:
    before = descriptors(daemon)
    with start(daemon, *arguments) as process:
        # It has asked for the daemon's health on a connection that is gone again, and stays on another.
        wait_until(lambda: descriptors(daemon) > before, DEADLINE_S)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert err == ""


def descriptors(daemon: DaemonProcess) -> int:
    """How many the daemon has, less those of connections that come and go."""
    counts = []
    for _ in range(20):
        time.sleep(0.02)
        counts.append(len(os.listdir(f"/proc/{daemon.pid}/fd")))
    return min(counts)


def test_a_reader_that_goes_is_no_error(shared_daemon: DaemonProcess) -> None:
    with start(shared_daemon, "stats", "--watch", "--interval", "100ms") as process:
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(DEADLINE_S) == 0
        assert process.stderr.read() == ""


def test_watch_json_is_a_line_per_sample(shared_daemon: DaemonProcess) -> None:
    with start(shared_daemon, "stats", "--watch", "--json", "--interval", "100ms") as process:
        assert process.stdout is not None
        samples = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
    uptimes = [sample["uptime_seconds"] for sample in samples]
    assert uptimes == sorted(set(uptimes))


@pytest.mark.parametrize("columns", [80, 120])
def test_watch_redraws_one_page_and_gives_the_screen_back(shared_daemon: DaemonProcess, columns: int) -> None:
    with Terminal(shared_daemon, "stats", "--watch", "--interval", "100ms", columns=columns) as terminal:
        terminal.read_until(lambda seen: seen.count("Namespaces") >= 3)
        terminal.process.send_signal(signal.SIGINT)
        seen = terminal.read_until(lambda seen: "\x1b[?1049l" in seen)
        assert terminal.end() == 130
    assert seen.count("\x1b[?1049h") == 1
    # Drawn over, never cleared: a cleared screen flickers. The one clearing belongs to entering the screen.
    assert seen.count("\x1b[2J") <= 1
    assert "Traceback" not in seen


def test_watch_waits_for_a_daemon_that_restarts(daemon: DaemonProcess) -> None:
    with Terminal(daemon, "stats", "--watch", "--interval", "100ms") as terminal:
        terminal.read_until(lambda seen: "Ctrl-C ends" in seen)
        daemon.kill()
        terminal.read_until(lambda seen: "has ended" in seen)
        daemon.start()
        marker = len(terminal.seen)
        terminal.read_until(lambda seen: "Ctrl-C ends" in seen[marker:] and "has ended" not in last_page(seen))
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 130


def last_page(seen: str) -> str:
    """The last page that was drawn to its end."""
    return seen.split("\x1b[H")[-2]


def test_no_color_is_obeyed(shared_daemon: DaemonProcess) -> None:
    with Terminal(shared_daemon, "stats") as colours, Terminal(shared_daemon, "stats", NO_COLOR="1") as plain:
        assert colours.end() == plain.end() == 0
    assert "\x1b[32m" in colours.seen or "\x1b[1m" in colours.seen
    for code in range(30, 38):
        assert f"\x1b[{code}m" not in plain.seen


def test_clear_asks_and_takes_no_for_an_answer(shared_daemon: DaemonProcess) -> None:
    with FakeEngine(shared_daemon.directory, "tiny") as engine:
        engine.store([b"k" * 32], [0])
        for answer, status, found in (("n", 1, 1), ("", 1, 1), ("y", 0, 0)):
            with Terminal(shared_daemon, "clear", "--namespace", "tiny") as terminal:
                terminal.read_until(lambda seen: "[y/N]" in seen)
                assert "Drop 1 block (64.0 KiB) from namespace tiny" in terminal.seen
                terminal.write(f"{answer}\n")
                assert terminal.end() == status
            assert engine.lookup([b"k" * 32]) == found
            engine.release()


def test_events_are_printed_as_they_happen(shared_daemon: DaemonProcess) -> None:
    with start(shared_daemon, "events") as human, start(shared_daemon, "events", "--json") as machine:
        with FakeEngine(shared_daemon.directory, "tiny") as engine:
            line, found = store_until_heard(engine, human), json.loads(store_until_heard(engine, machine))
        for process in (human, machine):
            process.send_signal(signal.SIGINT)
    assert re.search(r"\d\d:\d\d:\d\d\.\d{3} .* tiny  stored   group 0       2 blocks  (\w\w)a{10} to \1b{10}", line)
    assert found["label"] == "tiny"
    assert found["events"][0]["type"] == "stored"
    first, second = found["events"][0]["block_hashes"]
    assert (first[2:], second[2:]) == ("aa" * 31, "bb" * 31)


def store_until_heard(engine: FakeEngine, process: subprocess.Popen[str]) -> str:
    """Store pairs of new keys until ``process`` prints a line: a subscription takes a while to arrive."""
    assert process.stdout is not None
    deadline = time.monotonic() + DEADLINE_S
    for number in range(256):
        if select.select([process.stdout], [], [], 0.1)[0]:
            return process.stdout.readline()
        assert time.monotonic() < deadline, "no event came"
        engine.store([bytes([number]) + b"\xaa" * 31, bytes([number]) + b"\xbb" * 31], [0, 1])
    raise AssertionError("no event came")
