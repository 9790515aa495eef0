"""Clients of the module's ``daemon`` that have opened the usual namespace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvoffd_proto import messages as m
from tests.kit.daemon import DaemonProcess
from tests.kit.struct_wire import WireClient


@pytest.fixture
def worker(daemon: DaemonProcess) -> Iterator[WireClient]:
    with WireClient(daemon.directory) as client:
        client.open_namespace()
        yield client


@pytest.fixture
def scheduler(daemon: DaemonProcess) -> Iterator[WireClient]:
    with WireClient(daemon.directory, m.Role.SCHEDULER) as client:
        client.open_namespace()
        yield client
