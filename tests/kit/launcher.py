"""``kvoffd`` with something of its inside made wrong or slow: ``launcher.py OPTIONS serve ...``. See ``DaemonProcess``.

``OPTIONS`` is a JSON object. This is the one program of the door suite that knows the daemon's inside.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import json
import logging
import os
import signal
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

STEP_BYTES = 8 << 20
"""Of a copy, or one piece, for each time that the file of faults is read."""
LOOK_S = 0.01
"""Between two looks of a copy that waits."""
CLOSING_US = 700_000
"""Time between a dying daemon's last socket and its copies, unless DYING_CLOSING_US is set."""
COPYING_US = 100_000
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 1 << 17, 1 << 12, 1 << 14, 1 << 18


def read_fault(file: Path) -> str:
    """What the file says; empty while it is not there. It may go at any time."""
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""


def copies_with_faults(file: Path) -> None:
    """Have every copy do as ``file`` says while it is there, see ``DaemonProcess.fault``."""
    from kvoffd.transfer.engine import HostEngine, Transfer, host_copy
    from kvoffd.transfer.plan import Plan

    begun = Counter[str]()
    """Copies that the file's ``first`` counts, by direction."""

    def copy(transfer: Transfer) -> None:
        plan, begin, number = transfer.plan(), 0, 0
        while begin < len(plan.size) and not transfer.stop.value:
            words = read_fault(file).split()
            if not words or words[0] != threading.current_thread().name.split("-")[1]:  # kvoffd-store-0
                words = ["", ""]
            if words[1] == "fails":
                raise OSError("a deliberate failure")
            if words[1] == "first" and not number:
                begun[words[0]] += 1
                number = begun[words[0]]
            if words[1] == "waits" or (words[1] == "first" and number > int(words[2])):
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
    from kvoffd.cache.stores import BlockStores

    commit = BlockStores.commit

    def commit_or_fail(*given: Any) -> int:
        if read_fault(file) == "commit fails":
            raise AssertionError("a deliberate bug")
        return commit(*given)

    BlockStores.commit = commit_or_fail  # type: ignore[method-assign]


def disks_with_faults(file: Path) -> None:
    """Have the reads of a disk not end while ``file`` says ``disk hangs DIRECTORY``."""
    from kvoffd.tiers.disk_io import EndedRead, Reads

    take_ended = Reads._take_ended

    def ended(reads: Reads) -> Sequence[EndedRead]:
        words = read_fault(file).split(maxsplit=2)
        hangs = words[:2] == ["disk", "hangs"] and str(reads._file.path).startswith(words[2])
        return () if hangs else take_ended(reads)

    Reads._take_ended = ended  # type: ignore[method-assign]


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
        libc.usleep(closing_us)
        driver.stub_release()  # what hung in the driver copies now
        libc.usleep(COPYING_US)
        os.kill(os.getpid(), signal.SIGKILL)

    closing_us = int(os.environ.get("DYING_CLOSING_US", CLOSING_US))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    threading.Thread(target=wait, daemon=True).start()


def release_slowly(seconds: float) -> None:
    """Have the kernel take so long to close and to unmap engines' memory, as it may for much of it."""
    from kvoffd.system.mappings import HostMapping

    close, unmap = os.close, HostMapping.close

    def slow_close(fd: int) -> None:
        if "memfd:attached" in os.readlink(f"/proc/self/fd/{fd}"):
            time.sleep(seconds)
        close(fd)

    def slow_unmap(mapping: HostMapping) -> None:
        if not mapping.closed:
            time.sleep(seconds)
        unmap(mapping)

    os.close, HostMapping.close = slow_close, slow_unmap  # type: ignore[method-assign]


def replace_hosts(file: Path) -> None:
    """Have this file in place of ``/etc/hosts``, in a mount namespace of this process and its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        partial(libc.unshare, CLONE_NEWNS),
        partial(libc.mount, None, b"/", None, MS_REC | MS_PRIVATE, None),
        partial(libc.mount, bytes(file), b"/etc/hosts", None, MS_BIND, None),
    ):
        if call():
            raise OSError(error := ctypes.get_errno(), os.strerror(error), str(file))


def write_lines_at_once() -> None:
    """Have each line of the log be written before what follows it, so that a test can read it then."""
    from kvoffd.observe.logging import QueuedLines

    emit = QueuedLines.emit

    def emit_and_flush(lines: QueuedLines, record: logging.LogRecord) -> None:
        emit(lines, record)
        lines.flush()

    QueuedLines.emit = emit_and_flush  # type: ignore[method-assign]


def main(options: dict[str, Any]) -> None:
    write_lines_at_once()
    if file := options.get("faults"):
        copies_with_faults(Path(file))
        commits_with_faults(Path(file))
        disks_with_faults(Path(file))
    if library := options.get("dies_slowly"):
        die_slowly(library)
    if seconds := options.get("releases_slowly"):
        release_slowly(float(seconds))
    if file := options.get("hosts"):
        replace_hosts(Path(file))
    if options.get("forks_helpers"):
        from .forked_helper import fork_helpers

        fork_helpers()
    from kvoffd.cli import main as kvoffd
    from kvoffd.config import ServerLimits

    sys.argv[0] = "kvoffd"
    sys.exit(kvoffd(limits=ServerLimits(**options.get("limits", {}))))


def run_forked(arguments: list[str], options: dict[str, Any], environ: dict[str, str], log: str) -> int:
    """Be a daemon in a process that was forked for it, see ``DaemonProcess``."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for output in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), output)
    # Descriptors of a service manager go where sd_listen_fds(3) has them.
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in forkserver.get_inherited_fds()]
    for place, fd in enumerate(kept, 3):
        os.dup2(fd, place)
    os.closerange(3 + len(kept), 1 << 16)
    os.environ.clear()
    os.environ.update(environ)
    if kept:
        os.environ["LISTEN_PID"] = str(os.getpid())
    sys.argv[1:] = arguments
    try:
        main(options)
    except SystemExit as end:
        sys.stdout.flush()
        # As Python's own end: what a thread or a library's exit handler keeps from ending must show.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        ctypes.CDLL(None).exit(int(end.code or 0))
    return 0


if __name__ == "__main__":
    main(json.loads(sys.argv.pop(1)))
