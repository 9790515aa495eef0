"""The daemon's start and end, where a real process does not show what comes before what."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import uvloop

from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.pool import backing, memory
from kvoffd.pool.memory import PoolMemory
from kvoffd.pool.pool import Pool
from kvoffd.server import daemon as module
from kvoffd.server import pool_opening
from kvoffd.server.daemon import Daemon
from kvoffd.server.http import HttpServer
from kvoffd.server.lifeline import LifelineServer
from kvoffd.server.persistence import PolicyFile, State, StateFile
from kvoffd.server.scrubber import Scrubber
from kvoffd.server.sockets import Sockets
from kvoffd.server.tier_supervisor import TierSupervisor
from kvoffd.system import limits
from kvoffd.system.directory import DaemonDirectory
from kvoffd.system.systemd import FdStore, Notifier
from kvoffd.transfer.cuda.gpus import Gpus
from kvoffd.transfer.engine import HostEngine
from tests.kit.command import run_daemon_here
from tests.kit.ports import free_port, http_get
from tests.kit.waiting import wait_until


@pytest.fixture
def directory() -> Iterator[Path]:
    with TemporaryDirectory(prefix="kvoffd-", dir="/tmp") as made:
        yield Path(made)


def test_probes_are_answered_while_the_pool_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a daemon whose memory is refused was alive until then."""
    port, answers = free_port(), dict[str, tuple[int, str]]()

    def touch_slowly(*_: object, **__: object) -> None:
        answers.update({path: http_get(port, path) for path in ("/healthz", "/readyz", "/metrics")})
        raise KvoffdError("The memory is refused.")

    monkeypatch.setattr(module, "open_pool", touch_slowly)
    with pytest.raises(KvoffdError, match="refused"):
        asyncio.run(Daemon(Config(directory=tmp_path, http_address=f"127.0.0.1:{port}")).serve())
    sentence = "The daemon is starting.\n"
    assert answers == {
        "/healthz": (200, f"ok\n{sentence}"),
        "/readyz": (503, f"not ok\n{sentence}"),
        "/metrics": (503, sentence),
    }


@pytest.mark.parametrize("thread", ["kvoffd-open", "log"])
def test_a_daemon_that_gets_no_threads_says_so_and_ends_well(tmp_path: Path, thread: str) -> None:
    program = (
        "import sys, threading; from kvoffd.cli import main\n"
        "real = threading.Thread.start\n"
        "def start(thread):\n"
        f"    if thread.name.startswith('{thread}'): raise RuntimeError(\"can't start new thread\")\n"
        "    real(thread)\n"
        "threading.Thread.start = start\n"
        f"sys.exit(main(['serve', '--directory', '{tmp_path}', '--disk', '{tmp_path}=16MiB', '--pool-size', '16MiB',"
        "    '--http-address', '', '--log-level', 'error']))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "pids.max" in ended.stderr


def test_a_crash_and_a_bad_flag_are_json_too(tmp_path: Path) -> None:
    environ = {**os.environ, "KVOFFD_LOG_FORMAT": "json"}
    program = (
        "import sys, threading, warnings; from kvoffd.server import daemon; from kvoffd.cli import main\n"
        "def broken():\n"
        "    warnings.warn('x', stacklevel=1); threading.Thread(target=lambda: 1 / 0).start(); raise LookupError\n"
        "daemon.native = broken\n"
        f"sys.exit(main(['serve', '--directory', '{tmp_path}']))"
    )
    for arguments, levels in (
        (("-m", "kvoffd", "serve", "--pool-siz", "1"), ["error"]),
        (("-c", program), ["critical", "critical", "warning"]),
    ):
        command = [sys.executable, *arguments]
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode != 0
        assert sorted(json.loads(line)["level"] for line in ended.stderr.splitlines()) == levels


def test_a_start_without_a_required_disk_is_refused(tmp_path: Path) -> None:
    """Also by `kvoffd config`, before the pool is touched. Nothing is created."""
    (link := tmp_path / "link").symlink_to(tmp_path)
    cases = {
        f"{tmp_path / 'missing'}=16MiB": "missing cannot be used (No such file or directory); make it, name another",
        f"{tmp_path}=1024TiB": "can be used; choose a smaller size",
        f"{tmp_path}=16MiB,{link}=16MiB": "is the same directory as",
    }
    for disk, why in cases.items():
        for command in ("serve", "config"):
            given = "--directory", str(tmp_path / "run"), "--pool-size", "1MiB", "--disk", disk
            ended = run_daemon_here(command, *given)
            assert ended.returncode == 2
            assert why in ended.stderr
            assert "disk_start" in ended.stderr
    assert {one.name for one in tmp_path.iterdir()} <= {"run", "link"}


def test_a_pool_that_reserved_huge_pages_hold_needs_no_other_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By `kvoffd config`, as at the start; a file does not take them."""
    monkeypatch.setattr(limits, "memory_limit", lambda: limits.MemoryLimit(1 << 20, "other memory"))
    command = "config", "--directory", str(tmp_path), "--http-address", "", "--pool-size", "2GiB"
    assert "other memory" in run_daemon_here(*command).stderr
    monkeypatch.setattr(limits, "default_huge_page_bytes", lambda: 2 << 20)
    monkeypatch.setattr(limits, "free_huge_pages", lambda page_bytes: 1024)
    ended = run_daemon_here(*command)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "other memory" in run_daemon_here(*command, "--pool-file", "/dev/shm/no-such-pool").stderr
    assert "other memory" in run_daemon_here(*command, "--reserved-pages", "off").stderr


# --- what comes before what ------------------------------------------------------------------------

START = [
    (DaemonDirectory, "acquire", "lock the directory"),
    (HttpServer, "start", "answer probes"),
    (State, "restore", "read the state"),
    (module, "open_pool", "touch the pool"),
    (module, "restore", "recover blocks"),
    (Sockets, "open", "open sockets"),
    (LifelineServer, "open", "open the lifeline"),
    (Notifier, "ready", "say ready"),
    (TierSupervisor, "start", "open disks"),
]
END = [
    (Notifier, "stopping", "take no more jobs"),
    (Sockets, "flush", "publish the last results"),
    (TierSupervisor, "close", "close disks"),
    (PolicyFile, "close", "write what the policy knows"),
    (StateFile, "close", "write the state"),
    (HostEngine, "close", "end copies"),
    (Gpus, "stop", "end copies of GPUs"),
    (LifelineServer, "close", "end sessions"),
    (Gpus, "close", "release GPUs"),
    (Sockets, "close", "close sockets"),
    (Pool, "close", "unmap the pool"),
    (HttpServer, "close", "answer no probes"),
    (DaemonDirectory, "release", "unlock the directory"),
]


def life(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception] | None = None,
    **replaced: Callable[..., Any],
) -> tuple[Daemon, list[str]]:
    """A daemon that is stopped once it is ready; what it did, each thing when it did it for the first time in
    its start and for the last time in its end. ``replaced``: what to do in place of things, by name; ``error``: what
    that raises in the end.
    """
    done: list[str] = []

    def watch(owner: Any, name: str, what: str) -> None:
        right = replaced.get(what.replace(" ", "_"), getattr(owner, name))

        def watched(*arguments: Any, **named: Any) -> Any:
            done.append(what)
            if what == START[-1][-1]:
                os.kill(os.getpid(), signal.SIGTERM)
            return right(*arguments, **named)

        monkeypatch.setattr(owner, name, watched)

    for one in (*START, *END):
        watch(*one)

    daemon = Daemon(Config(directory=directory, pool_bytes=1 << 20, http_address=f"127.0.0.1:{free_port()}"))
    with nullcontext() if error is None else pytest.raises(error):
        uvloop.run(daemon.serve())
    begin = done.index("say ready") + 2
    return daemon, [*dict.fromkeys(done[:begin]), *reversed(dict.fromkeys(reversed(done[begin:])))]


def test_start_and_end_have_their_order(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is refused has touched nothing; who stops lets go of memory when nothing can use it any more."""
    _, done = life(directory, monkeypatch)
    again = "publish the last results"  # once more when the last copies have ended
    assert [what for what in done if what != again] == [what for *_, what in [*START, *END] if what != again]


@pytest.mark.parametrize("part", ["PageFaulter", "HostEngine", "PolicyFile", "TierSupervisor", "LifelineServer"])
def test_a_start_that_fails_half_way_ends_what_it_has_begun(
    directory: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """It left its threads, and unmapped the pool while copy threads and a GPU's driver still had it."""
    ended: list[str] = []

    def fail(*_: object, **__: object) -> None:
        raise KvoffdError("There is no more.")

    for owner, name in ((HostEngine, "copies"), (Gpus, "GPUs"), (Sockets, "sockets"), (Pool, "pool")):
        close: Callable[..., bool] = owner.close
        monkeypatch.setattr(owner, "close", lambda *one, close=close, name=name: ended.append(name) or close(*one))
    monkeypatch.setattr(module, part, fail)
    tasks = Path("/proc/self/task")
    before = {*tasks.iterdir()}
    with pytest.raises(KvoffdError, match="no more"):
        uvloop.run(Daemon(Config(directory=directory, pool_bytes=1 << 20, http_address="")).serve())
    wait_until(lambda: {*tasks.iterdir()} <= before)
    has_copies = part not in ("PageFaulter", "HostEngine")
    assert ended == [*["copies"] * has_copies, "GPUs", "sockets", "pool"]


@pytest.mark.parametrize("what", ["write what the policy knows", "end sessions"])
def test_an_end_that_fails_keeps_no_other_from_its_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    done: list[str] = []

    def fail(*_: object) -> None:
        raise LookupError("a bug")

    for owner, name in ((StateFile, "write the state"), (Sockets, "close sockets")):
        close: Callable[..., None] = owner.close
        monkeypatch.setattr(owner, "close", lambda *one, close=close, name=name: done.append(name) or close(*one))
    daemon, _ = life(directory, monkeypatch, LookupError, **{what.replace(" ", "_"): fail})
    assert done[-1] == "close sockets"
    assert "write the state" in done
    daemon._lifelines._listener.close()


def test_scrubbing_that_failed_does_not_keep_jobs_from_their_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried again, and logged once a minute."""
    tries = 0

    def fail(scrubber: Scrubber) -> None:
        nonlocal tries
        tries += 1
        if tries == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        raise LookupError("a bug")

    monkeypatch.setattr(Scrubber, "has_work", True)
    monkeypatch.setattr(Scrubber, "next_step", fail)
    monkeypatch.setattr(module, "TICK_S", 0.01)
    stopping: list[str] = []
    monkeypatch.setattr(Notifier, "stopping", lambda notifier, text: stopping.append(text))
    uvloop.run(Daemon(Config(directory=directory, pool_bytes=1 << 20, http_address="")).serve())
    assert (tries, stopping) == (3, ["Stopping: running jobs may finish."])
    failures = [one.levelname for one in caplog.records if one.exc_info and one.levelno > logging.DEBUG]
    assert failures == ["ERROR"]


@pytest.mark.parametrize("fails", ["close disks", "end copies", "end copies of GPUs", "release GPUs"])
def test_an_end_that_fails_keeps_the_pool(directory: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """It may not have ended what uses it."""

    def fail(*_: object) -> None:
        raise LookupError("a bug")

    daemon, done = life(directory, monkeypatch, LookupError, **{fails.replace(" ", "_"): fail})
    assert {what for *_, what in END} - {*done} == {"unmap the pool"}
    daemon._directory.release()
    daemon._pool.close()


HANGING = [
    ["close disks"],
    ["end copies"],
    ["end copies of GPUs"],
    ["release GPUs"],
    ["end copies", "end copies of GPUs"],
]


@pytest.mark.parametrize("hanging", HANGING, ids=" and ".join)
def test_what_hangs_keeps_the_pool_and_the_lock(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hanging: list[str]
) -> None:
    """Until the process is gone: a successor would take memory in which a copy still writes."""
    daemon, done = life(directory, monkeypatch, **{what.replace(" ", "_"): lambda *_: False for what in hanging})
    assert sum("stays mapped" in text for text in caplog.messages) == 1
    assert daemon.copy_stuck
    assert "unmap the pool" not in done
    assert {what for *_, what in END} - {*done} == {"unmap the pool"}, "all others ended"
    assert not list(directory.glob("*.sock"))
    with pytest.raises(KvoffdError, match="Another kvoffd"):
        DaemonDirectory(directory).acquire()
    daemon._directory.release()
    daemon._pool.close()


def test_process_is_set_up_before_anything_is_made() -> None:
    """Nobody else may open what it makes, and a copy thread gives the interpreter back in 0.1 ms."""
    script = (
        "import os, sys, resource; from kvoffd.server.daemon import _prepare; _prepare(); "
        "print(oct(os.umask(0)), round(sys.getswitchinterval(), 6), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    limit = ["prlimit", "--nofile=1024:5000"]
    said = subprocess.run([*limit, sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert said.stdout.split() == ["0o7", "0.0001", "5000", "5000"]


def test_memory_that_systemd_kept_is_free_before_new_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only when systemd has closed it too: the machine may not have both."""
    done: list[str] = []
    make = PoolMemory.create
    monkeypatch.setattr(PoolMemory, "create", lambda *one: done.append("make") or make(*one))
    notifier: Any = SimpleNamespace(
        fd_store=FdStore.YES,
        remove_fds=lambda name: done.append(f"remove {name}"),
        wait_until_handled=lambda timeout_s: done.append("wait") or timeout_s > 0,
        store_fd=lambda name, _: done.append(f"store {name}"),
        starting=lambda _: None,
    )
    stored = {name: [os.memfd_create(name)] for name in ("kvoffd-pool", "kvoffd-slot-table")}
    progress = pool_opening.StartProgress(1 << 20, notifier)
    pool_opening.open_pool(Config(pool_bytes=1 << 20), notifier, stored, lambda: False, progress).close()
    removed = ["remove kvoffd-pool", "remove kvoffd-slot-table", "wait"]
    assert done == [*removed, "make", "make", "store kvoffd-pool", "store kvoffd-slot-table"]


@pytest.mark.parametrize("fd_store", [FdStore.YES, FdStore.NO])
def test_reserved_huge_pages_are_not_looked_for_if_that_is_off(
    fd_store: FdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backing, "fits_reserved", lambda *_, **__: pytest.fail("it was"))
    notifier: Any = SimpleNamespace(fd_store=fd_store, store_fd=lambda *_: None)
    progress = pool_opening.StartProgress(1 << 20, notifier)
    config = Config(pool_bytes=1 << 20, reserved_pages="off")
    pool_opening.open_pool(config, notifier, {}, lambda: False, progress).close()


def test_a_daemon_that_is_to_stop_touches_no_more_of_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """To touch all of a large one takes minutes, after which systemd would kill the daemon."""
    size = 64 << 20
    progress = pool_opening.StartProgress(size, Notifier({}))
    made: list[Any] = []
    monkeypatch.setattr(memory, "_populate", lambda *part: made.append(part))
    pool = pool_opening.open_pool(Config(pool_bytes=size), Notifier({}), {}, lambda: True, progress)
    assert made == []
    pool.close()


def test_how_far_the_start_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = iter((0.0, 5.0, 45.0, 60.0, 62.0, 64.0)), list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    progress = pool_opening.StartProgress(64 << 30, Notifier({}), told.append)
    assert progress.text == "starting"
    for done_gib in (8, 34, 64, 1, 32):
        progress(done_gib << 30)
    assert told == [
        "starting, 12 % of 64.0 GiB, about 35 s",
        "starting, 53 % of 64.0 GiB, about 40 s",
        "starting, 100 % of 64.0 GiB, about 0 s",
        "starting, 1 % of 64.0 GiB, about 0 s",
        "starting, 50 % of 64.0 GiB, about 2 s",
    ], "touching begins at nothing again"


# --- while it runs ---------------------------------------------------------------------------------


def test_pages_that_cannot_be_mapped_or_measured_are_logged_and_the_pool_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    daemon: Any = Daemon(Config(pool_bytes=2 << 30))
    daemon._service = MagicMock()
    daemon._pool = MagicMock(**{"measure_pages.side_effect": RuntimeError("a bug"), "pool_bytes": 2 << 30})

    async def map_and_stop() -> None:
        daemon._page_mapper = asyncio.get_running_loop().run_in_executor(None, daemon._map_pages)
        await asyncio.wait([daemon._page_mapper])
        await daemon._close_pool()

    asyncio.run(map_and_stop())
    assert [one.levelname for one in caplog.records if one.exc_info] == ["ERROR"]
    daemon._pool.close.assert_called_once_with()


def test_regular_work_that_fails_does_not_end_the_daemon(caplog: pytest.LogCaptureFixture) -> None:
    daemon: Any = Daemon(Config())
    daemon._service, daemon._lifelines = MagicMock(**{"tick.side_effect": RuntimeError("a bug")}), MagicMock()
    daemon._policy_file = MagicMock()
    for _ in range(3):
        daemon._tick()
    assert [one.tick.call_count for one in (daemon._service, daemon._lifelines, daemon._policy_file)] == [3] * 3
    assert len(caplog.records) == 1, "logged once a minute"


@pytest.mark.parametrize("works", [True, False])
def test_the_watchdog_is_fed_after_a_turn_of_the_message_loop_that_worked(works: bool) -> None:
    daemon: Any = Daemon(Config())
    daemon._service = MagicMock(**{"mapper.copy_hangs": False, "mapper.gpus.lost": None, "scrubber.has_work": False})
    daemon._lifelines = daemon._policy_file = daemon._notifier = MagicMock()
    daemon._directory = MagicMock(**{"lost_sockets.return_value": ""})
    daemon._sockets = MagicMock(**{"serve.side_effect": lambda: daemon._stop.set() or works})
    asyncio.run(daemon._main_loop())
    assert daemon._notifier.watchdog.call_count == works
