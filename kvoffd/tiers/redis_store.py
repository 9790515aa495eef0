"""One Redis or Valkey server as a store: RESP2 over a socket, directly from and into the pool.

The clients on PyPI copy every value twice and reach a quarter of the network's speed; only four kinds of replies of the
protocol are needed (https://redis.io/docs/latest/develop/reference/protocol-spec/).
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import socket
import ssl
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from kvoffd.system.files import address_of, drop_bytes
from kvoffd.system.native import NUMBER, VOID_P, declare, native
from kvoffd.tiers.header import HEADER_BYTES, Block, BlockGroup, decode_header, encode_header
from kvoffd.tiers.names import block_name, block_names, decode_generation, generation_name
from kvoffd.tiers.store import (
    Credentials,
    GetRequest,
    PutRequest,
    Received,
    Servers,
    Store,
    StoreError,
    StoreUsage,
    name_of,
)
from kvoffd_proto.units import printable

declare(keep_gil=False, receive=(ctypes.c_int64, *(NUMBER,) * 5, VOID_P, VOID_P, VOID_P, NUMBER))

CONNECT_S = 1.0
"""Limit for TCP, TLS and the password together, once the name is resolved."""
STALL_S = 1.0
"""Limit for a single send or receive in which no byte moves."""
LINE_BYTES = 512
"""Size of a receive call for lines."""
HEAD_BYTES = HEADER_BYTES + 64
"""Size of a receive call for the part before a value's shards: bytes of the pool beyond it are copied once more."""
MAX_COMING_BYTES = 2 << 20
"""Limit of requested values that have not come yet: more than the socket buffers hold costs a third of the speed
(measured). A larger value is requested alone."""
REPLIES_BYTES = 65536
MAX_PARTS = 256
"""Parts of one ``sendmsg``; the kernel accepts 1024."""
MAX_INFO_BYTES = 1 << 20
MAX_ELEMENTS = 16_384, 1024, 1024, 1024, 0
"""Limits of a list and of lists nested in it: a cluster's slot ranges, their fields, those of a server, its names."""
MAX_NAME_BYTES, MAX_NUMBER = 1024, 10**18
MAX_QUOTED_CHARACTERS = 200
NEEDED_COMMANDS = (
    "~kvoffd/* +ping +get +exists +touch +expire +set +incrby +unlink, of a cluster +cluster|slots, "
    "and where the URL names a database +select"
)
_FIGURE = re.compile(r"^(maxmemory|used_memory|evicted_keys):([0-9]{1,18})\r?$", re.MULTILINE)
ELSEWHERE = (b"-MOVED ", b"-ASK ", b"-CLUSTERDOWN ")
"""Error replies of a cluster's server for a key whose slot it does not own, or not serve."""
BUSY = (b"-BUSY ", b"-LOADING ", b"-ERR max number of clients ")
"""Error replies of a server that serves again later: while a script runs, while it loads its data, and to a connection
beyond its ``maxclients``, which it closes."""
KEEPALIVE_S = 60  # firewalls and NAT forget a connection that is idle for some minutes
WANTS_NO_TLS = " If it has no TLS, name it redis://; a cluster with TLS needs tls-cluster yes."
WANTS_TLS = " If it requires TLS, name it rediss://."


@dataclass(slots=True)
class Demoted:
    """Address of a server that became a replica and that the store's name has left since, for all connections."""

    address: object = None


class Redis(Store):
    """See ``Store``.

    A server that became a replica still answers questions on kept connections, perhaps without what its successor has:
    once the name leads elsewhere, all connections go there.
    """

    poll_s = 5.0
    most_window_keys = 8192
    keys_at_once = 1024
    blocks_at_once, bytes_at_once = 32, 4 << 20
    writers = 2

    def __init__(
        self,
        host: str,
        port: int,
        database: int,
        credentials: Credentials,
        *,
        tls: bool,
        ttl_s: int = 0,
        clustered: bool = False,
        demoted: Demoted | None = None,
    ) -> None:
        self._address = (host, port)
        self._name = name_of((host, port))
        self.servers = Servers(self._name)
        self.connect_s = CONNECT_S
        self._database = database
        self._credentials = credentials
        self._tls = tls
        self._ttl = b"%d" % ttl_s if ttl_s else b""
        """Seconds after which the server deletes keys that were not written or touched; empty for never."""
        self._socket: socket.socket | None = None
        self._input = bytearray()
        self._beyond = bytearray(HEAD_BYTES)
        self._unasked: deque[GetRequest] = deque()
        self._coming_bytes = 0
        self._answered = False
        """Whether anything was received over this connection."""
        self._demoted = demoted or Demoted()
        self._peer: object = None
        self._refused_by: object = None
        """Address of the server that refused the last write, as a replica."""
        self._clustered = clustered
        """Whether the server is in a cluster: keys that it does not own now are absent, which is not a failure."""
        self.elsewhere = 0
        """Number of answers that a key is elsewhere."""
        self.moved = False
        """Whether such an answer said that the slot moved permanently."""
        self.down: StoreError | None = None
        """Error of an answer that the cluster does not serve, as one that was just started."""

    # --- the connection --------------------------------------------------------------------------

    def connect(self) -> None:
        connected = self._socket is not None and not self._input and self._peer != self._demoted.address
        if connected and self._socket is not None and self._quiet(self._socket):
            return
        self.close()
        self._answered = False
        try:
            places = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)
            deadline = time.monotonic() + self.connect_s
            plain = _connected([place[:2] for *_, place in places], deadline)
            try:
                plain.settimeout(max(0.001, deadline - time.monotonic()))
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
                host, self._peer = self._address[0], plain.getpeername()
                self._socket = _tls_context().wrap_socket(plain, server_hostname=host) if self._tls else plain
            except BaseException:
                plain.close()
                raise
        except ssl.SSLCertVerificationError as error:
            why = f"The certificate of {self._name} is not accepted: {error.verify_message}"
            raise StoreError("tls", f"{why}. Name its CA in SSL_CERT_FILE.", final=True) from error
        except (OSError, ValueError) as error:  # an invalid host name is a ValueError
            hint = WANTS_NO_TLS if "handshake" in str(error) or "SSL" in str(error) else ""
            why = f"{self._name} cannot be reached: {getattr(error, 'strerror', None) or error}.{hint}"
            raise StoreError("unreachable", why, final=True) from error
        if self._refused_by not in (None, self._peer):
            self._demoted.address = self._refused_by
        if self._demoted.address == self._peer:  # it was made primary again, or the name has several addresses
            self._demoted.address = None
        self._refused_by = None
        user, password = self._credentials
        if password:
            # A password from a variable need not be UTF-8.
            words = [word.encode(errors="surrogateescape") for word in (user, password) if word]
            self._command([b"AUTH", *words], deadline)
        if self._database:
            self._command([b"SELECT", b"%d" % self._database], deadline)

    @staticmethod
    def _quiet(connected: socket.socket) -> bool:
        """Return whether the server has neither closed the connection nor sent anything unrequested."""
        connected.settimeout(0)
        try:
            connected.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        self._input.clear()
        self._unasked.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def interrupt(self) -> None:
        if (connected := self._socket) is not None:
            with suppress(OSError):  # it may be closed already
                socket.socket.shutdown(connected, socket.SHUT_RDWR)

    def ping(self, deadline: float) -> None:
        self._command([b"PING"], deadline)

    def usage(self, deadline: float) -> StoreUsage | None:
        self._send_words([b"INFO"], deadline)
        found = dict(_FIGURE.findall(self._reply(deadline, b"$", MAX_INFO_BYTES)))
        if not {"maxmemory", "used_memory", "evicted_keys"} <= found.keys():
            return None
        return StoreUsage(*(int(found[name]) for name in ("maxmemory", "used_memory", "evicted_keys")))

    def generation(self, fingerprint: bytes, deadline: float) -> int:
        return self.stored_generation(generation_name(fingerprint), deadline)

    def stored_generation(self, name: bytes, deadline: float) -> int:
        """Return the generation of this name."""
        self.send_questions([], deadline, [name])
        return self.generation_answer(name, deadline)

    def ask(self, group: BlockGroup, keys: Sequence[bytes], deadline: float, *, prefix: bool) -> tuple[int, list[bool]]:
        own_name = generation_name(group.fingerprint)
        self.send_questions(block_names(group, keys), deadline, [own_name])
        return self.generation_answer(own_name, deadline), self.answers(len(keys), deadline)

    def touch(self, blocks: Sequence[Block], deadline: float) -> list[bool]:
        self.send_touches([block_name(block.group, block.key) for block in blocks], deadline)
        return self.answers(len(blocks), deadline)

    def send_touches(self, names: Sequence[bytes], deadline: float) -> None:
        """Send touches, whose results ``answers`` receives. This restarts the time to live, and counts as a use."""
        command, *last = (b"EXPIRE", self._ttl) if self._ttl else (b"TOUCH",)
        self._send([_repeated(command, names, *last)], deadline)

    def send_questions(self, names: Sequence[bytes], deadline: float, generations: Sequence[bytes] = ()) -> None:
        """Send questions about names of generations, each received by ``generation_answer``, and then about names of
        blocks, received by ``answers``."""
        self._send([_repeated(b"GET", generations) + _repeated(b"EXISTS", names)], deadline)

    def generation_answer(self, name: bytes, deadline: float) -> int:
        length, text = self._value_length(deadline), b""
        if isinstance(length, StoreError):
            self.close()
            raise length
        if length is not None:
            text = self._take(length + 2, deadline)[:-2] if 0 <= length <= LINE_BYTES else b"of another type, or long"
        return self._number(name, text)

    def _number(self, name: bytes, text: bytes) -> int:
        try:
            return decode_generation(text, f"The value of {name.decode()} at {self._name}")
        except StoreError:
            self.close()
            raise

    def get(self, requests: Sequence[GetRequest], patience_s: float) -> Iterator[Received | StoreError | None]:
        self.send_gets(requests, time.monotonic() + patience_s)
        for request in requests:
            received = self.value(request, time.monotonic() + patience_s)
            yield received
            if isinstance(received, Received) and received.block is None:
                return

    def send_gets(self, requests: Sequence[GetRequest], deadline: float) -> None:
        """Request blocks, each of which one call of ``value`` receives."""
        self._unasked, self._coming_bytes = deque(requests), 0
        self._send(self._questions(), deadline)

    def _questions(self) -> list[bytes]:
        """Request further blocks if at most half of MAX_COMING_BYTES is still coming."""
        names: list[bytes] = []
        most = MAX_COMING_BYTES if self._coming_bytes <= MAX_COMING_BYTES // 2 else 0
        while self._unasked and (self._coming_bytes + self._unasked[0].nbytes <= most or not self._coming_bytes):
            request = self._unasked.popleft()
            self._coming_bytes += request.nbytes
            names.append(block_name(request.group, request.key))
        return [_repeated(b"GET", names)]

    def value(self, request: GetRequest, deadline: float) -> Received | StoreError | None:
        """Receive one block, as ``get`` yields it; if it is no block, the connection is closed."""
        received: Received | StoreError | None = None
        if isinstance(length := self._value_length(deadline), StoreError):
            received = length
        elif length is not None:
            fits = length == HEADER_BYTES + request.nbytes
            if not fits or (block := decode_header(self._take(HEADER_BYTES, deadline))) is None:
                self.close()
                return Received(None)
            received = Received(block, self._fill(request.views, deadline))
            if self._take(2, deadline) != b"\r\n":
                raise self._broken("a value does not end where it should")
        self._coming_bytes -= request.nbytes
        self._send_on(self._questions(), deadline)
        return received

    def put(self, requests: Sequence[PutRequest], deadline: float) -> list[bool | None]:
        self.send_puts(requests, deadline)
        return self.put_results(len(requests), deadline)

    def send_puts(self, requests: Sequence[PutRequest], deadline: float) -> None:
        """Send blocks; ``put_results`` receives the answers."""
        parts: list[bytes | memoryview] = []
        head, end = (b"*5", b"\r\n$2\r\nEX\r\n" + _bulk(self._ttl)) if self._ttl else (b"*3", b"\r\n")
        for block, views in requests:
            name, nbytes = block_name(block.group, block.key), HEADER_BYTES + sum(map(len, views))
            parts.append(b"%s\r\n$3\r\nSET\r\n%s$%d\r\n" % (head, _bulk(name), nbytes))
            parts += [encode_header(block), *views, end]
        self._send(parts, deadline)

    def put_results(self, count: int, deadline: float) -> list[bool | None]:
        """Receive ``count`` answers, as ``put`` returns them. Raises StoreError if a busy server refused all."""
        ended = [self._stored(deadline) for _ in range(count)]
        refused = [one for one in ended if isinstance(one, StoreError)]
        if refused and len(refused) == count:
            self.close()
            raise refused[0]
        return [None if isinstance(one, StoreError) else one for one in ended]

    def _stored(self, deadline: float) -> bool | StoreError | None:
        line = self._line(deadline)
        if self._is_elsewhere(line):
            return None
        if line.startswith(BUSY):
            return self._busy(line)
        if line.startswith(b"-OOM"):
            return False
        self._check(line, b"+")
        return True

    def remove(self, group: BlockGroup, keys: Sequence[bytes], deadline: float) -> None:
        self.remove_names(block_names(group, keys), deadline)

    def remove_names(self, names: Sequence[bytes], deadline: float) -> None:
        self._send([_repeated(b"UNLINK", names)], deadline)
        self.answers(len(names), deadline)

    def cluster_slots(self, deadline: float) -> list[Any]:
        """Return the reply to CLUSTER SLOTS, of numbers, texts and lists of them."""
        self._send_words([b"CLUSTER", b"SLOTS"], deadline)
        return cast(list[Any], self._reply(deadline, b"*"))

    def _reply(self, deadline: float, kinds: bytes = b":$*", most_bytes: int = MAX_NAME_BYTES, depth: int = 0) -> Any:
        """Receive a short reply of one of these kinds: a number, a text, or a list of them; null is an empty text."""
        line = self._line(deadline, REPLIES_BYTES)
        kind, text = line[:1], line[1:]
        if line == b"$-1" and b"$" in kinds:
            return ""
        if kind not in kinds:
            self._check(line, kinds[:1])
        most = {b":": MAX_NUMBER, b"$": most_bytes, b"*": MAX_ELEMENTS[min(depth, 4)]}[kind]
        if not re.fullmatch(rb"-?[0-9]{1,18}", text) or not (kind == b":" or 0 <= int(text) <= most):
            raise self._broken(f"{self._quoted(text)} is not a valid number or length")
        if kind == b":":
            return int(text)
        if kind == b"$":
            return self._take(int(text) + 2, deadline)[:-2].decode(errors="replace")
        return [self._reply(deadline, depth=depth + 1) for _ in range(int(text))]

    def raise_generation(self, fingerprint: bytes, seen: int, generation: int, deadline: float) -> int:
        return self.raise_stored(generation_name(fingerprint), seen, generation, deadline)

    def raise_stored(self, name: bytes, seen: int, generation: int, deadline: float) -> int:
        """Raise the generation of this name, as ``raise_generation`` does."""
        if not seen:  # if several nodes find it missing, after a server lost it, only one may write it
            self._send_words([b"SET", name, b"%d" % generation, b"NX"], deadline)
            if (line := self._line(deadline)) != b"$-1":
                self._check(line, b"+")
                return generation
            seen = self.stored_generation(name, deadline)
            if seen >= generation:
                return seen
        self._send_words([b"INCRBY", name, b"%d" % (generation - seen)], deadline)
        return self._number(name, self._check(self._line(deadline), b":"))

    # --- RESP ------------------------------------------------------------------------------------

    def _send_words(self, words: Sequence[bytes], deadline: float) -> None:
        self._send([b"*%d\r\n" % len(words), *map(_bulk, words)], deadline)

    def _command(self, words: Sequence[bytes], deadline: float) -> None:
        self._send_words(words, deadline)
        self._check(self._line(deadline), b"+")

    def _is_elsewhere(self, line: bytes) -> bool:
        found = self._clustered and line.startswith(ELSEWHERE)
        self.elsewhere += found
        if found:
            self.moved = self.moved or line.startswith(b"-MOVED")
            self.down = self._cluster_down(self._quoted(line[1:])) if line.startswith(b"-CLUSTERDOWN") else self.down
        return found

    def _cluster_down(self, text: str) -> StoreError:
        why = "some slots have no master; repair it, or set cluster-require-full-coverage no."
        return StoreError("cluster", f"The cluster of {self._name} is down ({text}): {why}")

    def _busy(self, line: bytes) -> StoreError:
        return StoreError("busy", f"{self._name} is busy and answers: {self._quoted(line[1:]).rstrip('.')}.")

    def _check(self, line: bytes, kind: bytes) -> bytes:
        """Return the rest of a reply's line of this kind. Raises StoreError for any other kind."""
        if line[:1] == kind:
            return line[1:]
        if line[:1] != b"-":
            raise self._broken(f"{self._quoted(line)} is not a reply to the request")
        self.close()
        text = self._quoted(line[1:])
        code = text.partition(" ")[0]
        if line.startswith(BUSY):
            raise self._busy(line)
        if code == "NOPERM":
            why = f"{self._name} does not permit this user to do that ({text}); it needs {NEEDED_COMMANDS}."
            raise StoreError("forbidden", why, final=True)
        if code == "READONLY":
            self._refused_by = self._peer
            why = f"{self._name} is a read-only replica ({text.rstrip('.')})"
            cure = "The name is resolved again before the next write, as after a failover; else name its primary."
            raise StoreError("refused", f"{why}. {cure}")
        if code in ("NOAUTH", "WRONGPASS") or "AUTH" in text:
            why = f"{self._name} refuses the login ({text}); see shared_password_file, which is read at the start."
            raise StoreError("credentials", why, final=True)
        if code == "CLUSTERDOWN":
            raise self._cluster_down(text)
        if code in ("MOVED", "ASK", "CROSSSLOT"):
            why = f"{self._name} is in a cluster: name it redis+cluster://, or it changed ({text})."
            raise StoreError("cluster", why)
        hint = " Name it redis://." if "cluster support disabled" in text else ""
        raise StoreError("refused", f"{self._name} answers: {text.rstrip('.')}.{hint}")

    def _quoted(self, line: bytes) -> str:
        """Return a server's text for the log, without the password, which an error about AUTH repeats in part."""
        text = line.decode(errors="surrogateescape").partition(", with args beginning with")[0]
        if self._credentials.password:
            text = text.replace(self._credentials.password, "***")
        return printable(text[:MAX_QUOTED_CHARACTERS])

    def answers(self, count: int, deadline: float) -> list[bool]:
        """Receive ``count`` numbers; return whether each is not 0. What a busy server refused counts as 0, unless that
        is all."""
        data, lines = self._input, self._input.count(b"\n")
        while lines < count:
            if len(data) > REPLIES_BYTES + count * LINE_BYTES:
                raise self._broken("lines do not end")
            part = self._receive(REPLIES_BYTES, deadline)
            data += part
            lines += part.count(b"\n")
        replies = data.split(b"\r\n", count)
        if len(replies) <= count:
            raise self._broken("malformed line ending")
        self._input = replies[count]
        answers = list(map(bytes, replies[:count]))
        absent, kinds = {b":0"}, set(answers)
        some = any(line.startswith(b":") for line in kinds)
        for line in kinds - {b":0", b":1"}:
            if self._is_elsewhere(line) or (some and line.startswith(BUSY)):
                absent.add(line)
            else:
                self._check(line, b":")
        return [line not in absent for line in answers]

    def _value_length(self, deadline: float) -> int | StoreError | None:
        """Return the length of the next value; None for no value, -1 for one of another type, which is not sent; the
        error if a busy server refuses it."""
        line = self._line(deadline, HEAD_BYTES)
        if line.startswith(BUSY):
            return self._busy(line)
        if line.startswith(b"-WRONGTYPE"):
            return -1
        if self._is_elsewhere(line):
            return None
        text = self._check(line, b"$")
        if not re.fullmatch(rb"-1|[0-9]{1,18}", text):
            raise self._broken(f"{self._quoted(text)} is not a length")
        return int(text) if text != b"-1" else None

    def _line(self, deadline: float, most: int = LINE_BYTES) -> bytes:
        while (end := self._input.find(b"\r\n")) < 0:
            if len(self._input) > 4 * LINE_BYTES:
                raise self._broken("a line does not end")
            self._input += self._receive(most, deadline)
        line = bytes(self._input[:end])
        del self._input[: end + 2]
        return line

    def _take(self, count: int, deadline: float) -> bytes:
        while len(self._input) < count:
            self._input += self._receive(max(HEAD_BYTES, count - len(self._input)), deadline)
        data = bytes(self._input[:count])
        del self._input[:count]
        return data

    def _fill(self, views: Sequence[memoryview], deadline: float) -> Sequence[int]:
        """Receive into these views, and any further bytes into the input, if possible by the same call.

        Returns the views' checksums if that call computes them, without the GIL.
        """
        done = 0
        for view in views:
            part = self._input[done : done + len(view)]
            view[: len(part)] = part
            done += len(part)
        del self._input[:done]
        rest = drop_bytes(list(views), done)
        if rest and not self._tls:
            return self._receive_all(rest, views, deadline)
        while rest:
            with self._ready(deadline) as connected:
                count = connected.recv_into(rest[0])
            if not count:
                raise self._lost("it closed the connection")
            rest = drop_bytes(rest, count)
        return ()

    def _receive_all(self, rest: Sequence[memoryview], views: Sequence[memoryview], deadline: float) -> Sequence[int]:
        """Receive the rest of the views, and any further bytes; return the checksums of the views."""
        with self._ready(deadline) as connected:
            fd, left_s = connected.fileno(), deadline - time.monotonic()
        parts = array("Q", [number for view in (*rest, memoryview(self._beyond)) for number in _place(view)])
        addresses, lengths = (array("Q", column) for column in zip(*map(_place, views), strict=True))
        sums = array("Q", bytes(8 * len(views)))
        columns = (column.buffer_info()[0] for column in (addresses, lengths, sums))
        waits_ms = int(1000 * min(STALL_S, left_s)) + 1, int(1000 * left_s) + 1
        count = native().receive(fd, parts.buffer_info()[0], len(rest) + 1, *waits_ms, *columns, len(views))
        if count < 0:
            closed = count == -errno.ENODATA
            raise self._lost("it closed the connection" if closed else OSError(-count, os.strerror(-count)))
        self._input += self._beyond[:count]
        return sums

    def _receive(self, count: int, deadline: float) -> bytes:
        with self._ready(deadline) as connected:
            data = connected.recv(count)
        if not data:
            raise self._lost("it closed the connection")
        self._answered = True
        return data

    def _send(self, parts: Sequence[bytes | memoryview], deadline: float) -> None:
        """Send the beginning of an exchange. Earlier unexpected input would be taken for its answer."""
        if self._input:
            raise self._broken("unexpected extra reply")
        self._send_on(parts, deadline)

    def _send_on(self, parts: Sequence[bytes | memoryview], deadline: float) -> None:
        rest = drop_bytes([memoryview(part) for part in parts], 0)
        while rest:
            with self._ready(deadline) as connected:  # TLS has no sendmsg
                sent = connected.send(rest[0]) if self._tls else connected.sendmsg(rest[:MAX_PARTS])
            rest = drop_bytes(rest, sent)

    @contextmanager
    def _ready(self, deadline: float) -> Iterator[socket.socket]:
        """Give the socket, with its timeout set to the time left. Its errors become StoreErrors."""
        if self._socket is None:
            raise StoreError("unreachable", f"{self._name} is not connected.")
        left = deadline - time.monotonic()
        if left <= 0:
            raise self._lost(TimeoutError("it does not answer in time"))
        self._socket.settimeout(min(STALL_S, left))
        try:
            yield self._socket
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, why: object) -> StoreError:
        self.close()
        if isinstance(why, TimeoutError):
            return StoreError("timeout", f"The connection to {self._name} is closed: {why}.")
        hint = " If it requires client certificates, set tls-auth-clients no." if self._tls else WANTS_TLS
        hint = "" if self._answered else hint
        return StoreError("disconnected", f"The connection to {self._name} is lost: {why}.{hint}")

    def _broken(self, why: str) -> StoreError:
        self.close()
        return StoreError("protocol", f"{self._name} violates the Redis protocol: {why}.")


def _connected(places: Sequence[Any], deadline: float) -> socket.socket:
    """Connect to the first of a name's addresses that answers; each gets an equal part of the time."""
    try:
        return socket.create_connection(places[0], max(0.001, deadline - time.monotonic()) / len(places))
    except OSError:
        if len(places) == 1:
            raise
    return _connected(places[1:], deadline)


def _place(view: memoryview) -> tuple[int, int]:
    """Return a view's address and length."""
    return address_of(view) if len(view) else 0, len(view)


def _tls_context() -> ssl.SSLContext:
    """Return the context of all connections, renewed when the file of CA certificates has changed."""
    file = ssl.get_default_verify_paths().cafile
    return _context_of(file, os.stat(file).st_mtime_ns if file is not None else 0)


@lru_cache(1)
def _context_of(file: str | None, changed_ns: int) -> ssl.SSLContext:
    """Make a context: with a distribution's CA certificates, it takes 60 ms and 0.8 MiB (measured)."""
    return ssl.create_default_context()


def _bulk(data: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(data), data)


def _repeated(command: bytes, names: Sequence[bytes], *last: bytes) -> bytes:
    """Encode a command for each name, with the arguments ``last``."""
    head, end = b"*%d\r\n%s" % (2 + len(last), _bulk(command)), b"".join(map(_bulk, last))
    return b"".join([b"%s$%d\r\n%s\r\n%s" % (head, len(name), name, end) for name in names])
