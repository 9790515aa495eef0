"""What tests of several tiers need."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.support.faulty_store import FaultyStore
from tests.support.redis_server import Certificate, RedisCluster

Sign = Callable[[str], Certificate]


@pytest.fixture(scope="session")
def sign(tmp_path_factory: pytest.TempPathFactory) -> Sign:
    """An authority, which makes a certificate for a name."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate")
    place = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30, cwd=place)

    new = ("-newkey", "rsa:2048", "-nodes")
    openssl("req", "-x509", *new, "-days", "2", "-subj", "/CN=authority", "-keyout", "ca-key", "-out", "ca")

    def sign(name: str) -> Certificate:
        made = Certificate(*(str(place / part) for part in ("ca", f"cert-{name}", f"key-{name}")))
        openssl("req", *new, "-subj", f"/CN={name}", "-keyout", made.key, "-out", "request")
        (place / "more").write_text(f"subjectAltName=DNS:{name}\nbasicConstraints=CA:FALSE\n")
        signed = ("-CA", "ca", "-CAkey", "ca-key", "-CAcreateserial", "-days", "2", "-extfile", "more")
        openssl("x509", "-req", "-in", "request", *signed, "-out", made.cert)
        return made

    return sign


@pytest.fixture(scope="session")
def certificate(sign: Sign) -> Certificate:
    return sign("localhost")


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared store that failed is probed soon again."""
    monkeypatch.setattr("kvoffd.tiers.shared.breaker.FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr("kvoffd.tiers.shared.breaker.LONGEST_PAUSE_S", 0.2)


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    with FaultyStore() as running:
        yield running


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as running:
        yield running
