"""Sessions on the module's ``shared_daemon``, in the usual namespace, and memory for a worker of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvoffd_client import SharedMemory
from tests.kit.daemon import DaemonProcess
from tests.kit.require import require_nixl
from tests.kit.wire import PAGE_BYTES, WireClient

BLOCKS = 32


@pytest.fixture(scope="module")
def nixl() -> Iterator[None]:
    """Peers of this machine, without the devices that UCX looks for."""
    require_nixl()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        yield


@pytest.fixture
def worker(shared_daemon: DaemonProcess) -> Iterator[WireClient]:
    with WireClient(shared_daemon.directory) as client:
        client.open_namespace()
        yield client


@pytest.fixture
def scheduler(shared_daemon: DaemonProcess) -> Iterator[WireClient]:
    with WireClient(shared_daemon.directory, "scheduler") as client:
        client.open_namespace()
        yield client


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    """Blocks of random bytes."""
    with SharedMemory(BLOCKS * PAGE_BYTES, "test") as shared:
        shared.view[:] = np.random.default_rng(1).integers(0, 256, shared.size_bytes, dtype=np.uint8)
        yield shared


@pytest.fixture
def cache(worker: WireClient, memory: SharedMemory) -> bytes:
    """The worker's registration of the memory."""
    return worker.register(memory)
