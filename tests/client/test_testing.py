"""The fake engine against a real daemon: what anyone's tests may rely on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvoffd_client import DaemonUnavailable, RequestRefused
from kvoffd_client.testing import FakeEngine
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from tests.kit.daemon import DaemonProcess
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.wire import keys


@pytest.mark.parametrize("world_size", [1, 2])
def test_blocks_go_out_and_come_back_elsewhere(shared_daemon: DaemonProcess, world_size: int) -> None:
    with FakeEngine(shared_daemon.directory, world_size=world_size) as engine:
        engine.fill(range(20), seed=1)
        before = engine.checksums(range(20))
        stored = engine.store(keys(*range(20)), range(20))
        assert (stored.ok, stored.bytes, stored.failed_keys) == (True, 20 * 4 * 16384 * world_size, [])
        assert engine.store(keys(0), [0]).bytes == 0, "it is there already"
        engine.fill(range(20), seed=2)
        assert engine.lookup(keys(*range(25))) == 20
        loaded = engine.load(keys(*range(20)), range(100, 120))
        assert loaded.ok
        assert engine.checksums(range(100, 120)) == before
        assert engine.checksums(range(20)) != before


def test_nonsense_is_an_error_of_the_caller(shared_daemon: DaemonProcess) -> None:
    with FakeEngine(shared_daemon.directory, blocks=4) as engine:
        for call in (engine.store, engine.load):
            with pytest.raises(ValueError, match="32 bytes"):
                call([b"short"], [0])
            with pytest.raises(ValueError, match="one block id per key"):
                call(keys(0, 1), [0])
            with pytest.raises(ValueError, match="but not"):
                call(keys(0), [4])
        with pytest.raises(ValueError, match="32 bytes"):
            engine.lookup([b"short"])
    with pytest.raises(ValueError, match="at least 1"):
        FakeEngine(shared_daemon.directory, layers=0)


def test_without_a_daemon_the_constructor_says_where_it_looked(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(DaemonUnavailable, match=str(tmp_path)):
        FakeEngine(tmp_path, connect_timeout_s=0.2)
    assert 0.2 <= time.monotonic() - began < 10


def test_a_refusal_is_raised_without_waiting(fake: FakeDaemon) -> None:
    fake.answers[m.Register] = lambda request, _: m.Error(request.request_id, ErrorCode.BAD_GEOMETRY, "Does not fit.")
    began = time.monotonic()
    with pytest.raises(RequestRefused, match="Does not fit"):
        FakeEngine(fake.directory)
    assert time.monotonic() - began < 5


def test_a_store_that_takes_too_long_is_given_up(fake: FakeDaemon) -> None:
    with FakeEngine(fake.directory, layers=1, blocks=2) as engine:
        fake.hold_jobs = True
        late = engine.store(keys(0), [0], timeout_s=0.1)
        assert (late.ok, late.error, late.failed_keys) == (False, ErrorCode.DEADLINE, keys(0))
        assert engine.lookup(keys(0)) == 1
        assert engine.load(keys(0), [1], timeout_s=0.1).error is not None
