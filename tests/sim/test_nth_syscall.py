"""Every call of the daemon to the system fails once: it serves on or says why it does not start, and leaves nothing."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakSet

import pytest

import kvoffd.system.mappings
from kvoffd.config import Config, ServerLimits
from kvoffd.errors import KvoffdError
from kvoffd.server.daemon import Daemon
from kvoffd_client import ClientOptions, DaemonUnavailable, ErrorCode, RequestRefused
from kvoffd_client.testing import FakeEngine
from tests.kit.amount import TIMES
from tests.kit.open_files import open_files

BLOCKS = 4
KEYS = [bytes([number]) * 32 for number in range(BLOCKS)]
OPTIONS = ClientOptions(handshake_timeout_s=0.3, request_timeout_s=0.3, backoff_max_s=0.05)
PATIENCE_S = 1.5
THREAD_S = 5.0
"""A thread of an ended daemon that still runs after this long stays."""
MOST = 1 if TIMES == 1 else 3
"""Failures tried of each kind: a life needs few of the calls that set things up, and the others are all alike."""


_stay = WeakSet[threading.Thread]()
"""Threads that were waited for once, such as those that tests of other files left in this process."""


def traces() -> dict[str, object]:
    """What a daemon may leave behind in its process: descriptors, mappings, threads."""
    gc.collect()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("kvoffd")]
    for thread in threads:  # of a busy machine one may end after the daemon's deadline for it
        thread.join(0 if thread in _stay else THREAD_S)
        if thread.is_alive():
            _stay.add(thread)
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": sorted(link.split(":[")[0] for _, link, _ in open_files()),
        "mappings": sum("memfd:kvoffd" in line or ".pool" in line for line in maps),
        "threads": sorted(thread.name for thread in threads if thread.is_alive()),
    }


def live(directory: Path, pool_file: Path | None) -> str:
    """Start a daemon, store, look up and load, stop it. Returns why it did not start; empty when it did.

    Raises whatever ends the daemon but a refusal to start, and AssertionError when a load that was ok brought a wrong
    byte or a job got no result.
    """
    config = Config(
        directory=directory,
        pool_bytes=4 << 20,
        pool_file=str(pool_file) if pool_file else "",
        http_address="",
        shutdown_deadline_s=0.5,
        limits=ServerLimits(touch_threads=1),
    )
    failures: list[BaseException] = []

    async def serve() -> None:
        daemon = Daemon(config)
        loop = asyncio.get_running_loop()

        def use() -> None:
            try:
                _use(directory)
            except BaseException as error:
                failures.append(error)
            finally:
                loop.call_soon_threadsafe(daemon._stop.set)

        client = threading.Thread(target=use, name="client")
        client.start()
        try:
            await daemon.serve()
        finally:
            await loop.run_in_executor(None, client.join)

    reason = ""
    try:
        asyncio.run(serve())
    except KvoffdError as error:
        reason = error.message
    if failures:
        raise failures[0]
    return reason


def _use(directory: Path) -> None:
    """A client's whole day. Not being served is no failure; being served wrong bytes, or left waiting, is."""
    try:
        engine = FakeEngine(
            directory, layers=1, blocks=2 * BLOCKS, page_bytes=4096, options=OPTIONS, connect_timeout_s=PATIENCE_S
        )
    except (DaemonUnavailable, RequestRefused):
        return
    with engine:
        engine.fill(range(BLOCKS), seed=1)
        stored = engine.checksums(range(BLOCKS))
        assert engine.store(KEYS, range(BLOCKS), 2 * PATIENCE_S).error is not ErrorCode.DEADLINE, "no result"
        found = engine.lookup(KEYS, PATIENCE_S)
        into = range(BLOCKS, BLOCKS + found)
        loaded = engine.load(KEYS[:found], into, 2 * PATIENCE_S)
        assert loaded.error is not ErrorCode.DEADLINE, "no result"
        assert not loaded.ok or engine.checksums(into) == stored[:found], "wrong bytes"


def _error(code: int) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


CALLS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "open": (os, "open", _error(errno.EMFILE)),
    "memfd_create": (os, "memfd_create", _error(errno.EMFILE)),
    "ftruncate": (os, "ftruncate", _error(errno.ENOSPC)),
    "pwrite": (os, "pwrite", _error(errno.ENOSPC)),
    "fallocate": (os, "posix_fallocate", _error(errno.ENOSPC)),
    "link": (os, "link", _error(errno.EACCES)),
    "unlink": (os, "unlink", _error(errno.EACCES)),
    "mmap": (kvoffd.system.mappings, "_mmap", lambda *args: kvoffd.system.mappings._MAP_FAILED),
    "accept": (socket.socket, "accept", _error(errno.EMFILE)),
    "send": (socket.socket, "send", _error(errno.EPIPE)),
    "receive from a lifeline": (socket.socket, "recvmsg", _error(errno.ECONNRESET)),
    "receive a request": (socket.socket, "recv_into", _error(errno.ECONNRESET)),
    "bind a socket": (socket.socket, "bind", _error(errno.EADDRINUSE)),
}


OF_FILES = {"open", "ftruncate", "fallocate", "link", "unlink", "mmap"}
"""Calls that a pool in a file makes otherwise than one in a memfd."""
CASES = [(call, False) for call in CALLS] + [(call, True) for call in CALLS if call in OF_FILES]


@cache
def warm_up(with_file: bool) -> None:
    """Make what is made once and kept, such as the event loop's own things."""
    with TemporaryDirectory(dir="/dev/shm") as directory:
        live(Path(directory), Path(directory) / "pool" if with_file else None)


@pytest.mark.parametrize(
    ("call", "with_file"), CASES, ids=lambda value: {False: "memfd", True: "file"}.get(value, value)
)
def test_nth_failing_system_call_leaves_nothing(
    call: str, with_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, fail = CALLS[call]
    real = getattr(owner, name)
    count = wanted = 0

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        # The clients live in this process too, in threads of their own.
        if threading.current_thread().name.startswith(("client", "kvoffd-worker", "kvoffd-scheduler")):
            return real(*args, **kwargs)
        count += 1
        return fail(*args, **kwargs) if count == wanted else real(*args, **kwargs)

    warm_up(with_file)
    with TemporaryDirectory(dir="/dev/shm") as directory:
        pool_file = Path(directory) / "pool" if with_file else None
        for wanted in range(1, MOST + 1):
            if pool_file is not None:
                pool_file.unlink(missing_ok=True)
            count = 0
            before = traces()
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, sometimes)
                reason = live(tmp_path, pool_file)
            assert traces() == before, f"{call}, {wanted}. time"
            if count < wanted:
                break
            assert not reason or reason.endswith("."), "a refusal to start is a sentence"
