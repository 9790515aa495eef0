"""A session's sockets, the lock around it and the thread that drives it."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.util import Finalize
from pathlib import Path
from typing import cast

import zmq

from kvoffd_client.errors import ForkedProcess
from kvoffd_client.lifeline_stream import NEVER, LifelineStream, poller_of
from kvoffd_client.session import Session
from kvoffd_proto.codec import CODEC_ERRORS, decode_reply
from kvoffd_proto.lifeline import Attach, LifelineError
from kvoffd_proto.paths import SocketPaths

log = logging.getLogger("kvoffd_client")

MESSAGES_PER_ROUND = 64
"""Messages that are read from each socket under one hold of the lock."""
MAX_SLEEP_S = 3600.0
CLOSE_S = 0.8
"""How long close() waits for the thread."""
ERROR_PAUSE_S = 0.05
"""An error inside that repeats must not spin."""
RECONNECT_MS = 20
"""ZeroMQ's pause between attempts. A daemon that starts binds its lifeline first; its other sockets follow at once."""
SEND_QUEUE = 1000
"""Messages that wait to be sent to the daemon; beyond it requests fail at once."""
RECEIVE_QUEUE = 10_000
"""Messages that wait to be read; what the daemon publishes beyond it is dropped, and asked for again."""
BUSY_WAIT_S = 150e-6
"""How long a reply is polled for before its thread sleeps. A lookup of 64 keys took 119 µs, and 169 where it slept at
once: to wake threads on idle CPUs is most of it."""
LONG_YIELD_S = 500e-6
"""Where a thread that yields its CPU gets it back as late as that, others want it."""
NO_BUSY_WAIT_S = 30.0
"""Nothing is polled for so long after that."""
MAX_MESSAGE_BYTES = 1 << 28
"""Largest message taken from the daemon: a bound against garbage."""

# pyzmq's own calls for messages of several frames combine members of enums for each frame. Measured with processes that
# have slept, whose caches are cold: a lookup of 1,000 keys took 10 µs longer with them, of 170.
_NOW, _RCVMORE, _EVENTS, _READABLE = (int(one) for one in (zmq.NOBLOCK, zmq.RCVMORE, zmq.EVENTS, zmq.POLLIN))


class SocketTransport:
    """The ``Transport`` over real sockets.

    The user's threads call the session directly, under the lock, and send from there: a request is on its way before
    the call returns. One thread of its own waits for time and for messages. A thread that waits for a reply polls the
    sockets and reads the reply itself: until it has it, messages do not wake the transport's own thread.

    ZeroMQ's descriptors are edge-triggered: they tell of what comes after a socket was seen empty, and not of what a
    later use of the socket has noticed. Hence one rule: **who has used a socket reads it empty before it releases the
    lock, or wakes the thread, which does.**
    """

    def __init__(self, directory: str, *, threaded: bool = True) -> None:
        self._paths = SocketPaths(Path(directory))
        self._threaded = threaded
        self.daemon_pid = 0
        """Of the last connection; 0 where the daemon is in another pid namespace."""
        self.lock: AbstractContextManager[object] = threading.Lock()
        self.now = time.monotonic
        self._context = zmq.Context(io_threads=1)
        self._stream: LifelineStream | None = None
        self._draining = False
        """The stream is one that we have closed, and is read until the daemon has released the memory."""
        self._jobs: zmq.Socket[bytes] | None = None
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        """By the descriptor that tells of messages: to ask a socket for it takes longer than to poll it."""
        self._messages = select.epoll()
        """Readable when one of the sockets has a message."""
        self._wakes_thread = select.epoll()
        """Readable when a message wakes the transport's own thread."""
        self._wakes_thread.register(self._messages.fileno(), select.EPOLLIN)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sleeping_until = 0.0
        self._idle_wakers: list[tuple[int, select.poll]] = []
        """Descriptors that woke threads which wait no more, for the next ones, and what polls them and the sockets."""
        self._waiting: list[int] = []
        """By waiting thread, a descriptor that wakes it."""
        self._reading: int | None = None
        """While a thread holds the lock that reads the sockets: its descriptor among these, -1 where it has none. It
        sees by itself what it has changed."""
        self._busy_wait_from = 0.0
        self._closed = False
        self._last_error = ""
        self._session: Session
        self._thread: threading.Thread
        _transports.add(self)
        # For each client anew: children of multiprocessing forget what was entered before them, and run no atexit.
        Finalize(self, _leave, (weakref.ref(self),), exitpriority=0)

    def start(self, session: Session) -> None:
        self._session = session
        if self._threaded:
            self._thread = threading.Thread(target=self._run, name=f"kvoffd-{session.role.value}", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # there are too many
                self._closed, self._threaded = True, False
                self._shut()
                raise

    # --- for any thread --------------------------------------------------------------------------

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        wake_fd, deadline = -1, time.monotonic() + timeout_s
        while not self._threaded:
            with self.lock:
                if self._closed:
                    return ready()
                poller, pause_s = self._work([])
                now = time.monotonic()
                if (done := ready()) or now >= deadline:
                    return done
            self._sleep(poller, min(pause_s, deadline - now))
        try:
            while True:
                with self.lock:
                    # Before the first sleep too: where this thread has computed since it sent a request, the
                    # transport's own still waits for the GIL, to read the reply.
                    self._reading, unread = wake_fd, True
                    try:
                        unread = self._receive()
                    finally:
                        self._reading = None
                        if unread:
                            self._wake_thread()
                    now = time.monotonic()
                    if (done := ready()) or self._closed or now >= deadline:
                        return done
                    if wake_fd < 0:
                        wake_fd, poller = self._idle_wakers.pop() if self._idle_wakers else self._new_waker()
                        self._waiting.append(wake_fd)
                        self._wakes_thread.modify(self._messages.fileno(), 0)  # this one reads them
                woken = poller.poll(0) if unread else self._poll(poller, deadline)
                if (wake_fd, select.POLLIN) in woken:
                    os.eventfd_read(wake_fd)
        finally:
            if wake_fd >= 0:
                with self.lock:
                    self._waiting.remove(wake_fd)
                    if self._closed:
                        os.close(wake_fd)
                    else:
                        self._idle_wakers.append((wake_fd, poller))
                        if not self._waiting:
                            self._wakes_thread.modify(self._messages.fileno(), select.EPOLLIN)

    def _poll(self, poller: select.poll, deadline: float) -> list[tuple[int, int]]:
        """Wait for a descriptor: busily for a moment, as long as nobody else wants the CPU."""
        now = time.monotonic()
        busy_until = min(now + BUSY_WAIT_S, deadline)
        while self._busy_wait_from <= now < busy_until:
            if woken := poller.poll(0):
                return woken
            os.sched_yield()  # to the threads that bring the reply
            began, now = now, time.monotonic()
            if now - began > LONG_YIELD_S:
                self._busy_wait_from = now + NO_BUSY_WAIT_S
        return poller.poll(max(0.0, deadline - now) * 1000)

    def _new_waker(self) -> tuple[int, select.poll]:
        wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        return wake_fd, poller_of(wake_fd, self._messages.fileno())

    def _wake_thread(self) -> None:
        if self._sleeping_until:
            self._sleeping_until = 0.0
            os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        if isinstance(self.lock, _ParentsLock):
            return
        with self.lock:
            if not self._closed:
                self._closed = True
                self._session.on_close(time.monotonic())
                os.eventfd_write(self._wake_fd, 1)
                if not self._threaded:
                    self._shut()
        if self._threaded:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.error("The I/O thread of %s did not end in time.", self._session.name)

    # --- for the session, with the lock held -----------------------------------------------------

    def open(self) -> None:
        self._stream = LifelineStream(self._paths)
        self.daemon_pid = self._stream.pid

    def connect(self, route: bytes, topics: Sequence[bytes]) -> None:
        # Completions are read before replies, which may say that there are some.
        if topics:
            events = self._connected(zmq.SUB, self._paths.events)
            for topic in topics:
                events.setsockopt(zmq.SUBSCRIBE, topic)
        self._jobs = self._connected(zmq.DEALER, self._paths.jobs, route)

    def _connected(self, kind: int, path: Path, route: bytes = b"") -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        if route:
            made.setsockopt(zmq.ROUTING_ID, route)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.SNDHWM, SEND_QUEUE),
            (zmq.RCVHWM, RECEIVE_QUEUE),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
        ):
            made.setsockopt(option, value)
        made.connect(f"ipc://{path}")
        self._sockets[made.FD] = made
        self._messages.register(made.FD, select.EPOLLIN)
        return made

    def attach(self, message: Attach, fd: int) -> None:
        if self._stream is None or self._draining:
            raise OSError("the lifeline is closed")
        self._stream.send(message, [fd])

    def send(self, frame: bytes) -> bool:
        if self._jobs is None:
            return False
        try:
            self._jobs.send(frame, _NOW)
        except zmq.Again:
            return False
        unread = self._reading is None and cast(int, self._jobs.get(_EVENTS)) & _READABLE
        if unread or self._session.wake_at() < self._sleeping_until:
            self._wake_thread()
        return True

    def disconnect(self, *, drain: bool) -> None:
        stream = self._stream
        if stream is not None and drain and not self._draining:
            self._draining = True
            if not stream.ended:
                stream.stop_sending()
        elif stream is not None:
            if not self._draining:
                stream.leave()
            self._close_stream()
        # A jobs socket that is left open connects to the next daemon, and delivers old requests there.
        for fd, connected in self._sockets.items():
            self._messages.unregister(fd)
            connected.close(linger=0)
        self._jobs = None
        self._sockets.clear()

    def notify(self) -> None:
        for fd in self._waiting:
            if fd != self._reading:
                os.eventfd_write(fd, 1)
        if self._session.wake_at() < self._sleeping_until:
            self._wake_thread()

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream, self._draining = None, False

    # --- reading, with the lock held -------------------------------------------------------------

    def _receive(self) -> bool:
        """Read the sockets empty, or MESSAGES_PER_ROUND messages of each: then True. An error ends the connection."""
        session, jobs, unread = self._session, self._jobs, False
        try:
            for connected in list(self._sockets.values()):
                for _ in range(MESSAGES_PER_ROUND):
                    if not cast(int, connected.get(_EVENTS)) & _READABLE:
                        break
                    frames = [connected.recv(_NOW)]
                    while connected is not jobs and connected.get(_RCVMORE):
                        frames.append(connected.recv(_NOW))
                    if connected is jobs:
                        session.on_reply(decode_reply(frames[0]), time.monotonic())
                    elif len(frames) == 3:
                        session.on_publication(frames[0], frames[1], frames[2], time.monotonic())
                    if self._jobs is not jobs:  # it has ended the session
                        return False
                else:
                    unread = True
        except CODEC_ERRORS as error:
            session.disconnect(f"The daemon sent what is no reply of this protocol ({error}).", time.monotonic())
        except Exception as error:
            self._recover(error)
        return unread

    def _read_lifeline(self, stream: LifelineStream, now: float) -> None:
        session = self._session
        try:
            for message in stream.read():
                if not self._draining:
                    session.on_lifeline_message(message, now)
                if stream is not self._stream:  # the session has closed it
                    return
        except LifelineError as error:
            session.disconnect(f"What answers in {session.directory} is no kvoffd daemon: {error}", now)
        # Copies in host memory are made by the daemon's threads, which end before the kernel closes its descriptors.
        released = stream.released(now) or (stream.ended and not session.memory_on_gpu)
        if stream is self._stream and self._draining and released:
            self._close_stream()
            session.on_released(now)
        elif stream is self._stream and not self._draining and stream.ended:
            session.on_lifeline_end(now, released)

    def _recover(self, error: Exception) -> None:
        """A bug must neither end the thread nor reach the engine: log it once, connect again."""
        if repr(error) != self._last_error:
            self._last_error = repr(error)
            log.error("The kvoffd client failed internally; it connects again.", exc_info=error)
        try:
            self._session.disconnect(f"The client failed internally: {error!r}.", time.monotonic())
        except Exception:
            log.exception("The kvoffd client could not put its session in order.")
            self.disconnect(drain=False)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        ended: list[int] = []
        while not self._closed:
            try:
                with self.lock:
                    poller, pause_s = self._work(ended)
                ended = self._sleep(poller, pause_s)
            except Exception as error:
                with self.lock:
                    self._sleeping_until, self._reading = 0.0, None
                    self._recover(error)
                time.sleep(ERROR_PAUSE_S)
        with self.lock:
            self._shut()

    def _work(self, ended: list[int]) -> tuple[select.poll, float]:
        """Do what is due, with the lock held; returns what to sleep on then, and how long at most.

        ``ended``: the descriptors that ended the last sleep.
        """
        self._sleeping_until, self._reading = 0.0, -1
        # Completions before the end: what arrived before the daemon died still counts.
        self._receive()
        now = time.monotonic()
        if self._stream is not None and (self._draining or not self._threaded or self._stream.fileno() in ended):
            self._read_lifeline(self._stream, now)
        self._session.tick(now)
        unread = self._receive()  # last: see the rule above
        self._reading = None
        stream = self._stream
        wake_at = min(self._session.wake_at(), NEVER if stream is None else stream.wake_at())
        pause_s = 0.0 if unread or self._closed else min(max(0.0, wake_at - now), MAX_SLEEP_S)
        self._sleeping_until = now + pause_s
        return poller_of(self._wakes_thread.fileno(), self._wake_fd, -1 if stream is None else stream.fileno()), pause_s

    def _sleep(self, poller: select.poll, pause_s: float) -> list[int]:
        """Returns the descriptors that ended the sleep."""
        ended = [fd for fd, _ in poller.poll(pause_s * 1000)]
        if self._wake_fd in ended:
            os.eventfd_read(self._wake_fd)
        return ended

    def _shut(self) -> None:
        self.disconnect(drain=False)
        self._context.term()
        self._wakes_thread.close()
        self._messages.close()
        for fd in (self._wake_fd, *(fd for fd, _ in self._idle_wakers)):
            os.close(fd)

    def leave(self) -> None:
        """Have the end of the process that follows count as meant."""
        if self._stream is not None and not isinstance(self.lock, _ParentsLock):
            self._stream.leave()

    def forget_in_child(self) -> None:
        """Close the lifeline in a forked child: its EOF must mean the parent's death."""
        self.lock = _ParentsLock()
        if self._stream is not None:
            self._stream.close()


class _ParentsLock(AbstractContextManager[object]):
    """In a forked child, where the sockets are the parent's."""

    def __enter__(self) -> object:
        raise ForkedProcess(
            "This kvoffd client was made before the process forked; make a new client in the child "
            "(or start the child with the spawn method)."
        )

    def __exit__(self, *_: object) -> None: ...


_transports: weakref.WeakSet[SocketTransport] = weakref.WeakSet()


def _leave(transport: weakref.ref[SocketTransport]) -> None:
    """A process that ends in good order without closing its clients, as vLLM's do by SIGTERM, is not one that died."""
    if (living := transport()) is not None:
        living.leave()


def _forget_in_child() -> None:
    for transport in list(_transports):
        transport.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
