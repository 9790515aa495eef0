"""The cache: which blocks are in the pool, who may read them, and which go when space is wanted.

A block's life::

    FREE    -> WRITING  begin_store, begin_fill: the slots of all ranks are taken at once
    WRITING -> READY    commit_store: the last missing shard is there
    WRITING -> FREE     abort_store, where nothing else is written of it
    WRITING -> DROPPED  drop: invalidated, corrupt, partial for too long
    READY   -> DROPPED  drop
    READY   -> FREE     evict
    DROPPED -> FREE     at once; or with the last unpin or the end of a store that it waits for

A block is DROPPED once it has left the index, and keeps its slots until nothing holds them.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress, repeat, takewhile
from math import inf

import numpy as np
import numpy.typing as npt
from msgspec import msgpack

from kvoffd.cache.block_table import (
    CORRUPT,
    DROPPED,
    FREE,
    NO_BLOCK,
    READY,
    RESERVED,
    SHARD_STATE,
    UNVERIFIED,
    WITH_SLOTS,
    WRITING,
    WRITING_SHARD,
    WRITTEN,
    BlockIds,
    BlockTable,
    Found,
    Verdict,
)
from kvoffd.cache.hooks import NO_TOKENS, BlockTokens, CacheListener, TierHooks
from kvoffd.cache.namespace import (
    MissReason,
    Namespace,
    NamespaceRecord,
)
from kvoffd.cache.policy import REJECTED, Chain, Group, Policy
from kvoffd.cache.tickets import (
    Check,
    FillTicket,
    Held,
    Lease,
    LoadTicket,
    PoolUsage,
    Stored,
    StorePart,
    StoreTicket,
)
from kvoffd.cache.victims import Victims
from kvoffd.errors import BadGeometry, NotReady, UnknownLease, UnknownNamespace
from kvoffd.pool.allocator import PAGE_BYTES, SlotAllocator, SlotIds
from kvoffd.pool.slot_table import Deflated, SlotTable
from kvoffd_proto.admin import BlockInfo, ShardSpec
from kvoffd_proto.messages import ABSENT, KeyState

logger = logging.getLogger(__name__)
# np.unique is called nowhere here: it imports numpy.ma at its first call, for 20 ms.

LOOKED_AT_ONCE = 4096
"""Slots of which one step looks whether they were compared with their checksums."""
SWEPT_AT_ONCE, ENDED_AT_ONCE = 1024, 1024
"""Slots of what was reset that one step frees, and leases whose blocks one step lets go."""
MAX_OVER_QUOTA = 2048
"""Blocks that one store evicts, besides one for each of its own, of a namespace that has more than its quota."""
PARTIAL_GRACE_S = 2.0
"""Partial blocks that are older go first when space is wanted."""
MOST_WRITING_PART = 4
"""Where blocks that lack a shard have more of the pool, those that nobody writes go as soon as space is wanted."""
MAX_REQUESTS_TO_NOTE = 8
"""Requests of which the policy has not heard yet; one more than these notes the oldest."""
RECOVERED_AT_ONCE = 4096
"""Recovered blocks of which those of one group are entered together: about the order of use among all."""
_NOTHING: BlockIds = np.empty(0, np.uint32)
_NO_SLOTS: npt.NDArray[np.uint32] = np.empty((0, 1), np.uint32)
_REASONS, _KEY_STATES = list(MissReason), {int(state): state for state in KeyState}
_LACKING = bytes([Verdict.LACKING])


class Cache:
    """Blocks of all namespaces in one pool. For one thread.

    Every method raises KvoffdError and changes nothing, or does all it says. A ticket is ended exactly once, after the
    last byte of its copy has moved.

    Args:
        partial_timeout_s: partial blocks that are older go.
        leased_share: of the pool that leases may pin. The first half of it is for any session; beyond it each session
            that has leases has an equal part.
        max_leased_keys: of a session.
    """

    def __init__(
        self,
        slots: SlotAllocator,
        table: SlotTable,
        policy: Policy,
        events: CacheListener,
        clock: Callable[[], float],
        lease_ttl_s: float = 30.0,
        partial_timeout_s: float = 60.0,
        leased_share: float = 0.875,
        max_leased_keys: int = 1 << 20,
    ) -> None:
        self.slots, self.table, self.policy = slots, table, policy
        slots.save_sizes_in(table.region_sizes)
        self.blocks = BlockTable(table.records)
        self.tiers: TierHooks | None = None
        self.namespaces: dict[bytes, Namespace] = {}
        """By fingerprint, in the order in which they were opened."""
        self.quotas: dict[bytes, int] = {}
        """By fingerprint, the most bytes of the pool that a namespace may have, open or not: an operator says so."""
        self.leases: dict[int, Lease] = {}
        """The one that ends first comes first."""
        self.checked_slots = self.checked_bytes = self.mismatches = 0
        """Slots that were compared with their checksum, and those of them that were wrong."""
        self.quarantined_slots = self.quarantined_bytes = 0
        self.unverified_slots = 0
        """Slots that an earlier daemon wrote and nobody has checked, or whose checksum is still to be taken."""
        self.watchers: list[Callable[[Sequence[Chain]], None]] = []
        """``note_requests`` passes each request on to them, after the policy."""
        self._events, self._clock = events, clock
        self._lease_ttl_s, self._partial_timeout_s = lease_ttl_s, partial_timeout_s
        self._max_leased_keys, self.most_leased_bytes = max_leased_keys, int(leased_share * slots.pool_bytes)
        self.held: dict[int, Held] = {}
        """By session that has leases."""
        self._bytes_in = dict.fromkeys(WITH_SLOTS, 0)
        """By state, bytes of all blocks, of forgotten namespaces too."""
        self._next_number = 1
        self._warned_of_no_space = False
        self._saves_late = self._save_due = self._saves_short = False
        self._unverified_at = 0
        """Slots before this one were looked at by ``next_unverified``."""
        self._groups: dict[int, Group] = {}
        """By number, those that blocks may be stored in, and those of which slots are still to be freed."""
        self._next_group = 1
        self._current: dict[Namespace, list[Group]] = {}
        """By number in the namespace."""
        self._victims = Victims(slots, self.blocks, policy, self._groups, self._waiting)
        self._partial: dict[int, float] = {}
        """Blocks that lack a shard which nobody writes, and since when."""
        self._requested: deque[tuple[Namespace, list[Chain]]] = deque()
        """What was asked for, oldest first, until ``note_requests``."""
        self._some_left = False
        """READY blocks left the index since then."""
        self.swept_at_once, self.ended_at_once = SWEPT_AT_ONCE, ENDED_AT_ONCE
        self._dead: dict[int, Group] = {}
        """By number, groups that were reset and are to be swept out."""
        self._ended: deque[Lease] = deque()
        """Leases that nobody can use any more, and whose blocks are still to be let go."""
        self.unannounced = np.zeros(len(self.blocks.state), np.bool_)
        """By slot: a recovered block that listeners have not heard of yet."""
        self._to_announce = _NOTHING

    # --- namespaces -----------------------------------------------------------------------------

    def namespace(self, fingerprint: bytes) -> Namespace:
        """The open namespace. Raises UnknownNamespace."""
        if (found := self.namespaces.get(fingerprint)) is None:
            raise UnknownNamespace(
                f"No namespace with the fingerprint {fingerprint.hex()} is open; send OpenNamespace first."
            )
        return found

    def open_namespace(self, namespace: Namespace) -> tuple[Namespace, bool]:
        """Open or join a namespace; the flag says that it is new. Raises NamespaceMismatch if its geometry differs."""
        if (known := self.namespaces.get(namespace.fingerprint)) is not None:
            known.check_same(namespace.world_size, namespace.key_bytes, namespace.groups)
            return known, False
        self.namespaces[namespace.fingerprint] = namespace
        self._give_number(namespace, self._next_number)
        self._events.cleared(namespace)
        return namespace, True

    def _give_number(self, namespace: Namespace, number: int) -> None:
        """From now on its blocks belong to new groups."""
        namespace.number = number
        self._next_number = max(self._next_number, number + 1)
        first, self._next_group = self._next_group, self._next_group + len(namespace.groups)
        groups = [Group(first + index, namespace, index) for index in range(len(namespace.groups))]
        self._current[namespace] = groups
        self._groups.update((group.number, group) for group in groups)
        self._fix_sizes(namespace)

    def _fix_sizes(self, namespace: Namespace) -> None:
        """Its groups may have blocks once all ranks of the world have registered."""
        for group in self._current[namespace]:
            lengths = namespace.shard_lengths(group.index)
            group.set_sizes(lengths, [self.slots.slot_size(length) for length in lengths])

    def _fix_shard_bytes(self, namespace: Namespace, rank: int, shard_bytes: Sequence[int]) -> bool:
        """As the namespace's. Raises ShardTooLarge too."""
        for nbytes in shard_bytes:
            self.slots.slot_size(nbytes)  # which raises
        return namespace.fix_shard_bytes(rank, shard_bytes)

    def register_rank(
        self,
        namespace: Namespace,
        rank: int,
        shard_bytes: Sequence[int],
        node: int | None,
        shards: Sequence[ShardSpec] | None = None,
    ) -> None:
        """Fix the bytes of a rank's shards, by group, at its first registration, and the NUMA node of its slots.

        ``shards`` describes them. Raises BadGeometry if they were fixed otherwise or do not fit the namespace;
        ShardTooLarge if no slot could hold one. A shard of 0 bytes, of a rank without a layer in the group, gets the
        smallest slot.
        """
        new = self._fix_shard_bytes(namespace, rank, shard_bytes)
        namespace.nodes[rank] = node
        self._fix_sizes(namespace)
        if shards is not None:
            new |= namespace.describe_shards(rank, shards)
        if new:
            self._save()

    def _save(self) -> None:
        """Write down what a successor must know of the namespaces. It has no block of those that are left out.

        Where there is too little room, that is first what nobody needs to read the blocks, then namespaces, those with
        the fewest blocks first.
        """
        self._save_due = self._saves_late
        if self._saves_late:
            return
        kept = [one for one in self.namespaces.values() if any(one.shard_bytes)]
        count = len(kept)
        while not self.table.save_namespaces(_snapshot(self._next_number, kept, short=self._saves_short)):
            if self._saves_short:
                kept = sorted(kept, key=lambda one: one.ready_blocks, reverse=True)[: len(kept) // 2]
            self._saves_short = True
        if len(kept) < count and not self._warned_of_no_space:
            self._warned_of_no_space = True
            logger.warning("Too many namespaces (%d) to persist: %d are lost at a restart.", count, count - len(kept))

    def group(self, namespace: Namespace, group: int) -> Group:
        """The group as it is until the next reset. Raises BadGeometry."""
        current = self._current[namespace]
        if not 0 <= group < len(current):
            namespace.check(group)  # which raises
        return current[group]

    def reset(self, namespace: Namespace, *, keep_tiers: bool = False, generation: int | None = None) -> int:
        """Forget every block, as when the weights changed, in the tiers too. Returns how many pool and disks had.

        Nothing is found from now on, by a successor either: the namespace has a new number. ``background`` frees the
        slots. Its leases end, lest a load under one serves what is stale. ``generation``: of the blocks to come.
        """
        dropped = namespace.blocks_in[READY] + namespace.blocks_in[WRITING]
        namespace.counters.invalidated_blocks += dropped
        dead = self._current[namespace]
        tiers = None if keep_tiers else self.tiers
        self._give_number(namespace, self._next_number)
        if generation is not None:
            namespace.generation = generation
        for group, now in zip(dead, self._current[namespace], strict=True):
            self._retire(group)
            now.unswept = [number for number in (*group.unswept, group.number) if number in self._dead]
        self._partial = {block: since for block, since in self._partial.items() if not self._of_block(block).dead}
        self._end(list(namespace.leases))
        self._save()
        if tiers is not None:
            dropped += tiers.forget_all(namespace)
        self._events.cleared(namespace)
        return dropped

    @contextmanager
    def saving_once(self) -> Iterator[None]:
        """For many changes of namespaces: they are written down once, at the end. A kill before leaves none of them."""
        self._saves_late = True
        try:
            yield
        finally:
            self._saves_late = False
            if self._save_due:
                self._save()

    def _retire(self, group: Group) -> None:
        """Nothing is looked for in the group any more."""
        group.dead = True
        if group.blocks_in[WRITING] or group.blocks_in[READY]:
            self._dead[group.number] = group
        for state in (WRITING, READY):
            self._count(group, state, DROPPED, group.blocks_in[state])
        if not group.blocks_in[DROPPED]:
            del self._groups[group.number]

    def forget_namespace(self, namespace: Namespace) -> None:
        """Forget a namespace that has no block in the index and that nobody has open; its name is free for another."""
        assert not namespace.blocks_in[READY] + namespace.blocks_in[WRITING]
        for group in self._current.pop(namespace):
            self._retire(group)
        del self.namespaces[namespace.fingerprint]
        self._requested = deque(request for request in self._requested if request[0] is not namespace)
        self._saves_short = False
        self._save()

    def restore_namespace(self, record: NamespaceRecord) -> list[Group]:
        """Open a namespace as an earlier daemon wrote it down, with its number, before anything else. Returns its
        groups; ``enter_recovered`` takes their blocks.

        Raises BadGeometry, ShardTooLarge, and has changed nothing then, where this pool cannot hold its shards.
        """
        geometry = record.world_size, record.key_bytes, record.groups, record.description
        namespace = Namespace(record.fingerprint, record.label, *geometry)
        for rank, shard_bytes in enumerate(record.shard_bytes):
            if shard_bytes is not None:
                self._fix_shard_bytes(namespace, rank, shard_bytes)
        for rank, shards in enumerate(record.shards):
            if shards is not None:
                namespace.describe_shards(rank, shards)
        namespace.generation = record.generation
        self.namespaces[namespace.fingerprint] = namespace
        self._give_number(namespace, record.number)
        return self._current[namespace]

    def enter_recovered(self, blocks: BlockIds, quarantined: SlotIds) -> None:
        """Take over READY blocks that are in the BlockTable and the allocator, the least recently used first, and slots
        that are not to be used. The namespaces are written down anew; ``announce_recovered`` is to be called."""
        for begin in range(0, len(blocks), RECOVERED_AT_ONCE):
            for group, alike in self.by_group(blocks[begin : begin + RECOVERED_AT_ONCE]):
                self.blocks.pages[alike] = group.block_bytes // PAGE_BYTES
                self.unverified_slots += len(alike) * len(group.sizes)
                self._count(group, FREE, READY, len(alike))
                self.blocks.append(group, alike)
                self.policy.insert(group, alike, self.blocks.keys(alike, group.key_bytes))
        self._to_announce = blocks
        self.unannounced[blocks] = True
        self._quarantine(quarantined)
        self._save()

    def announce_recovered(self) -> bool:
        """Tell listeners of some blocks that were recovered, the latest first. Returns whether there are more."""
        some, self._to_announce = self._to_announce[-RECOVERED_AT_ONCE:], self._to_announce[:-RECOVERED_AT_ONCE]
        some = some[self.unannounced[some]]
        self.unannounced[some] = False
        for group, alike in self.by_group(some):
            if not group.dead:
                self._events.stored(group.namespace, group.index, self.blocks.split_keys(alike, group.key_bytes)[::-1])
        return bool(self._to_announce.size)

    # --- lookups and leases ---------------------------------------------------------------------

    def lookup(
        self,
        namespace: Namespace,
        session: int,
        lease_id: int,
        groups: Sequence[tuple[int, bytes]],
        *,
        again: bool = False,
    ) -> tuple[list[bytes], int]:
        """The state of each key, and how many blocks the lease has. READY ones are pinned under it.

        What a tier has is requested from it, and PENDING. ``again``: the request was counted before. Where leases may
        not pin so much, each group's last READY keys are called ABSENT. Raises BadGeometry, BadKeys; UnknownLease where
        the lease is another session's or namespace's.
        """
        lease = self.leases.get(lease_id)
        if lease is not None and (lease.session != session or lease.namespace is not namespace):
            raise UnknownLease(f"The lease {lease_id} belongs to another session or namespace; choose a new lease id.")
        current, size = self._current[namespace], namespace.key_bytes
        for index, keys in groups:
            if not 0 <= index < len(current) or len(keys) % size:
                namespace.check(index, keys)  # which raises
        is_new = lease is None
        if lease is None:
            lease = Lease(lease_id, session, namespace, self._clock() + self._lease_ttl_s, _NOTHING)
        lease.asking = 0
        for index, keys in groups if self._dead else ():
            self._note_reset(current[index], keys)
        found = [self.blocks.lookup(current[index].number, keys, size, pin=is_new) for index, keys in groups]
        ready = found[0].ready if len(found) == 1 else np.concatenate([_NOTHING, *[one.ready for one in found]])
        states = [one.states for one in found]
        if self.tiers is not None and len(ready) < sum(map(len, states)):
            try:
                shown = self.tiers.find(lease, groups, states, again)
            except BaseException:
                if is_new:
                    self.unpin(ready)
                    self.tiers.lease_ended(lease)
                raise
            if shown is not states:
                every = zip(groups, found, shown, strict=True)
                found = [self._coming(current[index], keys, one, shows) for (index, keys), one, shows in every]
        held = self.held.get(session) or Held()
        if is_new and (ready.size or lease.coming):
            self.leases[lease_id], self.held[session] = lease, held
            held.leases[lease] = namespace.leases[lease] = None
        if ready.size:
            if is_new:
                fresh, loose_bytes = ready, sum([one.loose_bytes for one in found])
            else:
                fresh = ready[~np.isin(ready, lease.blocks)]
                loose_bytes = self.blocks.pin(fresh)
            roomy = self.blocks.pinned_bytes <= self.most_leased_bytes // 2
            if roomy and held.keys + len(fresh) <= self._max_leased_keys:
                part = 1.0
            else:
                part = self._leasable(held, len(fresh), loose_bytes)
            if part < 1.0:
                self.blocks.unpin(fresh)
                found = [_shortened(one, lease.blocks, part) for one in found]
                ready = np.concatenate([one.ready for one in found])
                fresh = ready[~np.isin(ready, lease.blocks)]
                loose_bytes = self.blocks.pin(fresh)
            self._note_held(lease, held, fresh, loose_bytes)
            if not lease.blocks.size and not lease.coming:  # it may pin nothing
                self._end([lease])
        if not again:
            counters, tokens, chains = namespace.counters, 0, []
            counters.lookups += 1
            for (index, keys), one in zip(groups, found, strict=True):
                group = current[index]
                counters.keys_asked += len(one.states)
                counters.keys_ready += len(one.ready)
                counters.prefix_keys_ready += one.run
                tokens = max(tokens, len(one.states) * group.tokens)
                if len(one.ready) < len(one.states):
                    self._count_missing(namespace, one.misses)
                if group.sizes:
                    chains.append(Chain(group, keys, one.ready, one.run))
            counters.asked_tokens += tokens
            if chains:
                self._requested.append((namespace, chains))
                if len(self._requested) > MAX_REQUESTS_TO_NOTE:
                    self._note_request()
        return [one.states for one in found], len(lease.blocks)

    def _note_held(self, lease: Lease, held: Held, fresh: BlockIds, loose_bytes: int) -> None:
        """Blocks were pinned for a lease of a session."""
        lease.blocks = np.concatenate([lease.blocks, fresh]) if lease.blocks.size else fresh
        lease.nbytes += loose_bytes
        held.nbytes += loose_bytes
        held.keys += len(fresh)

    def hold(self, lease: Lease, blocks: BlockIds) -> None:
        """Pin READY blocks that came up for a lease, if it has not ended and leases may pin as much."""
        if self.leases.get(lease.lease_id) is not lease:
            return
        lease.coming = max(0, lease.coming - len(blocks))
        held, loose_bytes = self.held[lease.session], self.blocks.pin(blocks)
        if held.keys + len(blocks) > self._max_leased_keys or (loose_bytes and self.leasable_bytes < 0):
            self.blocks.unpin(blocks)
        else:
            self._note_held(lease, held, blocks, loose_bytes)

    @property
    def leasable_bytes(self) -> int:
        """Bytes that leases may still pin."""
        return self.most_leased_bytes - self.blocks.pinned_bytes

    def _leasable(self, held: Held, keys: int, loose_bytes: int) -> float:
        """The part of so many keys, which are pinned, that a session may lease besides what it has: 1.0 for all.

        ``loose_bytes``: of those of their bytes that nothing else pins. Only such bytes are taken from others.
        """
        part, most = (self._max_leased_keys - held.keys) / max(1, keys), self.most_leased_bytes
        if loose_bytes and self.blocks.pinned_bytes > most // 2:
            # Not those that wait for a tier and have nothing yet.
            sharers = sum(one.nbytes > 0 for one in self.held.values()) + (not held.nbytes)
            part = min(part, (most // sharers - held.nbytes) / loose_bytes)
        return max(0.0, min(1.0, part))

    def leases_of(self, session: int) -> Held:
        """What a session has leased."""
        return self.held.get(session) or Held()

    def _coming(self, group: Group, keys: bytes, found: Found, states: bytes) -> Found:
        """What a lookup found, where tiers bring some of it up: that is no miss yet."""
        if states == found.states:
            return found
        covered = np.maximum(np.frombuffer(found.states, np.uint8), np.frombuffer(states, np.uint8)).tobytes()
        misses = list(self.blocks.count_misses(group.number, keys, group.key_bytes, covered))
        misses[MissReason.PARTIAL] += states.count(WRITING)
        return found._replace(states=states, misses=misses)

    def _count_missing(self, namespace: Namespace, misses: Sequence[int]) -> None:
        """Count keys by the number of the reason for which they are not there."""
        for reason, count in enumerate(misses):
            if count:
                namespace.counters.misses[_REASONS[reason]] += count

    def count_misses(self, namespace: Namespace, group: int, keys: bytes) -> None:
        """Count keys as missed, of which a lookup could not tell whether they would come."""
        states = bytes(len(keys) // namespace.key_bytes)
        known = self.group(namespace, group)
        self._note_reset(known, keys)
        self._count_missing(namespace, self.blocks.count_misses(known.number, keys, namespace.key_bytes, states))

    def note_misses(self, namespace: Namespace, group: int, keys: bytes, reason: MissReason) -> None:
        """These keys are not there from now on, for this reason."""
        self.blocks.note_misses(self.group(namespace, group).number, keys, namespace.key_bytes, reason)

    def reason_of(self, namespace: Namespace, group: int, key: bytes) -> MissReason:
        """Why a key was not there when it was asked for, as far as is known; it may have been stored since."""
        known = self.group(namespace, group)
        self._note_reset(known, key)
        counts = self.blocks.count_misses(known.number, key, namespace.key_bytes, bytes(1))
        return _REASONS[counts.index(1)]

    def _note_reset(self, group: Group, keys: bytes) -> None:
        """Note which of these keys were reset, as ``background`` does when it comes to their blocks."""
        for number in self._dead.keys() & group.unswept:
            states, _ = self.blocks.find(number, keys, group.key_bytes)
            gone = np.flatnonzero(np.frombuffer(states, np.uint8) != FREE)
            names = _some(keys, gone, group.key_bytes)
            self.blocks.note_misses(group.number, names, group.key_bytes, MissReason.INVALIDATED)

    def note_requests(self) -> None:
        """Tell the policy and the watchers what was asked for, but by a bench. For when the replies are out."""
        while self._requested:
            self._note_request()
        self._some_left = False

    def _note_request(self) -> None:
        namespace, found = self._requested.popleft()
        chains, ready = [], []
        for chain in found:
            if not chain.group.dead:
                if self._some_left:
                    chain = chain._replace(ready=chain.ready[self.blocks.state[chain.ready] == READY])
                chains.append(chain)
                if chain.ready.size:
                    ready.append(chain.ready)
        if self.tiers is not None and ready:
            self.tiers.used(np.concatenate(ready))
        if chains and not namespace.of_bench:
            self.policy.requested(chains)
            for tell in self.watchers:
                tell(chains)

    def release(
        self,
        session: int,
        lease_ids: Iterable[int],
        unused: MissReason | None = None,
        not_awaited: MissReason | None = None,
    ) -> int:
        """End leases of a session; those that are not alive are no error. Returns how many ended.

        ``unused``: why what they hold was not loaded, a miss then; ``not_awaited``: the same of what comes up.
        """
        found = [self.leases.get(lease_id) for lease_id in dict.fromkeys(lease_ids)]
        leases = [lease for lease in found if lease is not None and lease.session == session]
        for lease in leases:
            misses = lease.namespace.counters.misses
            if unused is not None:
                misses[unused] += 0 if lease.loaded else len(lease.blocks)
            if not_awaited is not None:
                misses[not_awaited] += lease.coming
        return self._end(leases)

    def end_session(self, session: int) -> int:
        """End all leases of a session that is gone. Returns how many."""
        return self._end([one for one in self.leases_of(session).leases if self.leases.get(one.lease_id) is one])

    def _end(self, leases: Sequence[Lease]) -> int:
        """End leases. Where they are many, ``background`` lets go what they hold."""
        for lease in leases:
            del self.leases[lease.lease_id]
            del lease.namespace.leases[lease]
        self._ended.extend(leases)
        if len(self._ended) <= self.ended_at_once:
            self._let_go()
        return len(leases)

    def _let_go(self) -> None:
        some = [self._ended.popleft() for _ in range(min(self.ended_at_once, len(self._ended)))]
        for lease in some:
            held = self.held[lease.session]
            del held.leases[lease]
            held.keys -= len(lease.blocks)
            held.nbytes -= lease.nbytes
            if not held.leases:
                del self.held[lease.session]
            if self.tiers is not None:
                self.tiers.lease_ended(lease)
        if some:
            self.unpin(some[0].blocks if len(some) == 1 else np.concatenate([lease.blocks for lease in some]))

    def tick(self) -> int:
        """End overdue leases, drop blocks that were partial for too long. Returns how many of both."""
        now = self._clock()
        overdue = list(takewhile(lambda lease: lease.deadline <= now, self.leases.values()))
        partial = self._partial_since(now - self._partial_timeout_s)
        self._drop_partial(partial)
        return self._end(overdue) + len(partial)

    def unpin(self, blocks: BlockIds) -> None:
        """Undo a ``BlockTable.pin``."""
        loose = self.blocks.unpin(blocks)
        if self._bytes_in[DROPPED]:
            self._free_dropped(loose[self.blocks.state[loose] == DROPPED])

    # --- stores ---------------------------------------------------------------------------------

    def begin_store(self, namespace: Namespace, rank: int, parts: Sequence[StorePart]) -> StoreTicket:
        """Take slots for what is not there, evicting where need be, after blocks that hold less than is offered went.

        Each group comes once; it, its keys and the rank were checked. What is there of any is not evicted for others.
        """
        groups, size, ticket = self._current[namespace], namespace.key_bytes, StoreTicket(rank, [])
        offers: list[tuple[Stored, StorePart, Sequence[int]]] = []
        held: list[BlockIds] = []
        try:
            for part in parts:
                group = groups[part.group]
                offered = group.number, part.keys, size, rank, part.first_blocks
                verdicts, blocks = self.blocks.plan(*offered)
                if verdicts == _LACKING * len(verdicts):
                    offers.append((Stored(group, _NOTHING, _NOTHING), part, range(len(verdicts))))
                    continue
                if Verdict.NARROW in verdicts:
                    gone = blocks[np.frombuffer(verdicts, np.uint8) == Verdict.NARROW]
                    names = self.blocks.keys(gone, size)
                    self.drop(gone, MissReason.PARTIAL)
                    if self.tiers is not None:  # what a tier has of them is as little
                        self.tiers.forget(namespace, group.index, names, MissReason.PARTIAL)
                    verdicts, blocks = self.blocks.plan(*offered)
                of_key = np.frombuffer(verdicts, np.uint8)
                lacking, mine, again = (
                    np.flatnonzero(of_key == one).tolist() for one in (Verdict.LACKING, Verdict.MINE, Verdict.AGAIN)
                )
                offers.append((Stored(group, blocks[mine], _NOTHING, mine, again=again), part, lacking))
                held.append(blocks[blocks != NO_BLOCK])
                self.blocks.pin(held[-1])
            for stored, part, new in offers:
                ticket.parts.append(stored)
                self._admit(rank, stored, part, new)
        except BaseException:
            self.abort_store(ticket)
            raise
        finally:
            for there in held:
                self.unpin(there)
        return ticket

    def _admit(self, rank: int, stored: Stored, part: StorePart, lacking: Sequence[int]) -> None:
        """Make blocks of the lacking keys that the policy admits; and enter what is to be copied."""
        group, mine = stored.group, stored.copy
        size, begin, names = group.key_bytes, 0, part.keys
        if len(lacking) * size < len(names):
            names = _some(names, lacking, size)
        numbers: list[Sequence[int]] = [mine] if mine else []
        blocks = [stored.blocks] if mine else []
        runs: Sequence[tuple[int, float]] = [(len(lacking), inf)]
        short = -inf  # what has a score up to here gets no space
        try:
            if part.starts is not None and lacking and group.sizes and not group.namespace.of_bench:
                starts = list(part.starts)
                if len(starts) > 1:
                    starts = sorted({*np.searchsorted(lacking, starts).tolist()})
                runs = self.policy.admit(group, names, starts)
                if self.slots.free_bytes < group.block_bytes and not self._dead and not self._partial:
                    short = self.policy.lowest
            for count, score in runs:
                end, taken = begin + count, 0
                limit = inf if self.tiers is not None else score  # the pool is the way down to them
                if score != REJECTED and limit > short:
                    slots = self._take(group, names[begin * size : end * size], limit)
                    if taken := len(slots):
                        blocks.append(slots[:, 0])
                        numbers.append(lacking[begin : begin + taken])
                    if taken < count:
                        short = limit
                if taken < count:
                    others = short < inf and self._victims.are_left(self._bytes_in[READY])
                    lost = stored.rejected if score == REJECTED or others else stored.no_space
                    lost += lacking[begin + taken : end]
                begin = end
            if stored.no_space:
                cause = self.no_space_cause(group)
                reason = MissReason.QUOTA if cause == "quota" else MissReason.NO_SPACE
                self.blocks.note_misses(group.number, _some(part.keys, stored.no_space, size), size, reason)
                group.namespace.counters.no_space[cause] += len(stored.no_space)
            if stored.rejected:
                names = _some(part.keys, stored.rejected, size)
                self.policy.rejected(group, names)
                self.blocks.note_misses(group.number, names, size, MissReason.REJECTED)
                group.namespace.counters.rejected_keys += len(stored.rejected)
        finally:  # what was taken is the store's, also where it fails
            stored.copy = list(numbers[0]) if len(numbers) == 1 else [key for some in numbers for key in some]
            stored.blocks = blocks[0] if len(blocks) == 1 else np.concatenate([_NOTHING, *blocks])
            if mine:
                order = np.argsort(stored.copy)
                stored.copy, stored.blocks = np.array(stored.copy)[order].tolist(), stored.blocks[order]
            stored.slots, stored.offsets = self.blocks.begin_writes(self.slots, stored.blocks, rank)
            if part.first_blocks:
                stored.first_blocks = [part.first_blocks.get(key, 0) for key in stored.copy]
            for block in stored.blocks.tolist() if self._partial else ():
                self._partial.pop(block, None)

    def commit_store(
        self,
        ticket: StoreTicket,
        checksums: Sequence[Iterable[int]],
        tokens: Mapping[bytes, BlockTokens] = NO_TOKENS,
    ) -> int:
        """End a store whose bytes are all in place. Returns how many blocks became READY.

        ``checksums``: by part, of each key to copy; 0 where one is still to be taken.
        """
        became_ready = 0
        for part, given in zip(ticket.parts, checksums, strict=True):
            group, blocks, slots, firsts = part.group, part.blocks, part.slots, part.first_blocks
            if group.dead or not blocks.size:
                self._end_writes(group, blocks, slots)
                continue
            length, sums, living = group.lengths[ticket.rank], array("Q", given), self.blocks.state[blocks] == WRITING
            if not living.all():
                self._end_writes(group, blocks[~living], slots[~living])
                blocks, slots, sums = blocks[living], slots[living], array("Q", compress(sums, living))
                firsts = None if firsts is None else array("H", compress(firsts, living))
            ready, names = self.blocks.publish(blocks, slots, firsts, length, sums, group.key_bytes)
            became_ready += len(ready)
            self.unverified_slots += sums.count(0)
            if len(ready) < len(blocks):
                self._note_partial(group, blocks[self.blocks.missing[blocks] != 0])
            if ready.size:
                group.namespace.counters.stored_blocks += len(ready)
                self._count(group, WRITING, READY, len(ready))
                self.policy.insert(group, ready, names)
                keys = np.frombuffer(names, group.namespace.key_type)[::-1].tolist()
                self._events.stored(group.namespace, group.index, keys, tokens=tokens)
                if self.tiers is not None:
                    self.tiers.stored(ready[::-1])
        return became_ready

    def abort_store(self, ticket: StoreTicket) -> None:
        """End a store that did not copy everything: its shards go, what other ranks wrote stays and waits."""
        for part in ticket.parts:
            self._end_writes(part.group, part.blocks, part.slots)

    def drop_unfinished(self, ticket: StoreTicket | FillTicket, reason: MissReason = MissReason.PARTIAL) -> None:
        """Drop those of a ticket's blocks that lack a shard: others may store their keys elsewhere. The ticket is still
        to be ended. What a tier has of them stays."""
        parts = ticket.parts if isinstance(ticket, StoreTicket) else [ticket]
        for part in parts:
            if not part.group.dead:
                self.drop(part.blocks[self.blocks.state[part.blocks] == WRITING], reason)

    def _end_writes(self, group: Group, blocks: BlockIds, slots: SlotIds) -> None:
        """The slots of these shards of blocks are not written any more, and hold nothing."""
        if not blocks.size:
            return
        self.blocks.shard[slots] = RESERVED
        writing = blocks[self.blocks.state[blocks] == WRITING]
        if writing.size and not group.dead:
            every = self.blocks.shard[self.blocks.slots(writing, len(group.sizes))] & SHARD_STATE
            unused = (every == RESERVED).all(axis=1)
            self._note_partial(group, writing[~unused])
            self._remove(group, WRITING, writing[unused])
        self._free_dropped(blocks[self.blocks.state[blocks] == DROPPED])

    def _note_partial(self, group: Group, blocks: BlockIds) -> None:
        """Note those of the blocks as partial that nobody writes."""
        shards, now = self.blocks.shard[self.blocks.slots(blocks, len(group.sizes))] & SHARD_STATE, self._clock()
        self._partial |= dict.fromkeys(blocks[(shards != WRITING_SHARD).all(axis=1)].tolist(), now)

    def begin_fill(self, namespace: Namespace, group: int, keys: Sequence[bytes]) -> dict[int, FillTicket | None]:
        """Take slots of all ranks for keys that come from a tier. By their places, those that the pool lacks: a ticket
        for each, None where there is no space. Raises BadGeometry."""
        known = self._current[namespace][group]
        if not known.sizes:
            raise BadGeometry("Not all ranks of the namespace have registered; register them first.")
        states, _ = self.blocks.find(known.number, b"".join(keys), namespace.key_bytes)
        first = {key: number for number, key in reversed(list(enumerate(keys)))}
        numbers = [number for number, state in enumerate(states) if state == FREE and first[keys[number]] == number]
        slots = self._take(known, b"".join([keys[number] for number in numbers]), inf)
        self.blocks.shard[slots] = WRITING_SHARD
        each = zip(slots, self.slots.offsets(slots).tolist(), strict=True)
        tickets = (FillTicket(known, its, offsets) for its, offsets in each)
        return {number: next(tickets, None) for number in numbers}

    def end_fill(self, ticket: FillTicket, first_blocks: Sequence[int], checksums: Sequence[int]) -> bool:
        """End a fill, with both by rank; without them where not all of the block is there. True where it is READY."""
        group, slots = ticket.group, ticket.slots
        if not checksums:
            self._end_writes(group, slots[:1], slots)
        ready = 0
        for length in dict.fromkeys(group.lengths) if checksums else ():
            ranks = [rank for rank, nbytes in enumerate(group.lengths) if nbytes == length]
            firsts = [first_blocks[rank] for rank in ranks]
            part = Stored(group, np.repeat(slots[:1], len(ranks)), slots[ranks], first_blocks=firsts)
            ready += self.commit_store(StoreTicket(ranks[0], [part]), [[checksums[rank] for rank in ranks]])
        return bool(ready)

    # --- loads ----------------------------------------------------------------------------------

    def begin_load(
        self, namespace: Namespace, rank: int, lease_id: int, group: int, keys: bytes, first_block: int = 0
    ) -> LoadTicket:
        """Hold the slots of a rank's shards of READY blocks. The first key is read from ``first_block`` on.

        Rank, group and keys were checked. Raises UnknownLease; NotReady with the numbers of keys that are not READY,
        are corrupt, or whose written range begins later.
        """
        lease = self.leases.get(lease_id)
        if lease is None or lease.namespace is not namespace:
            raise UnknownLease(f"The lease {lease_id} is unknown, has ended or is of another namespace; look up again.")
        known, size = self._current[namespace][group], namespace.key_bytes
        found = self.blocks.begin_load(self.slots, known.number, keys, size, rank, first_block)
        if isinstance(found, list):
            raise NotReady(group, found)
        return LoadTicket(rank, lease, known, keys[:size], *found)

    def end_load(self, tickets: Sequence[LoadTicket], *, counts: bool = False, ends_lease: bool = False) -> None:
        """End the tickets of one job. ``ends_lease``: the lease ends with the last rank of the world of which that is
        said.

        ``counts``: count the keys and tokens that the load brought. What several ranks load counts once. Tokens of a
        lease are those of the group with the most: with a sliding window less is loaded for as many.
        """
        if self.tiers is not None:
            self.tiers.loaded(tickets)
        for ticket in tickets:
            self.unpin(ticket.blocks)
            lease, group, part = ticket.lease, ticket.group.index, (ticket.group.index, ticket.first_key)
            if counts and ticket.blocks.size and part not in lease.loaded:
                lease.loaded.add(part)
                before = max(lease.loaded_tokens.values(), default=0)
                lease.loaded_tokens[group] = lease.loaded_tokens.get(group, 0) + ticket.tokens
                lease.namespace.counters.loaded_keys += len(ticket.blocks)
                lease.namespace.counters.loaded(max(0, lease.loaded_tokens[group] - before))
        if not tickets or not ends_lease:
            return
        lease = tickets[0].lease
        if self.leases.get(lease.lease_id) is lease:
            lease.loaded_ranks.add(tickets[0].rank)
            if len(lease.loaded_ranks) == lease.namespace.world_size:
                self._end([lease])

    # --- space ----------------------------------------------------------------------------------

    def _take(self, group: Group, keys: bytes, below: float) -> npt.NDArray[np.uint32]:
        """Make WRITING blocks of keys that have none, from the first on, as far as there is space; what has a lower
        score than ``below`` may go for them. Returns their slots, [blocks, ranks]."""
        size, ranks = group.key_bytes, len(group.sizes)
        count, entered = len(keys) // size if ranks else 0, 0
        if self.quotas and count and group.namespace.fingerprint in self.quotas:
            count = self._within_quota(group, count, below)
        found: list[npt.NDArray[np.uint32]] = []
        swept = not self._dead
        try:
            while entered < count:
                left, slots = keys[entered * size :] if entered else keys, _NO_SLOTS
                if self.slots.free_bytes >= group.block_bytes:
                    slots = self.blocks.take(self.slots, group, left, count - entered)
                if len(slots):
                    self._count(group, FREE, WRITING, len(slots))
                elif not swept:  # where that is not enough, others go
                    swept = True
                    self._sweep(sorted(self._dead.values(), key=lambda one: group.sizes != one.sizes), count - entered)
                    continue
                elif (victims := self._evict_for(group, count - entered, below)) is None:
                    break
                elif not victims.size:
                    continue
                else:
                    count = min(count, entered + len(victims))  # where they are fewer, nothing else may go
                    slots = self._replace(group, victims, left)
                found.append(slots)  # fewer than are wanted where slots ran out: space is made for the rest
                entered += len(slots)
        except BaseException:
            for slots in found:
                self.drop(slots[:, 0], MissReason.NO_SPACE)
            raise
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty((0, max(1, ranks)), np.uint32)

    def _within_quota(self, group: Group, count: int, below: float) -> int:
        """How many of ``count`` blocks the namespace may take, evicting its own where it has its quota."""
        namespace, each = group.namespace, group.block_bytes
        quota = self.quotas[namespace.fingerprint]
        most = count + MAX_OVER_QUOTA
        if (excess := namespace.held_bytes + count * each - quota) > 0 and self._dead:
            dead = [one for one in self._dead.values() if one.namespace is namespace]
            excess -= each * (taken := self._sweep(dead, min(most, -(-excess // each))))
            most -= taken
        if excess > 0:
            self._evict(
                self._victims.of_namespace(self._current[namespace], excess, most, below), reason=MissReason.QUOTA
            )
        return max(0, min(count, (quota - namespace.held_bytes) // each))

    def no_space_cause(self, group: Group) -> str:
        """What has the space that a block of a group does not get now: one of NO_SPACE_CAUSES."""
        usage, quota = self.usage, self.quotas.get(group.namespace.fingerprint)
        if quota is not None and group.namespace.held_bytes + group.block_bytes > quota:
            return "quota"
        if group.block_bytes > self.slots.pool_bytes:
            return "too_large"
        if usage.free + usage.ready - usage.pinned >= group.block_bytes:
            return "sizes"
        return "pinned" if usage.pinned >= usage.writing else "writing"

    def _evict_for(self, group: Group, count: int, below: float) -> BlockIds | None:
        """Blocks of a group, up to ``count``, for others of it to replace; none where space was made otherwise, and
        None where nothing may go."""
        if self._partial:
            # Where ranks store what others never do, that must not take the pool from what can be read.
            crowded = self._bytes_in[WRITING] > self.slots.pool_bytes // MOST_WRITING_PART
            partial = self._partial_since(self._clock() - (0.0 if crowded else PARTIAL_GRACE_S))
            if partial := [block for block in partial if not self.blocks.pins[block]]:
                self._drop_partial(partial[:count])
                return _NOTHING
        if (own := self._victims.own(group, count, below)) is not None:
            return own if own.size else None
        if not (victims := self._victims.for_space(group, count, below)).size:
            return None
        self._evict(victims)
        return _NOTHING

    def _waiting(self, blocks: BlockIds) -> npt.NDArray[np.bool_] | None:
        """Which of the blocks wait to be written to a tier; None where none does."""
        return None if self.tiers is None else self.tiers.waiting(blocks)

    def _replace(self, group: Group, victims: BlockIds, keys: bytes) -> npt.NDArray[np.uint32]:
        """Evict READY blocks of a group, and make WRITING ones of as many of the keys in their slots. Returns these."""
        if self.tiers is not None:
            self.tiers.evicted(victims)
        group.namespace.counters.evicted_blocks += len(victims)
        slots, names, unverified = self.blocks.replace(group, victims, keys, MissReason.EVICTED)
        self.unverified_slots -= unverified
        self._left(group, victims, names)
        self._count(group, READY, WRITING, len(victims))
        return slots

    def _partial_since(self, until: float) -> list[int]:
        return [block for block, _ in takewhile(lambda item: item[1] <= until, self._partial.items())]

    # --- ends -----------------------------------------------------------------------------------

    def _evict(self, blocks: BlockIds, reason: MissReason = MissReason.EVICTED) -> None:
        """Free READY blocks that nothing pins, because others need the space."""
        if self.tiers is not None and blocks.size:
            self.tiers.evicted(blocks)
        for group, alike in self.by_group(blocks):
            if not group.dead:
                group.namespace.counters.evicted_blocks += len(alike)
            self._remove(group, READY, alike, reason)

    def invalidate(self, namespace: Namespace, groups: Sequence[tuple[int, bytes]]) -> int:
        """Forget keys, in the tiers too. What is held keeps its slots. Returns how many blocks were in the pool.

        Raises BadGeometry, BadKeys.
        """
        for number, keys in groups:
            namespace.check(number, keys)
        dropped = 0
        for number, keys in groups:
            states, blocks = self.blocks.find(self.group(namespace, number).number, keys, namespace.key_bytes)
            there = np.array(sorted(set(blocks[np.frombuffer(states, np.uint8) != FREE].tolist())), np.uint32)
            dropped += len(there)
            self.drop(there, MissReason.INVALIDATED)
            if self.tiers is not None:
                self.tiers.forget(namespace, number, keys, MissReason.INVALIDATED)
        return dropped

    def drop(self, blocks: BlockIds | Sequence[int], reason: MissReason) -> None:
        """Take WRITING and READY blocks out of the index. Their slots come free once nothing holds them."""
        for group, alike in self.by_group(np.asarray(blocks, np.uint32)):
            group.namespace.counters.invalidated_blocks += len(alike)
            for state in (READY, WRITING):
                self._remove(group, state, alike[self.blocks.state[alike] == state], reason)

    def _drop_partial(self, blocks: Sequence[int]) -> None:
        """Drop blocks that lack a shard which nobody stored in time."""
        for group, alike in self.by_group(np.array(blocks, np.uint32)):
            group.namespace.counters.partial_blocks += len(alike)
            self.drop(alike, MissReason.PARTIAL)

    def _remove(self, group: Group, state: int, blocks: BlockIds, reason: MissReason | None = None) -> None:
        """Take blocks, all of one state, out of index and policy, and free the slots of those that nothing holds."""
        if not blocks.size:
            return
        names, slots, unverified, corrupt = self.blocks.drop(group, blocks, reason or 0)
        if group.dead and group.namespace in self._current:
            now = self._current[group.namespace][group.index]
            self.blocks.note_misses(now.number, names, group.key_bytes, MissReason.INVALIDATED)
        if state == READY:
            self._left(group, blocks, names)
        for block in blocks.tolist() if self._partial else ():
            self._partial.pop(block, None)
        held = len(blocks) - len(slots) // len(group.sizes)
        if held and not group.dead:
            self._count(group, state, DROPPED, held)
        self._freed(group, DROPPED if group.dead else state, slots, unverified, corrupt)

    def _left(self, group: Group, blocks: BlockIds, names: bytes) -> None:
        """Blocks that were READY are gone: the policy and listeners hear of it."""
        self._some_left = True
        self.policy.remove(group, blocks, names)
        keys = np.frombuffer(names, group.namespace.key_type)
        if self._to_announce.size:  # listeners have not heard of these
            silent = self.unannounced[blocks]
            self.unannounced[blocks] = False
            keys = keys[~silent]
        if not group.dead:
            self._events.removed(group.namespace, group.index, keys.tolist())

    def _free_dropped(self, blocks: BlockIds) -> None:
        """Free the slots of those of the blocks that are DROPPED and that nothing holds."""
        for group, alike in self.by_group(blocks):
            self._freed(group, DROPPED, *self.blocks.release(alike, len(group.sizes)))

    def _freed(self, group: Group, state: int, slots: SlotIds, unverified: int, corrupt: int) -> None:
        """Blocks of a group, which were counted as of this state, have ended."""
        self.unverified_slots -= unverified
        self._count(group, state, FREE, len(slots) // len(group.sizes))
        if corrupt:  # they stay handed out, so that nobody else gets them
            bad = self.blocks.shard[slots] != 0
            self._quarantine(slots[bad])
            slots = slots[~bad]
        if slots.size:
            self.slots.free(slots)
        if group.dead and not any(group.blocks_in.values()):
            del self._groups[group.number]

    def _quarantine(self, slots: SlotIds) -> None:
        self.quarantined_slots += len(slots)
        self.quarantined_bytes += int(self.slots.slot_bytes[slots // self.slots.slots_per_region].sum())
        self.blocks.group[slots] = 0

    def background(self) -> bool:
        """Free some of what was reset, and let go what ended leases hold. Returns whether there is more."""
        if self._ended:
            self._let_go()
        elif self._dead:
            group = next(iter(self._dead.values()))
            self._sweep([group], max(1, self.swept_at_once // len(group.sizes)))
        return bool(self._ended or self._dead)

    def _sweep(self, groups: Sequence[Group], count: int) -> int:
        """Free so many blocks of groups that were reset, or as many as there are. Returns how many it took."""
        taken = 0
        for group in groups:
            blocks = self.blocks.oldest(group, count - taken)
            if (taken := taken + len(blocks)) < count:
                del self._dead[group.number]
            states = self.blocks.state[blocks]
            for state in (READY, WRITING):
                self._remove(group, state, blocks[states == state])
            if taken == count:
                break
        return taken

    def by_group(self, blocks: BlockIds) -> list[tuple[Group, BlockIds]]:
        """Blocks that have slots by their groups, in each in the order in which they were given."""
        if not blocks.size:
            return []
        if only := self.blocks.group_of(blocks):
            return [(self._groups[only], blocks)]
        numbers = self.blocks.group[blocks]
        return [(self._groups[number], blocks[numbers == number]) for number in sorted(set(numbers.tolist()))]

    def _of_block(self, block: int) -> Group:
        return self._groups[int(self.blocks.group[block])]

    def _count(self, group: Group, before: int, after: int, count: int) -> None:
        """Count blocks of a group as of another state."""
        namespace, nbytes = group.namespace, count * group.block_bytes
        if before != FREE:
            group.blocks_in[before] -= count
            namespace.blocks_in[before] -= count
            namespace.bytes_in[before] -= nbytes
            self._bytes_in[before] -= nbytes
        if after != FREE:
            group.blocks_in[after] += count
            namespace.blocks_in[after] += count
            namespace.bytes_in[after] += nbytes
            self._bytes_in[after] += nbytes

    # --- checksums ------------------------------------------------------------------------------

    def check(self, slot: int, generation: int, checksum: int) -> bool:
        """Act on the ``checksum`` that a slot's bytes have; False where it is wrong: its block is dropped then.

        Where the slot was freed or written anew since ``generation``, nothing follows. Where another check found the
        bytes wrong they stay so: memory that changes is not trusted.
        """
        record, shard = self.table.records[slot], int(self.blocks.shard[slot])
        if int(record["generation"]) != generation or not self.slots.in_use[slot] or shard & SHARD_STATE != WRITTEN:
            return True
        head = self.blocks.first_slots(np.array([slot], np.uint32))
        if not record["checksum"]:
            self.blocks.set_checksum(slot, checksum)
        else:
            self.checked_slots += 1
            self.checked_bytes += int(record["length"])
            if shard & CORRUPT:
                return False
        if record["checksum"] != checksum:
            self.mismatches += 1
            self.unverified_slots -= shard & UNVERIFIED != 0
            self.blocks.set_corrupt(slot)
            group = self._of_block(slot)
            names = self.blocks.keys(head, group.key_bytes)
            if self.blocks.state[head[0]] != DROPPED:
                self.drop(head, MissReason.CORRUPT)
            if self.tiers is not None and not group.dead:
                self.tiers.forget(group.namespace, group.index, names, MissReason.CORRUPT)
            return False
        if self.blocks.shard[slot] & UNVERIFIED:
            self.blocks.shard[slot] &= ~np.uint8(UNVERIFIED)
            self.unverified_slots -= 1
        return True

    def checks(self, slots: SlotIds) -> list[Check]:
        """What there is to check in these slots by now: none that is free, being written or known to be corrupt."""
        shards = self.blocks.shard[slots]
        slots = slots[(shards & SHARD_STATE == WRITTEN) & (shards & CORRUPT == 0)]
        records = self.table.records[slots]
        columns = records["generation"], self.slots.offsets(slots), records["length"], records["checksum"]
        return list(map(Check, slots.tolist(), *(column.tolist() for column in columns)))

    def checks_of_load(self, ticket: LoadTicket, every: bool, first_block: int = 0) -> list[Check]:
        """What a load must check before it copies: shards that are not verified yet, or ``every`` shard.

        A shard that is read from its middle on is checked too: its reader has not all that its checksum covers. Shards
        whose checksum is still to be taken are loaded as they are.
        """
        wanted = (self.blocks.shard[ticket.slots] & UNVERIFIED != 0) | every
        wanted[:1] |= first_block > 0
        return [check for check in self.checks(ticket.slots[wanted]) if check.checksum]

    def corrupt_keys(self, ticket: LoadTicket) -> bytes:
        """The keys of a load's blocks of which wrong bytes were found in the slots that it holds."""
        bad = self.blocks.shard[ticket.slots] & CORRUPT != 0
        return self.blocks.keys(ticket.blocks[bad], ticket.group.key_bytes)

    def next_unverified(self, limit: int) -> SlotIds:
        """The next slots, up to so many, whose bytes an earlier daemon wrote and nobody has compared with their
        checksum, or whose checksum is still to be taken. They come again unless they are checked."""
        passes = 0
        while self.unverified_slots and passes < 2:
            begin, end = self._unverified_at, min(self._unverified_at + LOOKED_AT_ONCE, len(self.blocks.shard))
            shards = self.blocks.shard[begin:end]
            found = np.flatnonzero((shards & UNVERIFIED != 0) & (shards & SHARD_STATE == WRITTEN))[:limit] + begin
            if found.size:
                self._unverified_at = int(found[-1]) + 1
                return found.astype(np.uint32)
            passes += end == len(self.blocks.shard)
            self._unverified_at = 0 if end == len(self.blocks.shard) else end
        return _NOTHING

    # --- facts ----------------------------------------------------------------------------------

    def describe(self, blocks: BlockIds) -> list[BlockInfo]:
        """What there is to say of blocks of one group that have slots."""
        if not blocks.size:
            return []
        group = self._of_block(int(blocks[0]))
        slots = self.blocks.slots(blocks, len(group.sizes))
        written = self.blocks.shard[slots] & SHARD_STATE == WRITTEN
        records = self.table.records[slots]
        return list(
            map(
                BlockInfo,
                self.blocks.split_keys(blocks, group.key_bytes),
                map(_KEY_STATES.__getitem__, self.blocks.state[blocks].tolist()),
                repeat(group.block_bytes),
                self.blocks.pins[blocks].tolist(),
                np.where(written, records["first_block"], 0).max(axis=1).tolist(),
                [row.tobytes() for row in np.where(written, records["checksum"], 0).astype(">u8")],
            )
        )

    def page(
        self, namespace: Namespace, group: int, position: int, places: int, prefix: str, limit: int
    ) -> tuple[BlockIds, int]:
        """Some of a group's blocks whose keys begin with these hex digits, and the position behind them; 0 at the end.

        About ``places`` slots are looked into from ``position`` on, 0 at first. A block that is there from the first
        page to the last is on exactly one.
        """
        known, slots, seen = self.group(namespace, group), self.slots, list[SlotIds]()
        if len(prefix) == 2 * namespace.key_bytes:
            states, blocks = self.blocks.find(known.number, bytes.fromhex(prefix), namespace.key_bytes)
            return blocks[np.frombuffer(states, np.uint8) != FREE], 0
        end = len(self.blocks.state)
        while position < end and places > 0:
            region, first = position // slots.slots_per_region, position % slots.slots_per_region
            size = int(slots.slot_bytes[region])
            seen.append(np.arange(first, slots.slots_in(region, size) if size else 0, dtype=np.uint32))
            seen[-1] += region * slots.slots_per_region
            places -= len(seen[-1])
            position = (region + 1) * slots.slots_per_region
        blocks = np.concatenate([_NOTHING, *seen])
        blocks = blocks[self.blocks.group[blocks] == known.number]
        blocks = blocks[np.isin(self.blocks.state[blocks], (WRITING, READY))]
        if prefix:
            keys = self.blocks.split_keys(blocks, namespace.key_bytes)
            blocks = blocks[[key.hex().startswith(prefix) for key in keys]]
        if len(blocks) > limit:
            blocks, position = blocks[:limit], int(blocks[limit])
        return blocks, position if position < end else 0

    @property
    def usage(self) -> PoolUsage:
        """Bytes of the pool by use."""
        writing, ready, dropped = (self._bytes_in[state] for state in (WRITING, READY, DROPPED))
        pinned = self.blocks.pinned_bytes, self.blocks.pinned_blocks
        return PoolUsage(self.slots.free_bytes, writing, ready, dropped, self.quarantined_bytes, *pinned)


def _some(keys: bytes, numbers: Sequence[int] | npt.NDArray[np.intp], size: int) -> bytes:
    """The keys of these ascending numbers, end to end: one slice where they are neighbours, as they often are."""
    if len(numbers) and numbers[-1] - numbers[0] == len(numbers) - 1:
        return keys[numbers[0] * size : (numbers[-1] + 1) * size]
    return np.frombuffer(keys, np.dtype((np.void, size)))[numbers].tobytes()


def _snapshot(next_number: int, namespaces: Sequence[Namespace], *, short: bool) -> list[Deflated]:
    """A ``NamespaceSnapshot`` as msgpack."""
    head = b"\x92" + msgpack.encode(next_number) + b"\xdc" + len(namespaces).to_bytes(2, "big")
    return [Deflated.of(head), *[one.record(short=short) for one in namespaces]]


def _shortened(found: Found, held: BlockIds, part: float) -> Found:
    """The same with only this part of the READY keys, the first ones, called READY, beside what is ``held``."""
    states, ready = np.frombuffer(found.states, np.uint8).copy(), np.isin(found.ready, held)
    fresh = np.flatnonzero(~ready)
    ready[fresh[: int(fresh.size * part)]] = True
    states[np.flatnonzero(states == READY)[~ready]] = ABSENT
    misses = list(found.misses)
    misses[MissReason.LEASE_LIMIT] += len(ready) - int(ready.sum())
    run = min(found.run, int(np.append(ready, False).argmin()))
    return found._replace(states=states.tobytes(), ready=found.ready[ready], run=run, misses=misses)
