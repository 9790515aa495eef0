"""``kvoffd-cli stats``: what it says agrees with what was done, over the socket and over HTTP, on any screen."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffd_client import AdminClient, GroupSpec, NamespaceSpec
from kvoffd_client.testing import FakeEngine
from tests.kit.command import Cli, Terminal, run_cli_here
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import keys, prompt_of

LABEL = "meta-llama/Llama-3.1-405B-Instruct"
TOKENS = 16
POOL_BLOCKS = 128
SECTIONS = ((), ("--misses",), ("pool",), ("namespaces",), ("tiers",), ("policy",), ("settings",))


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def module_daemon(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A pool of 128 blocks with a disk, whose engine has stored 8 blocks, found 6, loaded 4 and missed 3."""
    disk = f"{tmp_path_factory.mktemp('disk')}=64MiB"
    with DaemonProcess("8MiB", eviction_policy="lru", disk=disk, http_address=f"127.0.0.1:{port}") as daemon:
        space = NamespaceSpec.named(LABEL, groups=[GroupSpec("full_attention", TOKENS)])
        with FakeEngine(daemon.directory, space) as engine:
            engine.fill(range(8), seed=1)
            assert engine.store(keys(*range(1, 9)), range(8)).ok
            assert engine.lookup([*keys(*range(1, 7)), *keys(100, 101, 102)]) == 6
            assert engine.load(keys(*range(1, 5)), range(8, 12)).ok
            engine.release()
            engine.scheduler.report_prompt(prompt_of(300, own=84, loaded=180))
            time.sleep(0.1)
            yield daemon


def stats(cli: Cli, *words: str) -> Any:
    done = cli("stats", *words, "--json")
    assert (done.status, done.err) == (0, "")
    return json.loads(done.out)


@pytest.mark.parametrize("section", ["pool", "namespaces", "tiers", "policy", "settings"])
def test_json_of_a_part_has_its_fields_of_the_whole(section: str, cli: Cli) -> None:
    part, whole = stats(cli, section), stats(cli)
    assert part
    assert part.keys() < whole.keys()
    if section in ("pool", "settings"):  # nothing of these changes while nobody asks
        assert part == {name: whole[name] for name in part}


def test_hits_misses_and_loads_are_those_that_there_were(cli: Cli) -> None:
    wait_until(lambda: stats(cli)["since_start"]["asked_keys"] == 9)
    wait_until(lambda: stats(cli)["since_start"]["prompt_tokens"])
    assert stats(cli, "--misses")["since_start"] == {"unknown": 3}
    page = cli("stats").out
    rows = {line[:21].strip(): line.split()[-2:] for line in page.splitlines()}
    shares = {
        name: rows[name] for name in ("computed", "engines' own cache", "pool", "store", "missed") if name in rows
    }
    assert list(rows).index("tokens of prompts") < list(rows).index("computed") < list(rows).index("missed")
    assert (rows["tokens of prompts"][-1], rows["tokens loaded"][-1]) == ("300", "64")
    assert shares == {
        "computed": ["12.0", "%"],
        "engines' own cache": ["28.0", "%"],
        "pool": ["60.0", "%"],
        "missed": ["33.3", "%"],
    }, "no store had any"
    (space,) = (line for line in page.splitlines() if line.startswith(LABEL[:10]))
    assert space.split()[-6:] == ["12.0", "%", "28.0", "%", "60.0", "%"]
    assert "never stored" in cli("stats", "--misses").out


def test_a_namespace_that_is_gone_is_counted_and_said_to_be_gone() -> None:
    with DaemonProcess(limits={"max_namespaces": 1}) as daemon, AdminClient(daemon.directory) as admin:
        with FakeEngine(daemon.directory, "short") as engine:
            assert engine.lookup(keys(1)) == 0
        wait_until(lambda: len(admin.sessions().sessions) == 1)
        with FakeEngine(daemon.directory, "other"):
            assert [one.model for one in admin.stats().namespaces] == ["other"]
            assert (admin.stats().gone_namespaces, admin.stats().since_start.asked_keys) == (1, 1)
            page, row = (
                run_cli_here("stats", *words, "--directory", str(daemon.directory)).stdout
                for words in ((), ("namespaces",))
            )
    assert page.splitlines()[-1] == "The sums above include 1 removed namespace."
    assert "sums" not in row


def test_http_says_the_same_as_the_socket(cli: Cli, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # nobody is there: a node is asked without it
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    moving = {"uptime_seconds", "cpu_seconds", "requests", "sessions", "resident_bytes", "loop_blocked_seconds"}
    moving |= {
        "last_minute",
        "last_hour",
        "last_day",
        "since_start",
        "disks",
        "tiers",
        "loop_blocked_max_seconds",
        "last_hour_loop_blocked",
        "index_bytes",
    }
    here = stats(cli)
    done = run_cli_here("stats", "--json", "--url", f"http://127.0.0.1:{port}")
    there = json.loads(done.stdout)
    assert here.keys() == there.keys()
    assert not [name for name in here if name not in moving and here[name] != there[name]]
    for words in SECTIONS:
        done = run_cli_here("stats", *words, "--url", f"127.0.0.1:{port}")
        assert (done.returncode, bool(done.stdout)) == (0, True), words
    doctor = run_cli_here("doctor", "--json", "--url", f"http://127.0.0.1:{port}")
    report = json.loads(doctor.stdout)
    assert (report["value"]["loaded_tokens"], len(report["verdict"])) == (64, 4)
    assert not {one["check"] for one in report["findings"]} & {"no_engine", "broken_check"}
    assert run_cli_here("doctor", "--self-test", "--url", f"http://127.0.0.1:{port}").returncode == 2
    done = run_cli_here("health", "--url", f"http://127.0.0.1:{port}")
    assert (done.returncode, done.stdout.startswith("ok"), done.stderr) == (0, True, "")


def test_a_url_that_leads_nowhere_is_one_sentence(port: int, tmp_path: Path) -> None:
    for url, sentence in (
        ("http://127.0.0.1:1", "it does not answer: Connection refused."),
        ("ftp://x", "'ftp://x' is not an address like http://HOST:PORT."),
        ("http://[::bad", "it does not answer as it should: Invalid IPv6 URL."),
        ("host:port", "it does not answer: nonnumeric port: 'port'."),
        (f"http://127.0.0.1:{port}/x", "it answers 404 "),
    ):
        done = run_cli_here("stats", "--url", url)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), url
        assert sentence in done.stderr
    for command in (
        ("health", "--url", "http://127.0.0.1:1"),
        ("doctor", "--url", "http://127.0.0.1:1"),
        ("verify", "127.0.0.1:1"),
        ("stats", "--url", "http://x", "--directory", str(tmp_path)),
    ):
        done = run_cli_here(*command)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), command


def test_an_error_whose_text_breaks_off_is_still_its_status() -> None:
    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as one:
            one.recv(4096)
            one.sendall(b"HTTP/1.1 500 Oh \x1b[31mno\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhalf")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        done = run_cli_here("stats", "--url", f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "it answers 500 Oh ?[31mno" in done.stderr, "no server moves the cursor"


def test_a_node_that_does_not_answer_is_more_than_timed_out() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        done = run_cli_here("stats", "--url", f"127.0.0.1:{listener.getsockname()[1]}")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "it does not answer within 1.4 s; check whether its process runs." in done.stderr


@pytest.mark.nightly
def test_nothing_is_cut_on_80_columns(module_daemon: DaemonProcess) -> None:
    where = ("--directory", str(module_daemon.directory))
    for words in SECTIONS:
        with Terminal("stats", *words, *where) as terminal, Terminal("stats", *words, *where, LC_ALL="C") as plain:
            assert terminal.end() == plain.end() == 0
        seen = re.sub(r"\x1b\[[0-9;]*m", "", terminal.seen)
        assert plain.seen.isascii()
        assert max(map(len, seen.splitlines())) <= 80
        assert "…" not in seen
        if words in ((), ("namespaces",)):
            assert all(part in seen for part in (LABEL[:10], LABEL[-4:])), "a name goes on in a second line"
