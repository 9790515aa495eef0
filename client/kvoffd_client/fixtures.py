"""Pytest fixtures: ``pytest_plugins = ["kvoffd_client.fixtures"]`` in a conftest.py, and tests have a daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffd_client.testing import running_daemon


@pytest.fixture
def kvoffd_directory() -> Iterator[Path]:
    """The directory of the sockets of a daemon with an empty pool of 64 MiB, which ends with the test."""
    with running_daemon() as directory:
        yield directory
