"""Several tiers as one: the directories of the disk tier, which come and go while the daemon serves."""

from __future__ import annotations

import time
from collections import ChainMap, Counter
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import cast

from kvoffd.tiers.tier import OnDone, Tier, TierBlock, TierKey, TierResult, TierStats


class Tiers(Tier):
    """Blocks lie in one member each. A new one goes where there is room, the fewest writes wait, and least is used.

    Members are made with the listener that is told of all; they tell it themselves.
    """

    name = "disk"

    def __init__(self) -> None:
        self._members: list[Tier] = []
        self._writing: set[TierKey] = set()

    @property
    def members(self) -> Sequence[Tier]:
        """In the order in which they were attached."""
        return tuple(self._members)

    def attach(self, tier: Tier) -> None:
        """Use one more. What it holds already is found from now on."""
        self._members.append(tier)

    def detach(self, tier: Tier) -> None:
        """Use one no more. What it has begun it ends; closing it is left to the caller."""
        self._members.remove(tier)

    def groups(self) -> Collection[tuple[bytes, int]]:
        return {name for tier in self._members for name in tier.groups()}

    def index(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        return _together([tier.index(fingerprint, group) for tier in self._members])

    def readable(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        return _together([tier.readable(fingerprint, group) for tier in self._members])

    def write(self, block: TierBlock, offsets: Sequence[int], on_done: OnDone) -> bool:
        if block.id in self._writing or self._owners(block.id):
            return False

        def done(result: TierResult) -> None:
            self._writing.discard(block.id)
            on_done(result)

        if any(tier.write(block, offsets, done) for tier in self._by_room(block.nbytes)):
            self._writing.add(block.id)
            return True
        return False

    def _by_room(self, nbytes: int) -> list[Tier]:
        if len(self._members) < 2:
            return self._members
        figures = [(tier, tier.stats()) for tier in self._members]
        figures.sort(
            key=lambda item: (
                item[1].used_bytes + nbytes > item[1].size_bytes,
                item[1].queued_writes,
                item[1].used_bytes / item[1].size_bytes,
            )
        )
        return [tier for tier, _ in figures]

    def _owners(self, block_id: TierKey) -> list[Tier]:
        return [tier for tier in self._members if block_id.key in tier.index(block_id.fingerprint, block_id.group)]

    def read(self, block_id: TierKey, offsets: Sequence[int], deadline: float, on_done: OnDone) -> bool:
        return any(tier.read(block_id, offsets, deadline, on_done) for tier in self._members)

    def touch(self, block_ids: Iterable[TierKey]) -> None:
        ids = list(block_ids)
        for tier in self._members:
            tier.touch(ids)

    def remove(self, block_ids: Iterable[TierKey]) -> int:
        ids = list(block_ids)
        return sum(tier.remove(ids) for tier in self._members)

    def remove_namespace(self, fingerprint: bytes) -> int:
        return sum(tier.remove_namespace(fingerprint) for tier in self._members)

    def tick(self) -> None:
        for tier in self._members:
            tier.tick()

    def stats(self) -> TierStats:
        figures = [tier.stats() for tier in self._members]
        errors: Counter[str] = Counter()
        for own in figures:
            errors.update(own.errors)
        return TierStats(
            size_bytes=sum(own.size_bytes for own in figures),
            used_bytes=sum(own.used_bytes for own in figures),
            physical_bytes=sum(own.physical_bytes for own in figures),
            blocks=sum(own.blocks for own in figures),
            read_blocks=sum(own.read_blocks for own in figures),
            read_bytes=sum(own.read_bytes for own in figures),
            written_blocks=sum(own.written_blocks for own in figures),
            written_bytes=sum(own.written_bytes for own in figures),
            evicted_blocks=sum(own.evicted_blocks for own in figures),
            refused_writes=sum(own.refused_writes for own in figures),
            queued_reads=sum(own.queued_reads for own in figures),
            queued_writes=sum(own.queued_writes for own in figures),
            running_reads=sum(own.running_reads for own in figures),
            running_writes=sum(own.running_writes for own in figures),
            busy_seconds=sum(own.busy_seconds for own in figures),
            errors=errors,
        )

    def drain(self) -> None:
        for tier in self._members:
            tier.drain()

    def close(self, deadline_s: float) -> bool:
        until = time.monotonic() + deadline_s
        closed = [tier.close(max(0.0, until - time.monotonic())) for tier in self._members]
        return all(closed)


def _together(views: Sequence[Mapping[bytes, TierBlock]]) -> Mapping[bytes, TierBlock]:
    if len(views) == 1:
        return views[0]
    # A ChainMap changes its first map only when it is itself changed, which a view never is.
    return ChainMap(*[cast(MutableMapping[bytes, TierBlock], view) for view in views])
