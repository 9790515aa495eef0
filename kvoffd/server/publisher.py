"""KV cache events: from the cache's calls to numbered messages in vLLM's format, with a bounded replay."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvoffd.cache.namespace import Namespace
from kvoffd_proto.codec import encode
from kvoffd_proto.events import (
    END_OF_REPLAY,
    MEDIUM_CPU,
    SEQUENCE_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
    kv_topic,
)

MAX_KEPT_BYTES = 32 * 1024**2
"""Payloads that are kept for replay, however few messages they are."""
MAX_EVENTS_PER_MESSAGE = 64
"""Bounds a message where very much happened at once, as when a pool is taken over."""

Frames = tuple[bytes, bytes, bytes]
"""Topic, sequence number, payload: one message of ``events.sock``."""


class EventPublisher:
    """A listener of the cache. Collects what happened and, at each flush, makes messages by namespace."""

    def __init__(self, buffer_steps: int, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._pending: dict[bytes, list[KvEvent]] = {}
        self._buffer_steps = buffer_steps
        self._sent: deque[Frames] = deque()
        """The last messages, the newest with the number before ``sequence``."""
        self._sent_bytes = 0
        self.sequence = 0
        """Number of the next message."""

    def stored(self, namespace: Namespace, group: int, keys: Sequence[bytes], medium: str = MEDIUM_CPU) -> None:
        size = namespace.groups[group].tokens_per_block
        self._add(namespace, BlockStored(list(keys), None, [], size, None, medium, None, group))

    def removed(self, namespace: Namespace, group: int, keys: Sequence[bytes], medium: str = MEDIUM_CPU) -> None:
        self._add(namespace, BlockRemoved(list(keys), medium, group))

    def cleared(self, namespace: Namespace) -> None:
        self._add(namespace, AllBlocksCleared())

    @property
    def has_news(self) -> bool:
        return bool(self._pending)

    def flush(self) -> list[Frames]:
        """Return the messages to publish for all that happened since the last flush."""
        if not self._pending:
            return []
        messages: list[Frames] = []
        pending = [
            (fingerprint, events[start : start + MAX_EVENTS_PER_MESSAGE])
            for fingerprint, events in self._pending.items()
            for start in range(0, len(events), MAX_EVENTS_PER_MESSAGE)
        ]
        for fingerprint, events in pending:
            payload = encode(EventBatch(self._wall_clock(), events))
            frames = (kv_topic(fingerprint), self.sequence.to_bytes(SEQUENCE_BYTES, "big"), payload)
            self._sent.append(frames)
            self._sent_bytes += len(payload)
            while len(self._sent) > self._buffer_steps or self._sent_bytes > MAX_KEPT_BYTES:
                self._sent_bytes -= len(self._sent.popleft()[2])
            messages.append(frames)
            self.sequence += 1
        self._pending.clear()
        return messages

    def replay(self, start: int) -> Iterator[Frames]:
        """The messages from number ``start`` to the last one that there is now, as vLLM's publisher does: those that
        are still kept when the iterator comes to them, then the end marker.
        """
        return self._replay(start, self.sequence)

    def _replay(self, number: int, end: int) -> Iterator[Frames]:
        while (number := max(number, self.sequence - len(self._sent))) < end:
            yield self._sent[number - self.sequence]
            number += 1
        yield b"", END_OF_REPLAY, b""

    def _add(self, namespace: Namespace, event: KvEvent) -> None:
        self._pending.setdefault(namespace.fingerprint, []).append(event)
