"""A session's sockets, its lock and the thread that drives it."""

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
"""Messages read from each socket before the lock is released."""
MAX_SLEEP_S = 3600.0
"""``poll`` takes no infinite time: a longer sleep is several of these."""
CLOSE_S = 0.8
"""Time that close() waits for the thread."""
ERROR_PAUSE_S = 0.05
"""Pause after an internal error, so that a repeated one does not spin."""
RECONNECT_MS = 20
"""ZeroMQ's pause between connection attempts. A starting daemon binds its other sockets right after its lifeline."""
SEND_QUEUE = 1000
"""Unsent messages to the daemon; further requests fail at once."""
RECEIVE_QUEUE = 10_000
"""Unread messages; further publications are dropped, and fetched later by a request."""
BUSY_WAIT_S = 150e-6
"""Time to poll for a reply before sleeping. A lookup of 64 keys took 119 µs, and 169 µs without polling, mostly to wake
threads on idle CPUs."""
LONG_YIELD_S = 500e-6
"""If a thread that yields gets its CPU back only after this long, other threads need the CPU."""
NO_BUSY_WAIT_S = 30.0
"""Time without polling after that."""
MAX_MESSAGE_BYTES = 1 << 28
"""Largest message accepted from the daemon, as a bound against garbage."""
NO_WAKE_FD = -1
"""Stands for the eventfd of a thread that has none: the transport's own, or one that has not slept in its wait yet."""

# Plain integers: pyzmq's multipart calls combine enum members for each frame, which took 10 of 170 µs of a lookup of
# 1,000 keys with cold caches.
_NOW, _RCVMORE, _EVENTS, _READABLE = (int(one) for one in (zmq.NOBLOCK, zmq.RCVMORE, zmq.EVENTS, zmq.POLLIN))


class SocketTransport:
    """The ``Transport`` over real sockets.

    The user's threads call the session directly, under the lock, and send: a request is on its way before the call
    returns. The transport's own thread waits for timers and messages. A thread that waits for a reply polls the sockets
    and reads the reply itself; during that time messages do not wake the transport's thread.

    ZeroMQ's descriptors are edge-triggered: they signal only messages that arrive after the socket was found empty, and
    any use of the socket may consume the signal. Hence one rule: **a thread that has used a socket drains it before it
    releases the lock, or wakes the transport's thread to do so.**

    | what sleeps | what wakes it |
    |---|---|
    | the transport's thread | a message, unless a thread is in ``wait``; the lifeline; ``_wake_thread`` |
    | a thread in ``wait`` | a message; ``notify``, after another thread has changed the session's state |
    | the only thread, if not ``threaded`` | as the transport's thread, whose work it does |
    """

    def __init__(self, directory: str, *, threaded: bool = True) -> None:
        self._paths = SocketPaths(Path(directory))
        self._threaded = threaded
        self.daemon_pid = 0
        """Pid of the last connection's daemon; 0 if it is in another pid namespace."""
        self.lock: AbstractContextManager[object] = threading.Lock()
        self.now = time.monotonic
        self._context = zmq.Context(io_threads=1)
        self._stream: LifelineStream | None = None
        self._draining = False
        """Whether the session has ended and the stream is read until the daemon has released the memory."""
        self._jobs: zmq.Socket[bytes] | None = None
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        """Sockets by the descriptor that signals messages; querying a socket for it is slower than polling."""
        self._messages = select.epoll()
        """Readable when one of the sockets has a message."""
        self._messages_for_thread = select.epoll()
        """The same while no thread waits; else never readable."""
        self._messages_for_thread.register(self._messages.fileno(), select.EPOLLIN)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sleeping_until = 0.0
        """Time at which the transport's thread wakes by itself; 0.0 while it is awake, or is being woken."""
        self._idle_wakers = [self._new_waker()]
        """Eventfds of threads that have finished waiting, for reuse, with the poll over each and the sockets. The first
        exists from the start: an engine that runs out of descriptors must not fail when it waits."""
        self._waiting_fds: list[int] = []
        """Eventfds, one for each waiting thread."""
        self._reader_fd: int | None = None
        """Eventfd, or NO_WAKE_FD, of the thread that holds the lock and reads the sockets: it will see all messages and
        changes, so nobody wakes it. None if no thread does."""
        self._busy_wait_from = 0.0
        """Time from which ``_poll`` may spin."""
        self._closed = False
        self._last_error = ""
        self._session: Session
        self._thread: threading.Thread
        _transports.add(self)
        # Once per client: children of multiprocessing drop their parent's finalizers, and run no atexit functions.
        Finalize(self, _leave, (weakref.ref(self),), exitpriority=0)

    def start(self, session: Session) -> None:
        self._session = session
        if self._threaded:
            self._thread = threading.Thread(target=self._run, name=f"kvoffd-{session.role.value}", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # too many threads
                self._closed, self._threaded = True, False
                self._shut()
                raise

    # --- for any thread --------------------------------------------------------------------------

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        wake_fd, deadline = NO_WAKE_FD, time.monotonic() + timeout_s
        if not self._threaded:
            return self._work_until(ready, deadline)
        try:
            while True:
                with self.lock:
                    # Also before the first sleep: if this thread has computed since it sent the request, the
                    # transport's thread may still be waiting for the GIL to read the reply.
                    self._reader_fd = wake_fd
                    unread = True  # stays so if an exception such as KeyboardInterrupt ends _receive
                    try:
                        unread = self._receive()
                    finally:
                        self._reader_fd = None
                        if unread:
                            self._wake_thread()
                    now = time.monotonic()
                    if (done := ready()) or self._closed or now >= deadline:
                        return done
                    if wake_fd == NO_WAKE_FD:  # this is the first sleep
                        if self._idle_wakers:
                            wake_fd, poller = self._idle_wakers.pop()
                        else:
                            wake_fd, poller = self._new_waker()
                        self._waiting_fds.append(wake_fd)
                        self._messages_for_thread.modify(self._messages.fileno(), 0)  # this thread reads messages
                # Messages that are left give no signal: do not sleep, only read the eventfd.
                woken_by = poller.poll(0) if unread else self._poll(poller, deadline)
                if (wake_fd, select.POLLIN) in woken_by:
                    os.eventfd_read(wake_fd)
        finally:
            if wake_fd != NO_WAKE_FD:
                with self.lock:
                    self._waiting_fds.remove(wake_fd)
                    if self._closed:
                        os.close(wake_fd)
                    else:
                        self._idle_wakers.append((wake_fd, poller))
                        if not self._waiting_fds:
                            self._messages_for_thread.modify(self._messages.fileno(), select.EPOLLIN)

    def _new_waker(self) -> tuple[int, select.poll]:
        """Return an eventfd for a thread that waits, and the poll over it and the sockets."""
        wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        return wake_fd, poller_of(wake_fd, self._messages.fileno())

    def _work_until(self, ready: Callable[[], bool], deadline: float) -> bool:
        """As ``wait``, in the only thread: it does the work of the transport's thread, too."""
        while True:
            with self.lock:
                if self._closed:
                    return ready()
                poller, pause_s = self._work()
                now = time.monotonic()
                if (done := ready()) or now >= deadline:
                    return done
            self._sleep(poller, min(pause_s, deadline - now))

    def _poll(self, poller: select.poll, deadline: float) -> list[tuple[int, int]]:
        """Wait for a descriptor; spin for a moment first unless other threads need the CPU."""
        now = time.monotonic()
        busy_until = min(now + BUSY_WAIT_S, deadline)
        while self._busy_wait_from <= now < busy_until:
            if woken_by := poller.poll(0):
                return woken_by
            os.sched_yield()  # to the threads that deliver the reply
            began, now = now, time.monotonic()
            if now - began > LONG_YIELD_S:
                self._busy_wait_from = now + NO_BUSY_WAIT_S
        return poller.poll(min(max(0.0, deadline - now), MAX_SLEEP_S) * 1000)

    def _wake_thread(self) -> None:
        if self._sleeping_until:
            self._sleeping_until = 0.0
            os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        if isinstance(self.lock, _ParentsLock):  # in a forked child
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
        try:
            # First, so that completions are read before replies that may refer to them.
            if topics:
                events = self._connected(zmq.SUB, self._paths.events)
                for topic in topics:
                    events.setsockopt(zmq.SUBSCRIBE, topic)
            self._jobs = self._connected(zmq.DEALER, self._paths.jobs, route)
        except zmq.ZMQError as error:  # no descriptor is free
            raise OSError(error.errno, str(error)) from error

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
        # Sending may have consumed the signal of a message that has come; see the rule in the class's docstring.
        unread = self._reader_fd is None and cast(int, self._jobs.get(_EVENTS)) & _READABLE
        if unread or self._session.wake_at() < self._sleeping_until:
            self._wake_thread()
        return True

    def disconnect(self, *, drain: bool) -> None:
        if self._stream is not None and drain:
            self._draining = True
            self._stream.stop_sending()
        elif self._stream is not None:
            self._stream.leave()
            self._close_stream()
        # An open jobs socket would connect to the next daemon and deliver old requests there.
        for fd, connected in self._sockets.items():
            self._messages.unregister(fd)
            connected.close(linger=0)
        self._jobs = None
        self._sockets.clear()

    def notify(self) -> None:
        # The thread that calls this and reads the sockets sees the change itself.
        for fd in self._waiting_fds:
            if fd != self._reader_fd:
                os.eventfd_write(fd, 1)
        if self._session.wake_at() < self._sleeping_until:
            self._wake_thread()

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream, self._draining = None, False

    # --- reading, with the lock held -------------------------------------------------------------

    def _receive(self) -> bool:
        """Drain the sockets, up to MESSAGES_PER_ROUND messages each; True if some may be left. An error disconnects.

        A reply has one frame; a publication has three: topic, number and payload.
        """
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
                    if self._jobs is not jobs:  # the message ended the session
                        return False
                else:
                    unread = True
        except CODEC_ERRORS as error:
            session.disconnect(f"The daemon sent an invalid reply ({error}).", time.monotonic())
        except Exception as error:
            self._recover(error)
        return unread

    def _read_lifeline(self, stream: LifelineStream, now: float) -> None:
        session = self._session
        try:
            for message in stream.read():
                if not self._draining:
                    session.on_lifeline_message(message, now)
                if stream is not self._stream:  # the message ended the session
                    return
        except LifelineError as error:
            session.disconnect(f"The server in {session.directory} is not a kvoffd daemon: {error}", now)
        # The daemon's threads, which copy host memory, end before the kernel closes the daemon's descriptors.
        released = stream.released(now) or (stream.ended and not session.memory_on_gpu)
        if stream is self._stream and self._draining and released:
            self._close_stream()
            session.on_released(now)
        elif stream is self._stream and not self._draining and stream.ended:
            session.on_lifeline_end(now, released)

    def _recover(self, error: Exception) -> None:
        """Log a bug once and reconnect: it must neither end the thread nor reach the engine."""
        if repr(error) != self._last_error:
            self._last_error = repr(error)
            log.error("Internal error of the kvoffd client; reconnecting.", exc_info=error)
        try:
            self._session.disconnect(f"Internal error of the client: {error!r}.", time.monotonic())
        except Exception:
            log.exception("The kvoffd client could not disconnect its session.")
            self.disconnect(drain=False)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        woken_by: list[int] = []
        while not self._closed:
            try:
                with self.lock:
                    poller, pause_s = self._work(woken_by)
                woken_by = self._sleep(poller, pause_s)
            except Exception as error:
                with self.lock:
                    self._sleeping_until, self._reader_fd = 0.0, None
                    self._recover(error)
                time.sleep(ERROR_PAUSE_S)
        with self.lock:
            self._shut()

    def _work(self, woken_by: Sequence[int] | None = None) -> tuple[select.poll, float]:
        """Do what is due, with the lock held; return the poll for the next sleep, and its maximal length.

        ``woken_by``: descriptors that ended the sleep before this call; None: any may be readable.
        """
        self._sleeping_until, self._reader_fd = 0.0, NO_WAKE_FD
        # Completions before EOF: those that arrived before the daemon died count.
        self._receive()
        now = time.monotonic()
        stream = self._stream
        # Draining may end by time alone.
        if stream is not None and (woken_by is None or stream.fileno() in woken_by or self._draining):
            self._read_lifeline(stream, now)
        self._session.tick(now)
        unread = self._receive()  # last: see the rule in the class's docstring
        self._reader_fd = None
        stream = self._stream  # perhaps another one
        wake_at = min(self._session.wake_at(), NEVER if stream is None else stream.wake_at())
        pause_s = 0.0 if unread or self._closed else min(max(0.0, wake_at - now), MAX_SLEEP_S)
        self._sleeping_until = now + pause_s
        lifeline_fd = -1 if stream is None else stream.fileno()
        return poller_of(self._messages_for_thread.fileno(), self._wake_fd, lifeline_fd), pause_s

    def _sleep(self, poller: select.poll, pause_s: float) -> list[int]:
        """Return the descriptors that ended the sleep."""
        woken_by = [fd for fd, _ in poller.poll(pause_s * 1000)]
        if self._wake_fd in woken_by:
            os.eventfd_read(self._wake_fd)
        return woken_by

    def _shut(self) -> None:
        """Close all descriptors, for the last thread that uses them."""
        self.disconnect(drain=False)
        self._context.term()
        self._messages_for_thread.close()
        self._messages.close()
        for fd in (self._wake_fd, *(fd for fd, _ in self._idle_wakers)):
            os.close(fd)

    def leave(self) -> None:
        """Announce that the process is about to end on purpose."""
        if self._stream is not None and not isinstance(self.lock, _ParentsLock):
            self._stream.leave()

    def forget_in_child(self) -> None:
        """Close the lifeline in a forked child, so that EOF means the parent's death."""
        self.lock = _ParentsLock()
        if self._stream is not None:
            self._stream.close()


class _ParentsLock(AbstractContextManager[object]):
    """Lock of a client in a forked child, where the sockets are the parent's: always raises ForkedProcess."""

    def __enter__(self) -> object:
        raise ForkedProcess(
            "This kvoffd client was made before the process forked; make a new client in the child "
            "(or start the child with the spawn method)."
        )

    def __exit__(self, *_: object) -> None: ...


_transports: weakref.WeakSet[SocketTransport] = weakref.WeakSet()


def _leave(transport: weakref.ref[SocketTransport]) -> None:
    """Announce the end of a process that did not close its clients, as vLLM's at SIGTERM: it has not crashed."""
    if (living := transport()) is not None:
        living.leave()


def _forget_in_child() -> None:
    for transport in list(_transports):
        transport.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
