"""The daemon's start and end, on real processes."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.server.daemon import Daemon
from kvoffd_client import AdminClient, SharedMemory
from kvoffd_proto import messages as m
from kvoffd_proto.sockets import SocketPaths
from kvoffd_proto.units import parse_size
from tests.kit import refused_calls
from tests.kit.daemon import DaemonProcess
from tests.kit.ports import free_port
from tests.kit.struct_wire import WireClient, ids, keys, stats, store_of
from tests.kit.waiting import wait_until


def serve(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``kvoffd serve`` to its end, which a refused start reaches by itself."""
    return subprocess.run(
        [sys.executable, "-m", "kvoffd", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, **environ},
        check=False,
    )


def test_the_directory_and_its_sockets_are_closed_to_strangers():
    base = tempfile.mkdtemp(prefix="kvoffd-", dir="/tmp")
    directory = Path(base) / "made" / "here"
    running = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "kvoffd",
            "serve",
            "--directory",
            str(directory),
            "--pool-size",
            "1MiB",
            "--http-address",
            "",
        ]
    )
    try:
        paths = SocketPaths(directory)
        wait_until(paths.events.exists, 20)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o750
        for path in (paths.jobs, paths.events, paths.lifeline):
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
    finally:
        running.terminate()
        running.wait(10)
        shutil.rmtree(base)


def test_a_second_daemon_on_the_same_directory_is_refused(shared_daemon):
    second = serve("--directory", str(shared_daemon.directory), "--pool-size", "1MiB")
    assert second.returncode == 2
    assert str(shared_daemon.pid) in second.stderr
    assert len(second.stderr.strip().splitlines()) == 1
    stats(shared_daemon.directory)  # the first is unharmed


def test_sockets_of_a_dead_daemon_are_replaced_and_the_next_has_another_epoch(daemon):
    first = stats(daemon.directory).epoch
    daemon.kill()
    assert SocketPaths(daemon.directory).jobs.exists()
    daemon.start()
    assert stats(daemon.directory).sessions == 1
    assert stats(daemon.directory).epoch != first


def test_sigterm_removes_the_sockets_and_ends_with_success(daemon):
    assert daemon.stop() == 0
    assert "ERROR" not in daemon.log
    assert daemon.log.rstrip().endswith("Stopped.")
    paths = SocketPaths(daemon.directory)
    assert not any(path.exists() for path in (paths.jobs, paths.events, paths.lifeline))


@pytest.mark.parametrize("ignored", [False, True], ids=["terminal", "nohup"])
def test_a_terminal_that_is_closed_ends_the_daemon_in_good_order_unless_it_is_told_otherwise(
    tmp_path: Path, ignored: bool
) -> None:
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        daemon = DaemonProcess().start()
    finally:
        signal.signal(signal.SIGHUP, handler)
    with closing(daemon):
        daemon.process.send_signal(signal.SIGHUP)
        if ignored:
            with AdminClient(daemon.directory) as admin:
                assert admin.health().healthy
            assert daemon.stop() == 0
        else:
            assert daemon.process.wait(20) == 0
            assert not SocketPaths(daemon.directory).jobs.exists()


def test_a_daemon_whose_standard_streams_are_closed_serves_and_ends() -> None:
    closed = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh"]
    with DaemonProcess(before=closed) as daemon, AdminClient(daemon.directory) as admin:
        opened = [os.readlink(f"/proc/{daemon.pid}/fd/{fd}") for fd in range(3)]
        assert opened == [os.devnull] * 3
        assert admin.health().healthy
        admin.close()
        assert daemon.stop() == 0


def test_a_log_that_nobody_reads_keeps_no_client_waiting() -> None:
    """As where the program that takes a container's log stands still."""
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)

    unread = ["sh", "-c", f'exec "$@" 2>/dev/fd/{write_end}', "sh"]
    try:
        with DaemonProcess(before=unread, pass_fds=[write_end]) as daemon:
            for _ in range(40):  # each leaves two lines
                with WireClient(daemon.directory) as client:
                    client.open_namespace()
            assert daemon.stop() == 0
    finally:
        os.close(read_end)
        os.close(write_end)


def test_more_memory_than_there_is_is_refused_with_both_numbers(tmp_path):
    refused = serve("--directory", str(tmp_path), "--pool-size", "500TiB")
    assert refused.returncode == 2
    wanted, given = map(parse_size, re.findall(r"[0-9.]+ [GT]iB", refused.stderr))
    assert wanted >= parse_size("500TiB")
    assert 0 < given < parse_size("64TiB")
    assert len(refused.stderr.strip().splitlines()) == 1


def test_credentials_that_cannot_be_read_are_refused_before_the_pool_is_taken(tmp_path):
    store = ("--shared", "redis://127.0.0.1:1", "--shared-password-file", str(tmp_path / "absent"))
    refused = serve("--directory", str(tmp_path), "--http-address", "", *store)
    assert refused.returncode == 2
    assert "absent" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1


def test_the_pool_takes_what_was_asked_for_and_at_most_two_percent_more():
    with DaemonProcess("256MiB") as daemon:
        shared_kib = 0
        for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines():
            if line.startswith("RssShmem:"):
                shared_kib = int(line.split()[1])
        assert 256 * 1024 <= shared_kib <= 256 * 1024 * 1.02
        report = stats(daemon.directory)
        assert report.pool.pool_bytes == 256 * 2**20
        assert report.pool.table_bytes <= 0.02 * report.pool.pool_bytes


def test_the_daemon_does_not_import_torch(shared_daemon):
    maps = Path(f"/proc/{shared_daemon.pid}/maps").read_text()
    assert "libtorch" not in maps
    script = "import sys, kvoffd.server.daemon, kvoffd.cli; print(json.dumps(sorted(sys.modules)))"
    modules = subprocess.run(
        [sys.executable, "-c", f"import json; {script}"], capture_output=True, text=True, check=True, timeout=60
    )
    assert not {"torch", "vllm", "kvoffd_client"} & set(json.loads(modules.stdout))


def test_sigterm_lets_running_jobs_finish_and_refuses_new_ones(daemon):
    with WireClient(daemon.directory) as client, SharedMemory(16 * 2**20, "test") as memory:
        client.open_namespace()
        registration = client.register(memory, page_bytes=2**20)
        client.send(m.Submit, registration, [store_of(1, keys(*range(16)), ids(*range(16)))])
        # Requests are handled in order: once this one is answered the store was accepted.
        client.ask(m.Health)
        daemon.process.terminate()
        assert client.completions().results[0].ok
        assert client.lifeline_ended()
        assert daemon.process.wait(10) == 0


def test_the_loop_answers_health_over_http():
    port = free_port()
    with DaemonProcess(http_address=f"127.0.0.1:{port}") as daemon:
        daemon.wait_log("Serving ")  # HTTP opens after the sockets
        base = f"http://127.0.0.1:{port}"
        assert urllib.request.urlopen(f"{base}/healthz", timeout=5).read().startswith(b"ok")
        assert urllib.request.urlopen(f"{base}/readyz", timeout=5).status == 200
        assert b"kvoffd_pool" in urllib.request.urlopen(f"{base}/metrics", timeout=5).read()


def http_status(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_broken_disk_ends_neither_life_nor_service(tmp_path):
    port = free_port()
    with DaemonProcess(http_address=f"127.0.0.1:{port}", disk=f"{tmp_path}/missing=64MiB"):
        wait_until(lambda: "missing" in http_status(port, "/healthz")[1], 10)
        assert http_status(port, "/healthz")[0] == 200
        assert http_status(port, "/readyz")[0] == 200


def test_probes_are_answered_while_the_pool_is_touched(tmp_path, monkeypatch):
    """And a daemon whose memory is refused was alive until then."""
    told = {}

    def touch_slowly(config, *_):
        told.update({path: http_status(port, path) for path in ("/healthz", "/readyz", "/metrics")})
        raise KvoffdError("The memory is refused.")

    monkeypatch.setattr("kvoffd.server.daemon.open_pool", touch_slowly)
    port = free_port()

    async def serve() -> None:
        await Daemon(Config(directory=tmp_path, http_address=f"127.0.0.1:{port}")).serve()

    with pytest.raises(KvoffdError, match="refused"):
        asyncio.run(serve())
    sentence = "The daemon is starting.\n"
    assert told == {
        "/healthz": (200, f"ok\n{sentence}"),
        "/readyz": (503, f"not ok\n{sentence}"),
        "/metrics": (503, f"not ok\n{sentence}"),
    }


def test_a_taken_http_address_is_refused_before_the_pool_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with closing(DaemonProcess(http_address=address)) as daemon:
            daemon.start(wait=False)
            assert daemon.process.wait(60) == 2
            assert f"The HTTP address {address} cannot be listened on" in daemon.log
            assert "takes a pool" not in daemon.log


def test_systemd_is_told_when_the_daemon_is_ready_and_that_it_lives(tmp_path):
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(20)
        daemon = DaemonProcess()
        command = [sys.executable, "-m", "kvoffd", "serve", "--directory", str(daemon.directory), "--pool-size", "1MiB"]
        environ = {**os.environ, "NOTIFY_SOCKET": address, "WATCHDOG_USEC": "200000"}
        running = subprocess.Popen([*command, "--http-address", ""], env=environ)
        try:
            seen: list[str] = []
            while not any("WATCHDOG=1" in text for text in seen):
                seen.append(manager.recv(4096).decode())
            assert any("READY=1" in text for text in seen)
            running.terminate()
            while not any("STOPPING=1" in text for text in seen):
                seen.append(manager.recv(4096).decode())
        finally:
            running.terminate()
            running.wait(10)
            daemon.close()


def refusing(code: int, call: str) -> DaemonProcess:
    """Make a daemon under a seccomp filter that refuses one call to the system."""
    return DaemonProcess(before=[sys.executable, refused_calls.__file__, str(code), call])


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize("call", ["madvise", "prlimit64", "sched_getaffinity"])
def test_a_call_that_a_seccomp_filter_refuses_is_done_without(call: str, code: int) -> None:
    with refusing(code, call) as daemon, AdminClient(daemon.directory) as admin:
        assert admin.stats().pool.pool_bytes == parse_size("64MiB")


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize("call", ["epoll_create1", "eventfd2", "pipe2", "rt_sigaction", "socketpair"])
def test_a_call_that_no_daemon_can_do_without_is_refused_in_one_sentence(call: str, code: int) -> None:
    with closing(refusing(code, call)) as daemon:
        daemon.start(wait=False)
        assert daemon.process.wait(30) == 2
        assert os.strerror(code) in daemon.log
        assert daemon.log.startswith("kvoffd: ")
        assert daemon.log.count("\n") == 1


@pytest.mark.parametrize(("kind", "limit"), [(resource.RLIMIT_NOFILE, 20), (resource.RLIMIT_FSIZE, 0)])
def test_a_limit_that_no_daemon_can_do_with_is_refused_in_one_sentence(kind: int, limit: int, tmp_path: Path) -> None:
    code = (
        f"import os, resource, sys; resource.setrlimit({kind}, ({limit}, {limit})); os.execv(sys.argv[1], sys.argv[1:])"
    )
    daemon = [sys.executable, "-m", "kvoffd", "serve", "--directory", str(tmp_path)]
    refused = subprocess.run(
        [sys.executable, "-c", code, *daemon], capture_output=True, text=True, timeout=30, check=False
    )
    assert refused.returncode == 2
    assert refused.stderr.startswith("kvoffd: ")
    assert refused.stderr.count("\n") == 1


def test_regular_work_that_fails_does_not_end_the_daemon(caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon(Config())
    ticked: list[str] = []

    class Failing:
        def tick(self) -> None:
            ticked.append("service")
            raise RuntimeError("a bug")

    class Sound:
        def tick(self) -> None:
            ticked.append("sound")

    daemon._service, daemon._lifelines, daemon._transport = Failing(), Sound(), Sound()  # type: ignore[assignment]
    daemon._kept_policy = Sound()  # type: ignore[assignment]
    for _ in range(3):
        daemon._tick()
    assert ticked == ["service", "sound", "sound", "sound"] * 3
    assert len(caplog.records) == 1, "logged once a minute"
