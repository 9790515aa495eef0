"""Nodes that peers may ask, without a daemon or NIXL: all have no blocks, and follow what they are told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Self

import msgspec
import zmq

from kvoffd.tiers.peer_messages import FIND, FOLLOW, GENERATION_BYTES, Find, Follow, curve_keys, peer_socket


def cleared(address: str, follow: Follow) -> bytes | None:
    """The answer of a node that has cleared at once."""
    return follow.generation.to_bytes(GENERATION_BYTES, "little") + b"\1"


class AnsweringNodes:
    """Nodes at these addresses, in one thread.

    Args:
        answer: called in the thread; returns an address's answer to a ``Follow``, or None for none.

    Attributes:
        asked: addresses of the ``Follow`` messages with a generation, in order.
    """

    def __init__(
        self, secret: bytes, addresses: Sequence[str], answer: Callable[[str, Follow], bytes | None] = cleared
    ) -> None:
        self._secret, self._addresses, self._answer = secret, addresses, answer
        self.asked: list[str] = []
        self._stopped = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(60.0)
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join(60.0)

    def _run(self) -> None:
        with zmq.Context() as context:
            poller, address_of = zmq.Poller(), dict[zmq.Socket[bytes], str]()
            for address in self._addresses:
                router = peer_socket(context, zmq.ROUTER, curve_keys(self._secret), is_server=True)
                router.bind(f"tcp://{address}")
                poller.register(router, zmq.POLLIN)
                address_of[router] = address
            self._started.set()
            while not self._stopped.is_set():
                for one, _ in poller.poll(20):
                    self._reply(one, address_of[one])
            context.destroy(linger=0)

    def _reply(self, router: zmq.Socket[bytes], address: str) -> None:
        route, kind, ident, payload = router.recv_multipart()
        reply: bytes | None = None
        if kind[0] == FIND:
            find = msgspec.msgpack.decode(payload, type=Find)
            reply = find.generation.to_bytes(GENERATION_BYTES, "little") + bytes(len(find.keys) // find.key_bytes)
        elif kind[0] == FOLLOW:
            follow = msgspec.msgpack.decode(payload, type=Follow)
            if follow.generation:
                self.asked.append(address)
            reply = self._answer(address, follow)
        if reply is not None:
            router.send_multipart([route, ident, reply, msgspec.msgpack.encode((b"", 0))])
