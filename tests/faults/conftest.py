"""A daemon whose pool outlives it, and the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffd_client.cli import main
from tests.faults.checked import Command
from tests.kit.daemon import DaemonProcess


@pytest.fixture
def lasting(pool_file: Path) -> Iterator[DaemonProcess]:
    """A running daemon with a pool of 16 MiB in a file."""
    with DaemonProcess("16MiB", pool_file=str(pool_file)) as running:
        yield running


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """``command(daemon, "health")``: the exit status, and all that ``kvoffd-cli`` printed."""

    def run(daemon: DaemonProcess, *words: str) -> tuple[int, str]:
        capsys.readouterr()
        try:
            status = main([*words, "--directory", str(daemon.directory)])
        except SystemExit as end:
            status = int(end.code or 0)
        return status, "".join(capsys.readouterr())

    return run
