"""A server that speaks as much of Redis's protocol as a shared tier needs, and lies, hangs and cuts on purpose."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Callable
from math import inf
from typing import BinaryIO

from tests.kit.closing import ServerThread, ThreadsServer

Values = dict[bytes, bytes]


class FaultyStore(ServerThread):
    """Answers like ``redis-server`` until a test sets a fault.

    Attributes:
        values: what it has.
        delay_s: time that it takes before each answer.
        answering: while it is cleared, no answer is sent.
        spoil: changes a value on its way to a client.
        cut_after: bytes of a value after which it closes the connection; ``cuts`` times.
        busy: what commands get that read or write these keys, which the server is too busy for.
        error: what every command gets, such as ``LOADING ...``.
        forced: what commands get, byte for byte, whatever they ask for.
        forced_values: what is got of values that are asked for, byte for byte.
        surplus: what is sent once more behind the next value.
        commands: how many of each it was given.
    """

    def __init__(self) -> None:
        self.values: Values = {}
        self.delay_s = 0.0
        self.answering = threading.Event()
        self.answering.set()
        self.spoil: Callable[[bytes], bytes] = bytes
        self.cut_after: int | None = None
        self.cuts = inf
        self.error = ""
        self.busy: Values = {}
        self.forced: Values = {}
        self.forced_values: Values = {}
        self.surplus = b""
        self.commands: dict[bytes, int] = {}
        self._lock = threading.Lock()
        store = self

        class Handler(socketserver.StreamRequestHandler):
            disable_nagle_algorithm = True

            def handle(self) -> None:
                try:
                    while (words := _read_command(self.rfile)) and store._answer(words, self.connection):
                        pass
                except OSError:
                    pass

        super().__init__(ThreadsServer(Handler))

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def refuse_writes(self, answer: bytes) -> None:
        self.forced[b"SET"] = answer

    def close(self) -> None:
        self.answering.set()
        super().close()

    def _answer(self, words: list[bytes], connection: socket.socket) -> bool:
        """Answer a command; False ends the connection."""
        with self._lock:
            self.commands[words[0]] = self.commands.get(words[0], 0) + 1
        if self.delay_s:
            time.sleep(self.delay_s)
        self.answering.wait()
        name, arguments = words[0], words[1:]
        if self.error:
            connection.sendall(f"-{self.error}\r\n".encode(errors="surrogateescape"))
        elif arguments and arguments[0] in self.busy:
            connection.sendall(self.busy[arguments[0]])
        elif name in self.forced:
            connection.sendall(self.forced[name])
        elif name == b"GET":
            return self._send_value(arguments[0], connection)
        elif name in (b"EXISTS", b"TOUCH"):
            connection.sendall(b":%d\r\n" % (arguments[0] in self.values))
        elif name == b"UNLINK":
            connection.sendall(b":%d\r\n" % (self.values.pop(arguments[0], None) is not None))
        elif name == b"INCRBY":
            self.values[arguments[0]] = b"%d" % (int(self.values.get(arguments[0], b"0")) + int(arguments[1]))
            connection.sendall(b":%s\r\n" % self.values[arguments[0]])
        elif name == b"SET" and arguments[-1] == b"NX" and arguments[0] in self.values:
            connection.sendall(b"$-1\r\n")
        elif name == b"SET" and b"PX" in arguments:  # it has passed by now
            connection.sendall(b"+OK\r\n")
        elif name == b"SET":
            self.values[arguments[0]] = arguments[1]
            connection.sendall(b"+OK\r\n")
        else:
            connection.sendall(b"+PONG\r\n" if name == b"PING" else b"-ERR unknown command\r\n")
        return True

    def _send_value(self, key: bytes, connection: socket.socket) -> bool:
        """Send a value, a block's with the faults that are set; False ends the connection."""
        value = self.values.get(key)
        if key in self.forced_values or value is None or key.endswith(b"/generation"):
            connection.sendall(self.forced_values.get(key) or _bulk(value))
            return True
        message = _bulk(self.spoil(value))
        if self.cut_after is not None and self.cuts:
            self.cuts -= 1
            connection.sendall(message[: self.cut_after])
            return False
        message, self.surplus = message + self.surplus, b""
        connection.sendall(message)
        return True


def _bulk(value: bytes | None) -> bytes:
    return b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value)


def _read_command(stream: BinaryIO) -> list[bytes]:
    head = stream.readline()
    if not head:
        return []
    words = []
    for _ in range(int(head[1:])):
        length = int(stream.readline()[1:])
        words.append(stream.read(length))
        stream.read(2)
    return words
