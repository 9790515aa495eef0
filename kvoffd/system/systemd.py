"""Sends the daemon's state to systemd as sd_notify(3) does: one datagram per message."""

from __future__ import annotations

import logging
import os
import re
import select
import socket
import time
from array import array
from collections.abc import Mapping, MutableMapping, Sequence
from enum import Enum
from itertools import chain, repeat

logger = logging.getLogger(__name__)

MAX_STATUS_CHARACTERS = 1024
START_EXTENSION_S = 30
MANAGER_SOCKETS = "/systemd/notify"
"""End of NOTIFY_SOCKET if systemd itself listens, for the system or a user. A container engine, which keeps no
descriptors, has another path."""
FIRST_STORED_FD = 3
"""SD_LISTEN_FDS_START (sd_listen_fds(3))."""


class FdStore(Enum):
    """Whether systemd keeps descriptors for the next daemon."""

    NO = "no"
    MAYBE = "maybe"
    """It does if the unit has FileDescriptorStoreMax=; only release 254 and later say so."""
    YES = "yes"


class Notifier:
    """Sends to the socket ``NOTIFY_SOCKET``; does nothing if that is not set.

    No method raises, and only ``wait_until_handled`` blocks. The first failure is logged.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._watchdog_at, self._watchdog_timeout_s = 0.0, _watchdog_timeout_s(environ)
        self._socket: socket.socket | None = None
        self._failed = False
        self.fd_store = FdStore.NO
        address = environ.get("NOTIFY_SOCKET", "")
        if not address:
            return
        if address[0] not in "/@":
            logger.warning(
                "NOTIFY_SOCKET is %r, neither a path nor an abstract socket; systemd is not notified.", address
            )
            return
        if "FDSTORE" in environ:
            self.fd_store = FdStore.YES if environ["FDSTORE"] != "0" else FdStore.NO
        elif address.endswith(MANAGER_SOCKETS):
            self.fd_store = FdStore.MAYBE
        self._address = f"\0{address[1:]}" if address[0] == "@" else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    def starting(self, text: str) -> None:
        """Report the progress of the start, and extend its timeout by ``START_EXTENSION_S`` from now."""
        self._send(f"EXTEND_TIMEOUT_USEC={START_EXTENSION_S * 1_000_000}\nSTATUS={_one_line(text)}")

    def ready(self, text: str) -> None:
        self._send(f"READY=1\nSTATUS={_one_line(text)}")

    def watchdog(self) -> None:
        """Report that the loop runs, at half of systemd's timeout, as systemd recommends."""
        now = time.monotonic()
        if self._watchdog_timeout_s and now >= self._watchdog_at:
            self._watchdog_at = now + self._watchdog_timeout_s / 2
            self._send("WATCHDOG=1")

    def stopping(self, text: str) -> None:
        self._send(f"STOPPING=1\nSTATUS={_one_line(text)}")

    def store_fd(self, name: str, fd: int) -> None:
        """Ask systemd to keep ``fd`` for the next daemon under ``name``, ASCII without a colon."""
        # Without FDPOLL=0 systemd would poll the descriptor and drop it at EOF.
        self._send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", [fd])

    def remove_fds(self, name: str) -> None:
        """Ask systemd to close all descriptors stored under ``name``."""
        self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def wait_until_handled(self, timeout_s: float) -> bool:
        """Wait until systemd has handled all messages; return False after ``timeout_s``. See sd_notify_barrier(3)."""
        if self._socket is None:
            return True
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            self._send("BARRIER=1", [write_end])
            os.close(write_end)
            poller = select.poll()
            poller.register(read_end, 0)
            return bool(poller.poll(timeout_s * 1000))
        finally:
            os.close(read_end)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _send(self, text: str, fds: Sequence[int] = ()) -> None:
        if self._socket is None:
            return
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([text.encode(errors="replace")], ancillary, 0, self._address)
        except OSError as error:
            if not self._failed:
                logger.warning("systemd cannot be notified of %r over %r: %s.", text, self._address, error)
            self._failed = True


def take_stored_fds(environ: MutableMapping[str, str]) -> dict[str, list[int]]:
    """Return the descriptors that systemd stored for this process, by name, and remove their variables.

    As with sd_listen_fds(3), children inherit neither the descriptors nor the variables.
    """
    given = [environ.pop(variable, "") for variable in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")]
    listen_pid, count, names = given
    if listen_pid != str(os.getpid()) or not re.fullmatch("[0-9]{1,6}", count):
        return {}
    fds = range(FIRST_STORED_FD, FIRST_STORED_FD + int(count))
    stored: dict[str, list[int]] = {}
    for fd, name in zip(fds, chain(names.split(":") if names else (), repeat("unknown")), strict=False):
        try:
            os.set_inheritable(fd, False)
        except OSError as error:
            logger.warning("systemd announced descriptor %d (%s), which is invalid: %s.", fd, name, error.strerror)
            continue
        stored.setdefault(name, []).append(fd)
    return stored


def _watchdog_timeout_s(environ: Mapping[str, str]) -> float | None:
    """Return the watchdog timeout if the variables are set for this process (sd_watchdog_enabled(3))."""
    microseconds = environ.get("WATCHDOG_USEC", "")
    if not re.fullmatch("[0-9]{1,18}", microseconds) or int(microseconds) == 0:
        return None
    pid = str(os.getpid())
    return int(microseconds) / 1_000_000 if environ.get("WATCHDOG_PID", pid) == pid else None


def _one_line(text: str) -> str:
    """Return the text without line breaks, which would begin another field of the message."""
    return " ".join(text.split())[:MAX_STATUS_CHARACTERS]
