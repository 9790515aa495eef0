"""Sends a clear to every node behind a name, however many there are, and records which of them have cleared.

Few of these nodes are connected at a time (``PeerPlaces``), and the others hear of a clear from each other, which
nobody confirms. So a thread of the daemon connects to each of them, for one question.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec
import zmq

from kvoffd.system.threads import TaskThread
from kvoffd.tiers.generations import checked
from kvoffd.tiers.peer_messages import FOLLOW, Follow, curve_keys, decode_raised, peer_socket
from kvoffd.tiers.peer_names import PeerName, resolve
from kvoffd.tiers.store import StoreError, StoreFault
from kvoffd.tiers.tier import PEER

CALLS_S, KNOWN_S = 6.0, 2.0
"""Limits for resolving the names and all calls of a clear, and for the calls before that, of nodes that are known."""
CALLED_AT_ONCE = 64
"""Nodes that are connected for a call at once, with two descriptors each."""
CALL_S, PAUSE_S = 1.5, 0.2
"""Limit for a node's answer, and pause after it. A node that has not cleared is called again, after the others."""
TURN_MS = 50
"""Longest time in which no connection is begun or given up."""
MAX_CLEARS = 16
"""Clears whose calls may wait for those of others."""
MAX_NAMED = 32
"""Nodes of one name that are named in a sentence; the others are counted."""
NOT_CALLED, NO_ANSWER = "not called in time", "no answer"
AHEAD = "it had a higher number, which may be an earlier clear's, by a clock that is ahead"


@dataclass(eq=False)
class Calls:
    """The calls of one clear. Written by the thread that calls, read by any.

    Attributes:
        nodes: addresses of each name's nodes, by the name as it is configured.
        unknown: reasons, half a sentence, why a name's nodes are not known.
        problems: why a node has not cleared, by address; empty for one that has.
    """

    nodes: dict[str, Sequence[str]]
    unknown: dict[str, str]
    problems: dict[str, str] = field(default_factory=dict)
    ended: bool = False

    @property
    def tiers(self) -> set[str]:
        """Names that tiers of the nodes have, or would have."""
        return {f"{PEER}{address}" for addresses in self.nodes.values() for address in addresses}

    def unreached(self, heard: Mapping[str, str]) -> Iterator[str]:
        """Yield a sentence for each name with nodes that have not cleared.

        Args:
            heard: problem of each tier that a connected node has; empty if that has cleared.
        """
        for text, why in list(self.unknown.items()):  # the thread may still change it
            yield f"{text}: its nodes are not known: {why}."
        for text, addresses in self.nodes.items():
            left = [f"{one} ({why})" for one in addresses if (why := self._why_not(one, heard))]
            named = left[:MAX_NAMED] + ([f"and {len(left) - MAX_NAMED} others"] if len(left) > MAX_NAMED else [])
            if left:
                yield f"{text}: {len(left)} of its {len(addresses)} nodes have not cleared: {', '.join(named)}."

    def _why_not(self, address: str, heard: Mapping[str, str]) -> str:
        """Return why a node has not cleared; empty if it has, as it said to a call or to its tier."""
        by_call, by_tier = self.problems.get(address, NOT_CALLED), heard.get(f"{PEER}{address}")
        return "" if "" in (by_call, by_tier) else (by_tier or by_call).removesuffix(".")


class _Call(NamedTuple):
    """A call of a node that has not begun.

    Attributes:
        begin_at: time from which it may begin.
    """

    address: str
    follow: Follow
    begin_at: float


class PeerCaller:
    """Calls all nodes behind names, in a thread of its own: one clear after the other.

    Args:
        listen: where this node lends, as ``host:port``; empty if it does not. Its own address is left out.
        secret: see ``read_secret``.

    Raises NoMoreThreads.
    """

    def __init__(self, names: Sequence[PeerName], listen: str, secret: bytes) -> None:
        self._names, self._listen, self._keys = names, listen, curve_keys(secret)
        self._closed = threading.Event()
        self._thread = TaskThread("kvoffd-calls")

    def call(self, fingerprint: bytes, generation: int, cleared_at: int, known: Sequence[Sequence[str]]) -> Calls:
        """Begin to have all nodes follow a namespace's generation.

        Args:
            cleared_at: see ``Follow``.
            known: addresses that each name had; they are called before it is resolved again, which may take long.
        """
        is_busy = self._thread.waiting >= MAX_CLEARS
        why = "too many clears wait; try it again" if is_busy else "the name is being resolved"
        texts = [name.text for name in self._names]
        calls = Calls(dict(zip(texts, known, strict=True)), dict.fromkeys(texts, why), ended=is_busy)
        if not is_busy:
            until = time.monotonic() + CALLS_S
            self._thread.put(partial(self._run, calls, Follow(fingerprint, generation, b"", cleared_at), until))
        return calls

    def close(self) -> None:
        """End the thread, without waiting for it: it uses nothing of the daemon's."""
        self._closed.set()
        self._thread.stop()

    def _run(self, calls: Calls, follow: Follow, until: float) -> None:
        try:
            self._call_each(calls, follow, min(until, time.monotonic() + KNOWN_S))
            for name in self._names:
                if self._closed.is_set() or time.monotonic() >= until:
                    return  # the question about the name before took all the time; other clears wait
                answer = resolve(name, self._listen)
                if answer.addresses is None:
                    calls.unknown[name.text] = answer.problem
                else:
                    calls.nodes[name.text] = answer.addresses
                    del calls.unknown[name.text]
            self._call_each(calls, follow, until)
        finally:
            calls.ended = True

    def _call_each(self, calls: Calls, follow: Follow, until: float) -> None:
        """Call the nodes that have not cleared until all have, or until the deadline."""
        every = dict.fromkeys(address for each in calls.nodes.values() for address in each)
        waiting = deque(_Call(address, follow, 0.0) for address in every if calls.problems.get(address, NOT_CALLED))
        if waiting:
            with ExitStack() as sockets:
                self._call_until(sockets, waiting, calls, until)

    def _call_until(self, sockets: ExitStack, waiting: deque[_Call], calls: Calls, until: float) -> None:
        """Make these calls, and more of the nodes that do not clear. ``sockets`` closes what is left open."""
        try:
            context = sockets.enter_context(zmq.Context(io_threads=1))
        except zmq.ZMQError as error:
            calls.problems.update(dict.fromkeys([call.address for call in waiting], _cannot_connect(error)))
            return
        running: dict[zmq.Socket[bytes], tuple[_Call, float]] = {}  # calls, and the end of each one's time
        poller, ident, now = zmq.Poller(), secrets.token_bytes(8), time.monotonic()
        while (waiting or running) and now < until and not self._closed.is_set():
            while waiting and waiting[0].begin_at <= now and len(running) < CALLED_AT_ONCE:
                call = waiting.popleft()
                try:
                    dealer = sockets.enter_context(peer_socket(context, zmq.DEALER, self._keys))
                except zmq.ZMQError as error:  # no descriptor is free: some are once other calls have ended
                    calls.problems[call.address] = _cannot_connect(error)
                    waiting.append(call._replace(begin_at=now + PAUSE_S))
                    break
                dealer.connect(f"tcp://{call.address}")
                question = msgspec.msgpack.encode(call.follow)
                dealer.send_multipart([bytes([FOLLOW]), ident, question])  # once it is connected
                poller.register(dealer, zmq.POLLIN)
                running[dealer] = call, now + CALL_S
                calls.problems.setdefault(call.address, NO_ANSWER)
            ready, now = dict(poller.poll(TURN_MS)), time.monotonic()
            for dealer, (call, end_at) in list(running.items()):
                if dealer not in ready and now < end_at:
                    continue
                why, following = NO_ANSWER, call.follow
                if dealer in ready:
                    why, following = _judge(dealer.recv_multipart(zmq.NOBLOCK), ident, call.follow)
                calls.problems[call.address] = why
                poller.unregister(dealer)
                dealer.close()
                del running[dealer]
                if why:
                    waiting.append(_Call(call.address, following, now + PAUSE_S))


def _cannot_connect(error: zmq.ZMQError) -> str:
    return f"this node cannot connect: {error}"


def _judge(parts: Sequence[bytes], ident: bytes, follow: Follow) -> tuple[str, Follow]:
    """Return why a node that has answered has not cleared, empty if it has, and what the next call says."""
    try:
        if len(parts) != 3 or parts[0] != ident:
            raise StoreError(StoreFault.PROTOCOL, "Its answer is not valid.")
        found = checked(decode_raised(parts[1], follow.generation), follow.fingerprint)
    except StoreError as error:
        return error.sentence.removesuffix("."), follow
    if found > follow.generation:
        return AHEAD, msgspec.structs.replace(follow, generation=found + 1)
    return "", follow
