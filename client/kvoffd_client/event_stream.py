"""KV events of one namespace, and what takes their place where some were lost."""

from __future__ import annotations

from collections import deque

import msgspec

from kvoffd_proto.events import AllBlocksCleared, KvEvent, decode_event_batch

MAX_BUFFERED_EVENTS = 100_000
"""KV events kept until take_events(); beyond it all are dropped and counted."""


class EventStream:
    """Keeps the KV events of one topic until they are taken.

    Each connection begins with ``AllBlocksCleared``, which also takes the place of what was lost: of the blocks that
    are there by then nothing is known.

    Attributes:
        lost: messages that did not come, and events that were dropped because they were not taken.
    """

    def __init__(self, topic: bytes) -> None:
        self.topic = topic
        self._events: deque[KvEvent] = deque([AllBlocksCleared()])
        self.next_sequence: int | None = None
        self.lost = 0

    def disconnected(self) -> None:
        """A connection ended. The next one may be to another daemon, and what is published until then is missed."""
        self.next_sequence = None
        self._events = deque([AllBlocksCleared()])

    def message(self, sequence: bytes, payload: bytes) -> None:
        """Take a message. The daemon numbers those of a topic one after the other."""
        number = int.from_bytes(sequence, "big")
        if self.next_sequence is not None and number != self.next_sequence:
            self._lose(max(1, number - self.next_sequence))
        self.next_sequence = number + 1
        try:
            self._events += decode_event_batch(payload).events
        except msgspec.MsgspecError:
            self._lose(1)
        if len(self._events) > MAX_BUFFERED_EVENTS:
            self._lose(len(self._events))

    def take(self) -> list[KvEvent]:
        """Events since the last call, in order."""
        taken = list(self._events)
        self._events.clear()
        return taken

    def _lose(self, count: int) -> None:
        self.lost += count
        self._events = deque([AllBlocksCleared()])
