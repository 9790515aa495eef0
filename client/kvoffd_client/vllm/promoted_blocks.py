"""The blocks of one request that were promoted for it: from which tier each came."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import OffloadKey

from kvoffd_client.vllm.connector_metadata import Place
from kvoffd_client.vllm.keyed_lookup import NOT_COMING, KeyedLookup
from kvoffd_proto.messages import COMING, SHARED

ASKED = 255
"""State of a chunk that is SHARED only because a store is being asked for it."""
_TIER_ONLY = bytes(0 if state in NOT_COMING else state for state in range(256))
_WHILE_ASKING = bytes(ASKED if state == SHARED else state for state in _TIER_ONLY)


@dataclass(slots=True, eq=False)
class PromotedBlocks:
    """Blocks that were, or were to be, promoted for a request.

    Attributes:
        chunks: by group, the last such state of each chunk, or ASKED; 0 for others.
        tails: the same of tails, by vLLM's keys.
    """

    chunks: dict[int, bytes] = field(default_factory=dict)
    tails: dict[OffloadKey, int] = field(default_factory=dict)

    def record(self, answer: KeyedLookup) -> None:
        """Record which blocks an answer reports as being promoted."""
        if not answer.is_coming:
            return
        table = _WHILE_ASKING if answer.future.asking else _TIER_ONLY
        self.tails |= {key: state for key, state in answer.tail_states().items() if state in COMING}
        for index in answer.chunks:
            states = answer.chunk_states(index)
            if states.strip(NOT_COMING):
                before, now = self.chunks.get(index, b"").ljust(len(states), b"\0"), states.translate(table)
                merged = [old if old and new in (0, ASKED) else new for old, new in zip(before, now, strict=False)]
                self.chunks[index] = bytes(merged) + before[len(states) :]

    def tier_of(self, key: OffloadKey, place: Place) -> int:
        """Return the state that a block had while it was promoted; 0 if it was found in the pool."""
        if place.is_tail:
            return self.tails.get(key, 0)
        if place.chunk < 0:
            return 0
        state = self.chunks.get(place.group, b"")[place.chunk : place.chunk + 1]
        return SHARED if state == bytes([ASKED]) else state[0] if state else 0
