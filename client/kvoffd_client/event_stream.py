"""KV events of one namespace in their order, whatever the events socket dropped."""

from __future__ import annotations

from collections import deque

import msgspec

from kvoffd_proto.events import END_OF_REPLAY, AllBlocksCleared, KvEvent, decode_event_batch

MAX_BUFFERED_EVENTS = 100_000
"""KV events kept until take_events(); beyond it the oldest are dropped and counted."""
MAX_AHEAD = 10_000


class EventStream:
    """Puts messages in order and keeps the events of one topic until they are taken.

    The daemon numbers all its KV event messages from 0, whatever their namespace, so a subscriber that wants to see
    gaps reads every topic and decodes its own.

    Attributes:
        lost: messages that no replay could bring any more, and events that were dropped because they were not taken.
        next_sequence: number of the message that comes next; a replay is asked for from here on.
    """

    def __init__(self, topic: bytes, max_events: int = MAX_BUFFERED_EVENTS) -> None:
        self._topic = topic
        self._max_events = max_events
        self._events: deque[KvEvent] = deque()
        self._ahead: dict[int, tuple[bytes, bytes]] = {}
        self._epoch: int | None = None
        self._replay_upto = -1
        self.next_sequence = 0
        self.lost = 0

    @property
    def has_gap(self) -> bool:
        """Messages are missing that a replay may bring."""
        return bool(self._ahead)

    def new_epoch(self, epoch: int) -> None:
        """Begin anew where the epoch is another: a new daemon numbers its messages from 0 and holds no block."""
        if epoch == self._epoch:
            return
        if self._epoch is not None:
            self._keep(AllBlocksCleared())
        self._epoch = epoch
        self._ahead.clear()
        self._replay_upto = -1
        self.next_sequence = 0

    def begin_replay(self) -> int:
        """Prepare for a replay that is asked for now; returns the number that it must begin with."""
        self._replay_upto = max(self._ahead, default=-1)
        return self.next_sequence

    def replayed(self, topic: bytes, sequence: bytes, payload: bytes) -> None:
        """Take a replayed message. The end marker gives up what this replay should have brought and did not."""
        if sequence == END_OF_REPLAY:
            while self._ahead and min(self._ahead) <= self._replay_upto:
                self._skip_gap()
            return
        # The daemon replays in order: an earlier message has come already, or cannot be replayed any more.
        self._replay_upto = max(self._replay_upto, int.from_bytes(sequence, "big"))
        self.message(topic, sequence, payload)

    def message(self, topic: bytes, sequence: bytes, payload: bytes) -> None:
        number = int.from_bytes(sequence, "big")
        if number < self.next_sequence:
            return
        self._ahead[number] = (topic, payload)
        self._deliver()
        if len(self._ahead) > MAX_AHEAD:
            self._skip_gap()

    def take(self) -> list[KvEvent]:
        """Events since the last call, in order."""
        taken = list(self._events)
        self._events.clear()
        return taken

    def _skip_gap(self) -> None:
        first = min(self._ahead)
        self.lost += first - self.next_sequence
        self.next_sequence = first
        self._deliver()

    def _deliver(self) -> None:
        while (found := self._ahead.pop(self.next_sequence, None)) is not None:
            self.next_sequence += 1
            topic, payload = found
            if topic != self._topic:
                continue
            try:
                batch = decode_event_batch(payload)
            except msgspec.MsgspecError:
                self.lost += 1
                continue
            for event in batch.events:
                self._keep(event)

    def _keep(self, event: KvEvent) -> None:
        if len(self._events) >= self._max_events:
            self._events.popleft()
            self.lost += 1
        self._events.append(event)
