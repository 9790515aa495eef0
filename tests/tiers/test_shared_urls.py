"""Which URLs name a shared store, and whose credentials it gets."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffd.config import Config, ConfigError, load_config
from kvoffd.errors import KvoffdError
from kvoffd.server.tier_supervisor import shared_stores
from kvoffd.tiers.store import Credentials, check_url
from tests.kit.cases import case
from tests.kit.require import require_nixl

SECRET = "hunter2"


def test_a_url_that_can_be_used() -> None:
    for url in (
        "redis://host",
        "rediss://host:6380/3",
        "redis+cluster://host:7000",
        "redis+cluster://host/0",
        "redis://host?ttl=7d",
        "redis://[::1]:6379",
        "s3://bucket",
        "s3://bucket/with_under-scores.and.dots/",
        "s3://bucket/a/prefix?endpoint=https://ceph.example:8443&region=default",
    ):
        with case(url):
            check_url(url)


def test_a_url_that_cannot_be_used_is_refused_without_its_secret() -> None:
    for url in (
        "host:6379",
        "http://host",
        "redis://",
        "redis://host:0",
        "redis://host:port",
        "redis://host/db",
        "redis://host?a=b",
        "redis://host?ttl=soon",
        "redis://host?ttl=0s",
        "redis://host#a",
        "s3:///prefix",
        f"redis://host/#{SECRET}",
        "redis://ho\nst",
        "redis://my..host:6379",
        f"redis://host/{'1' * 5000}",
        "redis://host\x1b[31m",
        "s3://bucket/../other",
        "s3://bucket/a//b",
        "s3://bucket/a%00b",
        "s3://bucket?region=a b",
        "s3://bucket?endpoint=ftp://host",
        f"s3://bucket?endpoint=https://host?secret_access_key={SECRET}",
        f"s3://bucket?secret_access_key={SECRET}",
        f"redis://:{SECRET}@host",
    ):
        with case(url), pytest.raises(ValueError, match=r"password|can be used"):
            check_url(url)
        with case(url), pytest.raises(ConfigError) as refused:
            load_config({"shared": [url]}, {})
        assert SECRET not in str(refused.value)


def test_what_is_wrong_in_a_query_is_named() -> None:
    for url, name in (
        ("redis://host?tll=7d", "?tll"),
        ("redis://host?ttl=0s", "?ttl"),
        ("s3://bucket?region=a&endpint=https://host", "?endpint"),
        ("s3://bucket?endpoint=host:9000", "?endpoint"),
    ):
        with case(url), pytest.raises(ValueError, match=re.escape(f"with '{name}' is not")):
            check_url(url)


def test_credentials_are_in_a_line_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "passwords"
    file.write_text(f"\ufeff{SECRET}\n\nkey:more:colons\n")  # Windows begins a text so
    wanted = [Credentials("", SECRET), Credentials(), Credentials("key", "more:colons"), Credentials()]
    assert Credentials.read(str(file), 4) == wanted
    monkeypatch.setenv("KVOFFD_SHARED_PASSWORD", "user:other")
    assert Credentials.read("", 2) == [Credentials("user", "other"), Credentials()]
    assert Credentials.read(str(file), 1) == wanted[:1], "the file goes first"


def read_password(file: Path) -> None:
    Credentials.read(str(file), 1)


def read_peers_secret(file: Path) -> None:
    require_nixl()
    shared_stores(Config(peers=["127.0.0.1:1"], peer_secret_file=str(file)))


@pytest.mark.parametrize("read", [read_password, read_peers_secret])
def test_a_secret_that_others_can_read_is_reported(
    tmp_path: Path, read: Callable[[Path], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's own file by its mode; another's may be read by the group, which is how the daemon reads it."""
    file = tmp_path / "secret"
    file.write_text(SECRET.ljust(16, "."))

    def warned(mode: int) -> bool:
        file.chmod(mode)
        caplog.clear()
        read(file)
        assert SECRET not in caplog.text
        assert (f"{file}, with the " in caplog.text) == (f"{mode:04o}" in caplog.text)
        return bool(caplog.text)

    modes = 0o400, 0o600, 0o440, 0o640, 0o660, 0o604, 0o644
    assert [warned(mode) for mode in modes] == [False, False, True, True, True, True, True]
    assert "chmod 0400 it" in caplog.text
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    assert [warned(mode) for mode in modes] == [False, False, False, False, True, True, True]
    assert "defaultMode" in caplog.text


def test_a_file_without_a_password_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    for path in ("empty", "missing"):
        with pytest.raises(KvoffdError):
            Credentials.read(str(tmp_path / path), 1)
