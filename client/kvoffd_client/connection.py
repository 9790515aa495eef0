"""A session on real sockets, with the I/O thread that drives it; and what clients of such a connection share."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, ParamSpec, TypeVar

from kvoffd_client.client_options import ClientOptions, Closing, Identity
from kvoffd_client.client_session import Link, Session
from kvoffd_client.errors import ForkedProcess, RequestRefused
from kvoffd_client.socket_link import SocketLink
from kvoffd_proto.codec import CodecError, decode_reply
from kvoffd_proto.lifeline import FrameBuffer, LifelineError, decode_from_daemon
from kvoffd_proto.sockets import SocketPaths

log = logging.getLogger("kvoffd_client")

MESSAGES_PER_ROUND = 64
"""Messages that are read under one hold of the lock."""
MAX_SLEEP_S = 3600.0

S = TypeVar("S", bound=Session)
P = ParamSpec("P")
T = TypeVar("T")
MakeSession = Callable[[Link, Identity, ClientOptions, random.Random], S]


class Connection(Generic[S]):
    """Runs one session. The user's threads call the session directly, under ``lock``, and send from there: a request
    is on its way before the call returns, and never waits until the I/O thread gets the GIL.

    Attributes:
        lock: guards ``session``; held for microseconds.
        session: the state machine.
    """

    def __init__(self, identity: Identity, options: ClientOptions, make_session: MakeSession[S]) -> None:
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._followers = 0  # threads that wait for the leader to read
        self._options = options
        self._pid = os.getpid()
        self._link = SocketLink(SocketPaths(Path(identity.directory)), options)
        self.session: S = make_session(self._link, identity, options, random.Random())
        self.session.on_change = self._wake_waiters
        self._frames = FrameBuffer()
        self._frames_generation = 0
        self._sleeping_until = 0.0
        self._closing = False
        self._last_error = ""
        self._leading = threading.Lock()
        self._leader_sleeps = False
        self._thread = threading.Thread(target=self._run, name=f"kvoffd-{identity.role.value}", daemon=True)
        self._thread.start()

    # --- the user's side -------------------------------------------------------------------------

    def check_process(self) -> None:
        """Raise ForkedProcess in a process that was forked after this client was made."""
        if os.getpid() != self._pid:
            raise ForkedProcess(
                "This kvoffd client was made before the process forked; make a new client in the child "
                "(or start the child with the spawn method)."
            )

    def call(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the session with the lock held. Raises ForkedProcess as ``check_process``."""
        self.check_process()
        with self.lock:
            result = method(*args, **kwargs)
            self.flush()
        return result

    def outcome_of(self, start: Callable[[list[T], float, float], None], timeout_s: float) -> list[T]:
        """Call ``start`` with a list, the time and the timeout; wait until it appends to the list."""
        outcome: list[T] = []
        self.call(start, outcome, time.monotonic(), timeout_s)
        self.wait(lambda: bool(outcome), timeout_s)
        return outcome

    def flush(self) -> None:
        """Wake the I/O thread where that is needed. Called with the lock held, after the sockets were used."""
        if self._sleeping_until and (self._link.must_read() or self.session.wake_at() < self._sleeping_until):
            self._wake_thread()

    def _wake_thread(self) -> None:
        self._sleeping_until = 0.0
        self._link.wake()

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``ready()`` (called with the lock held) or the client is closed; returns what it says then.

        One waiting thread, the leader, reads the sockets itself: a round trip then costs no hand-over between threads.
        """
        self.check_process()
        deadline = time.monotonic() + timeout_s
        if self._leading.acquire(blocking=False):
            try:
                return self._wait_as_leader(ready, deadline)
            finally:
                self._leading.release()
        with self.lock:
            self.flush()
            self._followers += 1
            try:
                self._changed.wait_for(lambda: self._closing or ready(), max(0.0, deadline - time.monotonic()))
            finally:
                self._followers -= 1
            return ready()

    def poll(self) -> None:
        """Read what has arrived, in the caller's thread: no waiting for the I/O thread to get the GIL."""
        self.check_process()
        with self.lock:
            if not self._closing and self._link.readable():
                self._receive_guarded()
                self.flush()

    def _wake_waiters(self) -> None:
        if self._followers:
            self._changed.notify_all()
        if self._leader_sleeps:  # another thread may have read what the leader sleeps for
            self._leader_sleeps = False
            self._link.wake_leader()

    def _wait_as_leader(self, ready: Callable[[], bool], deadline: float) -> bool:
        # What stands between a send and this thread's sleep delays the request where both share a CPU with ZeroMQ.
        woken = False
        while True:
            with self.lock:
                self._leader_sleeps = False
                if not self._closing and not ready() and (woken or self._link.must_read()):
                    woken = False
                    self._receive_guarded()
                pause = deadline - time.monotonic()
                if self._closing or ready() or pause <= 0.0:
                    # What woke this thread wakes no other: if it was not read here, the I/O thread must be woken.
                    if woken and self._sleeping_until and self._link.readable():
                        self._wake_thread()
                    self.flush()
                    return ready()
                if self.session.wake_at() < self._sleeping_until:
                    self._wake_thread()
                if self._link.must_read():
                    continue
                self._leader_sleeps = True
            self._link.sleep_for_messages(pause)
            woken = True

    def _receive_guarded(self) -> None:
        try:
            self._receive()
        except Exception as error:
            self._recover(error)

    def close(self) -> None:
        """End the session and the thread. Repeatable; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self.lock:
            if not self._closing:
                self._closing = True
                self.session.close(time.monotonic())
                self._link.wake()
                self._wake_waiters()
        self._thread.join(self._options.close_timeout_s)
        if self._thread.is_alive():
            log.error("The I/O thread of %s did not end in time.", self.session.identity.name)

    # --- the I/O thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            try:
                while not self._closing:
                    self._run_once()
            except Exception as error:
                with self.lock:
                    self._recover(error)
                time.sleep(self._options.backoff_min_s)  # an error that repeats must not spin
        with self._leading, self.lock:
            self._link.shut()

    def _run_once(self) -> None:
        with self.lock:
            if self._closing:
                return
            now = time.monotonic()
            self.session.tick(now)
            pause = 0.0
            if not self._link.readable():
                pause = min(max(0.0, min(self.session.wake_at(), self._link.wake_at()) - now), MAX_SLEEP_S)
                self._sleeping_until = now + pause
        lifelines = pause > 0.0 and self._link.sleep(pause)
        with self.lock:
            self._sleeping_until = 0.0
            if self._closing:
                return
            self._receive()
            now = time.monotonic()
            if lifelines or self._link.wake_at() <= now:
                self._read_lifelines(now)

    def _receive(self) -> None:
        # Completions before replies before the end: what arrived before the daemon died still counts.
        session = self.session
        now = time.monotonic()
        published, replied = self._link.receive(MESSAGES_PER_ROUND)
        for frames in published:
            if len(frames) == 3:
                session.on_publication(frames[0], frames[1], frames[2], now)
        for frames in replied:
            if len(frames) == 4 and not frames[0]:
                session.on_event_replay(frames[1], frames[2], frames[3], now)
                continue
            try:
                reply = decode_reply(frames[0] if len(frames) == 1 else b"")
            except CodecError as error:
                session.disconnect(f"The daemon sent what is no reply of this protocol ({error}).", now)
                return
            session.on_reply(reply, now)

    def _read_lifelines(self, now: float) -> None:
        session = self.session
        for generation in self._link.drained(now):
            session.on_drained(generation, now)
        if self._frames_generation != session.generation:
            self._frames, self._frames_generation = FrameBuffer(), session.generation
        while (data := self._link.read_lifeline()) is not None:
            if not data:
                session.on_lifeline_end(now, self._link.memory_released(now))
                return
            try:
                for body in self._frames.feed(data):
                    session.on_lifeline_message(decode_from_daemon(body), now)
            except LifelineError as error:
                session.disconnect(f"The daemon's lifeline cannot be understood: {error}", now)

    def _recover(self, error: Exception) -> None:
        """A bug must neither end the thread nor reach the engine: log it once, connect again. Called with the lock."""
        self._sleeping_until = 0.0
        if repr(error) != self._last_error:
            self._last_error = repr(error)
            log.error("The kvoffd client failed internally; it connects again.", exc_info=error)
        try:
            self.session.disconnect(f"The client failed internally: {error!r}.", time.monotonic())
        except Exception:
            log.exception("The kvoffd client could not put its session in order.")
            self._link.close()


class SessionClient(Closing, Generic[S]):
    """What the scheduler's and the worker's client have in common. No call blocks unless it says wait. Thread-safe.

    It connects in the background, and again whenever the daemon goes.
    """

    def __init__(self, identity: Identity, options: ClientOptions, make_session: MakeSession[S]) -> None:
        self._connection: Connection[S] = Connection(identity, options, make_session)
        self._session = self._connection.session

    @property
    def ready(self) -> bool:
        """The session is open, with all that the client opens in it, and the daemon answers."""
        return self._session.usable

    @property
    def epoch(self) -> int:
        """The daemon's life this client is (or was last) connected to; 0 before the first."""
        return self._session.epoch

    @property
    def max_keys(self) -> int:
        """Keys of which a session may have blocks leased; 0 when not ready."""
        limits = self._session.limits
        return limits.max_leased_keys if self.ready and limits is not None else 0

    @property
    def credit_bytes(self) -> int:
        """Bytes of stores the daemon lets a session have outstanding, running ones included; 0 when not ready."""
        return self._session.credit_bytes if self.ready else 0

    @property
    def capabilities(self) -> frozenset[str]:
        """What the daemon last said that it can do, and wants to be told; see ``Welcome``."""
        return self._session.capabilities

    @property
    def problem(self) -> str | None:
        """A sentence that says why the client is not ready; None while it is."""
        return self._session.problem

    @property
    def refusal(self) -> RequestRefused | None:
        """The daemon's refusal, where that is why the client is not ready."""
        return self._session.refusal

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until ready; False when it is not after ``timeout_s`` seconds."""
        return self._connection.wait(lambda: self.ready, timeout_s)

    def wait_settled(self, timeout_s: float) -> bool:
        """As wait_ready(), but return at once when the daemon refuses this client; see ``refusal``."""
        self._connection.wait(lambda: self.ready or self._session.refusal is not None, timeout_s)
        return self.ready

    def close(self) -> None:
        """End the session and the thread, in less than a second; what has no answer fails. Repeatable."""
        self._connection.close()
