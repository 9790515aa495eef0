"""Fixtures of the client's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvoffd_client import (
    ClientOptions,
    NamespaceSpec,
    Registration,
    SchedulerClient,
    SharedMemory,
    WorkerClient,
    session,
    worker_client,
)
from kvoffd_proto.messages import PageRef, TensorLayout
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.stub_cuda import StubCuda, fresh_stub

SPEC = NamespaceSpec.named("client-tests")
QUICK = ClientOptions(request_timeout_s=0.3, unresponsive_after_s=0.5, backoff_max_s=0.1)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    """A scripted daemon, for clients that lose patience soon."""
    monkeypatch.setattr(session, "BACKOFF_MIN_S", 0.01)
    monkeypatch.setattr(worker_client, "JOB_PATIENCE_S", 0.1)
    with FakeDaemon() as running:
        yield running


@pytest.fixture
def registration() -> Iterator[Registration]:
    """Four blocks of 64 bytes."""
    with SharedMemory(4096) as memory:
        yield Registration(0, 1, (memory,), (TensorLayout(0, 0, 64, 4),), ((PageRef(0, 64),),))


@pytest.fixture
def scheduler(fake: FakeDaemon) -> Iterator[SchedulerClient]:
    """A connected scheduler that listens to events."""
    with SchedulerClient(fake.directory, SPEC, subscribe_events=True, options=QUICK) as client:
        assert client.wait_ready(5)
        yield client


@pytest.fixture
def worker(fake: FakeDaemon, registration: Registration) -> Iterator[WorkerClient]:
    with WorkerClient(fake.directory, SPEC, registration, options=QUICK) as client:
        assert client.wait_ready(5)
        yield client


@pytest.fixture
def stub() -> Iterator[StubCuda]:
    """A CUDA driver of this test's own, its context current in the test's thread."""
    stub = fresh_stub()
    stub.start()
    yield stub
    stub.release()
