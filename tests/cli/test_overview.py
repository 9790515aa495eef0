"""``kvoffd-cli`` without a command: one screen for a ticket, whatever there is to say."""

from __future__ import annotations

from pathlib import Path

from kvoffd_client.testing import FakeEngine
from tests.kit.command import run_cli_here
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import keys, prompt_of


def test_one_screen_says_what_a_ticket_needs(tmp_path: Path) -> None:
    with (
        DaemonProcess(disk=f"{tmp_path}=64MiB", shared="redis://127.0.0.1:1") as daemon,
        FakeEngine(daemon.directory, "llama", name="vllm pod-7") as engine,
    ):

        def shown() -> list[str]:
            done = run_cli_here(KVOFFD_DIRECTORY=str(daemon.directory))
            assert (done.returncode, done.stderr) == (0, "")
            return done.stdout.splitlines()

        assert engine.store(keys(1, 2), [0, 1]).ok
        assert engine.lookup(keys(1, 2, 3, 4)) == 2
        assert engine.load(keys(1, 2), [2, 3]).ok
        engine.release()
        engine.scheduler.report_prompt(prompt_of(100, own=20, loaded=50))
        wait_until(lambda: any("computed 30.0 %" in line for line in shown()))
        wait_until(lambda: any("redis" in line and "down" in line for line in shown()))
        lines = shown()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80
        text = " ".join(" ".join(lines).split())
        for words in (
            "(protocol ", " up ", "state degraded. Too early to say", "engines 1: vllm pod-7 (llama)",
            "tokens last hour: 100: computed 30.0 %, engines' own cache 20.0 %, pool 50.0 %",
            "missed last hour, of 4 keys: tier down 50.0 %", "tier serving, ",
            "tier down, unused: redis://127.0.0.1:1", "warning shared_unreachable: No blocks are shared over",
        ):  # fmt: skip
            assert words in text, (words, text)
        assert [line for line in lines if line.startswith("pool ") and " used (" in line]
        assert not [line for line in lines if line.startswith("Usage")], "--help prints that"


def test_the_directory_may_be_named(tmp_path: Path) -> None:
    with DaemonProcess() as daemon:
        named = run_cli_here("--directory", str(daemon.directory), KVOFFD_DIRECTORY=str(tmp_path))
        assert (named.returncode, named.stderr) == (0, "")
        assert named.stdout.startswith("kvoffd ")
        done = run_cli_here("--directory", str(daemon.directory), "namespaces", "diff", "a")
    assert (done.returncode, done.stdout) == (2, "")
    assert "write it after a command: kvoffd-cli namespaces diff a --directory." in done.stderr


def test_without_a_daemon_it_says_so_and_how_to_see_help(tmp_path: Path) -> None:
    done = run_cli_here(KVOFFD_DIRECTORY=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"kvoffd-cli: There is no kvoffd daemon in {tmp_path}")
    assert "`kvoffd-cli --help` shows all commands." in done.stderr
