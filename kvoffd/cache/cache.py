"""The cache: which blocks are in the pool, who may read them, what goes when room is wanted."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvoffd.cache.admission import Admission, Admitter, count_refused, with_again
from kvoffd.cache.adopt import Adoption, adopt_some, begin_adoption, forget_inherited, forget_inherited_keys
from kvoffd.cache.blocks import INDEXED, Blocks
from kvoffd.cache.hooks import CacheListener, TieringHooks
from kvoffd.cache.inherited import SLOTS_AT_ONCE
from kvoffd.cache.integrity import Integrity
from kvoffd.cache.lookup import LEASES_AT_ONCE, LeasedBlocks
from kvoffd.cache.namespace import Block, BlockState, MissReason, Namespace, nbytes_of_shards, slots_of
from kvoffd.cache.pins import Lease, LeaseBounds, LoadTicket, StoreTicket
from kvoffd.cache.policies import EvictionPolicy
from kvoffd.errors import KvoffdError, NotReady, UnknownLease, UnknownNamespace
from kvoffd.pool.pool import Pool
from kvoffd.pool.records import InheritedSlots, NamespaceRecord
from kvoffd_proto.admin import ShardSpec
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import GroupSpec

ABSENT, WRITING, READY, LEAVING, INHERITED = BlockState
CLEARED_AT_ONCE = 1000
"""Blocks that are forgotten in one step."""
Steps: TypeAlias = Generator[None, None, int]
"""Work that is done step by step, others being served in between. Whoever begins it makes all steps."""


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Pool bytes by use. free + writing + ready + leaving + inherited + quarantined = pool."""

    free_bytes: int
    writing_bytes: int
    ready_bytes: int
    leaving_bytes: int
    inherited_bytes: int
    """Of blocks of an earlier daemon that are still to be taken over."""
    pinned_bytes: int
    """Of the ready and leaving bytes, those that a lease or a running copy needs."""
    quarantined_bytes: int = 0
    """In slots that lost what was stored in them."""


class BlockCache(LeasedBlocks):
    """Blocks of all namespaces in one pool. Pure and synchronous; one thread at a time.

    ``blocks`` says how a block lives. Every method either raises KvoffdError and changes nothing, or does all it says;
    every ticket must be ended exactly once, after the last byte of its copy has moved.
    """

    def __init__(
        self,
        slots: Pool,
        policy: EvictionPolicy,
        listener: CacheListener,
        clock: Callable[[], float],
        half_stored_timeout_s: float = 60.0,
        lease_ttl_s: float = 30.0,
        lease_bounds: LeaseBounds | None = None,
        max_namespaces_bytes: int = 2**62,
        max_index_bytes: int = 2**62,
    ) -> None:
        blocks = Blocks(slots, policy, listener, clock, max_index_bytes)
        super().__init__(blocks, policy, clock, lease_ttl_s, lease_bounds)
        self.slots = slots
        self.integrity = Integrity(self)
        self.stores: set[StoreTicket] = set()
        """Tickets of running stores and promotions."""
        self.loads: set[LoadTicket] = set()
        self._listener = listener
        self._half_stored_timeout_s = half_stored_timeout_s
        self.max_namespaces_bytes = max_namespaces_bytes
        """Bound on ``namespaces_bytes``, of which one namespace may take an eighth."""

    def attach(self, tiering: TieringHooks) -> None:
        """Have the tiers below the pool looked after from now on. Once."""
        assert self.blocks.tiering is None
        self.blocks.tiering = tiering

    @property
    def namespaces(self) -> list[Namespace]:
        """All namespaces, in the order in which they were opened."""
        return list(self.blocks.namespaces.values())

    def namespace(self, fingerprint: bytes) -> Namespace:
        """The open namespace. Raises UnknownNamespace."""
        try:
            return self.blocks.namespaces[fingerprint]
        except KeyError:
            raise UnknownNamespace(
                f"No namespace with the fingerprint {fingerprint.hex()} is open; send OpenNamespace first."
            ) from None

    def find_namespace(self, fingerprint: bytes) -> Namespace | None:
        return self.blocks.namespaces.get(fingerprint)

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
        if (known := self.blocks.namespaces.get(fingerprint)) is not None:
            known.check_same(world_size, key_bytes, groups)
            return known, False
        namespace = Namespace(fingerprint, label, world_size, key_bytes, groups, description)
        self.blocks.add_namespace(namespace)
        return namespace, True

    def forget_namespace(self, namespace: Namespace) -> None:
        """Forget a namespace that has no block and that nobody has open; its name is free for another geometry."""
        assert not namespace.held_blocks
        self.blocks.remove_namespace(namespace)
        self.forget_requests(namespace)
        self.slots.forget_namespace(namespace.fingerprint)

    @property
    def namespaces_bytes(self) -> int:
        return sum(namespace.nbytes for namespace in self.blocks.namespaces.values())

    def set_shard_bytes(
        self, namespace: Namespace, rank: int, shard_bytes: Sequence[int], shards: Sequence[ShardSpec] | None = None
    ) -> None:
        """Fix the bytes of a rank's shards, by group, at the rank's first registration; ``shards`` describes them.

        That is forgotten where there is too little memory for descriptions.

        Raises BadGeometry if they were fixed otherwise, or do not fit the namespace; ShardTooLarge if no slot could
        hold one. A shard of 0 bytes, of a rank without a layer in the group, gets the smallest slot.
        """
        namespace.check_shard_bytes(rank, shard_bytes)
        news = namespace.shard_bytes(rank) is None
        namespace.fix_shard_bytes(rank, shard_bytes, list(map(self.slots.slot_bytes, shard_bytes)))
        if shards is not None:
            nbytes, most = nbytes_of_shards(shards), self.max_namespaces_bytes
            if namespace.nbytes + nbytes <= most // 8 and self.namespaces_bytes + nbytes <= most:
                news |= namespace.describe_shards(rank, shards)
        if news:
            self.slots.note_namespace(namespace.record())

    def set_generation(self, namespace: Namespace, generation: int) -> None:
        """Note the generation of blocks that are stored from now on, when all of earlier ones are gone."""
        namespace.generation = generation
        if any(namespace.shard_bytes(rank) is not None for rank in range(namespace.world_size)):
            self.slots.note_namespace(namespace.record())

    def adopt(
        self, namespaces: Iterable[NamespaceRecord], slots: InheritedSlots, slots_at_once: int = SLOTS_AT_ONCE
    ) -> Adoption:
        """Take over what an earlier daemon left, before anything else. The slot store has handed these slots out.

        Whole blocks are ready, the newest first, after as many calls of ``adopt_some`` as it takes; others are freed.
        """
        assert not self.blocks.namespaces
        return begin_adoption(self.blocks, self.slots, namespaces, slots, slots_at_once)

    def adopt_some(self) -> bool:
        """Make more blocks ready that an earlier daemon left, and tell the listener; False where none are left then."""
        adopt_some(self.blocks, self.slots)
        return self.blocks.inherited is not None

    @property
    def inherited_blocks(self) -> int:
        return len(self.blocks.inherited or ())

    def expire(self) -> int:
        """End overdue leases, drop blocks that stayed half stored for too long. Returns how many of both."""
        now = self._clock()
        ended = self._end(self.leases.overdue(now, LEASES_AT_ONCE))
        overdue = self.blocks.half_stored.overdue(now - self._half_stored_timeout_s)
        self.blocks.drop_half_stored(overdue)
        return ended + len(overdue)

    def begin_stores(
        self,
        namespace: Namespace,
        rank: int,
        group: int,
        keys: Sequence[bytes],
        first_blocks: Mapping[int, int],
        same_job: Sequence[StoreTicket] = (),
        node: int | None = None,
        starts: Sequence[int] | None = (0,),
    ) -> StoreTicket:
        """Take slots for the keys of which this rank's shard is neither written nor being written, evicting if needed.

        ``keys`` may be of several jobs: one that comes again is written once. ``first_blocks`` has, by the number of a
        key, from which engine block on it is written, where that is not the first. ``same_job`` are the tickets of the
        jobs' other groups: what they found present is not evicted for this one. Slots on NUMA node ``node`` are taken
        where there are any. ``starts``: numbers of the keys at which the jobs begin; None where the policy has no say,
        as for benches.
        Raises BadGeometry.
        """
        slot_bytes = namespace.slot_bytes(rank, group)
        blocks = self.blocks
        known = namespace.index[group].find(b"".join(keys)) if not namespace.clearing else [None] * len(keys)
        ticket = StoreTicket(namespace, rank, group)
        fresh = not any(known) and len(set(keys)) == len(keys)
        lacking, narrow = (list(range(len(keys))), []) if fresh else _lacking(ticket, keys, known, first_blocks)
        protected = set(ticket.present).union(*[other.present for other in same_job])
        namespace.nodes[rank] = node
        if namespace.clearing:
            found = Admission(dropped=lacking)
        else:
            allowance = blocks.allowance(namespace)
            admitter = Admitter(blocks, self.policy, namespace, group, slot_bytes, node, protected, allowance)
            unknown = lacking if fresh else [number for number in lacking if known[number] is None]
            found = admitter.admit(keys, lacking, unknown, None if namespace.of_bench else starts)
        offsets = found.offsets
        ticket.copy = found.admitted
        count_refused(blocks, namespace, group, keys, found)
        ticket.dropped = with_again(keys, found.dropped, ticket.again)
        ticket.declined = with_again(keys, found.declined, ticket.again)
        if narrow:
            offsets = self._reopen(ticket, narrow, offsets)
        ticket.offsets = offsets
        if len(offsets) < len(keys):
            keys, known = [keys[number] for number in ticket.copy], [known[number] for number in ticket.copy]
        firsts = [first_blocks.get(number, 0) for number in ticket.copy]
        ticket.blocks = blocks.start_shards(namespace, group, keys, known, rank, offsets, slot_bytes, firsts)
        self.stores.add(ticket)
        return ticket

    def _reopen(self, ticket: StoreTicket, narrow: Sequence[tuple[int, Block]], offsets: Sequence[int]) -> list[int]:
        """Have blocks written anew in the slots that they have, given by the number of their key.

        Puts them among the ticket's keys to copy; returns the slots of all of these, given those of the others.
        """
        slot_for = dict(zip(ticket.copy, offsets, strict=True))
        for number, block in narrow:
            slot_for[number] = block.shard(ticket.rank).offset
            self.blocks.reopen_shard(block, ticket.rank)
        if self.blocks.tiering is not None:  # what a tier has of them is as little
            names = [block.key for _, block in narrow]
            self.blocks.tiering.forget(ticket.namespace, ticket.group, names, MissReason.PARTIAL)
        ticket.copy = sorted(slot_for)
        return [slot_for[number] for number in ticket.copy]

    def commit_store(self, ticket: StoreTicket) -> int:
        """End a store whose bytes are all in place. Returns how many blocks became ready by it."""
        self.stores.remove(ticket)
        length = ticket.namespace.shard_length(ticket.rank, ticket.group)
        blocks = self.blocks
        ready = blocks.finish_shards(ticket.blocks, ticket.rank, length, ticket.checksums, ticket.tokens)
        if ready and blocks.tiering is not None:
            blocks.tiering.stored([block for block in ticket.blocks if block.state is READY])
        return ready

    def abort_store(self, ticket: StoreTicket) -> None:
        """End a store that did not copy everything: its shards go, what other ranks wrote stays and waits."""
        self.stores.remove(ticket)
        self.blocks.abandon_shards(ticket.blocks, ticket.rank)

    def begin_load(
        self, namespace: Namespace, rank: int, lease_id: int, group: int, keys: bytes, first_block: int = 0
    ) -> LoadTicket:
        """Hold the slots of a rank's shards of leased blocks. The first key is read from ``first_block`` on.

        Raises UnknownLease; BadGeometry, BadKeys; NotReady with the indices of keys that are not under the lease, or
        whose written range begins later, or that are corrupt.
        """
        namespace.slot_bytes(rank, group)
        split = namespace.split(group, keys)
        lease = self.leases.get(lease_id)
        if lease is None or lease.namespace is not namespace:
            raise UnknownLease(f"The lease {lease_id} is unknown, has ended or is of another namespace; look up again.")
        held = self.leases.by_key(lease, group)
        found = [held.get(key) for key in split]
        blocks = [block for block in found if block is not None]
        offsets, readable = slots_of(blocks, rank)
        if len(blocks) < len(found) or not readable:
            self._refuse_unreadable(found, rank, group, first_block)
        self.blocks.pin(blocks)
        ticket = LoadTicket(rank, lease_id, blocks, offsets, first_block, lease)
        self.loads.add(ticket)
        return ticket

    def _refuse_unreadable(self, found: Sequence[Block | None], rank: int, group: int, first_block: int) -> None:
        missing = [
            number
            for number, block in enumerate(found)
            if block is None
            or (shard := block.shard(rank)).corrupt
            or shard.first_block > (0 if number else first_block)
        ]
        if missing:
            raise NotReady(group, missing)

    def end_load(self, tickets: Sequence[LoadTicket], ok: bool) -> None:
        """End the tickets of one job. The lease ends with the last rank of the world that loaded well under it."""
        for ticket in tickets:
            self.loads.remove(ticket)
            self.blocks.unpin(ticket.blocks)
        lease = self.leases.get(tickets[0].lease_id) if tickets and ok else None
        if lease is not None:
            lease.loaded_ranks.add(tickets[0].rank)
            if len(lease.loaded_ranks) == lease.namespace.world_size:
                self._end([lease])

    def count_load(self, tickets: Sequence[LoadTicket]) -> None:
        """Count the keys and tokens that a load brought; what several ranks load counts once.

        Tokens of a lease are those of the group with the most: with a sliding window less is loaded for as many.
        """
        for ticket in tickets:
            if (lease := ticket.lease) is None or not ticket.blocks:
                continue
            first = ticket.blocks[0]
            if (part := (first.group, first.key)) in lease.loaded:
                continue
            lease.loaded.add(part)
            before = max(lease.loaded_tokens.values(), default=0)
            lease.loaded_tokens[first.group] += ticket.tokens
            counters = lease.namespace.counters
            counters.loaded_keys += len(ticket.blocks)
            counters.loaded(max(0, lease.loaded_tokens[first.group] - before))

    def invalidate(self, namespace: Namespace, groups: Sequence[tuple[int, bytes]]) -> Steps:
        """Forget keys, in the tiers below too. What a lease, load or store holds leaves the index now, its slots later.

        The steps end with the number of blocks there were. Raises BadGeometry, BadKeys.
        """
        for group, keys in groups:
            namespace.check_keys(group, keys)
        return self._invalidate(namespace, groups)

    def _invalidate(self, namespace: Namespace, groups: Sequence[tuple[int, bytes]]) -> Steps:
        tiering = self.blocks.tiering
        dropped = 0
        size = CLEARED_AT_ONCE * namespace.key_bytes
        inherited: list[set[bytes]] = [set() for _ in namespace.groups]
        for gone in forget_inherited_keys(self.blocks, self.slots, namespace, groups):
            for group, these in gone:
                inherited[group].update(these)
            yield
        # Cut part by part: single keys take nine times what the message does.
        parts = ((group, keys[at : at + size]) for group, keys in groups for at in range(0, len(keys), size))
        for number, (group, part) in enumerate(parts):
            keys = list(dict.fromkeys(namespace.split(group, part)))
            if number:
                yield
            if self.find_namespace(namespace.fingerprint) is not namespace:
                break
            there = namespace.index[group].find(b"".join(keys))
            found = [block for block in there if block is not None]
            readable = [block.key for block in found if block.state is READY]
            self.blocks.drop(found)
            if readable:
                self._listener.removed(namespace, group, readable)
            in_pool = inherited[group].intersection(keys)
            inherited[group] -= in_pool
            in_pool.update(block.key for block in found)  # what was stored anew is one block
            dropped += len(in_pool)
            if tiering is not None:
                dropped += sum(key not in in_pool and tiering.has(namespace, group, key) for key in keys)
                tiering.forget(namespace, group, keys, MissReason.INVALIDATED)
        return dropped

    def drop_incomplete(self, blocks: Iterable[Block], reason: MissReason = MissReason.PARTIAL) -> None:
        """Drop those of the blocks that lack a shard: nobody will complete them. What a tier has of them stays."""
        self.blocks.drop([block for block in dict.fromkeys(blocks) if block.state is WRITING], reason)

    def reset(self, namespace: Namespace) -> Steps:
        """Forget every block, as when the weights changed: its leases end too, lest one serve what is stale."""
        steps = self.clear(namespace)
        return self._reset([lease for lease in self.leases if lease.namespace is namespace], steps)

    def _reset(self, leases: Sequence[Lease], steps: Steps) -> Steps:
        for start in range(0, len(leases), LEASES_AT_ONCE):
            if start:
                yield
            # Each may have ended meanwhile, and another one of its owner may have its id.
            self._end([one for one in leases[start : start + LEASES_AT_ONCE] if self.leases.get(one.lease_id) is one])
        return (yield from steps)

    def clear(self, namespace: Namespace, *, keep_tiers: bool = False) -> Steps:
        """Forget every block of a namespace, in the tiers below too unless they keep theirs. Leases keep theirs.

        From now on until the last step lookups find nothing and stores get no room. The steps end with the number of
        blocks there were.

        Raises KvoffdError: NOT_READY, it is being cleared already.
        """
        if namespace.clearing:
            raise KvoffdError(
                f"A reset or clear of the namespace {namespace.label!r} is running; ask again when it is done.",
                ErrorCode.NOT_READY,
            )
        namespace.clearing = True
        return self._clear(namespace, None if keep_tiers else self.blocks.tiering)

    def _clear(self, namespace: Namespace, tiering: TieringHooks | None) -> Steps:
        dropped = namespace.inherited_blocks
        try:
            for group, keys in forget_inherited(self.blocks, namespace):
                if tiering is not None:
                    dropped -= sum(tiering.has(namespace, group, key) for key in keys)
                yield
            there = [block for index in namespace.index for block in index.blocks()]
            for start in range(0, len(there), CLEARED_AT_ONCE):
                if start:
                    yield
                found = [block for block in there[start : start + CLEARED_AT_ONCE] if block.state in INDEXED]
                dropped += len(found)
                if tiering is not None:
                    dropped -= sum(tiering.has(namespace, block.group, block.key) for block in found)
                self.blocks.drop(found)
            if tiering is not None:
                dropped += tiering.forget_all(namespace)
            self._listener.cleared(namespace)
        finally:
            namespace.clearing = False
        return dropped

    def clear_all(self) -> Steps:
        """Forget every block of all namespaces but those that are being cleared already."""
        dropped = 0
        for namespace in self.namespaces:
            if self.find_namespace(namespace.fingerprint) is namespace and not namespace.clearing:
                cleared = yield from self.clear(namespace)
                dropped += cleared
                if cleared:
                    yield
        return dropped

    def pool_usage(self) -> PoolUsage:
        writing, ready, leaving, inherited = (
            sum(namespace.bytes_in[state] for namespace in self.blocks.namespaces.values())
            for state in (WRITING, READY, LEAVING, INHERITED)
        )
        pinned, quarantined = self.blocks.pinned_bytes, self.blocks.quarantined_bytes
        return PoolUsage(self.slots.free_bytes, writing, ready, leaving, inherited, pinned, quarantined)


def _lacking(
    ticket: StoreTicket, keys: Sequence[bytes], known: Sequence[Block | None], first_blocks: Mapping[int, int]
) -> tuple[list[int], list[tuple[int, Block]]]:
    """Numbers of the keys whose shard is to be written in a new slot, and in the one that holds less, with the block.

    Enters in the ticket which blocks are present and which keys come again.
    """
    lacking: list[int] = []
    narrow: list[tuple[int, Block]] = []
    wanted: set[bytes] = set()
    for number, (key, block) in enumerate(zip(keys, known, strict=True)):
        if key in wanted:
            ticket.again.append(number)
            continue
        if block is not None:
            ticket.present.append(block)
            if block.words[2 * ticket.rank]:
                if block.holds_less(ticket.rank, first_blocks.get(number, 0)) and not block.pins:
                    narrow.append((number, block))
                    wanted.add(key)
                continue
        wanted.add(key)
        lacking.append(number)
    return lacking, narrow
