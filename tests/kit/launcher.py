"""``kvoffd`` with something of its inside made wrong or slow: ``launcher.py OPTIONS serve ...``. See ``DaemonProcess``.

``OPTIONS`` is a JSON object. ``launcher.py forks FD`` imports kvoffd once and forks a daemon for each request, see
``ForkedDaemon``. This is the one program of the door suite that knows the daemon's inside.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import stat
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

STEP_BYTES = 8 << 20
"""Of a copy, or one piece, for each time that the file of faults is read."""
LOOK_S = 0.01
"""Between two looks of a copy that waits."""
CLOSING_US = int(os.environ.get("DYING_CLOSING_US", 700_000))
COPYING_US = 100_000


def copies_with_faults(file: Path) -> None:
    """Have every copy do as ``file`` says while it is there, see ``DaemonProcess.fault``."""
    from kvoffd.transfer.engine import HostEngine, Transfer, host_copy
    from kvoffd.transfer.plan import Plan

    def copy(transfer: Transfer) -> None:
        plan, begin = transfer.plan(), 0
        while begin < len(plan.size) and not transfer.stop.value:
            words = file.read_text().split() if file.exists() else []
            if not words or words[0] != threading.current_thread().name.split("-")[1]:  # kvoffd-store-0
                words = ["", ""]
            if words[1] == "fails":
                raise OSError("a deliberate failure")
            if words[1] == "waits":
                time.sleep(LOOK_S)
                continue
            if words[1] == "slow":
                time.sleep(float(words[2]))
            if begin == 0 and words[1] != "slow":
                host_copy(transfer)  # all of it
                begin = len(plan.size)
            else:
                end = begin + max(1, int(plan.size[begin:].cumsum().searchsorted(STEP_BYTES)))
                some = slice(begin, end)
                columns = plan.destination[some], plan.source[some], plan.size[some]
                part = partial(Plan, *columns, int(columns[2].sum()))
                host_copy(Transfer(transfer.direction, part, 0.0, transfer.on_done, stop=transfer.stop))
                begin = end
            if words[1] == "lies":
                for address, size in zip(plan.destination.tolist(), plan.size.tolist(), strict=True):
                    ctypes.memset(address, 0x3C, size)

    HostEngine.__init__.__defaults__ = (time.monotonic, 1, copy)  # type: ignore[attr-defined]


def commits_with_faults(file: Path) -> None:
    """Have the end of every store raise while ``file`` says ``commit fails``."""
    from kvoffd.cache.cache import Cache

    commit = Cache.commit_store

    def commit_store(*given: Any) -> int:
        if file.exists() and file.read_text() == "commit fails":
            raise AssertionError("a deliberate bug")
        return commit(*given)

    Cache.commit_store = commit_store  # type: ignore[method-assign]


def die_slowly(library: str) -> None:
    """At SIGUSR1 do what the kernel does with a killed process, and take time between the steps.

    Its sockets close from the highest down. The GPU, whose descriptors are lower, copies on; then it is gone too. No
    other Python thread runs until then, since calls of PyDLL keep the GIL.
    """

    def wait() -> None:
        signal.sigwait({signal.SIGUSR1})
        libc, driver = ctypes.PyDLL(None), ctypes.PyDLL(library)
        for fd in sorted(map(int, os.listdir("/proc/self/fd")), reverse=True):
            try:
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.close(fd)
            except OSError:
                pass  # that of the listing
        libc.usleep(CLOSING_US)
        driver.stub_release()  # what hung in the driver copies now
        libc.usleep(COPYING_US)
        os.kill(os.getpid(), signal.SIGKILL)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    threading.Thread(target=wait, daemon=True).start()


def release_slowly(seconds: float) -> None:
    """Have the kernel take so long to close and to unmap engines' memory, as it may for much of it."""
    from kvoffd.system import mappings

    close, munmap = os.close, mappings._munmap

    def slow_close(fd: int) -> None:
        if "memfd:attached" in os.readlink(f"/proc/self/fd/{fd}"):
            time.sleep(seconds)
        close(fd)

    def slow_munmap(address: int, nbytes: int) -> int:
        time.sleep(seconds)
        return munmap(address, nbytes)

    os.close, mappings._munmap = slow_close, slow_munmap


def main(options: dict[str, Any]) -> None:
    if file := options.get("faults"):
        copies_with_faults(Path(file))
        commits_with_faults(Path(file))
    if library := options.get("dies_slowly"):
        die_slowly(library)
    if seconds := options.get("releases_slowly"):
        release_slowly(float(seconds))
    from kvoffd.cli import main as kvoffd
    from kvoffd.config import Limits

    sys.argv[0] = "kvoffd"
    sys.exit(kvoffd(limits=Limits(**options.get("limits", {}))))


def forks(requests: socket.socket) -> None:
    """Fork a daemon for each request until the other end is closed. In the new process, run it.

    With a request come the descriptors of its log and of a pipe that gets its exit status.
    """
    os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")  # as kvoffd.cli does before it imports NumPy
    import kvoffd.server.daemon  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    pipes: dict[int, int] = {}
    """By the process id of a daemon that runs."""
    while True:
        ready = select.select([requests, woken], [], [])[0]
        if woken in ready:
            woken.recv(4096)
        while pipes and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pipe = pipes.pop(ended[0])
            try:
                os.write(pipe, b"%d" % os.waitstatus_to_exitcode(ended[1]))
            except BrokenPipeError:
                pass  # nobody waits for it
            os.close(pipe)
        if requests not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 2)
        if not message:
            return
        log, pipe = descriptors
        pid = os.fork()
        if pid == 0:
            break
        os.close(log)
        pipes[pid] = pipe
        requests.send(b"%d" % pid)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for output in (1, 2):
        os.dup2(log, output)
    os.closerange(3, 1 << 16)
    for one in (requests, woken, wake):
        one.detach()
    request = json.loads(message)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv[1:] = request["arguments"]
    main(request["options"])


if __name__ == "__main__":
    if sys.argv[1] == "forks":
        forks(socket.socket(fileno=int(sys.argv[2])))
    else:
        main(json.loads(sys.argv.pop(1)))
