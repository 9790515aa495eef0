"""One client's connection: a session on real sockets, an I/O thread that drives it, a lock around both."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from kvoffd_client.errors import ForkedProcess
from kvoffd_client.link import Link
from kvoffd_client.options import ClientOptions
from kvoffd_client.session import Identity, Session
from kvoffd_client.socket_link import SocketLink
from kvoffd_proto.codec import CodecError, decode_reply
from kvoffd_proto.lifeline import FrameBuffer, LifelineError, decode_from_daemon
from kvoffd_proto.messages import AnyReply
from kvoffd_proto.sockets import SocketPaths

log = logging.getLogger("kvoffd_client")

MESSAGES_PER_TURN = 256
MAX_SLEEP_S = 3600.0

S = TypeVar("S", bound=Session)
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
        self._options = options
        self._pid = os.getpid()
        self._link = SocketLink(SocketPaths(Path(identity.directory)), options)
        self.session: S = make_session(self._link, identity, options, random.Random())
        self.session.on_change = self._changed.notify_all
        self._frames = FrameBuffer()
        self._frames_of = 0
        self._sleeping_until = 0.0
        self._closing = False
        self._failed_with = ""
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

    def flush(self) -> None:
        """Call with the lock held, after the session sent something: wakes the I/O thread where that is needed."""
        if self._sleeping_until and (self._link.readable() or self.session.wake_at() < self._sleeping_until):
            self._sleeping_until = 0.0
            self._link.wake()

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``ready()`` (called with the lock held) or the client is closed; returns what it says then."""
        self.check_process()
        with self.lock:
            self._changed.wait_for(lambda: self._closing or ready(), timeout_s)
            return ready()

    def close(self) -> None:
        """End the session and the thread. Repeatable; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self.lock:
            if not self._closing:
                self._closing = True
                self.session.close(time.monotonic())
                self._link.wake()
                self._changed.notify_all()
        self._thread.join(self._options.close_timeout_s)
        if self._thread.is_alive():
            log.error("The I/O thread of %s did not end in time.", self.session.identity.name)

    # --- the I/O thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            try:
                while not self._closing:
                    self._turn()
            except Exception as error:
                self._survive(error)
        with self.lock:
            self._link.shut()

    def _turn(self) -> None:
        with self.lock:
            if self._closing:
                return
            session = self.session
            now = time.monotonic()
            session.tick(now)
            if self._link.readable():
                pause = 0.0
                self._sleeping_until = 0.0
            else:
                wake_at = session.wake_at()
                pause = min(max(0.0, wake_at - now), MAX_SLEEP_S)
                self._sleeping_until = now + pause
        lifelines = pause > 0.0 and self._link.sleep(pause)
        with self.lock:
            self._sleeping_until = 0.0
            if self._closing:
                return
            # Completions before replies before the end: what arrived before the daemon died still counts.
            published = self._link.receive_events(MESSAGES_PER_TURN)
            replied = self._link.receive_jobs(MESSAGES_PER_TURN)
            generation = session.generation
        replies = [_decode(frames) for frames in replied]
        with self.lock:
            if not self._closing:
                self._apply(generation, published, replied, replies)
                if lifelines:
                    self._read_lifelines(time.monotonic())

    def _apply(
        self,
        generation: int,
        published: list[list[bytes]],
        replied: list[list[bytes]],
        replies: list[AnyReply | str | None],
    ) -> None:
        session = self.session
        now = time.monotonic()
        if session.generation == generation:
            for frames in published:
                if len(frames) == 3:
                    session.publication(frames[0], frames[1], frames[2], now)
            for frames, reply in zip(replied, replies, strict=True):
                if reply is None:
                    session.event_replay(frames[1], frames[2], frames[3], now)
                elif isinstance(reply, str):
                    session.lose(f"The daemon sent what is no reply of this protocol ({reply}).", now)
                else:
                    session.reply(reply, now)

    def _read_lifelines(self, now: float) -> None:
        session = self.session
        for ended in self._link.drained():
            session.drained(ended, now)
        if self._frames_of != session.generation:
            self._frames, self._frames_of = FrameBuffer(), session.generation
        while (data := self._link.read_lifeline()) is not None:
            if not data:
                session.lifeline_ended(now)
                return
            try:
                for body in self._frames.feed(data):
                    session.lifeline_message(decode_from_daemon(body), now)
            except LifelineError as error:
                session.lose(f"The daemon's lifeline cannot be understood: {error}", now)

    def _survive(self, error: Exception) -> None:
        """A bug must not end the thread silently: tell it once, start over."""
        if repr(error) != self._failed_with:
            self._failed_with = repr(error)
            log.exception("The kvoffd client's I/O thread failed; it connects again.")
        with self.lock:
            self._sleeping_until = 0.0
            try:
                self.session.lose(f"The client failed inside: {error!r}.", time.monotonic())
            except Exception:
                log.exception("The kvoffd client could not put its session in order.")
                self._link.close()
        time.sleep(self._options.backoff_min_s)  # whatever it is, it must not spin


def _decode(frames: list[bytes]) -> AnyReply | str | None:
    """The reply, None for a part of an event replay, or what is wrong with it."""
    if len(frames) == 4 and not frames[0]:
        return None
    if len(frames) != 1:
        return f"{len(frames)} frames"
    try:
        return decode_reply(frames[0])
    except CodecError as error:
        return str(error)
