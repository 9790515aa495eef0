"""Settings: flags over variables over a file, shown by ``kvoffd config``; what is wrong is refused in one sentence."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.command import run_daemon_here

ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("KVOFFD_")}


def process(*arguments: str, options: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the program to its end."""
    command = [sys.executable, *options, "-m", "kvoffd", *arguments]
    environ = {**ENVIRON, **variables}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


def kvoffd(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_daemon_here(*arguments, **ENVIRON, KVOFFD_HTTP_ADDRESS="", **variables)


def refused(*arguments: str, **variables: str) -> str:
    """The one sentence of a refusal."""
    ended = kvoffd(*arguments, **variables)
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert ended.stderr.startswith("kvoffd: ")
    assert ended.stderr.count("\n") == 1, "one sentence, one line"
    return ended.stderr


def shown(*arguments: str, **variables: str) -> dict[str, dict[str, object]]:
    """Settings by name, each with value, text and source."""
    ended = kvoffd("config", "--json", *arguments, **variables)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, dict[str, object]] = json.loads(ended.stdout)
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvoffd.toml"


def test_config_flags_go_over_variables_over_the_file(file: Path) -> None:
    file.write_text('pool_size = "1GiB"\nlog_level = "error"\ndisk_deadline = 12.5\nallowed_uids = [1000, 0, 1000]\n')
    given = {"KVOFFD_POOL_SIZE": "2GiB", "KVOFFD_LOG_LEVEL": "warning", "KVOFFD_CONFIG": "/nowhere"}
    found = shown("--config", str(file), "--pool-size", "1.5GiB", **given)
    assert found["pool_size"] == {"value": 3 << 29, "text": "1536MiB", "source": "flag --pool-size"}
    assert (found["log_level"]["value"], found["log_level"]["source"]) == ("warning", "variable KVOFFD_LOG_LEVEL")
    assert (found["disk_deadline"]["value"], found["disk_deadline"]["source"]) == (12.5, f"file {file}")
    assert found["allowed_uids"]["text"] == "0,1000"
    assert found["verify_share"]["source"] == "default"
    by_variable = shown(KVOFFD_CONFIG=str(file))
    assert by_variable["pool_size"]["source"] == f"file {file}"


def test_config_takes_disks_alike_from_one_flag_several_and_the_variable() -> None:
    wanted = "/mnt/a=1GiB,/mnt/b=2GiB"
    optional = ("--disk-start", "optional")
    flags = ("--disk", "/mnt/a=1GiB", "--disk", "/mnt/b=2GiB", *optional)
    for found in (shown("--disk", wanted, *optional), shown(*flags), shown(*optional, KVOFFD_DISK=wanted)):
        assert found["disk"]["text"] == wanted
        assert found["disk"]["value"] == [["/mnt/a", 1 << 30], ["/mnt/b", 2 << 30]]


def test_config_prints_a_file_that_gives_the_same(file: Path) -> None:
    flags = {
        "pool-size": "65MiB",
        "directory": '/tmp/odd "name"\x7f é',
        "allowed-uids": "0,1000",
        "http-address": "",
        "disk-deadline": "1500ms",
    }
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    printed = kvoffd("config", *arguments).stdout
    settings, comment = printed.split("\n\n")
    assert comment.startswith("# An idle daemon takes ")
    assert re.search('^pool_size = "65MiB" +# flag --pool-size$', settings, re.MULTILINE)
    file.write_text(printed)
    asked, read = shown(*arguments), shown("--config", str(file))
    assert {name: one["value"] for name, one in read.items()} == {name: one["value"] for name, one in asked.items()}
    assert set(read) == set(re.findall("^([a-z_]+) = ", settings, re.MULTILINE))


def test_config_defaults_can_be_given_by_every_source(file: Path) -> None:
    """What ``config`` shows of each setting that has a value is read back from flags, variables and a file."""
    defaults = shown()
    texts = {name: str(one["text"]) for name, one in defaults.items() if one["text"] != ""}
    file.write_text("".join(f"{name} = {json.dumps(text)}\n" for name, text in texts.items()))
    for source, found in (
        ("flag ", shown(*[f"--{name.replace('_', '-')}={text}" for name, text in texts.items()])),
        ("variable ", shown(**{f"KVOFFD_{name.upper()}": text for name, text in texts.items()})),
        ("file ", shown("--config", str(file))),
    ):
        for name in texts:
            assert found[name]["value"] == defaults[name]["value"], name
            assert str(found[name]["source"]).startswith(source), name


def test_config_refusals_name_setting_value_and_source(file: Path) -> None:
    for name, value in (
        ("pool_size", "20 bananas"),
        ("pool_size", "4KiB"),
        ("pool_size", "-1GiB"),
        ("log_level", "loud"),
        ("eviction_policy", "fifo"),
        ("disk_deadline", "nan"),
        ("allowed_uids", "nobody-at-all"),
        ("http_address", "127.0.0.1:65536"),
        ("peers", "10.0.0.0/16:65536"),
        ("peers", "10.0.0.1/16:7400"),
        ("peers", "dns+node"),
        ("pool_file", "/dev/shm/"),
        ("directory", "/" + "d" * 120),
    ):
        sentence = refused("config", f"--{name.replace('_', '-')}={value}")
        assert name in sentence
        assert repr(value)[:20] in sentence
        assert f"--{name.replace('_', '-')}" in sentence
    assert len(refused("config", "--log-level", "x" * 50_000)) < 400, "a long value is cut"
    for option, twice in (("--disk", "/mnt/a=1GiB,/mnt/a=2GiB"), ("--peers", "a:1,a:1")):
        assert "is given twice" in refused("config", option, twice)
    for option, rest in (("--directory", ""), ("--pool-file", ""), ("--disk", "=1GiB")):
        assert "UTF-8" in refused("serve", option, os.fsdecode(b"/tmp/\xff") + rest)
    sentence = refused("serve", KVOFFD_POOL_SIZE="0")
    assert all(part in sentence for part in ("pool_size", "'0'", "KVOFFD_POOL_SIZE"))
    for line in ("pool_size = true", "disk_deadline = inf", "allowed_uids = [-4]", "directory = 5"):
        file.write_text(line + "\n")
        sentence = refused("serve", "--config", str(file))
        assert line.split()[0] in sentence
        assert str(file) in sentence


def test_config_a_file_that_is_wrong_is_refused(file: Path, tmp_path: Path) -> None:
    for content, part in (
        (b"pool_size = ", str(file)),
        (b"\xff\xfe", str(file)),
        (b"a = 1\na = 2\n", str(file)),
        (b"a = " + b"[" * 100_000, str(file)),
        (b"pool_size = 64MiB\n", 'need quotes, as in pool_size = "64MiB"'),
        (b'[kvoffd]\npool_size = "1GiB"\n', "'kvoffd'"),
        (b'poolsize = "1GiB"\n', "pool_size?"),
    ):
        file.write_bytes(content)
        assert part in refused("config", "--config", str(file))
    assert "No such file" in refused("serve", "--config", str(tmp_path / "none.toml"))
    assert str(tmp_path) in refused("config", "--config", str(tmp_path)), "a directory"


def test_config_what_is_unknown_is_refused_with_the_likely_one() -> None:
    for arguments, part in (
        (["serve", "--pool-siz", "1GiB"], "--pool-siz 1GiB (did you mean --pool-size?); kvoffd serve --help"),
        (["serve", "--pool-size"], "--pool-size"),
        (["serve", "--unknown"], "--unknown"),
        (["config", "surplus"], "surplus"),
        (["config", ""], "unrecognized arguments"),
        (["config", "--jsn"], "did you mean --json?"),
        (["--verson"], "did you mean --version?"),
        (["server"], "'server'"),
    ):
        assert part in refused(*arguments)
    assert "KVOFFD_POOL_SIZE?" in refused("config", KVOFFD_POOLSIZE="1GiB")


def test_config_variables_of_a_kubernetes_service_are_ignored() -> None:
    """A service that is named kvoffd makes Kubernetes set them in every pod."""
    given = {
        "KVOFFD_SERVICE_HOST": "10.0.0.1",
        "KVOFFD_SERVICE_PORT": "9464",
        "KVOFFD_SERVICE_PORT_METRICS": "9464",
        "KVOFFD_PORT": "tcp://10.0.0.1:9464",
        "KVOFFD_PORT_9464_TCP": "tcp://10.0.0.1:9464",
        "KVOFFD_PORT_9464_TCP_ADDR": "10.0.0.1",
        "KVOFFD_METRICS_PORT_9464_TCP_PROTO": "tcp",
    }
    found = shown(**given)
    del found["http_address"]  # empty for all tests here
    assert {one["source"] for one in found.values()} == {"default"}


def test_help_shows_every_setting_and_stands_a_percent_sign() -> None:
    text = process("serve", "--help", KVOFFD_DIRECTORY="/tmp/50%s").stdout
    flags = [word for line in text.splitlines() if line.startswith("  --") for word in line.split()[:1]]
    assert flags[:4] == ["--directory", "--pool-size", "--config", "--pool-file"]
    assert set(flags) == {f"--{name.replace('_', '-')}" for name in shown()} | {"--config"}
    assert "/tmp/50%s" in text
    titles = [line for line in text.splitlines() if re.fullmatch("\\w[\\w ]*:", line)]
    assert len(titles) == 10, "settings come in groups"
    assert "default nothing" not in text
    without = kvoffd()
    assert (without.returncode, "serve" in without.stdout) == (0, True)
    assert re.fullmatch(r"kvoffd \d\S+ \(protocol \d+\)\n", kvoffd("--version").stdout)


def test_config_imports_nothing_heavy() -> None:
    imported = re.findall(r"\| +([a-z_]+)", process("config", "--json", options=("-X", "importtime")).stderr)
    assert "kvoffd" in imported
    heavy = {"asyncio", "msgspec", "numpy", "prometheus_client", "rich", "torch", "typer", "uvloop", "zmq"}
    assert heavy & set(imported) == set()
