"""The daemon's KV events as vLLM's own."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence

from vllm.v1.kv_offload.base import Medium, OffloadingEvent, OffloadKey, make_offload_key

from kvoffd_proto.events import MEDIUM_STORAGE, AllBlocksCleared, BlockStored, KvEvent

MAX_UNTOLD = 8192
"""Blocks of which vLLM keeps the tokens for an event that has not come: it comes within a step or two, or never."""


class KvEventTranslator:
    """Translates the daemon's KV events to vLLM's, and remembers which blocks were announced.

    vLLM's stream also speaks of the engine's own cache, and its ``AllBlocksCleared`` means both. So when the daemon's
    blocks are gone at once, each block that was announced is removed by name instead. ``group_ids`` are vLLM's, by
    index on the wire.
    """

    def __init__(self, group_ids: Sequence[int]) -> None:
        self._group_ids = group_ids
        self._announced: dict[Medium, dict[OffloadKey, None]] = {Medium.CPU: {}, Medium.STORAGE: {}}
        self._look_at = 2 * MAX_UNTOLD

    def translate(self, events: Iterable[KvEvent]) -> list[OffloadingEvent]:
        """Return vLLM's events for the daemon's, in order, without blocks stored twice or removed but never stored."""
        translated: list[OffloadingEvent] = []
        for event in events:
            if isinstance(event, AllBlocksCleared):
                for medium, announced in self._announced.items():
                    translated += _removal(list(announced), medium)
                    announced.clear()
                continue
            medium = Medium.STORAGE if event.medium == MEDIUM_STORAGE else Medium.CPU
            announced = self._announced[medium]
            index = event.group_idx or 0
            if not 0 <= index < len(self._group_ids):
                continue  # replayed, of somebody else's namespace of the name, which is forgotten
            group_id = self._group_ids[index]
            named = dict.fromkeys(make_offload_key(block_hash, group_id) for block_hash in event.block_hashes)
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

    def forget_untold(self, described: MutableMapping[OffloadKey, object]) -> None:
        """Keep of vLLM's descriptions those of blocks that were announced, and the latest of others.

        vLLM describes each block that it offers, and forgets that when the block is removed. What the daemon declines,
        or has no room for, is never announced, and so never removed; nor are blocks of requests with a LoRA adapter,
        which the daemon has under other keys.
        """
        if len(described) < self._look_at:
            return
        untold = [key for key in described if not any(key in announced for announced in self._announced.values())]
        for key in untold[:-MAX_UNTOLD]:
            del described[key]
        self._look_at = len(described) + max(MAX_UNTOLD, len(described) // 2)


def _removal(keys: list[OffloadKey], medium: Medium) -> list[OffloadingEvent]:
    return [OffloadingEvent(keys=keys, medium=medium, removed=True)] if keys else []
