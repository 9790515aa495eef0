"""``kvoffd-cli stats`` on a terminal: how the page is drawn."""

from __future__ import annotations

import signal

import pytest

from tests.kit.command import WATCH, Terminal
from tests.kit.daemon import DaemonProcess


def at(daemon: DaemonProcess) -> tuple[str, str]:
    return "--directory", str(daemon.directory)


@pytest.mark.parametrize("columns", [80, 120])
def test_watch_redraws_one_page_and_gives_the_screen_back(shared_daemon: DaemonProcess, columns: int) -> None:
    with Terminal(*WATCH, *at(shared_daemon), columns=columns) as terminal:
        terminal.read_until(lambda seen: seen.count("4 policy") >= 3)
        terminal.process.send_signal(signal.SIGINT)
        seen = terminal.read_until(lambda seen: "\x1b[?1049l" in seen)
        assert terminal.end() == 130
    assert seen.count("\x1b[?1049h") == 1
    # Drawn over, never cleared: a cleared screen flickers. The one clearing belongs to entering the screen.
    assert seen.count("\x1b[2J") <= 1
    assert "Traceback" not in seen


def test_no_color_is_obeyed(shared_daemon: DaemonProcess) -> None:
    with Terminal("stats", *at(shared_daemon)) as colours, Terminal("stats", *at(shared_daemon), NO_COLOR="1") as plain:
        assert colours.end() == plain.end() == 0
    assert "\x1b[32m" in colours.seen or "\x1b[1m" in colours.seen
    for code in range(30, 38):
        assert f"\x1b[{code}m" not in plain.seen
