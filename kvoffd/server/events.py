"""Messages of ``events.sock``: results of jobs, numbered by session, and KV events, numbered by namespace."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

from kvoffd.cache.hooks import NO_TOKENS, BlockTokens
from kvoffd.cache.namespace import Namespace
from kvoffd_proto.codec import encode
from kvoffd_proto.events import (
    MEDIUM_CPU,
    SEQUENCE_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
    session_topic,
)
from kvoffd_proto.messages import Completions, JobResult

MAX_EVENTS_PER_MESSAGE = 64
"""Limit of a message, for when a pool is recovered."""

Frames = tuple[bytes, bytes, bytes]
"""Topic, sequence number, payload: one message of ``events.sock``."""


class CompletionLog:
    """A session's results: published in numbered batches, and kept until the client acknowledges them."""

    def __init__(self, epoch: int, session_id: int) -> None:
        self.pending: list[JobResult] = []
        """Results of no batch yet."""
        self.nbytes = 0
        """Encoded size of the unacknowledged batches."""
        self._topic = session_topic(epoch, session_id)
        self._unacknowledged: deque[tuple[Completions, int]] = deque()
        """Batches with their encoded sizes, oldest first."""
        self._sequence = 0

    def close_batch(self, credit_bytes: int) -> Frames | None:
        """Number the pending results as one batch, and return the frames that publish it; None without results."""
        if not self.pending:
            return None
        self._sequence += 1
        batch, self.pending = Completions(self._sequence, credit_bytes, self.pending), []
        payload = encode(batch)
        self._unacknowledged.append((batch, len(payload)))
        self.nbytes += len(payload)
        return self._topic, self._sequence.to_bytes(SEQUENCE_BYTES, "big"), payload

    def acknowledge(self, sequence: int) -> None:
        """Forget all batches up to this one, which the client has received."""
        while self._unacknowledged and self._unacknowledged[0][0].sequence <= sequence:
            self.nbytes -= self._unacknowledged.popleft()[1]

    def replay(self) -> list[Completions]:
        return [batch for batch, _ in self._unacknowledged]


class EventLog:
    """Collects the cache's events and makes messages of them."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self.pending: dict[Namespace, list[KvEvent]] = {}
        """Events that the next ``take`` returns."""
        self._numbers: WeakKeyDictionary[Namespace, int] = WeakKeyDictionary()
        """Number of each namespace's next message. A namespace that was forgotten begins at 0 when it is opened again:
        its blocks were reported as cleared."""
        self.published = 0
        """Messages published for all namespaces."""

    def stored(
        self,
        namespace: Namespace,
        group: int,
        keys: Sequence[bytes],
        medium: str = MEDIUM_CPU,
        tokens: Mapping[bytes, BlockTokens] = NO_TOKENS,
    ) -> None:
        block_tokens, events = namespace.specs[group].tokens_per_block, self.pending.setdefault(namespace, [])
        if not tokens:
            events.append(BlockStored(list(keys), block_tokens, medium, group))
            return
        known = [key for key in keys if key in tokens]
        if known:
            parents = [tokens[key].parent for key in known]
            token_ids = b"".join([tokens[key].token_ids for key in known])
            events.append(BlockStored(known, block_tokens, medium, group, parents, token_ids))
        if len(known) < len(keys):
            unknown = [key for key in keys if key not in tokens]
            events.append(BlockStored(unknown, block_tokens, medium, group))

    def removed(self, namespace: Namespace, group: int, keys: Sequence[bytes], medium: str = MEDIUM_CPU) -> None:
        self.pending.setdefault(namespace, []).append(BlockRemoved(list(keys), medium, group))

    def cleared(self, namespace: Namespace) -> None:
        self.pending.setdefault(namespace, []).append(AllBlocksCleared())

    def take(self) -> list[Frames]:
        """Return the messages for all events since the last call."""
        messages: list[Frames] = []
        for namespace, events in self.pending.items():
            number = self._numbers.get(namespace, 0)
            for start in range(0, len(events), MAX_EVENTS_PER_MESSAGE):
                payload = encode(EventBatch(self._wall_clock(), events[start : start + MAX_EVENTS_PER_MESSAGE]))
                messages.append((namespace.topic, number.to_bytes(SEQUENCE_BYTES, "big"), payload))
                number += 1
            self._numbers[namespace] = number
        self.pending.clear()
        self.published += len(messages)
        return messages
