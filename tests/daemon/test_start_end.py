"""How a daemon starts and ends, and what it can do without. A start that is refused is one sentence and status 2."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from contextlib import closing
from itertools import cycle
from pathlib import Path

import pytest

from kvoffd_client import AdminClient, SharedMemory
from tests.daemon.refused_calls import refusing
from tests.kit.command import run_cli
from tests.kit.daemon import START_DEADLINE_S, STOP_DEADLINE_S, DaemonProcess
from tests.kit.daemon import refusal_to_serve as refused
from tests.kit.interrupt import interrupted_import
from tests.kit.service_manager import ServiceManager
from tests.kit.waiting import wait_until
from tests.kit.wire import WireClient, books, keys, store_of

MIB = 1 << 20
SOCKETS = ("jobs.sock", "events.sock", "lifeline.sock")


def limited(kind: int, limit: int) -> list[str]:
    """A command that runs what follows it under a resource limit."""
    code = f"import os, resource, sys; resource.setrlimit({kind}, ({limit},) * 2); os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", code]


# --- a start that is refused -----------------------------------------------------------------------


def test_start_is_refused_beside_another_daemon(shared_daemon: DaemonProcess) -> None:
    assert str(shared_daemon.pid) in refused("--directory", str(shared_daemon.directory), "--pool-size", "1MiB")
    assert books(shared_daemon.directory).health == "ok", "the first is unharmed"


def test_start_is_refused_beside_a_daemon_with_the_same_state_directory(tmp_path: Path) -> None:
    """Each would undo the other's clears when it writes its quotas or totals."""
    with DaemonProcess("1MiB", environ={"STATE_DIRECTORY": str(tmp_path)}):
        other, same = ("--directory", f"{tmp_path}/other", "--pool-size", "1MiB"), f"STATE_DIRECTORY={tmp_path}"
        assert "StateDirectory=" in refused(*other, before=["env", same])


def test_a_lock_on_the_directory_that_others_hold_is_in_nobodys_way(tmp_path: Path) -> None:
    """Engines can open the daemon's directory, and cron jobs lock directories."""
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    with DaemonProcess("1MiB", environ={"STATE_DIRECTORY": str(tmp_path)}) as daemon:
        assert (tmp_path / "kvoffd.state.lock").exists()
        assert daemon.stop() == 0
    assert not (tmp_path / "kvoffd.state.lock").exists()
    os.close(fd)


def test_start_with_more_memory_than_there_is_says_both(tmp_path: Path) -> None:
    sentence = refused("--directory", f"{tmp_path}/made/here", "--pool-size", "500TiB")
    assert not list(tmp_path.iterdir()), "it leaves nothing behind"
    (wanted, unit), (given, _) = re.findall(r"([0-9.]+) ([GT])iB", sentence)
    assert (float(wanted) >= 500, unit) == (True, "T"), sentence
    assert float(given) > 0


def test_start_is_refused_before_the_pool_is_taken(tmp_path: Path) -> None:
    """Where a file of credentials is missing, or the HTTP port that was asked for is another's."""
    store = ("--shared", "redis://127.0.0.1:1", "--shared-password-file", str(tmp_path / "absent"))
    assert "absent" in refused("--directory", str(tmp_path), *store)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with closing(DaemonProcess(fork=False, http_address=address)) as daemon:
            daemon.start(wait=False)
            assert daemon.process.wait(60) == 2
            assert f"The HTTP address {address} cannot be used" in daemon.log
            assert "opens a pool" not in daemon.log
        with socket.socket(socket.AF_UNIX) as left:  # as a kill leaves it
            left.bind(str(tmp_path / "lifeline.sock"))
        checks = [sys.executable, "-m", "kvoffd", "config", "--directory", str(tmp_path)]
        for asked, sentence in (
            (("--http-address", address), f"The HTTP address {address} cannot be used"),
            (("--http-address", "", "--pool-size", "500TiB"), "500 TiB"),
        ):
            found = subprocess.run([*checks, *asked], capture_output=True, text=True, check=False)
            assert found.returncode == 2
            assert sentence in found.stderr


def test_start_is_refused_under_an_impossible_limit(tmp_path: Path) -> None:
    for kind, value in ((resource.RLIMIT_NOFILE, 20), (resource.RLIMIT_NOFILE, 1023), (resource.RLIMIT_FSIZE, 0)):
        refused("--directory", str(tmp_path), before=tuple(limited(kind, value)))


REFUSED = cycle((errno.EPERM, errno.ENOSYS))
"""What containers' seccomp filters and kernels say."""


def test_start_is_refused_without_a_system_call_it_needs(tmp_path: Path) -> None:
    for call, code in zip(("epoll_create1", "eventfd2", "pipe2", "rt_sigaction", "socketpair"), REFUSED, strict=False):
        sentence = refused("--directory", str(tmp_path), before=tuple(refusing(code, call)))
        assert os.strerror(code) in sentence, call


# --- a start that is not ---------------------------------------------------------------------------


def test_start_does_without_some_system_calls() -> None:
    for call, code in zip(("madvise", "prlimit64", "sched_getaffinity"), REFUSED, strict=False):
        with DaemonProcess("4MiB", before=refusing(code, call)) as daemon:
            assert books(daemon.directory).pool.size_bytes == 4 * MIB, call


def test_start_makes_a_private_directory_and_sockets() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        directory = Path(base, "made", "here")
        command = [sys.executable, "-m", "kvoffd", "serve", "--directory", str(directory), "--pool-size", "1MiB"]
        with subprocess.Popen([*command, "--http-address", ""], stderr=subprocess.DEVNULL) as running:
            try:
                wait_until(lambda: all((directory / name).exists() for name in SOCKETS), START_DEADLINE_S)
                assert stat.S_IMODE(directory.stat().st_mode) == 0o750
                for name in SOCKETS:
                    wait_until(lambda name=name: stat.S_IMODE((directory / name).stat().st_mode) == 0o660)
            finally:
                running.terminate()
                running.wait(STOP_DEADLINE_S)


def test_while_it_starts_it_says_how_far_it_is_and_after_a_kill_how_to_keep_the_pool() -> None:
    with DaemonProcess("512MiB", fork=False) as daemon:
        daemon.kill()
        daemon.start(wait=False)
        starting = daemon.directory / "kvoffd.starting"
        wait_until(starting.exists, START_DEADLINE_S, interval_s=0.001)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            for command in ("stats", "health", "doctor"):
                said = run_cli(command, "--directory", str(daemon.directory)).stderr
                assert f"The kvoffd daemon (pid {daemon.pid}) in {daemon.directory} is starting" in said
                assert "restart" not in said
            statuses = {
                probe: run_cli("health", probe, "--directory", str(daemon.directory)).returncode
                for probe in ("--live", "--ready")
            }
            assert statuses == {"--live": 0, "--ready": 2}, "a probe that restarts it would do so again and again"
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        daemon.wait_ready()
        wait_until(lambda: not starting.exists())
        assert "The earlier daemon was killed, and its memory ended with it." in daemon.log
        assert "memory ends with this process. To keep it, set pool_file" in daemon.log


@pytest.mark.parametrize("imported", ["argparse", "msgspec", "numpy"])
def test_ctrl_c_while_it_is_loaded_prints_nothing(imported: str) -> None:
    command = ["-m", "kvoffd", "serve", "--pool-size", "1MiB"]
    assert interrupted_import(command, imported, STOP_DEADLINE_S) == (-signal.SIGINT, [])


def test_start_with_closed_standard_streams_serves_and_ends() -> None:
    closed = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh"]
    with DaemonProcess("1MiB", before=closed) as daemon:
        opened = [os.readlink(f"/proc/{daemon.pid}/fd/{fd}") for fd in range(3)]
        assert opened == [os.devnull] * 3
        assert books(daemon.directory).health == "ok"
        assert daemon.stop() == 0


@pytest.mark.parametrize(("kept", "kind"), [(False, "private"), (True, "shared")])
def test_the_pool_takes_its_size_and_its_table_two_percent_more_at_most(kept: bool, kind: str) -> None:
    with closing(ServiceManager()) as manager, DaemonProcess("256MiB", manager=manager if kept else None) as daemon:
        assert (books(daemon.directory).pool.size_bytes, books(daemon.directory).pool.memory) == (256 * MIB, kind)
        resident_kib = [
            int(line.split()[1])
            for line in Path(f"/proc/{daemon.pid}/smaps").read_text().splitlines()
            if line.startswith("Rss:")
        ]
        pool_kib = max(resident_kib)
        assert pool_kib == 256 * 1024
        status = Path(f"/proc/{daemon.pid}/status").read_text()
        (shared_kib,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("RssShmem:")]
        assert shared_kib - kept * pool_kib <= 0.02 * pool_kib


def test_the_daemon_does_not_load_torch(shared_daemon: DaemonProcess) -> None:
    assert "libtorch" not in Path(f"/proc/{shared_daemon.pid}/maps").read_text()


def test_systemd_learns_that_the_daemon_is_ready_lives_and_stops() -> None:
    manager = ServiceManager()
    try:
        with DaemonProcess("1MiB", manager=manager, watchdog_s=0.2) as daemon:
            wait_until(lambda: manager.ready and any("WATCHDOG" in said for said in manager.messages))
            assert daemon.stop() == 0
            wait_until(lambda: any("STOPPING" in said for said in manager.messages))
            order = [name for said in manager.messages for name in ("READY", "WATCHDOG", "STOPPING") if name in said]
            assert (order[0], order[-1]) == ("READY", "STOPPING"), order
    finally:
        manager.close()


# --- the end ---------------------------------------------------------------------------------------


def test_sigterm_removes_the_sockets_and_ends_with_success() -> None:
    with DaemonProcess("1MiB", fork=False) as daemon:
        assert daemon.stop() == 0
        assert "ERROR" not in daemon.log
        assert daemon.log.rstrip().endswith("Stopped.")
        assert not any((daemon.directory / name).exists() for name in SOCKETS)
        # A removed lock would be another file than the one that a daemon which starts at that moment has locked.
        assert (daemon.directory / "kvoffd.lock").exists()


def test_sigterm_waits_for_running_jobs() -> None:
    with DaemonProcess() as daemon, WireClient(daemon.directory) as client, SharedMemory(16 * MIB, "test") as memory:
        client.open_namespace()
        registration = client.register(memory, page_bytes=MIB)
        client.submit(registration, [store_of(1, keys(*range(16)), range(16))])
        client.health()  # requests are answered in order: the store was accepted
        daemon.process.terminate()
        batch = client.published()
        assert batch is not None
        assert batch.results[0].ok
        client.wait_lifeline_ended()
        assert daemon.process.wait(60) == 0


@pytest.mark.parametrize("ignored", [False, True], ids=["terminal", "nohup"])
def test_sighup_ends_the_daemon_unless_nohup_started_it(ignored: bool) -> None:
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        daemon = DaemonProcess("1MiB", fork=False).start()
    finally:
        signal.signal(signal.SIGHUP, handler)
    with closing(daemon):
        daemon.process.send_signal(signal.SIGHUP)
        if ignored:
            with AdminClient(daemon.directory) as admin:
                assert admin.health().level == "ok"
            assert daemon.stop() == 0
        else:
            assert daemon.process.wait(60) == 0
            assert not (daemon.directory / "jobs.sock").exists()
