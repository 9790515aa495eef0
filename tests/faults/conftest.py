"""A daemon whose pool outlives it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.daemon import DaemonProcess


@pytest.fixture
def lasting(pool_file: Path) -> Iterator[DaemonProcess]:
    """A running daemon with a pool of 16 MiB in a file."""
    with DaemonProcess("16MiB", pool_file=str(pool_file)) as running:
        yield running
