"""``kvoffd``: what it prints, what it refuses, how fast it starts."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvoffd import __version__
from kvoffd.cli import main
from kvoffd.config import SETTINGS, Config, load_config
from kvoffd.errors import PoolTooLarge


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in SETTINGS:
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.delenv("KVOFFD_CONFIG", raising=False)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[Config], int]], None]]:
    """Puts a function where the daemon's ``run`` is; gives logging back as it was."""

    def put(run: Callable[[Config], int]) -> None:
        module = types.ModuleType("kvoffd.server.daemon")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "kvoffd.server.daemon", module)

    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield put
    root.handlers[:], root.level = handlers, level


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code  # type: ignore[assignment]
    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert printed.err.startswith("kvoffd: ")
    assert printed.err.count("\n") == 1, "one sentence, one line"
    return printed.err


def test_serve_runs_the_daemon_with_the_configuration(stand_in: Callable[..., None]) -> None:
    given: list[Config] = []

    def run(config: Config) -> int:
        given.append(config)
        return 7

    stand_in(run)
    assert main(["serve", "--pool-size", "64MiB", "--http-address", "", "--log-level", "debug"]) == 7
    assert given == [load_config({"pool_size": "64MiB", "http_address": "", "log_level": "debug"}, {}).config]
    assert logging.getLogger().level == logging.DEBUG


def test_a_daemon_that_refuses_to_start_says_one_sentence(
    stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Config) -> int:
        raise PoolTooLarge("8 GiB were asked for, 4 GiB can be had.")

    stand_in(run)
    assert refused(["serve"], capsys) == "kvoffd: 8 GiB were asked for, 4 GiB can be had.\n"


def test_a_daemon_that_gets_no_threads_says_so(
    stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Config) -> int:
        raise RuntimeError("can't start new thread")

    stand_in(run)
    assert "pids.max" in refused(["serve"], capsys)


@pytest.mark.parametrize("option", ["--directory", "--pool-file", "--disk"])
def test_a_path_that_is_no_text_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No client could connect to such sockets, and no administrator be told of such a disk."""
    value = os.fsdecode(b"/tmp/\xff") + ("=1GiB" if option == "--disk" else "")
    assert "UTF-8" in refused(["serve", option, value], capsys)


@pytest.mark.parametrize("where", ["flag", "variable", "file"])
@pytest.mark.parametrize("text", ["pool_size = 'many'", "no TOML", "unknown = 1"])
def test_where_lines_are_json_so_is_a_refusal(where: str, text: str, tmp_path: Path) -> None:
    """In a process of its own: what the process as a whole writes is what a log collector reads."""
    file = tmp_path / "kvoffd.toml"
    file.write_text(text + ("\nlog_format = 'json'\n" if where == "file" else "\n"))
    command = [sys.executable, "-m", "kvoffd", "serve", "--config", str(file)]
    environ = {**os.environ, "KVOFFD_LOG_FORMAT": "json"} if where == "variable" else None
    if where == "flag":
        command += ["--log-format", "json"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = [json.loads(line) for line in ended.stderr.splitlines()]
    assert line["level"] == "error"
    assert str(file) in line["message"]


def test_a_crash_and_a_bad_flag_are_json_too(tmp_path: Path) -> None:
    environ = {**os.environ, "KVOFFD_LOG_FORMAT": "json"}
    bad = [sys.executable, "-m", "kvoffd", "serve", "--pool-siz", "1"]
    crash = [
        sys.executable,
        "-c",
        "import sys, threading, warnings; from kvoffd.server import daemon; from kvoffd.cli import main\n"
        "def broken():\n"
        "    warnings.warn('x', stacklevel=1); threading.Thread(target=lambda: 1 / 0).start(); raise LookupError\n"
        "daemon.native = broken\n"
        f"sys.exit(main(['serve', '--directory', '{tmp_path}']))",
    ]
    for command, levels in ((bad, ["error"]), (crash, ["critical", "critical", "warning"])):
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode != 0
        assert sorted(json.loads(line)["level"] for line in ended.stderr.splitlines()) == levels


@pytest.mark.parametrize("command", ["serve", "config"])
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--pool-size", "20 bananas"], "bananas"),
        (["--pool-size", "0"], "pool_size"),
        (["--pool-size"], "--pool-size"),
        (["--pool-siz", "1GiB"], "--pool-siz 1GiB (did you mean --pool-size?); kvoffd COMMAND --help"),
        (["--unknown"], "--unknown"),
        (["--config", "/nowhere/kvoffd.toml"], "/nowhere/kvoffd.toml"),
        (["--log-level", "loud"], "'loud'"),
        (["surplus"], "surplus"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(
    command: str, arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert part.replace("COMMAND", command) in refused([command, *arguments], capsys)


@pytest.mark.parametrize(
    ("arguments", "question"),
    [
        (["simulate", "--blcks", "1", "FILE"], ["--blocks"]),
        (["simulate", "--pool-size", "1GiB", "FILE"], ["--size"]),
        (["config", "--jsn"], ["--json"]),
        (["serve", "--jsn"], []),
        (["serve", "--cofig", "FILE"], ["--config"]),
        (["--verson"], ["--version"]),
    ],
)
def test_only_what_the_command_takes_is_asked_for(
    arguments: list[str], question: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.findall(r"did you mean (\S+)\?", refused(arguments, capsys)) == question


def test_an_unknown_command_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'server'" in refused(["server"], capsys)


def test_an_unknown_variable_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVOFFD_POLSIZE", "1GiB")
    assert "KVOFFD_POLSIZE" in refused(["config"], capsys)


def test_config_prints_values_with_their_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvoffd.toml"
    file.write_text('eviction_policy = "arc"\n')
    monkeypatch.setenv("KVOFFD_LEASE_TTL", "45s")
    assert main(["config", "--config", str(file), "--pool-size", "1.5GiB"]) == 0
    settings, comment = capsys.readouterr().out.split("\n\n")
    assert comment.startswith("# The daemon needs 2.23 GiB of memory: pool 1.50 GiB, ")
    lines = {line.split(" ")[0]: line for line in settings.splitlines()}
    assert list(lines) == [setting.name for setting in SETTINGS]
    assert lines["pool_size"].split("#") == [lines["pool_size"].split("#")[0], " flag --pool-size"]
    assert '"1536MiB"' in lines["pool_size"]
    assert lines["lease_ttl"].endswith("# variable KVOFFD_LEASE_TTL")
    assert lines["eviction_policy"].endswith(f"# file {file}")
    assert lines["log_level"].endswith("# default")


def test_what_config_prints_is_a_file_that_gives_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {
        "pool_size": "65MiB",
        "directory": '/tmp/odd "name"\x7f é',
        "allowed_uids": "0,1000",
        "http_address": "",
        "job_deadline": "1500ms",
    }
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    assert main(["config", *arguments]) == 0
    file = tmp_path / "kvoffd.toml"
    file.write_text(capsys.readouterr().out)
    assert load_config({}, {}, file).config == load_config(dict(flags), {}).config


def test_config_prints_json_with_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--json", "--pool-size", "1GiB"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["pool_size"] == {"value": 2**30, "text": "1GiB", "source": "flag --pool-size"}
    assert shown["lease_ttl"]["value"] == 30.0
    assert set(shown) == {setting.name for setting in SETTINGS}


def test_help_begins_with_the_flags_that_matter(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    flags = [word for line in text.splitlines() if line.startswith("  --") for word in line.split()[:1]]
    assert flags[:4] == ["--directory", "--pool-size", "--config", "--log-level"]
    assert set(flags) == {setting.flag for setting in SETTINGS} | {"--config"}


def test_help_stands_a_percent_sign_in_the_default_directory() -> None:
    environ = {"KVOFFD_DIRECTORY": "/tmp/50%s", "PATH": "/bin"}
    printed = subprocess.run(
        [sys.executable, "-m", "kvoffd", "serve", "--help"], capture_output=True, text=True, env=environ, timeout=60
    )
    assert printed.returncode == 0, printed.stderr
    assert "/tmp/50%s" in printed.stdout


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "serve" in capsys.readouterr().out


def test_python_m_kvoffd_is_kvoffd() -> None:
    printed = subprocess.run([sys.executable, "-m", "kvoffd", "--version"], capture_output=True, text=True, timeout=60)
    assert (printed.returncode, printed.stdout, printed.stderr) == (0, f"kvoffd {__version__}\n", "")


def test_nothing_heavy_is_imported_to_read_the_arguments() -> None:
    script = (
        "import sys; from kvoffd.cli import main; main(['config', '--json']); "
        "print(sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    heavy = {"asyncio", "msgspec", "numpy", "prometheus_client", "rich", "torch", "typer", "uvloop", "zmq"}
    assert heavy & set(printed.stderr.replace("'", " ").replace(",", " ").strip("[]\n").split()) == set()


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvoffd", "config"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == ""
    process.stderr.close()
