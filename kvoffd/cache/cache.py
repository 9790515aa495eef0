"""The cache: which blocks are in the pool, who may read them, what goes when room is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvoffd.cache.adopt import Adoption, adopt
from kvoffd.cache.block import Block, BlockState
from kvoffd.cache.blocks import Blocks
from kvoffd.cache.integrity import ChecksumCheck, Integrity
from kvoffd.cache.invariants import PoolUsage, audit
from kvoffd.cache.listener import CacheListener
from kvoffd.cache.lookup import LookupAnswer, Lookups
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.pins import OperatorPins
from kvoffd.cache.policies import EvictionPolicy
from kvoffd.cache.ticket import LoadTicket, StoreTicket
from kvoffd.cache.tiering_hooks import TieringHooks
from kvoffd.errors import NotReady, UnknownLease, UnknownNamespace
from kvoffd.pool.pool import Pool
from kvoffd.pool.records import NamespaceRecord, SlotRecord
from kvoffd.tiering.transfers import TierTransfers
from kvoffd_proto.blocks import ShardSpec
from kvoffd_proto.messages import GroupSpec

ABSENT, WRITING, READY, LEAVING = BlockState


class BlockCache:
    """Blocks of all namespaces in one pool. Pure and synchronous; one thread at a time.

    A block lives ``absent -> writing -> ready -> absent``. Dropped while a lease, a load or a store still holds it,
    it leaves the index at once and its slots later. Every method either raises KvoffdError and changes nothing, or
    does all it says; every ticket must be ended exactly once, after the last byte of its copy has moved.
    """

    def __init__(
        self,
        slots: Pool,
        policy: EvictionPolicy,
        listener: CacheListener,
        clock: Callable[[], float],
        half_stored_timeout_s: float = 60.0,
        lease_ttl_s: float = 30.0,
    ) -> None:
        self.slots = slots
        self.policy = policy
        self._blocks = Blocks(slots, policy, listener, clock)
        self._lookups = Lookups(self._blocks, policy, clock, lease_ttl_s)
        self._settle = self._lookups.settle
        self.leases = self._lookups.leases
        self.integrity = Integrity(self._blocks)
        self.operator_pins = OperatorPins(self._blocks, slots.pool_bytes)
        self._listener = listener
        self._clock = clock
        self._half_stored_timeout_s = half_stored_timeout_s
        self._namespaces: dict[bytes, Namespace] = {}
        self._stores: set[StoreTicket] = set()
        self._loads: set[LoadTicket] = set()
        self.exchange = TierTransfers(self, self._blocks, self._stores, self._settle)
        self._tiering: TieringHooks | None = None

    def attach(self, below: TieringHooks) -> None:
        """Have the tiers below the pool looked after from now on. Once."""
        assert self._tiering is None
        self._tiering = self._blocks.tiering = below

    # --- namespaces ------------------------------------------------------------------------------

    @property
    def namespaces(self) -> list[Namespace]:
        """All namespaces, in the order in which they were opened."""
        return list(self._namespaces.values())

    def namespace(self, fingerprint: bytes) -> Namespace:
        """The open namespace. Raises UnknownNamespace."""
        try:
            return self._namespaces[fingerprint]
        except KeyError:
            raise UnknownNamespace(
                f"No namespace with the fingerprint {fingerprint.hex()} is open; send OpenNamespace first."
            ) from None

    def find_namespace(self, fingerprint: bytes) -> Namespace | None:
        """The namespace, if it is open."""
        return self._namespaces.get(fingerprint)

    def open_namespace(
        self,
        fingerprint: bytes,
        label: str,
        world_size: int,
        key_bytes: int,
        groups: Sequence[GroupSpec],
        description: str,
    ) -> tuple[Namespace, bool]:
        """Open or join a namespace; the flag says that it is new. Raises NamespaceMismatch if its geometry differs."""
        if (known := self._namespaces.get(fingerprint)) is not None:
            known.check_same(world_size, key_bytes, groups)
            return known, False
        namespace = Namespace(fingerprint, label, world_size, key_bytes, groups, description)
        self._namespaces[fingerprint] = namespace
        return namespace, True

    def set_shard_bytes(
        self, namespace: Namespace, rank: int, shard_bytes: Sequence[int], shards: Sequence[ShardSpec] | None = None
    ) -> None:
        """Fix the bytes of a rank's shards, by group, at the rank's first registration; ``shards`` describes them.

        Raises BadGeometry if they were fixed otherwise, or do not fit the namespace; ShardTooLarge if no slot could
        hold one. A shard of 0 bytes, of a rank without a layer in the group, gets the smallest slot.
        """
        namespace.check_shard_bytes(rank, shard_bytes)
        news = namespace.shard_bytes(rank) is None
        namespace.fix_shard_bytes(rank, shard_bytes, [self.slots.slot_bytes(max(nbytes, 1)) for nbytes in shard_bytes])
        if shards is not None:
            news |= namespace.describe_shards(rank, shards)
        if news:
            self.slots.note_namespace(namespace.facts())

    def adopt(self, namespaces: Iterable[NamespaceRecord], slots: Iterable[SlotRecord]) -> Adoption:
        """Take over what an earlier daemon left, before anything else: ``slots`` are handed out by the slot store.

        What is whole is ready at once, and told to the listener; the other slots are freed.
        """
        assert not self._namespaces
        self._namespaces, adoption = adopt(self._blocks, self.slots, namespaces, slots)
        return adoption

    # --- look up ---------------------------------------------------------------------------------

    def lookup(
        self, namespace: Namespace, lease_id: int, owner: int, groups: Sequence[tuple[int, bytes]], again: bool = False
    ) -> LookupAnswer:
        """Say which keys are ready, and pin those under the lease: see ``Lookups``."""
        return self._lookups.lookup(namespace, lease_id, owner, groups, again)

    def hold(self, namespace: Namespace, lease_id: int, owner: int, group: int, keys: bytes) -> list[Block | None]:
        """As a lookup of one group, but for an operator: see ``Lookups``."""
        return self._lookups.hold(namespace, lease_id, owner, group, keys)

    def touch(self, lease_id: int) -> None:
        """Note the use of a lease's blocks, each group's tail first. For when the reply is out; no lease, no harm."""
        self._lookups.touch(lease_id)

    def renew(self, owner: int, lease_ids: Iterable[int]) -> list[int]:
        """Give leases their full time again; returns those that are not alive, or not the owner's."""
        return self._lookups.renew(owner, lease_ids)

    def release(self, owner: int, lease_ids: Iterable[int]) -> int:
        """End leases of the owner; those that are not alive are no error. Returns how many ended."""
        leases = [self.leases.owned(owner, lease_id) for lease_id in dict.fromkeys(lease_ids)]
        return self._lookups.end([lease for lease in leases if lease is not None])

    def end_owner(self, owner: int) -> int:
        """End all leases of a session that is gone. Returns how many. Its tickets end when its copies have."""
        return self._lookups.end(self.leases.of_owner(owner))

    def expire(self) -> int:
        """End overdue leases, drop blocks that stayed half stored for too long. Returns how many of both."""
        now = self._clock()
        ended = self._lookups.end(self.leases.overdue(now))
        return ended + self._blocks.drop_half_stored(now - self._half_stored_timeout_s)

    def pin(self, namespace: Namespace, group: int, keys: bytes) -> int:
        """Keep ready blocks for an operator; returns how many were not kept before. See OperatorPins."""
        split = namespace.split(group, keys)
        self._settle()
        return self.operator_pins.pin(namespace, group, split)

    def unpin(self, namespace: Namespace, group: int, keys: bytes) -> int:
        """Undo ``pin``; returns how many were kept."""
        return self.operator_pins.unpin(namespace, group, namespace.split(group, keys))

    # --- store -----------------------------------------------------------------------------------

    def begin_store(
        self,
        namespace: Namespace,
        rank: int,
        group: int,
        keys: bytes,
        first_block: int = 0,
        same_job: Sequence[StoreTicket] = (),
        node: int | None = None,
    ) -> StoreTicket:
        """Take slots for the keys of which this rank's shard is neither written nor being written, evicting if needed.

        The first key is written from engine block ``first_block`` on. ``same_job`` are the tickets of the job's other
        groups: what they found present is not evicted for this one. Slots on NUMA node ``node`` are taken where there
        are any. Raises BadGeometry, BadKeys.
        """
        slot_bytes = namespace.slot_bytes(rank, group)
        split = namespace.split(group, keys, distinct=True)
        self._settle()
        index = namespace.index[group]
        ticket = StoreTicket(namespace, rank, group)
        wanted: list[int] = []
        slot_for: dict[int, int] = {}
        narrow: list[Block] = []
        for number, key in enumerate(split):
            if (block := index.get(key)) is None:
                wanted.append(number)
                continue
            ticket.present.append(block)
            if (shard := block.shards.get(rank)) is None:
                wanted.append(number)
            elif shard.written and not block.pins and (0 if number else first_block) < shard.first_block:
                # It holds less of the key than is offered now, and nobody reads it.
                narrow.append(block)
                slot_for[number] = shard.offset
        protected = set(ticket.present).union(*[other.present for other in same_job])
        namespace.nodes[rank] = node
        slot_for.update(zip(wanted, self._blocks.take_slots(slot_bytes, len(wanted), protected, node), strict=False))
        for block in narrow:
            self._blocks.reopen_shard(block, rank)
        if narrow and self._tiering is not None:  # so does what a tier has of it
            self._tiering.forget(namespace, group, [block.key for block in narrow])
        ticket.dropped = [number for number in wanted if number not in slot_for]
        namespace.counters.dropped_keys += len(ticket.dropped)
        ticket.copy = sorted(slot_for)
        ticket.offsets = [slot_for[number] for number in ticket.copy]
        ticket.blocks = self._blocks.start_shards(
            namespace,
            group,
            [split[number] for number in ticket.copy],
            rank,
            ticket.offsets,
            slot_bytes,
            [0 if number else first_block for number in ticket.copy],
        )
        self._stores.add(ticket)
        return ticket

    def commit_store(self, ticket: StoreTicket) -> int:
        """End a store whose bytes are all in place. Returns how many blocks became ready by it."""
        self._stores.remove(ticket)
        shard_bytes = ticket.namespace.shard_bytes(ticket.rank)
        assert shard_bytes is not None
        ready = self._blocks.finish_shards(ticket.blocks, ticket.rank, shard_bytes[ticket.group], ticket.checksums)
        if ready and self._tiering is not None:
            self._tiering.stored([block for block in ticket.blocks if block.state is READY])
        return ready

    def abort_store(self, ticket: StoreTicket) -> None:
        """End a store that did not copy everything: its shards go, what other ranks wrote stays and waits."""
        self._stores.remove(ticket)
        self._blocks.abandon_shards(ticket.blocks, ticket.rank)

    # --- load ------------------------------------------------------------------------------------

    def begin_load(
        self, namespace: Namespace, rank: int, lease_id: int, group: int, keys: bytes, first_block: int = 0
    ) -> LoadTicket:
        """Hold the slots of a rank's shards of leased blocks. The first key is read from ``first_block`` on.

        Raises UnknownLease; BadGeometry, BadKeys; NotReady with the indices of keys that are not under the lease, or
        whose written range begins later, or that are corrupt.
        """
        namespace.slot_bytes(rank, group)
        split = namespace.split(group, keys)
        self._settle()
        lease = self.leases.get(lease_id)
        if lease is None or lease.namespace is not namespace:
            raise UnknownLease(f"The lease {lease_id} is unknown, has ended or is of another namespace; look up again.")
        held = lease.by_key(group)
        found = [held.get(key) for key in split]
        blocks = [block for block in found if block is not None]
        shards = [block.shards[rank] for block in blocks]
        if len(blocks) < len(found) or any(shard.first_block or shard.corrupt for shard in shards):
            self._refuse_unreadable(found, rank, group, first_block)
        self._blocks.pin(blocks)
        ticket = LoadTicket(namespace, rank, lease_id, blocks, [shard.offset for shard in shards], shards)
        self._loads.add(ticket)
        return ticket

    def _refuse_unreadable(self, found: Sequence[Block | None], rank: int, group: int, first_block: int) -> None:
        missing = [
            number
            for number, block in enumerate(found)
            if block is None
            or block.shards[rank].corrupt
            or block.shards[rank].first_block > (0 if number else first_block)
        ]
        if missing:
            raise NotReady(group, missing)

    def end_load(self, tickets: Sequence[LoadTicket], ok: bool) -> None:
        """End the tickets of one job. The lease ends with the last rank of the world that loaded well under it."""
        for ticket in tickets:
            self._loads.remove(ticket)
            self._blocks.unpin(ticket.blocks)
        lease = self.leases.get(tickets[0].lease_id) if tickets and ok else None
        if lease is not None:
            lease.loaded_ranks.add(tickets[0].rank)
            if len(lease.loaded_ranks) == lease.namespace.world_size:
                self._lookups.end([lease])

    def judge(self, look: ChecksumCheck, found: int) -> bool:
        """Note that the bytes of a look hash to ``found``; False where they are wrong, and the block is dropped."""
        self._settle()
        sound = self.integrity.judge(look, found)
        if not sound and self._tiering is not None:
            self._tiering.forget(look.block.namespace, look.block.group, [look.block.key])
        return sound

    # --- drop ------------------------------------------------------------------------------------

    def invalidate(self, namespace: Namespace, groups: Sequence[tuple[int, bytes]]) -> int:
        """Forget keys, in the tiers below too. What a lease, load or store holds leaves the index now, its slots later.

        Returns how many there were.
        """
        split = [(group, namespace.split(group, keys)) for group, keys in groups]
        self._settle()
        dropped = 0
        for group, keys in split:
            index = namespace.index[group]
            blocks = [index[key] for key in dict.fromkeys(keys) if key in index]
            readable = [block.key for block in blocks if block.state is READY]
            self._blocks.drop(blocks)
            if readable:
                self._listener.removed(namespace, group, readable)
            dropped += len(blocks)
            if self._tiering is not None:
                gone = dict.fromkeys(keys)
                own = {block.key for block in blocks}
                dropped += sum(key not in own and self._tiering.has(namespace, group, key) for key in gone)
                self._tiering.forget(namespace, group, gone)
        return dropped

    def give_up(self, blocks: Iterable[Block]) -> None:
        """Drop those of the blocks that are incomplete: nobody will complete them. What a tier has of them stays."""
        self._blocks.drop([block for block in dict.fromkeys(blocks) if block.state is WRITING])

    def reset(self, namespace: Namespace) -> int:
        """Forget every block, as when the weights changed: its leases end too, lest one serve what is stale."""
        self._lookups.end([lease for lease in self.leases if lease.namespace is namespace])
        return self.clear(namespace)

    def clear(self, namespace: Namespace | None = None) -> int:
        """Forget every block of one namespace, or of all, in the tiers below too. Leases keep what they hold.

        Returns how many there were.
        """
        self._settle()
        dropped = 0
        for one in [namespace] if namespace is not None else self.namespaces:
            blocks = [block for index in one.index for block in index.values()]
            if self._tiering is not None:
                both = sum(self._tiering.has(one, block.group, block.key) for block in blocks)
                dropped += self._tiering.forget_all(one) - both
            self._blocks.drop(blocks)
            self._listener.cleared(one)
            dropped += len(blocks)
        return dropped

    # --- books -----------------------------------------------------------------------------------

    @property
    def pinned_blocks(self) -> int:
        """Blocks under a lease or a running load."""
        self._settle()
        return self._blocks.pinned_blocks

    def pool_usage(self) -> PoolUsage:
        """Where the pool's bytes are."""
        self._settle()
        writing, ready, leaving = (
            sum(namespace.bytes_in[state] for namespace in self._namespaces.values())
            for state in (WRITING, READY, LEAVING)
        )
        return PoolUsage(
            self.slots.free_bytes, writing, ready, leaving, self._blocks.pinned_bytes, self._blocks.quarantined_bytes
        )

    def check_invariants(self) -> None:
        """Raise AssertionError where an invariant is broken. Looks at every block: for tests and the simulator."""
        balance = self.pool_usage()
        audit(
            self.slots,
            self.policy,
            self._blocks,
            self.namespaces,
            self.leases,
            self._stores,
            self._loads,
            self.exchange.writes,
            balance,
        )
