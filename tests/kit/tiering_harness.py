"""A cache by slots, over memory that holds bytes, and a tier below it."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvoffd.cache.namespace import Namespace
from kvoffd.cache.states import READY, SHARD_STATE, WRITING, WRITTEN
from kvoffd.cache.tickets import StoreTicket
from kvoffd.tiering import TieringSettings
from kvoffd.tiering.block_group import block_group_of
from kvoffd.tiering.promotion_source import PromotionSource
from kvoffd.tiering.promotions import SETTLED
from kvoffd.tiering.tiering import Tiering
from kvoffd.tiering.writer import Writer, writes_of
from kvoffd.tiers.header import BlockGroup
from kvoffd.tiers.tier import Result
from kvoffd_proto.events import MEDIUM_STORAGE
from kvoffd_proto.messages import COMING
from tests.kit.fake_tier import FakeTier, PoolBytes
from tests.kit.slot_cache import CacheRig, FoldedEvents, check_invariants

REGION_SLOTS = 4
LEASE, SESSION = 2**61, 9999


class TieringHarness(CacheRig):
    """A cache with a tier. A shard's bytes are a function of its name and are checked after promotions."""

    def __init__(
        self,
        settings: TieringSettings | None = None,
        regions: int = 4,
        tier_blocks: int = 0,
        most_jobs: int = 2**30,
        policy: str = "lru",
    ) -> None:
        super().__init__(REGION_SLOTS * regions, REGION_SLOTS, policy)
        self.memory = PoolBytes(self.slots.pool_bytes)
        self.tier_events = FoldedEvents(MEDIUM_STORAGE)
        self.engines_busy = False
        self.unshared: set[bytes] = set()
        """Namespaces that are not shared."""
        self._lookups, self._waiting = 0, list[int]()
        self.tiering = Tiering(
            self.cache,
            self.tier_events,  # type: ignore[arg-type]
            self.clock,
            settings or TieringSettings(),
            lambda: self.engines_busy,
            lambda fingerprint: fingerprint in self.unshared,
        )
        self.cache.life.tiers = self.tiering
        self.found: set[tuple[bytes, int, bytes]] = set()
        """What the disk had from before, of which there was no event."""
        self.tier = self.add_disk(tier_blocks, most_jobs)

    @property
    def source(self) -> PromotionSource:
        """Of the first disk."""
        return self.tiering.disks[0]

    @property
    def writer(self) -> Writer:
        """Of the disks."""
        return self.tiering.disk_writer

    def add_disk(self, most_blocks: int = 0, most_jobs: int = 2**30) -> FakeTier:
        name = f"disk:/fake/{len(self.tiering.disks)}"
        tier = FakeTier(self.memory, self.tiering, name=name, most_blocks=most_blocks, most_jobs=most_jobs)
        self.tiering.add_disk(tier)
        return tier

    def share(self, settings: TieringSettings, name: str = "redis://fake") -> FakeTier:
        tier = FakeTier(self.memory, self.tiering, name=name, asks=True)
        self.tiering.add_store(tier, settings)
        return tier

    def successor(self, settings: TieringSettings) -> TieringHarness:
        """The next life, with the same disk."""
        self.tier.close(1.0)
        successor = TieringHarness(settings)
        successor.tier.blocks = self.tier.blocks
        successor.found = {
            (block.group.fingerprint, block.group.group_index, block.key) for block, _ in self.tier.blocks.values()
        }
        return successor

    def states(self, namespace: Namespace, keys: bytes, group: int = 0, *, again: bool = False) -> list[int]:
        """The keys' states, by a lookup that the policy does not hear of.

        Its lease ends at once, unless something comes up for it: then at the next lookup in which all keys are known.
        """
        self._lookups += 1
        ((states,), _) = self.cache.lookup(namespace, SESSION, LEASE + self._lookups, [(group, keys)], again=again)
        self._waiting.append(LEASE + self._lookups)
        if COMING.isdisjoint(states):
            self.stop_waiting()
        self.cache.prompts.unreported.clear()
        return list(states)

    def use(self, namespace: Namespace, keys: bytes, lease: int = 1) -> None:
        """Look keys up, and do what follows the reply."""
        self.cache.lookup(namespace, 1, lease, [(0, keys)])
        self.cache.prompts.report()

    def index(self, namespace: Namespace, group: int = 0) -> dict[bytes, int]:
        """The blocks that are WRITING or READY, by key."""
        known = namespace.group(group)
        blocks = self.cache.blocks
        there = np.isin(blocks.state, (WRITING, READY)) & (blocks.group == known.number)
        heads = np.flatnonzero(there).astype(np.uint32)
        keys = namespace.split(group, blocks.keys(heads, namespace.key_bytes))
        return dict(zip(keys, heads.tolist(), strict=True))

    def records(self, namespace: Namespace, key: bytes) -> np.ndarray:
        """The slot table's records of a block, by rank."""
        blocks = self.blocks(namespace, key)
        found: np.ndarray = self.table.records[self.cache.blocks.slots(blocks, namespace.world_size)[0]]
        return found

    def evict(self, namespace: Namespace, keys: bytes) -> None:
        self.cache.life.evict(self.blocks(namespace, keys))

    def content(self, namespace: Namespace, group: int, key: bytes, rank: int) -> bytes:
        """The bytes that a shard must hold."""
        sizes = namespace.shard_bytes[rank]
        assert sizes is not None
        return (namespace.fingerprint + bytes([group, rank]) + key).ljust(sizes[group], b".")[: sizes[group]]

    def fill(self, stored: list[StoreTicket]) -> list[list[int]]:
        """Write the bytes of a store; returns their checksums, by part."""
        sums: list[list[int]] = []
        for part in stored:
            namespace, group = part.group.namespace, part.group.index
            keys = namespace.split(group, self.cache.blocks.keys(part.blocks, namespace.key_bytes))
            sums.append([])
            ranks = self.table.records["rank"][part.slots].tolist()
            for key, rank, offset in zip(keys, ranks, self.slots.offsets(part.slots).tolist(), strict=True):
                data = self.content(namespace, group, key, rank)
                self.memory.poke(offset, data)
                sums[-1].append(self.memory.sum_of(offset, len(data)))
        return sums

    def put(self, namespace: Namespace, keys: bytes, group: int = 0, first_block: int = 0) -> None:
        for rank in range(namespace.world_size):
            ticket = self.begin(namespace, rank, group, keys, {0: first_block})
            self.cache.stores.commit(ticket, self.fill(ticket))

    def put_in_tier(self, namespace: Namespace, keys: bytes) -> None:
        """Have the tier hold blocks of the first group, one after the other, and the pool not."""

        def done(result: Result) -> None:
            assert result is Result.DONE

        for key in namespace.split(0, keys):
            self.put(namespace, key)
            blocks = self.blocks(namespace, key)
            (write,) = writes_of(self.cache, namespace.group(0), blocks, [key])
            assert self.tier.write(write.copy, write.offsets, done)
            self.tier.end_all()
            self.evict(namespace, key)
            assert self.in_tier(namespace, key) == 1

    def in_tier(self, namespace: Namespace, keys: bytes) -> int:
        tag, tiers = self.group(namespace).tag, [source.tier for source in self.tiering.disks]
        held = [tier.blocks for tier in tiers if isinstance(tier, FakeTier)]
        return sum(any((tag, key) in blocks for blocks in held) for key in namespace.split(0, keys))

    def group(self, namespace: Namespace, group: int = 0) -> BlockGroup:
        return block_group_of(namespace.group(group))

    def bring_up(self) -> None:
        """Begin what was asked for, and have the tier end it."""
        self.tiering.pump()
        self.tier.end_all()

    def finish_promotions(self) -> None:
        self.bring_up()
        self.stop_waiting()

    def stop_waiting(self) -> None:
        """End the leases of all lookups by ``states`` that waited for something."""
        self.cache.leases.end(SESSION, self._waiting)
        self._waiting.clear()

    def check(self) -> None:
        """Check the cache's invariants, the pins, the events folded so far, and the bytes of all blocks."""
        check_invariants(self.cache)
        pins = Counter(number for writer in self.tiering.writers for number in writer.under_way)
        for lease in self.cache.leases.by_id.values():
            pins.update(lease.blocks.tolist())
            fills = self.tiering.promotions.fills_of_lease.get(lease, ())
            awaited = [fill for fill in fills if fill.state not in SETTLED]
            assert lease.coming == len(awaited) + lease.asking
        blocks = self.cache.blocks
        assert {block: int(blocks.pins[block]) for block in np.flatnonzero(blocks.pins).tolist()} == pins
        for namespace in self.cache.namespaces.values():
            for group in range(len(namespace.specs)):
                for key, block in self.index(namespace, group).items():
                    slots = blocks.slots(np.array([block], np.uint32), namespace.world_size)[0]
                    for rank, slot in enumerate(slots):
                        if blocks.shard[slot] & SHARD_STATE == WRITTEN:
                            expected = self.content(namespace, group, key, rank)
                            offset = int(self.slots.offsets(slots[rank : rank + 1])[0])
                            assert self.memory.peek(offset, len(expected)) == expected
        there: set[tuple[bytes, int, bytes]] = set()
        for source in self.tiering.disks:
            tier = source.tier
            assert isinstance(tier, FakeTier)
            tier.settle()
            there |= {
                (block.group.fingerprint, block.group.group_index, block.key) for block, _ in tier.blocks.values()
            }
        assert self.tier_events.index == there - self.found
