"""The daemon's end of its helper process: starts and watches it, and sends it requests. See ``peer_helper.py``."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from pathlib import Path

import msgspec

from kvoffd.errors import KvoffdError
from kvoffd.pool.memory import PoolMemory
from kvoffd.system.rare_warnings import RareWarnings
from kvoffd.system.threads import AbandonableThreads, TaskThread
from kvoffd.tiers.peer_messages import (
    ANSWER,
    BEAT,
    CONNECT,
    DONE,
    FAILED,
    FIND,
    FOLLOW,
    FREE,
    MAX_MESSAGE_BYTES,
    MODULES,
    PIN,
    READ,
    RELEASE,
    REPLY,
    REQUEST,
    SLICE_BYTES,
    SLICES,
    STARTED,
    HelperSettings,
    frame,
    parsed,
)
from kvoffd.tiers.store import StoreError, StoreFault
from kvoffd_proto.build import program
from kvoffd_proto.errors import ErrorCode

logger = logging.getLogger(__name__)

START_S = 10.0
"""Time since a helper's start for which a thread that asks waits for it."""
STARTS_S, PINNED_PER_S = 60.0, 2**30
"""Time after which a helper that starts is killed, and bytes of the pool, which RDMA pins, that add a second."""
SEND_S, SEND_PAUSE_S = 0.5, 0.001
"""Time for the helper to accept a message, after which it counts as hanging, and the pause between attempts."""
MAX_REPLIES = 64
"""Replies that wait for a helper that accepts no message now; further ones are dropped."""
HANGS_S = 10.0
"""Time without a sign of life (``BEAT_S``) after which the helper is killed."""
FIRST_PAUSE_S, MAX_PAUSE_S, STEADY_S = 0.25, 1.0, 10.0
"""Pauses before the helper is started again, longer each time that it ended within the last."""
CANNOT_WORK_PAUSE_S = 30.0
"""Longest pause if it said that it cannot work."""
DEBIAN_LIBRARY = "/usr/lib/kvoffd"
"""Directory of kvoffd, and of what it needs, in the Debian package."""


def read_secret(path: str) -> bytes:
    """Return the secret that all nodes share. Raises KvoffdError."""
    try:
        with open(path, "rb") as file:
            secret = file.read(4097).strip()
    except OSError as error:
        raise KvoffdError(f"The secret of peers cannot be read: {error}.") from error
    if not 16 <= len(secret) <= 4096:
        why = f"{path} must hold 16 to 4096 characters, the same on all nodes; make it with: openssl rand -hex 32."
        raise KvoffdError(why, ErrorCode.BAD_ARGUMENT)
    return secret


def check_installed() -> None:
    """Raise KvoffdError if NIXL is not installed. It is not imported: that is for the helper."""
    if not any(importlib.util.find_spec(name) for name in MODULES):
        # --no-deps: else it brings torch for CUDA. The Debian package has a directory of its own.
        where = f"--target {DEBIAN_LIBRARY} " if __file__.startswith(f"{DEBIAN_LIBRARY}/") else ""
        how = f"install it with: {sys.executable} -m pip install --no-deps {where}nixl-cu12."
        if importlib.util.find_spec("pip") is None:
            how = f"take the image with it (make image PEERS=yes), or get pip (apt install python3-pip), then {how}"
        raise KvoffdError(f"Peers need NIXL, which is not installed; {how}", ErrorCode.BAD_ARGUMENT)


def helper_command(channel: int) -> list[str]:
    """Return the helper's command line."""
    return [*program("kvoffd.tiers.peer_helper", Path(__file__).parents[2]), str(channel)]


class PeerCall:
    """A request to the helper that a thread waits for.

    Attributes:
        life: ``HelperProcess.life`` when it was sent.
        ended: set once there is a ``reply``, or a ``problem``, a sentence why there is none.
    """

    def __init__(self, kind: int, peer: int, ident: int, life: int) -> None:
        self.kind, self.peer, self.ident, self.life = kind, peer, ident, life
        self.ended = threading.Event()
        self.reply: bytes | None = None
        self.problem = ""


class HelperProcess:
    """Starts the helper, and starts it again when it has ended. ``call`` and ``send`` are for any thread.

    Args:
        settings: without descriptors.
        pool: descriptor, offset and size of the pool; only served if the settings name an address to listen on.
        on_request: called in a thread with a peer's route, the id and kind of its request, and the request.
        on_end: called in that thread when a helper that was started is gone, and with it all that peers borrowed.

    Raises NoMoreThreads; then none runs, and nothing of it is left.
    """

    def __init__(
        self,
        settings: HelperSettings,
        pool: tuple[int, int, int],
        on_request: Callable[[bytes, int, int, bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        self._settings, self._pool = settings, pool
        self._on_request, self._on_end = on_request, on_end
        self._lock = threading.Lock()
        self._calls: dict[int, PeerCall] = {}
        """Requests that a thread waits for, by id."""
        self._reads: dict[int, int] = {}
        """Peers by the ids of reads whose end the helper has not reported."""
        self._began = time.monotonic()
        """Time when the last helper was started."""
        self._ids = count(secrets.randbits(62))
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        """Set when the daemon stops."""
        self._start_ended = threading.Event()
        """Set unless a helper is starting, which ``check`` waits for: the last one works, or has failed."""
        self._cannot_work = False
        """Whether the last helper said so, as without NIXL."""
        self.life = 0
        """Number of helpers that have ended."""
        self.up, self.problem = False, ""
        """Whether a helper works, and if not, a sentence why."""
        self.refused_handshakes = self._refused_by_earlier = 0
        """Connections to ``listen`` that were refused; those of earlier helpers."""
        self._refusals = RareWarnings(logger)
        nbytes = len(settings.peers) * SLICES * SLICE_BYTES
        with ExitStack() as undone:  # if the memory or a thread is not to be had
            self._landing = PoolMemory.create(nbytes, "kvoffd-peers") if nbytes else None
            """Memory into which the helper reads; ``PeerStore`` copies from there into the pool."""
            self.landing_address = 0
            if self._landing is not None:
                undone.callback(self._landing.close)
                self._landing.touch(1)
                self.landing_address = self._landing.mapping.address
            self._replies = TaskThread("kvoffd-replies")
            undone.callback(self._replies.close, HANGS_S)
            self._thread = AbandonableThreads([("kvoffd-peers", self._run)], self._closed.set)
            undone.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def check(self) -> None:
        """Raise StoreError unless the helper works. Waits for one that starts."""
        if not self.up:
            self._start_ended.wait(max(0.0, self._began + START_S - time.monotonic()))
        if not self.up:
            why = self.problem or "The helper process for peers has not started yet."
            raise StoreError(StoreFault.HELPER, why)

    def send(self, data: bytes, timeout_s: float = 0.0, life: int | None = None) -> bool:
        """Send a frame; return False if the helper does not accept it in time. ``life``: the only one to send it to."""
        until = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if self._channel is None or life not in (None, self.life):
                    return False
                try:
                    self._channel.send(data, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass  # its queue is full
                except OSError:
                    return False
                else:
                    return True
            if time.monotonic() >= until:  # without the lock: the daemon's thread must not wait for it
                return False
            time.sleep(SEND_PAUSE_S)

    def has_reads(self, peer: int) -> bool:
        """Return whether a peer's memory here may still be written, also by reads that nobody waits for any more."""
        with self._lock:
            return peer in self._reads.values()

    def connect(self, peer: int, address: str) -> bool:
        """Give a peer's number to another one, or to none, while nothing is being read of it.

        Return False if the helper has no time. One that starts has it from the settings.
        """
        with self._lock:
            before, self._settings.peers[peer] = self._settings.peers[peer], address
            channel = self._channel
        if channel is None or self.send(frame(CONNECT, peer, 0, address.encode())):
            return True
        with self._lock:
            if self._channel is not channel:  # it has ended, and the next one may have started with the new address
                return True
            self._settings.peers[peer] = before
        return False

    def reply(self, route: bytes, ident: int, payload: bytes) -> None:
        """Answer a peer's request. Never blocks: a thread sends what the helper does not accept at once."""
        data = frame(REPLY, len(route), ident, route + payload)
        if not self.send(data) and self._replies.waiting < MAX_REPLIES:
            self._replies.put(partial(self.send, data, SEND_S))

    def begin(self, kind: int, peer: int, payload: bytes) -> PeerCall:
        """Send a request, whose answer ``wait`` returns. Raises StoreError."""
        with self._lock:
            call = PeerCall(kind, peer, next(self._ids) % 2**63, self.life)
            self._calls[call.ident] = call
            if kind == READ:
                self._reads[call.ident] = peer
        # A next helper would read for a call that has failed, into memory that nobody knows to be in use.
        if not self.send(frame(kind, peer, call.ident, payload), SEND_S, call.life):
            with self._lock:  # not ``end``: the helper has no read of this id, whose memory it would have to free
                self._reads.pop(call.ident, None)
                self._calls.pop(call.ident, None)
            raise StoreError(StoreFault.HELPER, self.problem or "The helper process for peers hangs.")
        return call

    def wait(self, call: PeerCall, deadline: float) -> bytes:
        """Return the answer. Raises StoreError."""
        if not call.ended.wait(max(0.0, deadline - time.monotonic())):
            raise StoreError(StoreFault.TIMEOUT, "The peer did not answer in time.")
        if call.reply is None:
            kind = StoreFault.UNREACHABLE if call.kind in (FIND, FOLLOW) else StoreFault.DISCONNECTED
            raise StoreError(kind, call.problem, is_lasting=False)
        return call.reply

    def end(self, call: PeerCall) -> None:
        """Forget a call that was sent. The helper uses a read's memory again once nothing can be written there any
        more."""
        with self._lock:
            self._calls.pop(call.ident, None)
        if call.kind == READ and not self.send(frame(FREE, call.peer, call.ident), SEND_S) and self.life == call.life:
            self._kill()  # it hangs, and that memory would be lost

    def call(self, kind: int, peer: int, payload: bytes, deadline: float) -> tuple[int, bytes]:
        """Send a request; return its id and the answer. Raises StoreError."""
        call = self.begin(kind, peer, payload)
        try:
            return call.ident, self.wait(call, deadline)
        except StoreError:
            if kind == PIN:  # the peer may have lent blocks, and its answer be late or lost
                self.release(peer, call.ident)
            raise
        finally:
            self.end(call)

    def release(self, peer: int, ident: int) -> None:
        """Return what the PIN with this id has borrowed."""
        self.send(frame(RELEASE, peer, ident), SEND_S)

    def fail_calls(self, why: str, peer: int | None = None) -> None:
        """Have all that wait for an answer, or for one peer's, raise StoreError."""
        with self._lock:
            calls = [call for call in self._calls.values() if peer in (None, call.peer)]
        for call in calls:
            call.problem = why
            call.ended.set()

    def interrupt(self) -> None:
        """Have all calls, and those that wait for a helper that starts, raise StoreError: the daemon stops."""
        self._closed.set()
        self._start_ended.set()
        self.fail_calls("The daemon stops.")

    def close(self, deadline_s: float) -> bool:
        """End the helper; return False if it does not end in time."""
        self.interrupt()
        self._kill()
        self._replies.stop()
        until = time.monotonic() + deadline_s
        ended = self._thread.join(until)
        ended = self._replies.close(max(0.0, until - time.monotonic())) and ended
        if ended and self._landing is not None:
            self._landing.close()
            self._landing = None
        return ended

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            with suppress(OSError):
                process.kill()

    def _run(self) -> None:
        """Start one helper after the other, in the thread."""
        pause_s = FIRST_PAUSE_S
        while not self._closed.is_set():
            began = time.monotonic()
            self._cannot_work = False
            try:
                self._run_helper()
            except Exception as error:
                self._cannot_work = True
                self.problem = f"The helper process for peers cannot be started: {error}."
            self._start_ended.set()
            if self._closed.is_set():
                return
            # One that cannot work may take long to find that out, on a busy machine.
            lived = not self._cannot_work and time.monotonic() - began >= STEADY_S
            most_s = CANNOT_WORK_PAUSE_S if self._cannot_work else MAX_PAUSE_S
            pause_s = FIRST_PAUSE_S if lived else min(most_s, 2 * pause_s)
            logger.warning("%s It is started again in %.1f s.", self.problem, pause_s)
            self._closed.wait(pause_s)

    def _run_helper(self) -> None:
        """Start a helper, and handle its messages until it is gone."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                self._process, settings = self._start(theirs.fileno())
            self._began = time.monotonic()
            pinned = self._pool[2] if settings.listen else 0
            self._start_ended.clear()
            if self._closed.is_set():  # ``interrupt`` may have set the event before it was cleared
                self._start_ended.set()
            hung = ""
            try:
                with self._lock:  # so that no address is lost that is set now
                    ours.send(msgspec.msgpack.encode(settings))
                    self._channel = ours
                if self._closed.is_set():  # ``close`` may have killed the one before
                    self._kill()
                hung = self._receive(ours, STARTS_S + pinned / PINNED_PER_S)
            except ConnectionError:
                pass  # it ended before it had read all messages
            finally:
                self._end_life(self._process, hung)

    def _receive(self, channel: socket.socket, patience_s: float) -> str:
        """Handle a helper's messages until it ends, or none comes in time; return how it hung, in words, empty if it
        ended. ``patience_s``: for the first one, as long as it starts."""
        frames = select.poll()
        frames.register(channel, select.POLLIN)
        # SO_RCVTIMEO would begin again whenever a signal, or a container that is frozen, interrupts the call.
        while frames.poll(1000 * patience_s):
            if not (data := channel.recv(MAX_MESSAGE_BYTES)):
                return ""
            self._received(data)
            if data[0] == STARTED:
                patience_s = HANGS_S
        return f"hung{'' if self.up else ' while it started'}, and was killed"

    def _end_life(self, process: subprocess.Popen[bytes], hung: str) -> None:
        """Kill a helper, wait for its end, and have all that waited for it know."""
        self.up = False
        with self._lock:
            self._channel = None
        self._kill()
        code = process.wait()
        self.life += 1
        self._refused_by_earlier = self.refused_handshakes
        with self._lock:
            self._reads.clear()
        if not (self._closed.is_set() or self._cannot_work):  # in that case it said why itself
            self.problem = f"The helper process for peers {hung or f'ended ({code}); the log may say why'}."
        self.fail_calls("The helper process for peers ended.")
        self._on_end()

    def _start(self, channel: int) -> tuple[subprocess.Popen[bytes], HelperSettings]:
        """Start the process, which inherits its end of the channel. Returns it, and the settings to send."""
        settings, inherited, served = self._settings, [channel], -1
        if settings.listen:
            fd, offset, nbytes = self._pool
            served = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            settings = msgspec.structs.replace(settings, pool=(served, offset, nbytes))
            inherited.append(served)
        if self._landing is not None:
            landing = self._landing.fd, self._landing.size_bytes
            settings = msgspec.structs.replace(settings, landing=landing)
            inherited.append(self._landing.fd)
        try:
            return subprocess.Popen(helper_command(channel), pass_fds=inherited, stdin=subprocess.DEVNULL), settings
        finally:
            if served >= 0:
                os.close(served)

    def _received(self, data: bytes) -> None:
        """Handle a message of the helper, in the thread."""
        kind, number, ident, payload = parsed(data)
        if kind == REQUEST:
            self._on_request(payload[:number], ident, payload[number], payload[number + 1 :])
            return  # its id is the peer's, and answers no call
        if kind == STARTED:
            self.up, self._cannot_work, self.problem = not payload, bool(payload), payload.decode(errors="replace")
            self._start_ended.set()
            if self.up:
                logger.info("The helper process for peers has started.")
            return
        if kind == BEAT:
            self._count_refused(ident)
            return
        if kind in (DONE, FAILED):
            with self._lock:
                self._reads.pop(ident, None)
        if (call := self._calls.get(ident)) is not None and call.peer == number:
            if kind == (DONE if call.kind == READ else ANSWER):
                call.reply = payload
            else:
                call.problem = payload.decode(errors="replace")
            call.ended.set()

    def _count_refused(self, count: int) -> None:
        """Count the connections to ``listen`` that this helper has refused so far."""
        new = self._refused_by_earlier + count - self.refused_handshakes
        self.refused_handshakes += new
        if new:
            self._refusals.warn(
                "%d connections to peer_listen were refused so far: who connects has another secret, or is no kvoffd. "
                "Give all nodes the same peer_secret_file.",
                self.refused_handshakes,
            )
