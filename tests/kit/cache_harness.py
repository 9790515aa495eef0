"""A cache for tests: on a slot store without memory, with a listener that folds its events and a clock to set."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvoffd.cache.adopt import Adoption
from kvoffd.cache.cache import BlockCache, Steps
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.pins import StoreTicket
from kvoffd.cache.policies import make_policy
from kvoffd.errors import ShardTooLarge
from kvoffd.pool.records import Ints, NamespaceRecord, Rows
from kvoffd_proto.messages import GroupSpec
from tests.kit.clock import Clock
from tests.kit.slot_table import SlotOwner, SlotRecord, inherited_slots, rows_of

SLOT_UNIT = 4096


class FakeSlots:
    """The slots of a pool, made of lists: each region has slots of one size, and each slot in use has a record."""

    def __init__(self, regions: int, region_bytes: int, last_region_bytes: int = 0) -> None:
        self.region_bytes = region_bytes
        self.length = [region_bytes] * regions + [last_region_bytes] * bool(last_region_bytes)
        regions = len(self.length)
        self.pool_bytes = sum(self.length)
        self.free_bytes = self.touched_bytes = self.pool_bytes
        self.size_of: list[int] = [0] * regions
        self.used: list[set[int]] = [set() for _ in range(regions)]
        self.free_in: list[list[int]] = [[] for _ in range(regions)]
        self.revoked: set[int] = set()
        self.requested_nodes: list[int | None] = []
        self.writes = 0
        self.generation: dict[int, int] = {}
        self.namespaces: dict[bytes, NamespaceRecord] = {}
        self.records: dict[int, tuple[str, SlotOwner | None, int, int]] = {}
        self.checksums: dict[int, int] = {}
        self.spilled_slots = 0
        self.left: dict[int, SlotRecord] = {}

    def rows(self, offsets: Ints) -> Rows:
        """The rows of slots that another store left."""
        return rows_of(self.left[offset] for offset in offsets.tolist())

    def slot_bytes(self, nbytes: int) -> int:
        rounded = max(1, -(-nbytes // SLOT_UNIT)) * SLOT_UNIT
        if rounded > self.region_bytes:
            raise ShardTooLarge(f"A shard of {nbytes} bytes does not fit a region of {self.region_bytes} bytes.")
        return rounded

    def take(self, slot_bytes: int, count: int, node: int | None = None) -> list[int]:
        taken: list[int] = []
        self.requested_nodes.append(node)
        own = [r for r, size in enumerate(self.size_of) if size == slot_bytes]
        fits = [r for r, size in enumerate(self.size_of) if not size and self.length[r] >= slot_bytes]
        for region in own + fits:
            if len(taken) == count:
                break
            if not self.size_of[region]:
                self.size_of[region] = slot_bytes
                start = region * self.region_bytes
                self.free_in[region] = [start + n * slot_bytes for n in range(self.length[region] // slot_bytes)][::-1]
            while self.free_in[region] and len(taken) < count:
                offset = self.free_in[region].pop()
                self.used[region].add(offset)
                self.free_bytes -= slot_bytes
                self.records[offset] = ("taken", None, 0, 0)
                taken.append(offset)
        return taken

    def neighbours(self, offset: int) -> list[int]:
        used = self.used[offset // self.region_bytes]
        assert offset in used
        return sorted(used)

    def mark_all_writing(
        self,
        offsets: Sequence[int],
        fingerprint: bytes,
        group: int,
        keys: Sequence[bytes],
        rank: int,
        world_size: int,
    ) -> None:
        for offset, key in zip(offsets, keys, strict=True):
            assert offset in self.records
            assert offset not in self.revoked
            self.records[offset] = ("writing", SlotOwner(fingerprint, group, key, rank, world_size), 0, 0)

    def digests(self, slots: Sequence[tuple[int, int]]) -> list[int]:
        """Checksums of slots. There are no bytes, so that they depend on the place and the length alone."""
        return [1 + offset + length for offset, length in slots]

    def mark_all_ready(
        self, offsets: Sequence[int], first_blocks: Sequence[int], length: int, checksums: Sequence[int]
    ) -> None:
        for offset, first_block, checksum in zip(offsets, first_blocks, checksums, strict=True):
            state, owner, _, _ = self.records[offset]
            assert state == "writing"
            self.records[offset] = ("ready", owner, first_block, length)
            self.checksums[offset] = checksum or self.digests([(offset, length)])[0]
            self.writes += 1
            self.generation[offset] = self.writes

    def set_checksum(self, offset: int, checksum: int) -> None:
        if self.records[offset][0] == "ready":
            self.checksums[offset] = checksum

    def note_namespace(self, record: NamespaceRecord) -> None:
        self.namespaces[record.fingerprint] = record

    def forget_namespace(self, fingerprint: bytes) -> None:
        self.namespaces.pop(fingerprint, None)

    def revoke_record(self, offset: int) -> None:
        assert self.records[offset][0] == "ready"
        self.revoked.add(offset)

    def free(self, offsets: Collection[int]) -> None:
        for offset in offsets:
            del self.records[offset]
            self.revoked.discard(offset)
            region = offset // self.region_bytes
            self.used[region].remove(offset)
            self.free_in[region].append(offset)
            self.free_bytes += self.size_of[region]
            if not self.used[region]:
                self.size_of[region] = 0
                self.free_in[region] = []

    def ready_records(self) -> list[SlotRecord]:
        """The records that a new daemon would find if the owner of these slots died now."""
        return [
            SlotRecord(
                offset,
                self.size_of[offset // self.region_bytes],
                *(owner.fingerprint, owner.group, owner.key, owner.rank, owner.world_size),
                *(first_block, length, self.checksums[offset], self.generation[offset]),
            )
            for offset, (state, owner, first_block, length) in self.records.items()
            if state == "ready" and offset not in self.revoked and owner is not None
        ]

    def successor(self, records: Sequence[SlotRecord]) -> FakeSlots:
        """A slot store of the same layout in which the slots of ``records`` are in use."""
        successor = FakeSlots(len(self.length), self.region_bytes)
        successor.length = list(self.length)
        successor.pool_bytes = successor.free_bytes = self.pool_bytes
        successor.namespaces = dict(self.namespaces)
        for record in records:
            region = record.offset // self.region_bytes
            successor.size_of[region] = record.slot_bytes
            successor.used[region].add(record.offset)
            owner = SlotOwner(record.fingerprint, record.group, record.key, record.rank, record.world_size)
            successor.records[record.offset] = ("ready", owner, record.first_block, record.length)
            successor.checksums[record.offset] = record.checksum
            successor.generation[record.offset] = record.generation
            successor.writes = max(successor.writes, record.generation)
            successor.left[record.offset] = record
            successor.free_bytes -= record.slot_bytes
        for region, size in enumerate(successor.size_of):
            if size:
                start = region * self.region_bytes
                slots = {start + n * size for n in range(successor.length[region] // size)}
                assert successor.used[region] <= slots
                successor.free_in[region] = sorted(slots - successor.used[region])[::-1]
        return successor


class FoldedEvents:
    """A CacheListener that folds the events into the index they describe, and refuses impossible ones."""

    def __init__(self) -> None:
        self.index: set[tuple[bytes, int, bytes]] = set()
        self.log: list[tuple[str, int, list[bytes]]] = []

    def stored(self, namespace: Namespace, group: int, keys: list[bytes], *, tokens: object = None) -> None:
        names = {(namespace.fingerprint, group, key) for key in keys}
        assert len(names) == len(keys)
        assert not names & self.index
        self.index |= names
        self.log.append(("stored", group, keys))

    def removed(self, namespace: Namespace, group: int, keys: list[bytes]) -> None:
        names = {(namespace.fingerprint, group, key) for key in keys}
        assert len(names) == len(keys)
        assert names <= self.index
        self.index -= names
        self.log.append(("removed", group, keys))

    def cleared(self, namespace: Namespace) -> None:
        self.index = {name for name in self.index if name[0] != namespace.fingerprint}
        self.log.append(("cleared", 0, []))


class CacheHarness:
    """A cache on fake slots, and shortcuts for what tests do with it."""

    def __init__(
        self,
        regions: int = 4,
        region_bytes: int = 4 * SLOT_UNIT,
        policy: str = "lru",
        last_region_bytes: int = 0,
        max_index_bytes: int = 2**62,
    ) -> None:
        self.slots = FakeSlots(regions, region_bytes, last_region_bytes)
        self.events = FoldedEvents()
        self.clock = Clock()
        made = make_policy(policy, self.slots.pool_bytes)
        self.cache = BlockCache(self.slots, made, self.events, self.clock, max_index_bytes=max_index_bytes)

    def open(
        self, name: str = "a", world_size: int = 1, shard_bytes: Sequence[int] = (SLOT_UNIT,), key_bytes: int = 8
    ) -> Namespace:
        """A namespace whose ranks are all registered."""
        groups = [GroupSpec("full", 16) for _ in shard_bytes]
        namespace, _ = self.cache.open_namespace(name.encode().ljust(32), name, world_size, key_bytes, groups, "{}")
        for rank in range(world_size):
            self.cache.set_shard_bytes(namespace, rank, shard_bytes)
        return namespace

    def put(self, namespace: Namespace, keys: bytes, group: int = 0, first_block: int = 0) -> int:
        """Store keys from all ranks. Returns how many keys were dropped for the last rank."""
        dropped = 0
        for rank in range(namespace.world_size):
            ticket = begin_store(self.cache, namespace, rank, group, keys, first_block)
            self.cache.commit_store(ticket)
            dropped = len(ticket.dropped)
        return dropped

    def states(self, namespace: Namespace, keys: bytes, group: int = 0) -> list[int]:
        """The keys' states, by a lookup whose lease is released at once."""
        answer = self.cache.lookup(namespace, 9999, 9999, [(group, keys)])
        self.cache.release(9999, [9999])
        return list(answer.states[0])


def begin_store(
    cache: BlockCache,
    namespace: Namespace,
    rank: int,
    group: int,
    keys: bytes,
    first_block: int = 0,
    same_job: Sequence[StoreTicket] = (),
    node: int | None = None,
) -> StoreTicket:
    """Begin the store of one job, whose first key is written from engine block ``first_block`` on."""
    namespace.slot_bytes(rank, group)
    split = namespace.split(group, keys, distinct=True)
    return cache.begin_stores(namespace, rank, group, split, {0: first_block}, same_job, node)


def adopt_all(cache: BlockCache, slots: FakeSlots) -> Adoption:
    """Have a cache take over all that another left in ``slots``."""
    adoption = cache.adopt(list(slots.namespaces.values()), inherited_slots(slots.ready_records()))
    while cache.adopt_some():
        pass
    return adoption


def made(steps: Steps) -> int:
    """Make all steps; return what they end with."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            return int(ended.value)


def keys_of(*numbers: int, key_bytes: int = 8) -> bytes:
    """Keys end to end, one for each number."""
    return b"".join(number.to_bytes(key_bytes, "big") for number in numbers)
