"""The blocks of one request that were promoted for it: from which tier each came."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest

from vllm.v1.kv_offload.base import OffloadKey

from kvoffd_client.vllm.chunk_groups import Place
from kvoffd_client.vllm.keyed_lookup import NOT_COMING, KeyedLookup
from kvoffd_proto.messages import COMING, READY, SHARED

ASKED = 255
"""State of a chunk that a store is being asked for: it may or may not come from there."""
LACKED = 254
"""State of a chunk that no store had. If it is ready later, an engine has stored it."""
_ALL_ANSWERED = bytes(0 if state == READY else LACKED if state in NOT_COMING else state for state in range(256))
"""Table that makes these states of an answer's: PENDING and SHARED stay, READY becomes 0."""
_WHILE_ASKING = bytes(ASKED if state == SHARED else state for state in _ALL_ANSWERED)
"""The same while a store has not answered for all keys: the answer does not say for which."""


@dataclass(slots=True, eq=False)
class PromotedBlocks:
    """Blocks that were, or were to be, promoted for a request.

    What comes from tiers that it excludes is noted too, since its report says where keys were found. Once such a block
    is ready, others had it brought up, and the request finds it in the pool.

    Attributes:
        chunks: by group, the last such state of each chunk, or ASKED or LACKED; 0 for others.
        tails: the same of tails that come or came, by vLLM's keys.
    """

    chunks: dict[int, bytes] = field(default_factory=dict)
    tails: dict[OffloadKey, int] = field(default_factory=dict)

    def record(self, answer: KeyedLookup) -> None:
        """Record which blocks an answer reports as being promoted, and which of the earlier ones as absent."""
        if not (answer.is_coming or self.chunks or self.tails):
            return
        table = _WHILE_ASKING if answer.future.asking else _ALL_ANSWERED
        excluded = COMING - answer.tiers
        for key, state in answer.tail_states().items():
            if state in COMING:
                self.tails[key] = state
            elif state != READY or self.tails.get(key) in excluded:
                self.tails.pop(key, None)
        for index in answer.chunks:
            states, before = answer.chunk_states(index), self.chunks.get(index, b"")
            if before or states.strip(NOT_COMING):
                before, now = before.ljust(len(states), b"\0"), states.translate(table)
                if excluded:
                    of_others = {*excluded, ASKED} if SHARED in excluded else excluded
                    before = bytes(0 if new == 0 and old in of_others else old for old, new in zip_longest(before, now))
                self.chunks[index] = bytes(map(_merged, before, now)) + before[len(states) :]

    def tier_of(self, key: OffloadKey, place: Place) -> int:
        """Return the state that a block had while it was promoted; 0 if it was found in the pool."""
        if place.is_tail:
            return self.tails.get(key, 0)
        states = self.chunks.get(place.group, b"")
        state = states[place.chunk] if 0 <= place.chunk < len(states) else 0
        if state == ASKED:
            return SHARED
        return 0 if state == LACKED else state


def _merged(old: int, new: int) -> int:
    """Return a chunk's state after an answer: a chunk whose tier is known keeps that while it is ready or lacking.

    | old | new is PENDING or SHARED | ASKED | LACKED | 0: it is ready |
    |---|---|---|---|---|
    | 0, of no tier so far | new | ASKED | 0 | 0 |
    | LACKED | new | ASKED | LACKED | LACKED |
    | ASKED | new | ASKED | LACKED | ASKED: a store had it |
    | PENDING or SHARED | new | old | old | old |
    """
    if new == LACKED:
        return LACKED if old == ASKED else old
    if new == ASKED:
        return ASKED if old in (0, LACKED) else old
    return new or old
