"""Values of settings, the memory they need and the example, beyond what tests/daemon/test_config.py asks."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tomllib
from ipaddress import ip_network
from pathlib import Path

import pytest

from kvoffd.config import (
    PEER_PLACES,
    SETTINGS,
    Config,
    ConfigError,
    DiskSize,
    Peer,
    ServerLimits,
    Setting,
    load_config,
    parse_address,
    parse_peer,
    peer_addresses,
)
from kvoffd.memory_estimate import memory_estimate, memory_shortage, memory_summary
from kvoffd.system.limits import MemoryLimit
from kvoffd.tiering.promotions import FILL_BYTES, MAX_QUEUED
from kvoffd.tiering.writer import MAX_WAITING, WAITING_BYTES
from kvoffd_proto.paths import default_directory

EXAMPLE = Path(__file__).parents[2] / "deploy" / "kvoffd.toml"
SETTING_LINE = re.compile(r"^# ([a-z_]+ = .*)$", re.MULTILINE)


def refusal(flags: dict[str, str | None], environ: dict[str, str] | None = None, path: Path | None = None) -> str:
    """The sentence with which the configuration is refused."""
    with pytest.raises(ConfigError) as error:
        load_config(flags, environ or {}, path)
    sentence = str(error.value)
    assert "\n" not in sentence.rstrip("\n")
    assert sentence.endswith((".", "?"))
    return sentence


def test_values_that_each_kind_of_setting_refuses(tmp_path: Path) -> None:
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
        assert refusal({}, path=file).startswith(f"{line.split()[0]} (file {file})"), line
    assert refusal({"pool_size": "64"}).endswith("is needed. A number without a unit is bytes: write 64GiB.")
    assert refusal({"pool_size": "64KiB"}).endswith("at least 1MiB is needed.")
    assert "choose auto or always or never" in refusal({"disk_write": "reuse"})
    assert "neither a name that this machine knows" in refusal({"allowed_uids": "root,nobody at all"})
    assert load_config({"allowed_uids": "root,7", "allowed_gids": "root"}, {}).allowed_uids == (0, 7)
    assert "is unknown" in refusal({}, {"KVOFFD_LIMITS": "1"}), "limits are constants that tests may replace"
    assert load_config({}, {}, limits=ServerLimits(max_leases=7)).limits.max_leases == 7


TEXTS = {
    "pool_size": "64MiB", "pool_file": "/dev/shm/pool", "numa": "off", "reserved_pages": "off",
    "directory": "/tmp/one", "eviction_policy": "lru", "disk": "/mnt/a=1GiB", "disk_start": "optional",
    "disk_write": "never", "disk_write_per_day": "1TiB", "disk_deadline": "3s", "shared": "redis://one:6379",
    "shared_password_file": "/etc/password", "shared_write": "always", "shared_ask_deadline": "1s",
    "shared_deadline": "4s", "peers": "node-b:7400", "peer_listen": "[::1]:7400", "peer_secret_file": "/etc/secret",
    "copy_threads": "3", "verify_share": "0.5", "allowed_uids": "root", "allowed_gids": "0", "admin_uids": "7",
    "max_sessions": "300", "shutdown_deadline": "1m", "http_address": "localhost:80", "http_hosts": "one.example",
    "log_level": "debug", "log_format": "json", "cuda_library": "/usr/libcuda.so", "pin_pool": "use",
}  # fmt: skip
"""A text of each setting, not its default."""


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: one.name)
def test_space_around_a_value_means_nothing_whatever_its_source(setting: Setting, tmp_path: Path) -> None:
    name, text, file = setting.name, TEXTS[setting.name], tmp_path / "kvoffd.toml"
    plain = load_config({name: text}, {})
    assert plain != Config(), "the default would hide a value that is not read"
    spaced = [f" {text}", f"{text} ", f"\t{text}\n"]
    if name == "disk":
        spaced += ["/mnt/a = 1GiB", "/mnt/a\t=1 GiB"]
    for one in spaced:
        assert load_config({name: one}, {}) == plain, "a flag"
        assert load_config({}, {setting.variable: one}) == plain, "a variable"
        file.write_text(f"{name} = {json.dumps(one)}\n")
        assert load_config({}, {}, file) == plain, "the file"
        if isinstance(getattr(plain, setting.field_name), tuple):
            file.write_text(f"{name} = [{json.dumps(one)}]\n")
            assert load_config({}, {}, file) == plain, "a list in the file"


def test_space_around_the_name_of_the_file_means_nothing(tmp_path: Path) -> None:
    (tmp_path / "kvoffd.toml").write_text('numa = "off"')
    assert load_config({}, {"KVOFFD_CONFIG": f" {tmp_path}/kvoffd.toml\n"}).numa == "off"
    assert load_config({}, {"KVOFFD_CONFIG": " "}) == Config()


def test_what_is_nothing_but_space_is_no_directory() -> None:
    assert refusal({"directory": " \t"}).startswith("directory (flag --directory): ' \\t' is not a path")
    assert "is not a directory and a size" in refusal({"disk": " = 1GiB"})


@pytest.mark.parametrize("text", ["~/kv", " ~/kv ", "/tmp/kv\n", " /tmp/kv"])
def test_clients_and_daemon_read_the_same_directory(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HOME", "/home/one")
    monkeypatch.setenv("KVOFFD_DIRECTORY", text)
    assert default_directory() == load_config({}, os.environ).directory
    assert str(default_directory()) in ("/home/one/kv", "/tmp/kv")


@pytest.mark.parametrize(("given", "nbytes"), [("auto", None), ("0", 0), ("2GiB", 2 << 30)])
def test_a_days_writes_may_be_by_the_size_of_the_disks(given: str, nbytes: int | None) -> None:
    config = load_config({"disk_write_per_day": given}, {})
    assert config.disk_write_bytes_per_day == nbytes
    assert load_config({}, {}).disk_write_bytes_per_day is None


def test_paths_become_absolute_and_addresses_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    assert load_config({"directory": "sockets"}, {}).directory == Path("/tmp/sockets")
    assert load_config({"pool_file": "here"}, {}).pool_file == "/tmp/here"
    assert load_config({"pool_file": ""}, {"KVOFFD_POOL_FILE": "/dev/shm/x"}).pool_file == "", "no file"
    assert (parse_address("localhost:0"), parse_address("[::1]:80")) == (("localhost", 0), ("::1", 80))


def test_the_memory_that_is_needed_and_a_shortage_of_it_are_told_with_numbers() -> None:
    config = Config(pool_bytes=64 << 30)
    assert memory_summary(config) == (
        "An idle daemon takes 65.4 GiB of memory (pool 64.0 GiB, its tables 1.34 GiB, the process about 34.0 MiB); set "
        "the memory limit to 68GiB, since a busy one may take up to: block metadata "
        "896 MiB, keys without blocks 1.28 GiB, process and clients 256 MiB."
    )
    assert "keys without blocks" not in memory_summary(Config(eviction_policy="lru"))
    tiers = memory_estimate(Config(disk=(DiskSize("/mnt", 1 << 30),), shared=("redis://one", "redis://two")))
    each = MAX_QUEUED * FILL_BYTES + MAX_WAITING * WAITING_BYTES
    assert tiers["queues of disks and stores"] == 3 * each, "one of the disks, one of each store"
    parts = memory_estimate(config)
    taken = ("pool", "slot table and page tables", "process and clients")
    to_come = sum(parts.values()) - sum(parts[part] for part in taken)
    assert memory_shortage(config, MemoryLimit(to_come, "the machine")) == ""
    assert memory_shortage(config, MemoryLimit(to_come - 1, "the machine")).startswith(
        "The daemon may need 2.15 GiB more memory, but only 2.15 GiB are left (the machine): "
    )
    with_disk = Config(pool_bytes=64 << 30, disk=(DiskSize("/mnt", 10 << 40),))
    assert memory_shortage(with_disk, MemoryLimit(4 << 30, "")).endswith("a smaller disk: its index takes 0.2 % of it.")


def test_peers_are_nodes_networks_and_names_of_many() -> None:
    of = {text: parse_peer(text) for text in ("Node-b:7400", "[fd00::1]:1", "10.0.0.0/16:7400", "dns+engines.kv.:7400")}
    assert [one.is_one for one in of.values()] == [True, True, False, False]
    assert of["dns+engines.kv.:7400"] == Peer("dns+engines.kv.:7400", "engines.kv.", 7400, has_many=True)
    assert of["10.0.0.0/16:7400"].host == ip_network("10.0.0.0/16")
    assert peer_addresses(["a:1", "b:1"]) == ["a:1", "b:1"]
    for many in (["10.0.0.0/16:1"], ["dns+a:1"], ["dns+a:1", "10.0.0.0/16:1", "dns+b:1"]):
        assert peer_addresses(["a:1", *many]) == ["a:1", *[""] * PEER_PLACES], "they share these"
    for wrong in ("dns+", "dns+a", "dns+:7400", "dns+a b:7400", "10.0.0.1/16:7400", "10.0.0.0/16:0x1", "a/b:1"):
        assert refusal({"peers": wrong}).startswith(f"peers (flag --peers): {wrong!r} is not a peer; write ")


# --- deploy/kvoffd.toml ----------------------------------------------------------------------------


def test_the_example_names_every_setting_once_and_no_other() -> None:
    names = re.findall(r"^(?:# )?([a-z_]+) = ", EXAMPLE.read_text(), re.MULTILINE)
    assert sorted(names) == sorted(setting.name for setting in SETTINGS)


def test_every_value_that_the_example_shows_is_the_default(tmp_path: Path) -> None:
    everything = tmp_path / "kvoffd.toml"
    everything.write_text(SETTING_LINE.sub(r"\1", EXAMPLE.read_text()))
    assert len(tomllib.loads(everything.read_text())) == len(SETTINGS)
    config = load_config({}, {}, everything)
    # The directory's default is another for users who are not root.
    assert config == dataclasses.replace(Config(), directory=Path("/run/kvoffd"))


def test_every_setting_of_the_example_is_explained() -> None:
    lines = EXAMPLE.read_text().splitlines()
    for number, line in enumerate(lines):
        if re.match(r"(?:# )?[a-z_]+ = ", line):
            assert re.match(r"# .{15,}", lines[number - 1]), f"no explanation above: {line}"
