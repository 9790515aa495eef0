"""The connection to one Redis or Valkey server: lines and bytes, directly from and into the pool."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import ssl
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvoffd.system.files import address_of, drop_bytes
from kvoffd.system.native import NUMBER, VOID_P, declare, native
from kvoffd.tiers.header import HEADER_BYTES
from kvoffd.tiers.store import StoreError, StoreFault, name_of

declare(keep_gil=False, receive=(ctypes.c_int64, *(NUMBER,) * 5, VOID_P, VOID_P, VOID_P, NUMBER))

CONNECT_S = 1.0
"""Limit for TCP, TLS and the password together, once the name is resolved."""
STALL_S = 1.0
"""Limit for a single send or receive in which no byte moves."""
LINE_BYTES = 512
"""Size of a receive call for lines."""
HEAD_BYTES = HEADER_BYTES + 64
"""Size of a receive call for the part before a value's shards: bytes of the pool beyond it are copied once more."""
REPLIES_BYTES = 65536
"""Size of a receive call for many lines."""
MAX_PARTS = 256
"""Parts of one ``sendmsg``; the kernel accepts 1024."""
KEEPALIVE_S = 60  # firewalls and NAT forget a connection that is idle for some minutes
WANTS_NO_TLS = " If it has no TLS, name it redis://; a cluster with TLS needs tls-cluster yes."
WANTS_TLS = " If it requires TLS, name it rediss://."


@dataclass(slots=True)
class Demoted:
    """Address of a server that became a replica and that the store's name has left since, for all connections."""

    address: object = None


class RedisConnection:
    """A connection of one thread, which may be opened again. All errors are StoreErrors, and close it.

    A server that became a replica still answers questions on kept connections, perhaps without what its successor has:
    once the name leads elsewhere, all connections go there.

    Args:
        demoted: the same for the connections of all threads.
    """

    def __init__(self, address: tuple[str, int], *, tls: bool, demoted: Demoted) -> None:
        self.name = name_of(address)
        self._address, self._tls, self._demoted = address, tls, demoted
        self._socket: socket.socket | None = None
        self._input = bytearray()
        """Received bytes that were not taken yet."""
        self._beyond = bytearray(HEAD_BYTES)
        """Buffer for what one call receives behind a value's shards."""
        self._answered = False
        """Whether anything was received over this connection: if not, TLS may be missing, or wanted."""
        self._server: object = None
        """Address of the server that it leads to, or last led to."""
        self._refused_by: object = None
        """Address of the server if it refused a write, as a replica, over the connection before."""

    def is_usable(self) -> bool:
        """Return whether it is open, with nothing more to come, and its server was not demoted."""
        if self._socket is None or self._input or self._server == self._demoted.address:
            return False
        self._socket.settimeout(0)
        try:
            self._socket.recv(1)  # it has been closed, or something unrequested came
            return False
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False

    def open(self, connect_s: float) -> float:
        """Connect to the server that has the name now. Return the deadline for the login.

        ``connect_s``: time for this and the login, once the name is resolved.
        """
        self._answered = False
        try:
            places = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)
            deadline = time.monotonic() + connect_s
            plain = _connected([place[:2] for *_, place in places], deadline)
            try:
                plain.settimeout(max(0.001, deadline - time.monotonic()))
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
                host, self._server = self._address[0], plain.getpeername()
                self._socket = _tls_context().wrap_socket(plain, server_hostname=host) if self._tls else plain
            except BaseException:
                plain.close()
                raise
        except ssl.SSLCertVerificationError as error:
            why = f"The certificate of {self.name} is not accepted: {error.verify_message}"
            raise StoreError(StoreFault.TLS, f"{why}. Name its CA in SSL_CERT_FILE.") from error
        except (OSError, ValueError) as error:  # an invalid host name is a ValueError
            hint = WANTS_NO_TLS if "handshake" in str(error) or "SSL" in str(error) else ""
            why = f"{self.name} cannot be reached: {getattr(error, 'strerror', None) or error}.{hint}"
            raise StoreError(StoreFault.UNREACHABLE, why) from error
        if self._refused_by not in (None, self._server):  # the name leads to another server than the one that refused
            self._demoted.address = self._refused_by
        if self._demoted.address == self._server:  # it was made primary again, or the name has several addresses
            self._demoted.address = None
        self._refused_by = None
        return deadline

    def mark_replica(self) -> None:
        """Record that the server refused a write, as a replica."""
        self._refused_by = self._server

    def close(self) -> None:
        self._input.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def interrupt(self) -> None:
        """Have a call that waits in another thread raise StoreError."""
        if (connected := self._socket) is not None:
            with suppress(OSError):  # it may be closed already
                socket.socket.shutdown(connected, socket.SHUT_RDWR)

    # --- sending ---------------------------------------------------------------------------------

    def send(self, parts: Sequence[bytes | memoryview], deadline: float, *, continues: bool = False) -> None:
        """Send the beginning of an exchange, or more of it if it ``continues``: then some of its answers may have
        come."""
        if self._input and not continues:  # it would be taken for the answer
            raise self.protocol_error("unexpected extra reply")
        rest = [memoryview(part) for part in parts if part]
        while rest:
            with self._ready(deadline) as connected:  # TLS has no sendmsg
                sent = connected.send(rest[0]) if self._tls else connected.sendmsg(rest[:MAX_PARTS])
            rest = drop_bytes(rest, sent)

    # --- receiving -------------------------------------------------------------------------------

    def line(self, deadline: float, most: int = LINE_BYTES) -> bytes:
        """Receive a line, without its end. ``most``: size of a receive call."""
        while (end := self._input.find(b"\r\n")) < 0:
            if len(self._input) > 4 * LINE_BYTES:
                raise self.protocol_error("a line does not end")
            self._input += self._receive(most, deadline)
        line = bytes(self._input[:end])
        del self._input[: end + 2]
        return line

    def lines(self, count: int, deadline: float) -> list[bytes]:
        """Receive this many lines, without their ends."""
        data, there = self._input, self._input.count(b"\n")
        while there < count:
            if len(data) > REPLIES_BYTES + count * LINE_BYTES:
                raise self.protocol_error("lines do not end")
            part = self._receive(REPLIES_BYTES, deadline)
            data += part
            there += part.count(b"\n")
        found = data.split(b"\r\n", count)
        if len(found) <= count:
            raise self.protocol_error("malformed line ending")
        self._input = found.pop()
        return list(map(bytes, found))

    def take(self, count: int, deadline: float) -> bytes:
        """Receive this many bytes."""
        while len(self._input) < count:
            self._input += self._receive(max(HEAD_BYTES, count - len(self._input)), deadline)
        data = bytes(self._input[:count])
        del self._input[:count]
        return data

    def fill(self, views: Sequence[memoryview], deadline: float) -> Sequence[int]:
        """Fill these views with what was received and what comes. Without TLS one call of C does it, without the GIL,
        takes any further bytes too, and returns the views' checksums; else, or if nothing had to come, none are
        returned."""
        done = 0
        for view in views:
            part = self._input[done : done + len(view)]
            view[: len(part)] = part
            done += len(part)
        del self._input[:done]
        rest = drop_bytes(list(views), done)
        while rest and self._tls:
            with self._ready(deadline) as connected:
                count = connected.recv_into(rest[0])
            if not count:
                raise self._lost("it closed the connection")
            rest = drop_bytes(rest, count)
        if not rest:
            return ()
        with self._ready(deadline) as connected:
            fd, left_s = connected.fileno(), deadline - time.monotonic()
        into = *rest, memoryview(self._beyond)
        parts = array("Q", [word for view in into for word in (address_of(view), len(view))])
        addresses, lengths = array("Q", map(address_of, views)), array("Q", map(len, views))
        sums = array("Q", bytes(8 * len(views)))
        columns = (column.buffer_info()[0] for column in (addresses, lengths, sums))
        waits_ms = int(1000 * min(STALL_S, left_s)) + 1, int(1000 * left_s) + 1
        count = native().receive(fd, parts.buffer_info()[0], len(into), *waits_ms, *columns, len(views))
        if count < 0:
            closed = count == -errno.ENODATA
            raise self._lost("it closed the connection" if closed else OSError(-count, os.strerror(-count)))
        self._input += self._beyond[:count]
        return sums

    def _receive(self, count: int, deadline: float) -> bytes:
        """Receive up to ``count`` bytes, at least one."""
        with self._ready(deadline) as connected:
            data = connected.recv(count)
        if not data:
            raise self._lost("it closed the connection")
        self._answered = True
        return data

    @contextmanager
    def _ready(self, deadline: float) -> Iterator[socket.socket]:
        """Give the socket, with its timeout set to the time left. Its errors become StoreErrors."""
        if self._socket is None:
            raise StoreError(StoreFault.DISCONNECTED, f"{self.name} is not connected.")
        left = deadline - time.monotonic()
        if left <= 0:
            raise self._lost(TimeoutError("it does not answer in time"))
        self._socket.settimeout(min(STALL_S, left))
        try:
            yield self._socket
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, why: object) -> StoreError:
        """Close the connection; return the error to raise."""
        self.close()
        if isinstance(why, TimeoutError):
            return StoreError(StoreFault.TIMEOUT, f"The connection to {self.name} is closed: {why}.")
        hint = " If it requires client certificates, set tls-auth-clients no." if self._tls else WANTS_TLS
        hint = "" if self._answered else hint
        return StoreError(StoreFault.DISCONNECTED, f"The connection to {self.name} is lost: {why}.{hint}")

    def protocol_error(self, why: str) -> StoreError:
        """Close the connection; return the error to raise."""
        self.close()
        return StoreError(StoreFault.PROTOCOL, f"{self.name} violates the Redis protocol: {why}.")


def _connected(places: Sequence[Any], deadline: float) -> socket.socket:
    """Connect to the first of a name's addresses that answers; each gets an equal part of the time."""
    try:
        return socket.create_connection(places[0], max(0.001, deadline - time.monotonic()) / len(places))
    except OSError:
        if len(places) == 1:
            raise
    return _connected(places[1:], deadline)


def _tls_context() -> ssl.SSLContext:
    """Return the context of all connections, renewed when the file of CA certificates has changed."""
    file = ssl.get_default_verify_paths().cafile
    return _context_of(file, os.stat(file).st_mtime_ns if file is not None else 0)


@lru_cache(1)
def _context_of(file: str | None, changed_ns: int) -> ssl.SSLContext:
    """Make a context: with a distribution's CA certificates, it takes 60 ms and 0.8 MiB (measured)."""
    return ssl.create_default_context()
