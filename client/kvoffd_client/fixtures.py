"""Pytest fixtures: put ``pytest_plugins = ["kvoffd_client.fixtures"]`` into a conftest.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffd_client.testing import running_daemon


@pytest.fixture
def kvoffd_directory() -> Iterator[Path]:
    """Yield the socket directory of a daemon with an empty pool of 64 MiB, which ends with the test."""
    with running_daemon() as directory:
        yield directory
