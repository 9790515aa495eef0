"""The configuration: flags over variables over a file; what is wrong is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffd.config import SETTINGS, ConfigError, Limits, load_config, parse_address


def refusal(
    flags: dict[str, str | None] | None = None, environ: dict[str, str] | None = None, path: Path | None = None
) -> str:
    """The sentence with which the configuration is refused."""
    with pytest.raises(ConfigError) as error:
        load_config(flags or {}, environ or {}, path)
    sentence = str(error.value)
    assert "\n" not in sentence.rstrip("\n")
    assert sentence.endswith((".", "?"))
    return sentence


def test_every_setting_is_described_in_sentences() -> None:
    for setting in SETTINGS:
        assert setting.description[0].isupper(), setting.name
        assert setting.description.endswith("."), setting.name


def test_values_that_each_kind_of_setting_refuses(tmp_path: Path) -> None:
    """Beyond those of tests/daemon/test_config.py."""
    file = tmp_path / "kvoffd.toml"
    for line in (
        *("pool_size = 1.5", "pool_size = [1]", "pool_size = 9223372036854775808", 'pool_size = ""', "log_level = 3"),
        *("copy_threads = true", "copy_threads = 2.0", "copy_threads = 65", 'copy_threads = "1.5"'),
        *("disk_deadline = 0", 'disk_deadline = {s = "30"}', 'shutdown_deadline = "-1s"'),
        *("allowed_uids = 5", "allowed_uids = [true]", "allowed_gids = [4294967295]", "max_sessions = 0"),
        *("pool_file = 1", 'pool_file = "/"', 'directory = ""', "http_address = false", 'http_address = "::1:9464"'),
        *('http_address = "localhost"', 'http_address = ":9464"', 'http_address = "my..host:9464"'),
    ):
        file.write_text(line + "\n")
        sentence = refusal(path=file)
        assert sentence.startswith(f"{line.split()[0]} (file {file})"), line


def test_a_size_without_its_unit_is_told_from_one_that_is_too_small() -> None:
    assert refusal({"pool_size": "64"}).endswith("at least 1MiB is needed. A number alone is bytes: write 64GiB.")
    assert refusal({"pool_size": "64KiB"}).endswith("at least 1MiB is needed.")


def test_a_relative_path_becomes_absolute_and_nothing_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    assert load_config({"directory": "sockets"}, {}).directory == Path("/tmp/sockets")
    assert load_config({"pool_file": "here"}, {}).pool_file == "/tmp/here"
    assert load_config({"pool_file": ""}, {"KVOFFD_POOL_FILE": "/dev/shm/x"}).pool_file == ""


def test_addresses_are_read() -> None:
    assert parse_address("localhost:0") == ("localhost", 0)
    assert parse_address("[::1]:80") == ("::1", 80)


def test_limits_are_constants_that_tests_may_replace() -> None:
    assert "is unknown" in refusal(environ={"KVOFFD_LIMITS": "1"})
    assert load_config({}, {}, limits=Limits(max_leases=7)).limits.max_leases == 7
