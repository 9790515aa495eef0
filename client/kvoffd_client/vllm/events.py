"""The daemon's KV events as vLLM's connector hands them to the engine's own event stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.v1.kv_offload.base import Medium, OffloadingEvent, make_offload_key

from kvoffd_client.vllm.request_lookups import Key
from kvoffd_proto.events import MEDIUM_STORAGE, AllBlocksCleared, BlockStored, KvEvent


class EventFold:
    """Translates events and remembers what was announced.

    vLLM's stream also speaks of the engine's own cache, and its ``AllBlocksCleared`` means both. So when the daemon's
    blocks are gone at once, each block that was announced is removed by name instead.

    Args:
        group_ids: vLLM's group id by index on the wire.
    """

    def __init__(self, group_ids: Sequence[int]) -> None:
        self._group_ids = group_ids
        self._announced: dict[Medium, dict[Key, None]] = {Medium.CPU: {}, Medium.STORAGE: {}}

    def translate(self, events: Iterable[KvEvent]) -> list[OffloadingEvent]:
        """Return vLLM's events for the daemon's, in order. Blocks stored twice or removed unknown are passed over."""
        translated: list[OffloadingEvent] = []
        for event in events:
            if isinstance(event, AllBlocksCleared):
                for medium, announced in self._announced.items():
                    translated += _removal(list(announced), medium)
                    announced.clear()
                continue
            medium = Medium.STORAGE if event.medium == MEDIUM_STORAGE else Medium.CPU
            announced = self._announced[medium]
            named = [self._key(block_hash, event.group_idx) for block_hash in event.block_hashes]
            removed = not isinstance(event, BlockStored)
            keys = [key for key in named if (key in announced) == removed]
            if removed:
                for key in keys:
                    del announced[key]
                translated += _removal(keys, medium)
            elif keys:
                announced.update(dict.fromkeys(keys))
                translated.append(OffloadingEvent(keys=keys, medium=medium, removed=False))
        return translated

    def _key(self, block_hash: bytes, index: int | None) -> Key:
        return bytes(make_offload_key(block_hash, self._group_ids[index or 0]))


def _removal(keys: list[Key], medium: Medium) -> list[OffloadingEvent]:
    return [OffloadingEvent(keys=keys, medium=medium, removed=True)] if keys else []
