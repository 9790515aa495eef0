"""The configuration: flags over variables over a file; what is wrong is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffd.config import SETTINGS, ConfigError, Limits, Setting, load_config, parse_address


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


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_is_described_in_a_sentence(setting: Setting) -> None:
    assert setting.description[0].isupper()
    assert setting.description.endswith(".")


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("pool_size = true", "True"),
        ("pool_size = 1.5", "1.5"),
        ("pool_size = [1]", "[1]"),
        ("pool_size = -5", "-5"),
        ("pool_size = 9223372036854775808", "9223372036854775808"),
        ("log_level = 3", "3"),
        ("copy_threads = true", "True"),
        ("copy_threads = 2.0", "2.0"),
        ("disk_deadline = nan", "nan"),
        ("disk_deadline = inf", "inf"),
        ('disk_deadline = {s = "30"}', "{'s': '30'}"),
        ("allowed_uids = 5", "5"),
        ("allowed_uids = [true]", "True"),
        ("allowed_uids = [-4]", "-4"),
        ("directory = 5", "5"),
        ("pool_file = 1", "1"),
        ("http_address = 9464", "9464"),
        ("http_address = false", "False"),
    ],
)
def test_a_value_of_the_wrong_type_in_the_file_is_refused(line: str, value: str, tmp_path: Path) -> None:
    file = tmp_path / "kvoffd.toml"
    file.write_text(line + "\n")
    sentence = refusal(path=file)
    assert line.split()[0] in sentence
    assert value in sentence
    assert str(file) in sentence


def test_a_relative_path_becomes_absolute_and_nothing_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    assert load_config({"directory": "sockets"}, {}).config.directory == Path("/tmp/sockets")
    assert load_config({"pool_file": "here"}, {}).config.pool_file == "/tmp/here"
    assert load_config({"pool_file": ""}, {"KVOFFD_POOL_FILE": "/dev/shm/x"}).config.pool_file == ""


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_addresses_are_read(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


def test_limits_are_constants_that_tests_may_replace() -> None:
    assert "is unknown" in refusal(environ={"KVOFFD_LIMITS": "1"})
    assert load_config({}, {}, limits=Limits(max_leases=7)).config.limits.max_leases == 7
