"""An engine on the module's daemon, and commands that run in this process, where a process adds nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvoffd_client.cli import main
from kvoffd_client.testing import FakeEngine
from tests.kit.command import KEYS, LABEL, Cli, Done
from tests.kit.daemon import DaemonProcess


@pytest.fixture
def engine(shared_daemon: DaemonProcess) -> Iterator[FakeEngine]:
    """An engine that has stored eight blocks."""
    with FakeEngine(shared_daemon.directory, LABEL) as running:
        running.fill(range(8), seed=1)
        assert running.store(KEYS, range(8)).ok
        yield running


@pytest.fixture
def cli(module_daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command on the module's daemon, or on another one."""

    def run(*arguments: str, on: DaemonProcess = module_daemon) -> Done:
        status = main([*arguments, "--directory", str(on.directory)])
        return Done(status, *capsys.readouterr())

    return run
