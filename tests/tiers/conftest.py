"""What tests of several tiers need."""

from __future__ import annotations

import shutil
import subprocess

import pytest


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """Files: an authority's certificate, one for localhost that it signed, and that one's key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate")
    place = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30, cwd=place)

    own, new = ("-subj", "/CN=localhost"), ("-newkey", "rsa:2048", "-nodes")
    openssl("req", "-x509", *new, "-days", "2", "-subj", "/CN=authority", "-keyout", "ca-key", "-out", "ca")
    openssl("req", *new, *own, "-keyout", "key", "-out", "request")
    (place / "more").write_text("subjectAltName=DNS:localhost\nbasicConstraints=CA:FALSE\n")
    signed = ("-CA", "ca", "-CAkey", "ca-key", "-CAcreateserial", "-days", "2", "-extfile", "more")
    openssl("x509", "-req", "-in", "request", *signed, "-out", "cert")
    return str(place / "ca"), str(place / "cert"), str(place / "key")


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared store that failed is probed soon again."""
    monkeypatch.setattr("kvoffd.tiers.shared.breaker.FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr("kvoffd.tiers.shared.breaker.LONGEST_PAUSE_S", 0.2)
