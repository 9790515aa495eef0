"""KV events for routers as numbered messages: what they are sent, what is kept for a replay, what latecomers get.

All subscribers get every number, so that a gap is a loss: what a message has for others is an empty batch for them, and
so is a heartbeat. Numbers begin at the time of the daemon's start in microseconds: after a restart they go on higher
up, and a subscriber sees a gap, not numbers that it has had.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvoffd.server.router_index import RouterIndex
from kvoffd_proto.codec import encode
from kvoffd_proto.events import END_OF_REPLAY, SEQUENCE_BYTES
from kvoffd_proto.router_events import RouterBatch

MAX_KEPT_BYTES = 32 * 1024**2
"""Payloads that are kept for replay, however few messages they are."""
ENTRY_BYTES = 128
"""What a kept message takes besides its payload."""


class RouterMessage(NamedTuple):
    """One message: its number, its topic and its payload; neither in a heartbeat."""

    number: int
    topic: bytes = b""
    payload: bytes = b""

    def frames(self, prefixes: set[bytes], empty: bytes) -> tuple[bytes, bytes, bytes]:
        """What a subscriber to topics with these prefixes is sent; ``empty`` is an empty batch.

        Who subscribes to all topics gets an empty one, as a vLLM sends that has none set: some take no other.
        """
        if self.payload and b"" in prefixes:
            topic, payload = b"", self.payload
        elif self.payload and any(self.topic.startswith(prefix) for prefix in prefixes):
            topic, payload = self.topic, self.payload
        else:
            topic, payload = min(prefixes), empty
        return topic, self.number.to_bytes(SEQUENCE_BYTES, "big"), payload


class RouterStream:
    """Makes messages of what the index publishes."""

    def __init__(self, index: RouterIndex, buffer_steps: int) -> None:
        self._index = index
        self._buffer_steps = buffer_steps
        self._kept: deque[RouterMessage] = deque()
        """The last messages, without gaps."""
        self._kept_bytes = 0
        self.number = int(time.time() * 1e6)
        """Of the next message."""
        self.messages = 0

    def take(self) -> Iterator[RouterMessage]:
        """What has happened since the last call."""
        for topic, events in self._index.take():
            payload = encode(RouterBatch(time.time(), events))
            yield self._keep(RouterMessage(self.number, topic, payload))

    def heartbeat(self) -> RouterMessage:
        """A message of its number alone."""
        return self._keep(RouterMessage(self.number))

    def snapshot(self, asked: Iterable[bytes]) -> Iterator[tuple[RouterMessage, RouterMessage]]:
        """All that is published now: each message as who comes late gets it, and as the others do.

        ``asked``: what the former have subscribed to.
        Between two steps ``take`` must be called to its end. A replay has it as the others do: who had the messages
        before these needs nothing of them.
        """
        for topic, events in self._index.snapshot(asked):
            payload = encode(RouterBatch(time.time(), events))
            number = self.number
            yield RouterMessage(number, topic, payload), self.heartbeat()

    def empty_batch(self) -> bytes:
        return encode(RouterBatch(time.time(), []))

    def replay(self, start: int) -> Iterator[tuple[bytes, bytes, bytes]]:
        """The messages from number ``start`` to the last one that there is now, and vLLM's end marker.

        Where the first of them is not kept any more, only that: who comes late gets all anew when it subscribes.
        """
        return self._replay(start, self.number)

    def _replay(self, number: int, end: int) -> Iterator[tuple[bytes, bytes, bytes]]:
        empty = self.empty_batch()
        while self.number - len(self._kept) <= number < end:
            yield self._kept[number - self.number].frames({b""}, empty)
            number += 1
        yield b"", END_OF_REPLAY, b""

    def _keep(self, message: RouterMessage) -> RouterMessage:
        self.number += 1
        self.messages += 1
        self._kept.append(message)
        self._kept_bytes += len(message.payload) + ENTRY_BYTES
        while len(self._kept) > self._buffer_steps or self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft().payload) + ENTRY_BYTES
        return message
