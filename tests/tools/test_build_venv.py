"""The environments' packages come from where this machine's pip would take them, though uv reads none of its files."""

import os
import sys
from pathlib import Path

import pytest

from tests.tools.build_venv import settings_of_pip


def test_uv_is_told_what_pip_would_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://a.test/simple\nfind-links = /not/these\nno-color = true\n"
        "[install]\nconstraint =\n    /one.txt\n    /two.txt\nindex-url = https://b.test/simple\n"
    )
    names = "INDEX_URL EXTRA_INDEX_URL NO_INDEX CONSTRAINT TRUSTED_HOST CERT PROXY TIMEOUT DEFAULT_TIMEOUT"
    for name in names.split():
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_FIND_LINKS", "/these /and/those")
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    told = settings_of_pip(Path(sys.executable))
    assert "--no-index" not in told
    pairs = list(zip(told[::2], told[1::2], strict=True))
    assert ("--default-index", "https://b.test/simple") in pairs
    assert [value for option, value in pairs if option == "--find-links"] == ["/these", "/and/those"]
    assert [value for option, value in pairs if option == "--constraint"][-2:] == ["/one.txt", "/two.txt"]
    assert not any("not/these" in word or "color" in word for word in told)


def test_uv_has_no_index_and_waits_as_long_where_pip_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "")
    monkeypatch.delenv("UV_HTTP_TIMEOUT")
    monkeypatch.delenv("PIP_TIMEOUT", raising=False)
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "123")
    monkeypatch.setenv("PIP_NO_INDEX", "true")
    assert "--no-index" in settings_of_pip(Path(sys.executable))
    assert os.environ["UV_HTTP_TIMEOUT"] == "123"
