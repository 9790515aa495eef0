"""Connections to the ZeroMQ sockets: what the daemon keeps for each, whose turn it is, and who subscribed to what."""

from __future__ import annotations

import itertools
import socket
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path

from kvoffd.server.publisher import Frames
from kvoffd_proto import zmtp

RECEIVE_BYTES, RECEIVE_EVENTS_BYTES = 64 * 1024, 4 * 1024
"""Read from a connection to ``jobs.sock`` and to ``events.sock`` at a time. One whose input waits for its turn is not
read while it has as much."""
MAX_FRAMES = 4
"""Frames of a message; no request has more than three."""
MAX_SUBSCRIPTIONS = 64
MAX_TOPIC_BYTES = 256
MAX_LONG_FRAMES = 4
"""Frames that arrive at a time and are longer than the input a connection may have, one of a process."""
LONG_FRAME_S, CONTENDED_FRAME_S = 10.0, 1.0
"""How long such a frame may take to arrive, and how long while others wait."""


@dataclass(eq=False)
class ClientProcess:
    """One client process. Its connections take turns with those of others."""

    key: tuple[int, ...]
    connections: Counter[ListeningSocket] = field(default_factory=Counter)
    waiting: deque[Connection] = field(default_factory=deque)
    """Its connections that have input."""
    held: set[Connection] = field(default_factory=set)
    """Those that get no turn until output of the process is read."""
    unsent_bytes: int = 0
    incoming_at: float = 0.0
    """When a long frame of it was last let in."""
    served_s: float = 0.0
    """Time that its messages took, on the clock of ``ProcessQueue``."""


class ProcessQueue:
    """Who is served next: the waiting process that was served least. One that was idle has saved nothing up.

    As ``FairQueue``, by time, and in a heap: there may be thousands of processes.
    """

    def __init__(self) -> None:
        self._order = itertools.count()
        self._waiting: list[tuple[float, int, ClientProcess]] = []
        self._served: ClientProcess | None = None
        self._now = 0.0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, connection: Connection) -> None:
        process = connection.process
        process.waiting.append(connection)
        if len(process.waiting) == 1 and process is not self._served:
            process.served_s = max(process.served_s, self._now)
            self._push(process)

    def serve(self, serve: Callable[[Connection], bool], until: float) -> None:
        """Call ``serve`` for waiting connections in turn until the time is up; it says whether one still waits."""
        while self._waiting:
            self._now, _, process = heappop(self._waiting)
            self._served = process
            connection = process.waiting.popleft()
            started = time.monotonic()
            try:
                if serve(connection):
                    process.waiting.append(connection)
            finally:
                self._served = None
                ended = time.monotonic()
                process.served_s = self._now + ended - started
                if process.waiting:
                    self._push(process)
            if ended >= until:
                return

    def _push(self, process: ClientProcess) -> None:
        heappush(self._waiting, (process.served_s, next(self._order), process))


@dataclass(eq=False, slots=True)
class Connection:
    """One connection of a client to one of the sockets."""

    name: bytes
    stream: socket.socket
    endpoint: ListeningSocket
    process: ClientProcess
    input: zmtp.Input = field(init=False)
    reading: bool = False
    waits: bool = False
    """It is among ``process.waiting``."""
    incoming_since: float | None = None
    """A frame longer than ``RECEIVE_BYTES`` is arriving since then."""
    unsent: deque[memoryview] = field(default_factory=deque)
    unsent_bytes: int = 0
    replay: Iterator[Frames] | None = None
    """What a replay of events has still to send."""
    subscriptions: set[bytes] = field(default_factory=set)
    closed: bool = False

    def __post_init__(self) -> None:
        self.input = zmtp.Input(self.endpoint.peers, self.endpoint.max_frame_bytes, MAX_FRAMES)


class LongFrames:
    """Which connections read a frame longer than the input that each may have, and which wait until they may."""

    def __init__(self, clock: Callable[[], float], read_on: Callable[[Connection], None]) -> None:
        self._clock = clock
        self._read_on = read_on
        self._arriving: set[Connection] = set()
        self._waiting: list[Connection] = []

    @property
    def patience_s(self) -> float:
        return CONTENDED_FRAME_S if self._waiting else LONG_FRAME_S

    def add(self, connection: Connection) -> None:
        """The rest of a long frame is to be read when it is the connection's turn."""
        if connection not in self._waiting:
            self._waiting.append(connection)
            self._let_in()

    def arrived(self, connection: Connection) -> None:
        """The connection's long frame, if it has one, is there, or will never be."""
        if connection.incoming_since is not None:
            connection.incoming_since = None
            self._arriving.discard(connection)
            self._let_in()
        elif connection.closed and connection in self._waiting:
            self._waiting.remove(connection)

    def overdue(self) -> list[Connection]:
        """Those whose frame takes too long."""
        until = self._clock() - self.patience_s
        return [
            connection
            for connection in self._arriving
            if connection.input.missing_bytes and (connection.incoming_since or 0.0) < until
        ]

    def _let_in(self) -> None:
        """Read the frames of the processes that had none for the longest, one of each."""
        busy = {connection.process for connection in self._arriving}
        for connection in sorted(self._waiting, key=lambda one: one.process.incoming_at):
            if len(self._arriving) >= MAX_LONG_FRAMES:
                break
            if connection.process not in busy:
                self._waiting.remove(connection)
                self._arriving.add(connection)
                busy.add(connection.process)
                connection.incoming_since = connection.process.incoming_at = self._clock()
                self._read_on(connection)


@dataclass(eq=False)
class ListeningSocket:
    path: Path
    type: bytes
    peers: frozenset[bytes]
    max_connections: int
    receive_bytes: int
    """Read from a connection at a time."""
    max_frame_bytes: int
    connections: dict[bytes, Connection] = field(default_factory=dict)
    """By name, oldest first."""


class Subscriptions:
    """Who wants which topics: those that begin with what it named."""

    def __init__(self) -> None:
        self._subscribers: defaultdict[bytes, set[Connection]] = defaultdict(set)
        self._sizes: Counter[int] = Counter()
        """How many connections named something of a size."""

    def add(self, connection: Connection, topic: bytes) -> None:
        """Raises ZmtpError beyond the bounds."""
        if topic in connection.subscriptions:
            return
        if len(topic) > MAX_TOPIC_BYTES or len(connection.subscriptions) >= MAX_SUBSCRIPTIONS:
            raise zmtp.ZmtpError(
                f"more than {MAX_SUBSCRIPTIONS} subscriptions, or one of more than {MAX_TOPIC_BYTES} bytes"
            )
        connection.subscriptions.add(topic)
        self._subscribers[topic].add(connection)
        self._sizes[len(topic)] += 1

    def remove(self, connection: Connection, topic: bytes) -> None:
        if topic not in connection.subscriptions:
            return
        connection.subscriptions.remove(topic)
        found = self._subscribers[topic]
        found.discard(connection)
        if not found:
            del self._subscribers[topic]
        self._sizes[len(topic)] -= 1
        if not self._sizes[len(topic)]:
            del self._sizes[len(topic)]

    def to(self, topic: bytes) -> set[Connection]:
        """Who gets what is published under a topic."""
        found: set[Connection] = set()
        for size in self._sizes:
            if size <= len(topic):
                found |= self._subscribers.get(topic[:size], set())
        return found
