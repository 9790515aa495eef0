"""Every call of the daemon to the system fails once: it serves on or says why it does not start, and leaves nothing."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import kvoffd.system.mappings
from tests.sim.real_daemon import Traces, live

MOST = 3
"""Failures tried of each kind: a life needs few of the calls that set things up, and the others are all alike."""


def _os_error(code: int) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


CALLS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "open": (os, "open", _os_error(errno.EMFILE)),
    "memfd_create": (os, "memfd_create", _os_error(errno.EMFILE)),
    "ftruncate": (os, "ftruncate", _os_error(errno.ENOSPC)),
    "pwrite": (os, "pwrite", _os_error(errno.ENOSPC)),
    "fallocate": (os, "posix_fallocate", _os_error(errno.ENOSPC)),
    "link": (os, "link", _os_error(errno.EACCES)),
    "unlink": (os, "unlink", _os_error(errno.EACCES)),
    "mmap": (kvoffd.system.mappings, "_mmap", lambda *args: kvoffd.system.mappings._MAP_FAILED),
    "accept": (socket.socket, "accept", _os_error(errno.EMFILE)),
    "send": (socket.socket, "send", _os_error(errno.EPIPE)),
    "receive from a lifeline": (socket.socket, "recvmsg", _os_error(errno.ECONNRESET)),
    "receive a request": (socket.socket, "recv_into", _os_error(errno.ECONNRESET)),
    "bind a socket": (socket.socket, "bind", _os_error(errno.EADDRINUSE)),
}


OF_FILES = {"open", "ftruncate", "fallocate", "link", "unlink", "mmap"}
"""Calls that a pool in a file makes otherwise than one in a memfd."""
CASES = [(call, False) for call in CALLS] + [(call, True) for call in CALLS if call in OF_FILES]


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

    with TemporaryDirectory(dir="/dev/shm") as directory:
        pool_file = Path(directory) / "pool" if with_file else None
        live(tmp_path, pool_file)  # what is made once and kept, such as the event loop's own things
        for wanted in range(1, MOST + 1):
            if pool_file is not None:
                pool_file.unlink(missing_ok=True)
            count = 0
            before = Traces()
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, sometimes)
                reason = live(tmp_path, pool_file)
            assert Traces() == before, f"{call}, {wanted}. time"
            if count < wanted:
                break
            assert not reason or reason.endswith("."), "a refusal to start is a sentence"
