"""The configuration: flags over variables over a file; what is wrong is refused in one sentence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvoffd.config import SETTINGS, Config, ConfigError, Setting, load_config
from kvoffd.settings import Address, parse_address


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


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvoffd.toml"


def test_nothing_given_means_the_defaults() -> None:
    loaded = load_config({}, {})
    assert loaded.config == Config()
    assert set(loaded.sources.values()) == {"default"}
    assert set(loaded.sources) == {field.name for field in dataclasses.fields(Config)}


def test_a_flag_goes_over_a_variable_and_a_variable_over_the_file(file: Path) -> None:
    file.write_text('pool_size = "1GiB"\nlog_level = "error"\nlease_ttl = 10\n')
    environ = {"KVOFFD_POOL_SIZE": "2GiB", "KVOFFD_LOG_LEVEL": "warning", "PATH": "/bin"}
    loaded = load_config({"pool_size": "3GiB", "log_level": None}, environ, file)
    assert loaded.config.pool_bytes == 3 * 2**30
    assert loaded.config.log_level == "warning"
    assert loaded.config.lease_ttl_s == 10.0
    assert loaded.sources["pool_bytes"] == "flag --pool-size"
    assert loaded.sources["log_level"] == "variable KVOFFD_LOG_LEVEL"
    assert loaded.sources["lease_ttl_s"] == f"file {file}"
    assert loaded.sources["directory"] == "default"


def test_the_file_can_be_named_by_a_variable(file: Path) -> None:
    file.write_text('eviction_policy = "arc"\n')
    assert load_config({}, {"KVOFFD_CONFIG": str(file)}).config.eviction_policy == "arc"


def test_the_named_file_goes_over_the_variables_one(file: Path) -> None:
    file.write_text("max_sessions = 3\n")
    assert load_config({}, {"KVOFFD_CONFIG": "/nowhere"}, file).config.max_sessions == 3


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_reads_back_what_it_shows_from_every_source(setting: Setting, file: Path) -> None:
    shown = setting.kind.show(getattr(Config(), setting.field_name))
    file.write_text(f'{setting.name} = "{shown}"\n')
    for loaded in (
        load_config({setting.name: shown}, {}),
        load_config({}, {setting.variable: shown}),
        load_config({}, {}, file),
    ):
        assert loaded.config == Config()
        assert loaded.sources[setting.field_name] != "default"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_is_described_in_a_sentence(setting: Setting) -> None:
    assert setting.description[0].isupper()
    assert setting.description.endswith(".")


def test_names_leave_the_unit_to_the_value() -> None:
    names = {setting.field_name: (setting.name, setting.flag, setting.variable) for setting in SETTINGS}
    assert names["pool_bytes"] == ("pool_size", "--pool-size", "KVOFFD_POOL_SIZE")
    assert names["disk_write_bytes_per_day"][0] == "disk_write_per_day"
    assert names["disk_write_bytes_per_s"][0] == "disk_write_rate"
    assert names["lease_ttl_s"] == ("lease_ttl", "--lease-ttl", "KVOFFD_LEASE_TTL")
    assert names["max_sessions"] == ("max_sessions", "--max-sessions", "KVOFFD_MAX_SESSIONS")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pool_size", "0"),
        ("pool_size", "4KiB"),
        ("pool_size", "-1GiB"),
        ("pool_size", "20 bananas"),
        ("pool_size", str(2**63)),
        ("pool_size", ""),
        ("log_level", "loud"),
        ("log_format", "xml"),
        ("eviction_policy", "fifo"),
        ("touch_threads", "-1"),
        ("touch_threads", "1.5"),
        ("touch_threads", "257"),
        ("lease_ttl", "0"),
        ("lease_ttl", "nan"),
        ("shutdown_deadline", "-1s"),
        ("allowed_uids", "root"),
        ("allowed_uids", "-1"),
        ("allowed_gids", str(2**32 - 1)),
        ("max_sessions", "0"),
        ("max_keys_per_request", "many"),
        ("max_frame_size", "1KiB"),
        ("event_buffer_steps", "0"),
        ("pool_file", "/dev/shm/"),
        ("pool_file", "/"),
        ("http_address", "localhost"),
        ("http_address", "127.0.0.1:65536"),
        ("http_address", ":9464"),
        ("http_address", "::1:9464"),
        ("http_address", "my..host:9464"),
        ("http_address", f"{'h' * 64}.example:9464"),
        ("event_connect", "*:5557"),
        ("directory", ""),
        ("directory", "/" + "d" * 120),
    ],
)
def test_an_impossible_value_is_refused_by_name_value_and_source(name: str, value: str, file: Path) -> None:
    flag = f"--{name.replace('_', '-')}"
    variable = f"KVOFFD_{name.upper()}"
    file.write_text(f'{name} = "{value}"\n')
    for sentence, source in (
        (refusal(flags={name: value}), flag),
        (refusal(environ={variable: value}), variable),
        (refusal(path=file), str(file)),
    ):
        assert name in sentence
        assert repr(value)[:20] in sentence
        assert source in sentence


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("pool_size = true", "True"),
        ("pool_size = 1.5", "1.5"),
        ("pool_size = [1]", "[1]"),
        ("pool_size = -5", "-5"),
        ("pool_size = 9223372036854775808", "9223372036854775808"),
        ("log_level = 3", "3"),
        ("touch_threads = true", "True"),
        ("touch_threads = 2.0", "2.0"),
        ("lease_ttl = nan", "nan"),
        ("lease_ttl = inf", "inf"),
        ('lease_ttl = {s = "30"}', "{'s': '30'}"),
        ("allowed_uids = 5", "5"),
        ("allowed_uids = [true]", "True"),
        ("allowed_uids = [-4]", "-4"),
        ("directory = 5", "5"),
        ("pool_file = 1", "1"),
        ("http_address = 9464", "9464"),
        ("http_address = false", "False"),
    ],
)
def test_a_value_of_the_wrong_type_in_the_file_is_refused(line: str, value: str, file: Path) -> None:
    file.write_text(line + "\n")
    sentence = refusal(path=file)
    assert line.split()[0] in sentence
    assert value in sentence
    assert str(file) in sentence


def test_the_file_takes_numbers_and_lists_as_toml_writes_them(file: Path) -> None:
    file.write_text("pool_size = 1073741824\nlease_ttl = 12.5\nallowed_uids = [1000, 0, 1000]\nmax_leases = 7\n")
    config = load_config({}, {}, file).config
    assert (config.pool_bytes, config.lease_ttl_s, config.allowed_uids, config.max_leases) == (
        2**30,
        12.5,
        (0, 1000),
        7,
    )


def test_an_unknown_key_in_the_file_is_refused_with_the_likely_one(file: Path) -> None:
    file.write_text('poolsize = "1GiB"\n')
    sentence = refusal(path=file)
    for part in ("'poolsize'", "'1GiB'", str(file), "pool_size?"):
        assert part in sentence


def test_a_table_in_the_file_is_refused(file: Path) -> None:
    file.write_text('[kvoffd]\npool_size = "1GiB"\n')
    assert "'kvoffd'" in refusal(path=file)


def test_an_unknown_variable_is_refused_with_the_likely_one() -> None:
    sentence = refusal(environ={"KVOFFD_POOLSIZE": "1GiB"})
    for part in ("KVOFFD_POOLSIZE", "'1GiB'", "KVOFFD_POOL_SIZE?"):
        assert part in sentence


def test_an_unknown_flag_is_refused() -> None:
    assert "'pool'" in refusal(flags={"pool": "1GiB"})


def test_variables_that_kubernetes_sets_for_a_service_named_kvoffd_are_not_ours() -> None:
    environ = {
        "KVOFFD_SERVICE_HOST": "10.0.0.1",
        "KVOFFD_SERVICE_PORT": "9464",
        "KVOFFD_SERVICE_PORT_METRICS": "9464",
        "KVOFFD_PORT": "tcp://10.0.0.1:9464",
        "KVOFFD_PORT_9464_TCP": "tcp://10.0.0.1:9464",
        "KVOFFD_PORT_9464_TCP_ADDR": "10.0.0.1",
        "KVOFFD_METRICS_SERVICE_HOST": "10.0.0.2",
        "KVOFFD_METRICS_PORT_9464_TCP_PROTO": "tcp",
    }
    assert load_config({}, environ).config == Config()


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    sentence = refusal(path=tmp_path / "none.toml")
    assert str(tmp_path / "none.toml") in sentence
    assert "No such file" in sentence


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(path=tmp_path)  # a directory: root may read any file


def test_a_size_without_quotes_is_told_to_have_some(tmp_path: Path) -> None:
    file = tmp_path / "kvoffd.toml"
    file.write_text("pool_size = 64MiB\n")
    with pytest.raises(ConfigError, match='need quotes, as in pool_size = "64MiB"'):
        load_config({}, {}, file)


@pytest.mark.parametrize("content", [b"pool_size = ", b"\xff\xfe", b"a = 1\na = 2\n", b"a = " + b"[" * 100_000])
def test_a_file_that_is_not_toml_is_refused(content: bytes, file: Path) -> None:
    file.write_bytes(content)
    assert str(file) in refusal(path=file)


def test_heartbeats_must_be_more_frequent_than_leases_end() -> None:
    sentence = refusal(flags={"heartbeat_interval": "1m"}, environ={"KVOFFD_LEASE_TTL": "10s"})
    for part in ("heartbeat_interval", "1m", "--heartbeat-interval", "lease_ttl", "10s", "KVOFFD_LEASE_TTL"):
        assert part in sentence


def test_an_index_without_room_is_refused() -> None:
    assert "at least 64KiB, or 0, is needed" in refusal(flags={"index_size": "1"})
    assert load_config({"index_size": "0"}, {}).config.index_bytes == 0


def test_credits_cannot_exceed_the_pool() -> None:
    sentence = refusal(flags={"credit_size": "2GiB", "pool_size": "1GiB"})
    for part in ("credit_size", "2GiB", "pool_size", "1GiB"):
        assert part in sentence


def test_a_long_value_is_cut_in_the_sentence() -> None:
    assert len(refusal(flags={"log_level": "x" * 100_000})) < 300


def test_a_relative_directory_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    assert load_config({"directory": "sockets"}, {}).config.directory == Path("/tmp/sockets")


def test_a_relative_pool_file_becomes_absolute_and_nothing_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config({"pool_file": "here"}, {}).config.pool_file == str(tmp_path / "here")
    assert load_config({"pool_file": ""}, {"KVOFFD_POOL_FILE": "/dev/shm/x"}).config.pool_file == ""


def test_the_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().pool_bytes = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9464", Address("127.0.0.1", 9464)),
        ("localhost:0", Address("localhost", 0)),
        ("[::1]:80", Address("::1", 80)),
    ],
)
def test_addresses_are_read(text: str, address: Address) -> None:
    assert parse_address(text) == address


def test_a_replay_of_events_needs_events() -> None:
    assert "neither event_address nor event_connect is set" in refusal({"event_replay_address": "127.0.0.1:5558"})
    for setting in ({"event_address": "127.0.0.1:5557"}, {"event_connect": ["router:5557"]}):
        load_config({"event_replay_address": "127.0.0.1:5558", **setting}, {})


def test_administration_over_tcp_needs_keys() -> None:
    sentence = refusal({"admin_address": "127.0.0.1:9465", "admin_key_file": "/etc/kvoffd/admin.key"})
    assert "admin_address is 127.0.0.1:9465 (flag --admin-address)" in sentence
    assert "known keys only" in sentence
