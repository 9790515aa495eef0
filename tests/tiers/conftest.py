"""What tests of several tiers need."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest

from tests.kit.redis_server import Authority, Certificate, RedisCluster
from tests.kit.require import require
from tests.tiers.faulty_store import FaultyStore
from tests.tiers.shared_rig import SharedRig


@pytest.fixture(scope="session")
def sign(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Certificate]:
    """Makes a certificate for a name."""
    require("redis", shutil.which("openssl"), "there is no openssl to make a server's certificate")
    return Authority(tmp_path_factory.mktemp("tls")).sign


@pytest.fixture(scope="session")
def certificate(sign: Callable[[str], Certificate]) -> Certificate:
    return sign("localhost")


@pytest.fixture(autouse=True)
def every_node_closes() -> Iterator[None]:
    yield
    while SharedRig.opened:
        assert SharedRig.opened.pop().close()


@pytest.fixture
def servers_may_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that count each error of a server: on a busy machine it may not run for a second."""
    monkeypatch.setattr("kvoffd.tiers.redis_connection.STALL_S", 60.0)


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared store that failed is probed soon again."""
    monkeypatch.setattr("kvoffd.tiers.breaker.PAUSE_S", 0.15)


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    with FaultyStore() as running:
        yield running


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as running:
        yield running
