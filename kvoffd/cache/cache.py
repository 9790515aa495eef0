"""The cache: which blocks are in the pool, who may read them, and which are evicted when space is needed.

A block's life::

    FREE    -> WRITING  begin_store, begin_fill: the slots of all ranks are allocated at once
    WRITING -> READY    commit_store, end_fill: the last missing shard is written
    WRITING -> FREE     abort_store, if no other shard of it is written or being written
    WRITING -> DROPPED  drop: invalidated, corrupt, partial for too long
    READY   -> DROPPED  drop
    READY   -> FREE     evict
    READY   -> WRITING  _replace: it is evicted, and a new block of its group gets its slots
    DROPPED -> FREE     at once, or with the last unpin or the end of the store that still uses it

A DROPPED block has left the index and keeps its slots until nothing uses them. Blocks of a group that was reset are
counted as DROPPED at once; ``_sweep`` removes them from the index.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress, islice, pairwise, takewhile
from math import inf
from typing import cast

import numpy as np
import numpy.typing as npt

from kvoffd.cache.asked_keys import COMING, AskedKeys, PromptOutcome, UncountedPrompts, count_prompt
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
from kvoffd.cache.computing import Computing
from kvoffd.cache.hints import HintedOrder
from kvoffd.cache.hooks import NO_TOKENS, BlockTokens, CacheListener, TierHooks
from kvoffd.cache.namespace import (
    Group,
    MissReason,
    Namespace,
    NamespaceRecord,
    NamespaceSnapshot,
    Shards,
)
from kvoffd.cache.policy import REJECTED, Chain, Policy
from kvoffd.cache.prompt_tokens import PromptTokens, UncountedLoads
from kvoffd.cache.tickets import (
    Check,
    FillTicket,
    Lease,
    LoadTicket,
    PoolUsage,
    SessionLeases,
    Stored,
    StorePart,
)
from kvoffd.cache.victims import ANY_PROMPT, Victims
from kvoffd.errors import BadGeometry, KvoffdError, NotReady, UnknownLease
from kvoffd.pool.allocator import PAGE_BYTES, SlotAllocator, SlotIds
from kvoffd.pool.slot_table import SlotTable
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import ABSENT, PENDING, SHARED, HintAction, KeyState

logger = logging.getLogger(__name__)
# Do not call np.unique here: its first call imports numpy.ma, which takes 20 ms.

LOOKED_AT_ONCE = 4096
"""Slots that one step of ``next_unverified`` scans."""
SWEPT_AT_ONCE, ENDED_AT_ONCE = 1024, 1024
"""Slots of reset namespaces that one step frees, and ended leases that one step unpins."""
CLAIM_S = 10.0
"""Time for which a session whose lookup was cut by the limit of leases counts as one that has some."""
MAX_OVER_QUOTA = 1024
"""Extra evictions per store while a namespace is over quota."""
PARTIAL_GRACE_S = 2.0
"""Age from which partial blocks are dropped first when space is needed."""
MAX_WRITING_DIVISOR = 4
"""If WRITING blocks take more than 1/4 of the pool, partial ones are dropped as soon as space is needed."""
MAX_UNREPORTED_REQUESTS = 8
"""Requests that may wait for ``report_requests``; one more reports the oldest."""
MAX_PREFETCHES, ASKED_AT_ONCE = 256, 4
"""Prefetches of hints that may wait for tiers, further ones do nothing; and those that a tick asks for again."""
KNOWN_RESETS = 4
"""Last resets of a namespace from before which it is known which keys it had."""
REFUSED = MissReason.NO_SPACE, MissReason.QUOTA
"""Reasons why a store's keys got no blocks."""
NO_LEASE = NO_SESSION = 0
"""Lease and session of a prefetch: ids that no other has."""
RECOVERED_AT_ONCE = 4096
"""Recovered blocks entered together, by group. Small, so that the order of use stays about right."""
LISTED_SLOTS = 1 << 20
"""Slots that a page of a listing looks at, which takes about a millisecond."""
_NOTHING: BlockIds = np.empty(0, np.uint32)
_NO_SLOTS: npt.NDArray[np.uint32] = np.empty((0, 1), np.uint32)
_ABSENT = bytes([Verdict.ABSENT])


class Cache:
    """Blocks of all namespaces in one pool. Not thread-safe.

    A method that raises KvoffdError has changed nothing. End a ticket exactly once, after the last byte of its copy has
    moved.

    Args:
        partial_timeout_s: age at which partial blocks are dropped.
        leased_share: the most of the pool that all leases together may pin, promoted blocks included. Half of it any
            session may lease; beyond that a session leases no more than its equal part among the sessions that have
            leases, or were refused some in the last CLAIM_S, and never more than what is left. What a lease has it
            keeps until its end. Blocks that others lease already count for these, and promoted ones (``hold``) are
            not subject to the equal parts.
        max_leased_keys: limit for one session.
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
        """Namespaces by fingerprint, in the order in which they were opened."""
        self.quotas: dict[bytes, int] = {}
        """Limits of pool bytes, set by an operator, by fingerprint; the namespace need not be open."""
        self.leases: dict[int, Lease] = {}
        """Active leases by id, in the order of their deadlines."""
        self.checked_slots = self.checked_bytes = self.mismatches = 0
        """Slots compared with their checksums, their bytes, and the slots whose checksum was wrong."""
        self.quarantined_slots = self.quarantined_bytes = 0
        self.unverified_slots = 0
        """Slots that an earlier daemon wrote and nobody has compared, or whose checksum is still to be computed."""
        self.watchers: list[Callable[[Sequence[Chain]], None]] = []
        """Called by ``report_requests`` with each request, after the policy."""
        self.on_counted: Callable[[Chain, int], None] = lambda chain, own: None
        """Called for each chain when it is counted, with the number of leading keys that the engine had itself."""
        self.on_offered: Callable[[Group, bytes], None] = lambda group, keys: None
        """Called with the keys that the first rank offers for storing."""
        self._events, self._clock = events, clock
        self._lease_ttl_s, self._partial_timeout_s = lease_ttl_s, partial_timeout_s
        self._max_leased_keys, self.most_leased_bytes = max_leased_keys, int(leased_share * slots.pool_bytes)
        self.reserved_bytes = 0
        """Bytes of blocks that will be promoted, and leases will pin; kept by ``tiers``."""
        self.session_leases: dict[int, SessionLeases] = {}
        """Active leases of each session that has any."""
        self._claims: dict[int, float] = {}
        """Sessions whose last lookup was cut by the limit of leases, with the time until which they count as sessions
        with leases."""
        self._bytes_in = dict.fromkeys(WITH_SLOTS, 0)
        """Bytes of all blocks by state, including those of forgotten namespaces."""
        self._next_number = 1
        self._warned_of_no_space = False
        self._unverified_at = 0
        """Slot at which ``next_unverified`` continues."""
        self._groups: dict[int, Group] = {}
        """Groups by number: those in use, and those whose slots are still to be freed."""
        self._next_group = 1
        self._current: dict[Namespace, list[Group]] = {}
        """Groups of each namespace, by index."""
        self.order = HintedOrder(policy, self.blocks, self._groups, self.quotas, clock, slots.pool_bytes)
        self._victims = Victims(slots, self.blocks, self.order, self._waiting, self._settled)
        self._prompts = 0
        """Number of the last prompt that was looked up, or whose store began."""
        self._partial: dict[int, float] = {}
        """Incomplete blocks of which no shard is being written, also of groups that were reset, with the time when that
        began."""
        self._sole: dict[int, int] = {}
        """WRITING blocks that only the stores of this number add shards to; all others are added to by any without."""
        self._requested: deque[tuple[Namespace, list[Chain], Sequence[AskedKeys], int, bool]] = deque()
        """Requests that ``report_requests`` has yet to report, oldest first; whether ``count_prompt`` counts them."""
        self._uncounted = UncountedPrompts()
        self._computing = Computing(clock)
        self._uncounted_loads = UncountedLoads()
        self._ready_removed = False
        """Whether READY blocks left the index since the last ``report_requests``."""
        self.swept_at_once, self.ended_at_once = SWEPT_AT_ONCE, ENDED_AT_ONCE
        self._dead: dict[int, Group] = {}
        """Groups that were reset and whose blocks are still to be freed, by number."""
        self._ended: deque[Lease] = deque()
        """Leases that have ended and whose blocks are still to be unpinned."""
        self._prefetches: dict[Lease, Sequence[tuple[int, bytes]]] = {}
        """Leases of prefetches, which pin nothing, and their keys."""
        self.unannounced = np.zeros(len(self.blocks.state), np.bool_)
        """[slots] whether it is a recovered block that was not reported to the listener yet."""
        self._to_announce = _NOTHING

    # --- namespaces -----------------------------------------------------------------------------

    def namespace(self, fingerprint: bytes) -> Namespace:
        """Return the open namespace. Raises KvoffdError (UNKNOWN_NAMESPACE)."""
        if (found := self.namespaces.get(fingerprint)) is None:
            why = f"No namespace with the fingerprint {fingerprint.hex()} is open; send OpenNamespace first."
            raise KvoffdError(why, ErrorCode.UNKNOWN_NAMESPACE)
        return found

    def open_namespace(self, namespace: Namespace) -> tuple[Namespace, bool]:
        """Open or join a namespace; return also whether it is new. Raises KvoffdError on another geometry."""
        if (known := self.namespaces.get(namespace.fingerprint)) is not None:
            known.check_same(namespace.world_size, namespace.key_bytes, namespace.groups)
            return known, False
        self.namespaces[namespace.fingerprint] = namespace
        self._give_number(namespace, self._next_number)
        self._events.cleared(namespace)
        return namespace, True

    def _give_number(self, namespace: Namespace, number: int) -> None:
        """Set the namespace's number and give it new groups for its blocks."""
        namespace.number = number
        self._next_number = max(self._next_number, number + 1)
        first, self._next_group = self._next_group, self._next_group + len(namespace.groups)
        groups = [Group(first + index, namespace, index) for index in range(len(namespace.groups))]
        self._current[namespace] = groups
        self._groups.update((group.number, group) for group in groups)
        self._fix_sizes(namespace)

    def _fix_sizes(self, namespace: Namespace) -> None:
        """Set the groups' sizes. Groups can have blocks once all ranks have registered."""
        for group in self._current[namespace]:
            lengths = namespace.shard_lengths(group.index)
            group.set_sizes(lengths, [self.slots.slot_size(length) for length in lengths])

    def _fix_shard_bytes(self, namespace: Namespace, rank: int, shard_bytes: Sequence[int]) -> bool:
        """Set the namespace's shard bytes. Raises BadGeometry."""
        for nbytes in shard_bytes:
            self.slots.slot_size(nbytes)  # which raises
        return namespace.fix_shard_bytes(rank, shard_bytes)

    def register_rank(
        self,
        namespace: Namespace,
        rank: int,
        shard_bytes: Sequence[int],
        node: int | None,
        shards: Shards | None = None,
    ) -> None:
        """Set the rank's NUMA node and, at its first registration, its shard sizes, by group, and their ``shards``.

        Raises BadGeometry if the bytes differ from earlier ones, do not fit the namespace, or no slot can hold a shard.
        """
        new = self._fix_shard_bytes(namespace, rank, shard_bytes)
        namespace.nodes[rank] = node
        self._fix_sizes(namespace)
        if namespace.describe_shards(rank, shards) or new:
            self._save()

    def _save(self) -> None:
        """Save what the next daemon must know of the namespaces.

        In the table of a very small pool some may have no space: those with the fewest blocks, which it loses.
        """
        kept = [one for one in self.namespaces.values() if any(one.shard_bytes)]
        count = len(kept)
        while not self.table.save_namespaces(NamespaceSnapshot(self._next_number, tuple(one.record() for one in kept))):
            kept.remove(min(kept, key=lambda one: one.ready_blocks))
        if len(kept) < count and not self._warned_of_no_space:
            self._warned_of_no_space = True
            logger.warning("Too many namespaces (%d) to persist: %d are lost at a restart.", count, count - len(kept))

    def group(self, namespace: Namespace, group: int) -> Group:
        """Return the current group, valid until the next reset. Raises BadGeometry."""
        namespace.check(group)
        return self._current[namespace][group]

    def reset(self, *namespaces: Namespace, generation: int | None = None) -> int:
        """Forget all blocks of namespaces in the pool, and what comes up to it. Returns their number.

        Each namespace gets a new number, so that no daemon finds them; ``background`` frees the slots. All leases end.
        ``generation``: that of later blocks, if it is another one; tiers have no others.
        """
        dropped = sum(self._reset(one, generation) for one in namespaces)
        if namespaces:
            self._save()
        for namespace in namespaces:
            if self.tiers is not None:
                self.tiers.cancel_promotions(namespace)
            self._events.cleared(namespace)
        return dropped

    def _reset(self, namespace: Namespace, generation: int | None) -> int:
        """Reset a namespace without saving that."""
        dropped = namespace.blocks_in[READY] + namespace.blocks_in[WRITING]
        namespace.counters.invalidated_blocks += dropped
        dead = self._current[namespace]
        self._give_number(namespace, self._next_number)
        if generation is not None:
            namespace.generation = generation
        for group, now in zip(dead, self._current[namespace], strict=True):
            self._retire(group)
            now.unswept = [number for number in (*group.unswept, group.number) if number in self._dead]
            now.before, group.before = (group, *group.before)[:KNOWN_RESETS], ()
        self._end(list(namespace.leases))
        return dropped

    def _retire(self, group: Group) -> None:
        """Stop using a group for lookups."""
        group.dead = True
        if group.blocks_in[WRITING] or group.blocks_in[READY]:
            self._dead[group.number] = group
        for state in (WRITING, READY):
            self._count(group, state, DROPPED, group.blocks_in[state])
        if not group.blocks_in[DROPPED]:
            del self._groups[group.number]

    def forget_namespace(self, namespace: Namespace) -> None:
        """Forget a namespace that has no blocks in the index and that no session has open.

        It stays in the slot table until the next save, as one without blocks.
        """
        assert not namespace.blocks_in[READY] + namespace.blocks_in[WRITING]
        for group in self._current.pop(namespace):
            self._retire(group)
        del self.namespaces[namespace.fingerprint]
        self._requested = deque(request for request in self._requested if request[0] is not namespace)

    def restore_namespace(self, record: NamespaceRecord) -> list[Group]:
        """Open a namespace with the number that an earlier daemon saved, before anything else. Returns its groups;
        pass their blocks to ``enter_recovered``.

        Raises BadGeometry, and changes nothing, if this pool cannot hold its shards.
        """
        geometry = record.world_size, record.key_bytes, record.groups, record.description
        namespace = Namespace(record.fingerprint, record.label, *geometry)
        for rank, shard_bytes in enumerate(record.shard_bytes):
            if shard_bytes is not None:
                self._fix_shard_bytes(namespace, rank, shard_bytes)
        for rank, shards in enumerate(record.shards or ()):
            if shards is not None and rank < record.world_size:
                sizes = [(count, tuple(page[0] for page in layers if page)) for count, layers in shards]
                namespace.describe_shards(rank, tuple(cast(Shards, sizes)))
        namespace.generation = record.generation
        self.namespaces[namespace.fingerprint] = namespace
        self._give_number(namespace, record.number)
        return self._current[namespace]

    def enter_recovered(self, blocks: BlockIds, quarantined: SlotIds) -> None:
        """Add READY blocks that are in the BlockTable and the allocator, the least recently used first, and quarantined
        slots. Saves the namespaces; call ``announce_recovered`` afterwards."""
        for begin in range(0, len(blocks), RECOVERED_AT_ONCE):
            for group, members in self.by_group(blocks[begin : begin + RECOVERED_AT_ONCE]):
                self.blocks.pages[members] = group.block_bytes // PAGE_BYTES
                self.unverified_slots += len(members) * len(group.sizes)
                self._count(group, FREE, READY, len(members))
                self.blocks.append(group, members)
                self.order.insert(group, members, self.blocks.keys(members, group.key_bytes))
                self.order.share(members)
        self._to_announce = blocks
        self.unannounced[blocks] = True
        self._quarantine(quarantined)
        self._save()

    def announce_recovered(self) -> bool:
        """Report a batch of recovered blocks to the listener, the latest first. Returns whether more remain."""
        if not self._to_announce.size:
            return False
        batch, self._to_announce = self._to_announce[-RECOVERED_AT_ONCE:], self._to_announce[:-RECOVERED_AT_ONCE]
        batch = batch[self.unannounced[batch]]
        self.unannounced[batch] = False
        for group, members in self.by_group(batch):
            if not group.dead:
                keys = self.blocks.split_keys(members, group.key_bytes)
                self._events.stored(group.namespace, group.index, keys[::-1])
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
        reported: bool = False,
        peer: str = "",
        giver: int = 0,
    ) -> tuple[list[bytes], int]:
        """Return the state of each key, and how many blocks the lease has. READY blocks are pinned under it.

        Keys from a disk are PENDING, those from a store SHARED. If leases may not pin all blocks, each group's last
        READY keys are ABSENT.

        Args:
            again: the request was counted before.
            reported: its keys are counted by ``count_prompt``.
            peer: see ``Lease``.
            giver: number of the owner of the prompt's hints; 0 if unknown.

        Raises:
            BadGeometry, BadKeys
            UnknownLease: the lease belongs to another session or namespace.
        """
        lease = self.leases.get(lease_id)
        if lease is not None and (lease.session != session or lease.namespace is not namespace):
            raise UnknownLease(f"The lease {lease_id} belongs to another session or namespace; choose a new lease id.")
        current = self._current[namespace]
        for index, keys in groups:
            namespace.check(index, keys)
        is_new = lease is None
        if lease is None:
            lease = Lease(lease_id, session, namespace, self._clock() + self._lease_ttl_s, _NOTHING)
            lease.counts = not (again or reported)
        lease.coming -= lease.asking  # stores are asked again
        lease.asking, lease.asking_bytes, lease.peer = 0, 0, peer
        for index, keys in groups if self._dead else ():
            self._record_reset(current[index], keys)
        pinned_before = self.blocks.pinned_bytes
        found = [self.blocks.lookup(current[index], keys, lease=is_new) for index, keys in groups]
        found = [
            one._replace(reasons=self._since_reset(current[index], keys, one.reasons)) if current[index].before else one
            for (index, keys), one in zip(groups, found, strict=True)
        ]
        self._prompts += 1
        for (index, keys), one in zip(groups, found, strict=True):
            self.blocks.prompt[one.ready] = self._prompts
            self.order.asked(current[index], keys, one.states, one.ready, giver)
        asked = None if again else [AskedKeys(namespace, reported=reported) for _ in groups]
        if self.tiers is not None:
            found = self._find_below(self.tiers, lease, groups, found, asked, is_new=is_new)
        found = self._lease_ready(lease, found, pinned_before, is_new=is_new)
        if asked is not None:
            self._count_lookup(lease, groups, found, asked, reported=reported)
        return [one.states for one in found], len(lease.blocks)

    def _find_below(
        self,
        tiers: TierHooks,
        lease: Lease,
        groups: Sequence[tuple[int, bytes]],
        found: list[Found],
        asked: list[AskedKeys] | None,
        *,
        is_new: bool,
    ) -> list[Found]:
        """Request what the pool lacks from the tiers. Returns what was found, with the states of keys that come up."""
        states = [one.states for one in found]
        if not lease.coming and sum([len(one.ready) for one in found]) == sum(map(len, states)):
            return found
        try:
            tier_states = tiers.find(lease, groups, states, asked)
        except BaseException:
            if is_new:
                self._free_unpinned(self.blocks.end_lease(_ready_of(found)))
                tiers.lease_ended(lease)
            raise
        if tier_states is states:
            return found
        return [_with_pending(one, new) for one, new in zip(found, tier_states, strict=True)]

    def _lease_ready(self, lease: Lease, found: list[Found], pinned_before: int, *, is_new: bool) -> list[Found]:
        """Give a lease the READY blocks, which it has pinned already if it ``is_new``. Returns what was found, without
        the blocks that it may not pin.

        ``pinned_before``: pinned bytes before the lookup.
        """
        ready, leased = _ready_of(found), self.leases_of(lease.session)
        if is_new and (ready.size or lease.coming):
            self.leases[lease.lease_id], self.session_leases[lease.session] = lease, leased
            leased.leases[lease] = lease.namespace.leases[lease] = None
        if not ready.size:
            return found
        if is_new:
            fresh, newly_leased_bytes = ready, sum([one.newly_leased_bytes for one in found])
        else:
            fresh = ready[~np.isin(ready, lease.blocks)]
            newly_leased_bytes = self.blocks.lease(fresh)
        if self._is_within_limit(lease.session, len(fresh), newly_leased_bytes, pinned_before):
            self._claims.pop(lease.session, None)
        else:
            self._free_unpinned(self.blocks.end_lease(fresh))
            if self._ended:
                self._unpin_some()
            found = self._cut(lease, leased, found)
            ready = _ready_of(found)
            fresh = ready[~np.isin(ready, lease.blocks)]
            newly_leased_bytes = self.blocks.lease(fresh)
        self._add_to_lease(lease, leased, fresh, newly_leased_bytes)
        if not lease.blocks.size and not lease.coming:  # the limit allowed no pin
            self._end([lease])
        return found

    def _is_within_limit(self, session: int, keys: int, newly_leased_bytes: int, pinned_before: int) -> bool:
        """Return whether a session may keep this many keys that a lookup has just leased."""
        leased = self.leases_of(session)
        if leased.keys + keys > self._max_leased_keys:
            return False
        if not newly_leased_bytes:
            return True
        most, pinned_bytes = self.most_leased_bytes, self.blocks.pinned_bytes
        if self.blocks.leased_bytes > most or pinned_bytes > max(most, pinned_before):
            return False
        return pinned_bytes <= most // 2 or leased.nbytes + newly_leased_bytes <= self._share_bytes(session)

    def _share_bytes(self, session: int) -> int:
        """Return the equal part of a session among those that have pinned something, or claim it, and itself."""
        now = self._clock()
        # Sessions that only wait for a tier, and have nothing pinned yet, do not count.
        sharers = {session, *(one for one, leased in self.session_leases.items() if leased.nbytes)}
        return self.most_leased_bytes // len(sharers.union(one for one, until in self._claims.items() if until > now))

    def _cut(self, lease: Lease, leased: SessionLeases, found: list[Found]) -> list[Found]:
        """Return what was found with as many READY keys as the session may lease besides what the lease has: the first
        of each group, about the same part of each."""
        fresh = [~np.isin(one.ready, lease.blocks) for one in found]
        counts = [int(which.sum()) for which in fresh]
        groups = np.repeat(np.arange(len(found)), counts)
        order = np.argsort(np.concatenate([np.arange(count) / max(1, count) for count in counts]), kind="stable")
        blocks = np.concatenate([one.ready[which] for one, which in zip(found, fresh, strict=True)])[order]
        nbytes = self.blocks.pages[blocks].astype(np.int64) * PAGE_BYTES
        to_pin = np.cumsum(nbytes * (self.blocks.pins[blocks] == 0))
        to_lease = np.cumsum(nbytes * (self.blocks.leases[blocks] == 0))
        most, pinned_bytes = self.most_leased_bytes, self.blocks.pinned_bytes
        share = max(0, self._share_bytes(lease.session) - leased.nbytes)
        fits = (to_lease <= most - self.blocks.leased_bytes) & (to_pin <= max(0, most - pinned_bytes))
        fits &= (to_lease <= share) | (pinned_bytes + to_pin <= most // 2)
        count = min(int(np.append(fits, False).argmin()), max(0, self._max_leased_keys - leased.keys))
        if count < len(blocks):
            self._claims[lease.session] = self._clock() + CLAIM_S
        leasable = np.bincount(groups[order[:count]], minlength=len(found)).tolist()
        return [_limit_ready(one, which, most) for one, which, most in zip(found, fresh, leasable, strict=True)]

    def _count_lookup(
        self,
        lease: Lease,
        groups: Sequence[tuple[int, bytes]],
        found: list[Found],
        asked: list[AskedKeys],
        *,
        reported: bool,
    ) -> None:
        """Count a lookup and its keys, and keep it for ``report_requests``."""
        namespace, tokens, chains = lease.namespace, 0, []
        number = hash((lease.session, lease.lease_id)) & 0xFFFFFFFF
        current, counters = self._current[namespace], namespace.counters
        counters.lookups += 1
        for (index, keys), one, counted in zip(groups, found, asked, strict=True):
            group = current[index]
            counters.keys_asked += len(one.states)
            counters.keys_ready += len(one.ready)
            counters.prefix_keys_ready += one.run
            tokens = max(tokens, len(one.states) * group.tokens)
            counted.prompt = number
            counted.found(chain := Chain(group, keys, one.ready, one.run), one.reasons)
            if group.sizes:
                chains.append(chain)
        counters.asked_tokens += tokens
        if reported:
            for prompt in self._uncounted.add(lease.session, lease.lease_id, asked):
                self._count_prompt(prompt, None)
        if chains:
            self._requested.append((namespace, chains, asked, number, reported))
            if len(self._requested) > MAX_UNREPORTED_REQUESTS:
                self._report_request()

    def _add_to_lease(self, lease: Lease, leased: SessionLeases, fresh: BlockIds, newly_leased_bytes: int) -> None:
        lease.blocks = np.concatenate([lease.blocks, fresh]) if lease.blocks.size else fresh
        lease.nbytes += newly_leased_bytes
        leased.nbytes += newly_leased_bytes
        leased.keys += len(fresh)

    def hold(self, lease: Lease, blocks: BlockIds) -> None:
        """Pin READY blocks that were promoted for a lease, unless it has ended or leases may not pin more."""
        if not lease.active:
            return
        leased, pinned_before = self.session_leases[lease.session], self.blocks.pinned_bytes
        newly_leased_bytes = self.blocks.lease(blocks)
        exceeds = self.blocks.leased_bytes > self.most_leased_bytes and newly_leased_bytes > 0
        exceeds |= self.blocks.pinned_bytes > max(self.most_leased_bytes, pinned_before)
        if exceeds or leased.keys + len(blocks) > self._max_leased_keys:
            self._free_unpinned(self.blocks.end_lease(blocks))
        else:
            self._add_to_lease(lease, leased, blocks, newly_leased_bytes)

    @property
    def pinnable_bytes(self) -> int:
        """Bytes that leases may still pin."""
        return self.most_leased_bytes - self.blocks.pinned_bytes

    @property
    def leasable_bytes(self) -> int:
        """Bytes that leases may still pin, without those that are reserved for promotions."""
        return self.pinnable_bytes - self.reserved_bytes

    def leases_of(self, session: int) -> SessionLeases:
        return self.session_leases.get(session) or SessionLeases()

    def count_prompt(self, session: int, lease_id: int, outcome: PromptOutcome) -> Sequence[AskedKeys]:
        """Count the keys of a prompt whose engine reports what it did with it. Counted ones are not counted again.

        Returns the keys that were counted.
        """
        parts = self._uncounted.take(session, lease_id)
        self._count_prompt(parts, outcome)
        return parts

    def count_tokens(self, namespace: Namespace, session: int, lease_id: int, tokens: PromptTokens) -> dict[str, int]:
        """Count a prompt's tokens by source, of which its engine loaded some under this lease. Return them by the
        sources' names."""
        found = tokens.by_source(self._uncounted_loads.take(session, lease_id))
        for source, count in found.items():
            namespace.counters.prompt_tokens[source.kind] += count
        return {source.name: count for source, count in found.items()}

    def _count_prompt(self, parts: Sequence[AskedKeys], outcome: PromptOutcome | None) -> None:
        for chain, own in count_prompt(parts, outcome, self._reasons_from):
            if chain.group.sizes and not (chain.group.dead or chain.group.namespace.of_bench):
                self.on_counted(chain, own)

    def _reasons_from(self, chain: Chain, first: int) -> bytes:
        """Return the reasons of a chain's keys from one on, as far as they are known by now."""
        return self.blocks.miss_reasons(chain.group, chain.keys[first * chain.group.key_bytes :])

    def tier_lacks(self, asked: AskedKeys, first: int, count: int) -> None:
        """Record why keys are missing, which follow one another, and which a tier was asked for and has not."""
        if (chain := asked.chain) is None:
            return
        size = chain.group.key_bytes
        keys = chain.keys[first * size : (first + count) * size]
        reasons = bytearray(self.reasons_of(asked.namespace, chain.group.index, keys))
        if asked.reported and not (chain.group.dead or asked.namespace.of_bench):
            self._computing.asked(chain.group, keys, reasons, asked.prompt)
        asked.missed(first, bytes(reasons))

    def record_misses(self, namespace: Namespace, group: int, keys: bytes, reason: MissReason) -> None:
        """Remember the reason why these keys have no block any more."""
        self.blocks.record_misses(self.group(namespace, group), keys, reason)

    def reasons_of(self, namespace: Namespace, group: int, keys: bytes) -> bytes:
        """Return the ``MissReason`` of each key when it was last missing, if known; it may have been stored since."""
        known = self.group(namespace, group)
        self._record_reset(known, keys)
        return self._since_reset(known, keys, self.blocks.miss_reasons(known, keys))

    def _since_reset(self, group: Group, keys: bytes, reasons: bytes) -> bytes:
        """Return the reasons of keys, which is INVALIDATED for those that are only known from before a reset."""
        never = bytes([MissReason.UNKNOWN, MissReason.FORGOTTEN])
        for earlier in group.before if not set(never).isdisjoint(reasons) else ():
            now, before = (np.frombuffer(one, np.uint8) for one in (reasons, self.blocks.miss_reasons(earlier, keys)))
            dropped = np.isin(now, list(never)) & ~np.isin(before, list(never))
            reasons = np.where(dropped, np.uint8(MissReason.INVALIDATED), now).tobytes()
        return reasons

    def _record_reset(self, group: Group, keys: bytes) -> None:
        """Record which of these keys were reset, as ``background`` does when it reaches their blocks."""
        for number in self._dead.keys() & group.unswept:
            states, _ = self.blocks.find(self._dead[number], keys)
            gone = np.flatnonzero(np.frombuffer(states, np.uint8) != FREE)
            packed_keys = _select_keys(keys, gone, group.key_bytes)
            self.blocks.record_misses(group, packed_keys, MissReason.INVALIDATED)

    def report_requests(self) -> None:
        """Report requests to the tiers and, except a bench's, to the policy, ``on_counted`` and the watchers. Call
        it after the replies are sent."""
        while self._requested:
            self._report_request()
        self._ready_removed = False

    def _report_request(self) -> None:
        namespace, found, asked, prompt, reported = self._requested.popleft()
        chains = [chain for chain in found if not chain.group.dead]
        if self._ready_removed:
            chains = [one._replace(ready=one.ready[self.blocks.state[one.ready] == READY]) for one in chains]
        if self.tiers is not None and (ready := [one.ready for one in chains if one.ready.size]):
            self.tiers.used(np.concatenate(ready))
        if chains and not namespace.of_bench:
            self.order.requested(chains)
            for chain in () if reported else chains:
                self.on_counted(chain, 0)
            for one in asked:
                if one.chain is not None and one.chain.run < len(one.reasons) and not one.chain.group.dead:
                    self._computing.asked(one.chain.group, one.chain.keys, one.reasons, prompt)
            for tell in self.watchers:
                tell(chains)

    def release(self, session: int, lease_ids: Iterable[int]) -> int:
        """End leases of a session; unknown ids are ignored. Returns how many ended."""
        found = [self.leases.get(lease_id) for lease_id in dict.fromkeys(lease_ids)]
        return self._end([lease for lease in found if lease is not None and lease.session == session])

    def end_session(self, session: int) -> int:
        """End all leases of a closed session. Returns how many."""
        self._uncounted.session_ended(session)
        self._claims.pop(session, None)
        return self._end(list(self.leases_of(session).leases))

    def _end(self, leases: Sequence[Lease]) -> int:
        """End active leases. Returns how many. If there are many, ``background`` unpins their blocks."""
        for lease in leases:
            del lease.namespace.leases[lease], self.leases[lease.lease_id]
            leased = self.session_leases[lease.session]
            del leased.leases[lease]
            leased.keys -= len(lease.blocks)
            leased.nbytes -= lease.nbytes
            if not leased.leases:
                del self.session_leases[lease.session]
        self._ended.extend(leases)
        if len(self._ended) <= self.ended_at_once:
            self._unpin_some()
        return len(leases)

    def _unpin_some(self) -> None:
        """Unpin blocks of some leases that have ended."""
        ended = [self._ended.popleft() for _ in range(min(self.ended_at_once, len(self._ended)))]
        for lease in ended:
            if lease.counts and lease.blocks.size:
                lease.namespace.counters.covered_keys += len(lease.blocks)
            if self.tiers is not None:
                self.tiers.lease_ended(lease)
        if ended:
            blocks = ended[0].blocks if len(ended) == 1 else np.concatenate([lease.blocks for lease in ended])
            self._free_unpinned(self.blocks.end_lease(blocks))

    def tick(self) -> int:
        """End overdue leases, and drop blocks that were partial for too long. Returns the number of both.

        At most ``ended_at_once`` of each; the others wait for the next call.
        """
        now = self._clock()
        overdue = list(islice(takewhile(lambda lease: lease.deadline <= now, self.leases.values()), self.ended_at_once))
        partial = list(islice(self._partial_since(now - self._partial_timeout_s), self.ended_at_once))
        self._drop_partial(partial)
        self.order.tick()
        self._tick_prefetches()
        return self._end(overdue) + len(partial)

    def unpin(self, blocks: BlockIds) -> None:
        """Undo ``BlockTable.pin``."""
        self._free_unpinned(self.blocks.unpin(blocks))

    def _free_unpinned(self, unpinned: BlockIds) -> None:
        """Free the DROPPED ones of blocks that are not pinned any more."""
        if self._bytes_in[DROPPED]:
            self._free_dropped(unpinned[self.blocks.state[unpinned] == DROPPED])

    # --- hints ----------------------------------------------------------------------------------

    def hint(
        self,
        namespace: Namespace,
        action: HintAction,
        groups: Sequence[tuple[int, bytes]],
        priority: int = 0,
        ttl_s: float = 0.0,
        *,
        session: int = NO_SESSION,
        giver: int = 0,
    ) -> int:
        """Retain, release or prefetch blocks of these keys, root first; see ``HintAction``. Returns how many are READY.

        ``giver``: number of the hint's owner; 0 for one of its own, whose hints no release ends.

        Raises BadGeometry, BadKeys.
        """
        for index, keys in groups:
            namespace.check(index, keys)
        if action is HintAction.PREFETCH:
            return self._prefetch(namespace, groups)
        wish, count = self.order.wish(namespace, session, giver, priority, ttl_s), 0
        for index, keys in groups:
            group, split = self._current[namespace][index], list(dict.fromkeys(namespace.split(index, keys)))
            states, blocks = self.blocks.find(group, b"".join(split))
            is_ready = np.frombuffer(states, np.uint8) == READY
            ready = blocks[is_ready]
            count += len(ready)
            if action is HintAction.RELEASE:
                self.order.release(giver, group, ready)
            else:
                self.order.asked(group, b"".join(split), states, ready, giver)
                self.order.retain(wish, group, ready, list(compress(split, (~is_ready).tolist())))
        return count

    def _prefetch(self, namespace: Namespace, groups: Sequence[tuple[int, bytes]]) -> int:
        """Promote what tiers have of these keys, for nobody: nothing is pinned."""
        states = self._states_of(namespace, groups)
        ready = sum(one.count(READY) for one in states)
        if self.tiers is not None and ready < sum(map(len, states)) and len(self._prefetches) < MAX_PREFETCHES:
            lease = Lease(NO_LEASE, NO_SESSION, namespace, self._clock() + self._lease_ttl_s, _NOTHING)
            self._prefetches[lease] = groups
            self._ask_tiers(self.tiers, lease, states)
        return ready

    def _states_of(self, namespace: Namespace, groups: Sequence[tuple[int, bytes]]) -> list[bytes]:
        return [self.blocks.find(self.group(namespace, index), keys)[0] for index, keys in groups]

    def _ask_tiers(self, tiers: TierHooks, lease: Lease, states: list[bytes]) -> None:
        """Request what the pool lacks of a prefetch's keys, or end it if nothing more comes."""
        lease.coming -= lease.asking
        lease.asking, lease.asking_bytes, before = 0, 0, lease.coming
        tiers.find(lease, self._prefetches[lease], states, None)
        lease.namespace.counters.prefetched_keys += max(0, lease.coming - lease.asking - before)
        if not lease.coming:
            self._end_prefetch(lease)

    def _end_prefetch(self, lease: Lease) -> None:
        del self._prefetches[lease]
        if self.tiers is not None:
            self.tiers.lease_ended(lease)

    def _tick_prefetches(self) -> None:
        """End prefetches whose blocks have come, and ask again for those of stores that have not answered, in turns."""
        left = ASKED_AT_ONCE
        for lease, groups in list(self._prefetches.items()):
            if (
                self.tiers is None
                or not lease.coming
                or lease.deadline <= self._clock()
                or lease.namespace not in self._current
            ):
                self._end_prefetch(lease)
            elif lease.asking and left:
                left -= 1
                self._prefetches[lease] = self._prefetches.pop(lease)
                self._ask_tiers(self.tiers, lease, self._states_of(lease.namespace, groups))

    # --- stores ---------------------------------------------------------------------------------

    def begin_store(self, namespace: Namespace, rank: int, parts: Sequence[StorePart], sole: int = 0) -> list[Stored]:
        """Allocate slots for the missing blocks, evicting if needed. Returns what to copy, by part.

        Existing blocks that begin later than the offered ones, and are not in use, are dropped first. The other
        existing blocks of these keys are not evicted, nor are those of the same prompts or of newer ones that no tier
        has. Each group occurs once; groups, keys and rank must be valid.

        ``sole``: a number of the store of all ranks; a block that was begun under another one gets no shard of it.
        """
        groups, size, begun = self._current[namespace], namespace.key_bytes, list[Stored]()
        offers: list[tuple[Stored, StorePart, Sequence[int], npt.NDArray[np.uint64]]] = []
        pinned: list[BlockIds] = []
        try:
            for part, prompts in zip(parts, self._prompts_of(namespace, parts), strict=True):
                group = groups[part.group]
                if rank == 0 and not namespace.of_bench:
                    self.on_offered(group, part.keys)
                    self._computing.offered(group, part.keys)
                offered = group, part.keys, rank, part.first_blocks
                verdicts, blocks = self.blocks.plan(*offered)
                if verdicts == _ABSENT * len(verdicts):
                    offers.append((Stored(group, _NOTHING, _NOTHING), part, range(len(verdicts)), prompts))
                    continue
                if Verdict.NARROW in verdicts:
                    gone = blocks[np.frombuffer(verdicts, np.uint8) == Verdict.NARROW]
                    packed_keys = self.blocks.keys(gone, size)
                    self.drop(gone, MissReason.PARTIAL)
                    if self.tiers is not None:  # a tier's copies are as narrow
                        self.tiers.remove(namespace, group.index, packed_keys, MissReason.PARTIAL)
                    verdicts, blocks = self.blocks.plan(*offered)
                of_key = np.frombuffer(verdicts, np.uint8)
                absent, joined, duplicates = (
                    np.flatnonzero(of_key == one).tolist() for one in (Verdict.ABSENT, Verdict.JOIN, Verdict.DUPLICATE)
                )
                if sole or self._sole:
                    joined = [key for key in joined if self._sole.get(int(blocks[key]), 0) == sole]
                stored = Stored(group, blocks[joined], _NOTHING, joined, duplicates=duplicates)
                offers.append((stored, part, absent, prompts[absent]))
                there = blocks[present := blocks != NO_BLOCK]
                self.blocks.prompt[there] = np.maximum(self.blocks.prompt[there], prompts[present])
                pinned.append(there)
                self.blocks.pin(there)
            for stored, part, new, prompts in offers:
                begun.append(stored)
                self._admit(rank, stored, part, new, prompts, sole)
        except BaseException:
            self.abort_store(begun)
            raise
        finally:
            for there in pinned:
                self.unpin(there)
        return begun

    def _prompts_of(self, namespace: Namespace, parts: Sequence[StorePart]) -> list[npt.NDArray[np.uint64]]:
        """Return the number of each key's prompt, by part.

        A prompt continues with the number of the block before a chain, of any group. It gets a new one if there is no
        such block, and 0, so that nothing of it is stored, if that block was refused.
        """
        size, jobs, known = namespace.key_bytes, list[list[int]](), dict[int, int]()
        for part in parts:
            starts = part.starts or (0,)
            jobs.append(its := list(part.jobs or range(len(starts))))
            numbers = self._prompts_before(self._current[namespace][part.group], part.before) if part.before else {}
            for at, start in enumerate(starts):
                if at and part.before.get(start) == part.keys[(start - 1) * size : start * size]:
                    its[at] = its[at - 1]  # it continues the chain before it
                elif start in numbers:
                    known[its[at]] = min(numbers[start], known.get(its[at], ANY_PROMPT))
        self._prompts += 1
        found = []
        for part, its in zip(parts, jobs, strict=True):
            each = np.array([known.get(job, self._prompts) for job in its], np.uint64)
            found.append(np.repeat(each, np.diff([*(part.starts or (0,)), len(part.keys) // size])))
        return found

    def _prompts_before(self, group: Group, before: Mapping[int, bytes]) -> dict[int, int]:
        """Return the number of each key's prompt, as far as it is known; 0 if the key was refused."""
        keys = b"".join(before.values())
        states, blocks = self.blocks.find(group, keys)
        reasons = self.blocks.miss_reasons(group, keys) if FREE in states else bytes(len(states))
        numbers: dict[int, int] = {}
        for start, state, block, reason in zip(before, states, blocks.tolist(), reasons, strict=True):
            if state == FREE and reason in REFUSED:
                numbers[start] = 0
            elif state != FREE and (number := int(self.blocks.prompt[block])):  # a recovered one has none
                numbers[start] = number
        return numbers

    def _admit(
        self,
        rank: int,
        stored: Stored,
        part: StorePart,
        absent: Sequence[int],
        prompts: npt.NDArray[np.uint64],
        sole: int,
    ) -> None:
        """Make blocks for the absent keys that the policy admits, and fill in what to copy. ``prompts``: the number of
        each one's prompt."""
        joins = len(stored.copy)
        try:
            self._take_admitted(stored, part, absent, prompts)
            self._record_lost(stored, part, prompts)
        finally:  # allocated slots belong to the store even if this fails
            if sole or self._sole:
                self._forget_sole(stored.blocks[joins:])
                if sole:
                    self._sole |= dict.fromkeys(stored.blocks[joins:].tolist(), sole)
            if joins:  # the keys of its blocks lie between those of new ones
                order = np.argsort(stored.copy)
                stored.copy, stored.blocks = np.array(stored.copy)[order].tolist(), stored.blocks[order]
            stored.slots, stored.offsets = self.blocks.begin_writes(self.slots, stored.blocks, rank)
            if part.first_blocks:
                stored.first_blocks = [part.first_blocks.get(key, 0) for key in stored.copy]
            for block in stored.blocks.tolist() if self._partial else ():
                self._partial.pop(block, None)

    def _take_admitted(
        self, stored: Stored, part: StorePart, absent: Sequence[int], prompts: npt.NDArray[np.uint64]
    ) -> None:
        """Make blocks for the absent keys as far as policy and space allow. Each key's number goes into
        ``stored.copy``, ``rejected`` or ``no_space``."""
        if not prompts.all():  # keys behind a refused one would never be found
            stored.no_space += [number for number, prompt in zip(absent, prompts.tolist(), strict=True) if not prompt]
            absent, prompts = np.array(absent)[prompts != 0].tolist(), prompts[prompts != 0]
        if not absent:
            return
        group, size, begin, packed_keys = stored.group, stored.group.key_bytes, 0, part.keys
        if len(absent) * size < len(packed_keys):
            packed_keys = _select_keys(packed_keys, absent, size)
        runs: Sequence[tuple[int, float]] = [(len(absent), inf)]
        refused_score = -inf  # keys with a score up to this get no space
        if part.starts is not None and group.sizes and not group.namespace.of_bench:
            starts = list(part.starts)
            if len(starts) > 1:
                starts = sorted({*np.searchsorted(absent, starts).tolist()})
            runs = self.order.admit(group, packed_keys, starts)
            if self.slots.free_bytes < group.block_bytes and not self._dead and not self._partial:
                refused_score = self.order.lowest
        for count, score in runs:
            end, left = begin + count, list(absent[begin : begin + count])
            # With tiers, every admitted block gets space, because only blocks in the pool are written to tiers.
            limit = inf if self.tiers is not None else score
            if score != REJECTED and limit > refused_score:
                left = self._take_run(stored, packed_keys[begin * size : end * size], left, prompts[begin:end], limit)
                if left and (prompts == prompts[0]).all():  # otherwise other prompts may still get some
                    refused_score = limit
            if left:
                is_outranked = max(limit, refused_score) < inf and self._victims.are_left(int(prompts.max()))
                lost = stored.rejected if score == REJECTED or is_outranked else stored.no_space
                lost += left
            begin = end

    def _take_run(
        self, stored: Stored, keys: bytes, numbers: list[int], prompts: npt.NDArray[np.uint64], below: float
    ) -> list[int]:
        """Make blocks for absent keys as far as there is space. Returns the numbers of those that got none.

        They may evict what the oldest of their prompts may. What gets no space then tries again with its own prompt.
        """
        taken, left = self._take_part(stored, keys, numbers, prompts, below), list[int]()
        begins = [taken, *(taken + 1 + np.flatnonzero(np.diff(prompts[taken:]))).tolist(), len(numbers)]
        if taken == len(numbers) or (len(begins) == 2 and prompts[taken] == prompts.min()):
            return numbers[taken:]
        size = stored.group.key_bytes
        for begin, end in pairwise(begins):
            one = slice(begin, end)
            taken = self._take_part(stored, keys[begin * size : end * size], numbers[one], prompts[one], below)
            left += numbers[begin + taken : end]
        return left

    def _take_part(
        self, stored: Stored, keys: bytes, numbers: Sequence[int], prompts: npt.NDArray[np.uint64], below: float
    ) -> int:
        """Make blocks for the first absent keys. Returns how many got one."""
        blocks = self._take(stored.group, keys, below, int(prompts.min()))[:, 0]
        self.blocks.prompt[blocks] = prompts[: len(blocks)]
        stored.blocks = np.concatenate([stored.blocks, blocks])
        stored.copy += numbers[: len(blocks)]
        return len(blocks)

    def _record_lost(self, stored: Stored, part: StorePart, prompts: npt.NDArray[np.uint64]) -> None:
        """Count the keys that got no space or were rejected, and remember why they have no block."""
        group, size = stored.group, stored.group.key_bytes
        stored.no_space.sort()
        if stored.no_space:
            cause = self.no_space_cause(group, int(prompts.max()))
            reason = MissReason.QUOTA if cause == "quota" else MissReason.NO_SPACE
            self.blocks.record_misses(group, _select_keys(part.keys, stored.no_space, size), reason)
            group.namespace.counters.no_space[cause] += len(stored.no_space)
        if stored.rejected:
            packed_keys = _select_keys(part.keys, stored.rejected, size)
            self.policy.rejected(group, packed_keys)
            self.blocks.record_misses(group, packed_keys, MissReason.REJECTED)
            group.namespace.counters.rejected_keys += len(stored.rejected)

    def commit_store(
        self,
        parts: Sequence[Stored],
        checksums: Sequence[Iterable[int]],
        tokens: Mapping[bytes, BlockTokens] = NO_TOKENS,
    ) -> int:
        """End a store whose bytes are all written. Returns how many blocks became READY.

        ``checksums``: by part, of each copied key; 0 if it is still to be computed.
        """
        became_ready = 0
        for part, given in zip(parts, checksums, strict=True):
            group, blocks, slots, firsts = part.group, part.blocks, part.slots, part.first_blocks
            if group.dead or not blocks.size:
                self._end_writes(group, blocks, slots)
                continue
            sums, living = array("Q", given), self.blocks.state[blocks] == WRITING
            if not living.all():
                self._end_writes(group, blocks[~living], slots[~living])
                blocks, slots, sums = blocks[living], slots[living], array("Q", compress(sums, living))
                firsts = None if firsts is None else array("H", compress(firsts, living))
            ready, packed_keys = self.blocks.publish(group, blocks, slots, firsts, sums)
            became_ready += len(ready)
            self.unverified_slots += sums.count(0)
            if len(ready) < len(blocks):
                self._mark_partial(group, blocks[self.blocks.missing[blocks] != 0])
            if ready.size:
                self._forget_sole(ready)
                group.namespace.counters.stored_blocks += len(ready)
                self._count(group, WRITING, READY, len(ready))
                self.order.insert(group, ready, packed_keys)
                keys = np.frombuffer(packed_keys, group.namespace.key_type)[::-1].tolist()
                self._events.stored(group.namespace, group.index, keys, tokens=tokens)
                if self.tiers is not None:
                    self.tiers.stored(ready[::-1])
        return became_ready

    def abort_store(self, parts: Sequence[Stored]) -> None:
        """End a store that did not copy everything: its shards are discarded, those of other ranks stay and wait."""
        for part in parts:
            self._end_writes(part.group, part.blocks, part.slots)

    def drop_unfinished(self, parts: Sequence[Stored | FillTicket], reason: MissReason = MissReason.PARTIAL) -> None:
        """Drop the blocks that lack a shard, so that their keys can be stored again. The store or fill must still be
        ended. Copies in a tier stay."""
        for part in parts:
            if not part.group.dead:
                self.drop(part.blocks[self.blocks.state[part.blocks] == WRITING], reason)

    def _end_writes(self, group: Group, blocks: BlockIds, slots: SlotIds) -> None:
        """End the writes to these shards' slots, whose content is discarded."""
        if not blocks.size:
            return
        self.blocks.shard[slots] = RESERVED
        writing = blocks[self.blocks.state[blocks] == WRITING]
        if writing.size and not group.dead:
            every = self.blocks.shard[self.blocks.slots(writing, len(group.sizes))] & SHARD_STATE
            unused = (every == RESERVED).all(axis=1)
            self._mark_partial(group, writing[~unused])
            self._remove(group, WRITING, writing[unused])
        self._free_dropped(blocks[self.blocks.state[blocks] == DROPPED])

    def _mark_partial(self, group: Group, blocks: BlockIds) -> None:
        """Mark the blocks that nobody is writing as partial."""
        shards, now = self.blocks.shard[self.blocks.slots(blocks, len(group.sizes))] & SHARD_STATE, self._clock()
        self._partial |= dict.fromkeys(blocks[(shards != WRITING_SHARD).all(axis=1)].tolist(), now)

    def begin_fill(self, namespace: Namespace, group_index: int, keys: Sequence[bytes]) -> dict[int, FillTicket | None]:
        """Allocate slots of all ranks for keys from a tier. Returns, by the index of each key without a block, a
        ticket, or None if there is no space. Raises BadGeometry."""
        group = self._current[namespace][group_index]
        if not group.sizes:
            raise BadGeometry("Not all ranks of the namespace have registered; register them first.")
        states, _ = self.blocks.find(group, b"".join(keys))
        first: dict[bytes, int] = {}
        for number, (key, state) in enumerate(zip(keys, states, strict=True)):
            if state == FREE:
                first.setdefault(key, number)
        slots = self._take(group, b"".join(first), inf, ANY_PROMPT)
        self.blocks.prompt[slots[:, 0]] = self._prompts
        self.blocks.shard[slots] = WRITING_SHARD
        each = zip(slots, self.slots.offsets(slots).tolist(), strict=True)
        tickets = (FillTicket(group, its, offsets) for its, offsets in each)
        return {number: next(tickets, None) for number in first.values()}

    def end_fill(self, ticket: FillTicket, first_blocks: Sequence[int], checksums: Sequence[int]) -> bool:
        """End a fill. Both arguments are by rank, and empty if the block was not read completely. Returns whether it
        became READY."""
        group, slots = ticket.group, ticket.slots
        if not checksums:
            self._end_writes(group, slots[:1], slots)
            return False
        part = Stored(group, np.repeat(slots[:1], len(slots)), slots, first_blocks=first_blocks)
        is_ready = bool(self.commit_store([part], [checksums]))
        if is_ready:
            self.order.share(slots[:1])  # it may be anybody's
        return is_ready

    # --- loads ----------------------------------------------------------------------------------

    def begin_load(
        self, namespace: Namespace, rank: int, lease_id: int, group_index: int, keys: bytes, first_block: int = 0
    ) -> LoadTicket:
        """Pin READY blocks and return a rank's slots of them. The first key is read from ``first_block`` on.

        The load counts for the lease. Its blocks need not be the lease's: a key may have been stored again since.
        Rank, group and keys must be valid. Raises UnknownLease, and NotReady with the numbers of keys that are not
        READY, are corrupt, or whose written range begins later.
        """
        lease = self.leases.get(lease_id)
        if lease is None or lease.namespace is not namespace:
            raise UnknownLease(f"The lease {lease_id} is unknown, ended or of another namespace; look up again.")
        group, size = self._current[namespace][group_index], namespace.key_bytes
        found = self.blocks.begin_load(self.slots, group, keys, rank, first_block)
        if isinstance(found, list):
            raise NotReady(group_index, found)
        return LoadTicket(rank, lease, group, keys[:size], *found)

    def end_load(self, tickets: Sequence[LoadTicket], *, counts: bool = False, ends_lease: bool = False) -> None:
        """End the tickets of one job. ``ends_lease``: end the lease too, once every rank's job has asked for it.

        ``counts``: count the loaded keys and tokens, once all ranks have loaded them. A lease's tokens are those of its
        largest group: with a sliding window, fewer blocks stand for as many tokens.
        """
        if self.tiers is not None and (keys := self.tiers.loaded(tickets)) is not None and counts:
            self._uncounted_loads.add(tickets[0].lease.session, tickets[0].lease.lease_id, keys)
        for ticket in tickets:
            self.unpin(ticket.blocks)
            if counts and ticket.blocks.size:
                self._count_load(ticket)
        if tickets and ends_lease and (lease := tickets[0].lease).active:
            lease.loaded_ranks.add(tickets[0].rank)
            if len(lease.loaded_ranks) == lease.namespace.world_size:
                self._end([lease])

    def _count_load(self, ticket: LoadTicket) -> None:
        lease, group = ticket.lease, ticket.group.index
        ranks = lease.loaded.setdefault((group, ticket.first_key), set())
        if ticket.rank in ranks:  # loaded again
            return
        ranks.add(ticket.rank)
        if len(ranks) == lease.namespace.world_size:
            before = max(lease.loaded_tokens.values(), default=0)
            lease.loaded_tokens[group] = lease.loaded_tokens.get(group, 0) + ticket.tokens
            lease.namespace.counters.loaded_keys += len(ticket.blocks)
            lease.namespace.counters.loaded(max(0, lease.loaded_tokens[group] - before))

    # --- space ----------------------------------------------------------------------------------

    def _take(self, group: Group, keys: bytes, below: float, older_than: int) -> npt.NDArray[np.uint32]:
        """Make WRITING blocks for keys without one, as far as there is space, evicting blocks of prompts ``older_than``
        this one with a score below ``below``. Returns their slots, [blocks, ranks]."""
        size, ranks = group.key_bytes, len(group.sizes)
        count, entered = len(keys) // size if ranks else 0, 0
        if self.quotas and count and group.namespace.fingerprint in self.quotas:
            count = self._within_quota(group, count, below, older_than)
        found: list[npt.NDArray[np.uint32]] = []
        swept = not self._dead
        try:
            while entered < count:
                left, slots = keys[entered * size :] if entered else keys, _NO_SLOTS
                if self.slots.free_bytes >= group.block_bytes:
                    slots = self.blocks.take(self.slots, group, left, count - entered)
                if len(slots):
                    self._count(group, FREE, WRITING, len(slots))
                elif not swept:  # evicts only if this is not enough
                    swept = True
                    self._sweep(sorted(self._dead.values(), key=lambda one: group.sizes != one.sizes), count - entered)
                    continue
                elif (victims := self._evict_for(group, count - entered, below, older_than)) is None:
                    break
                elif not victims.size:
                    continue
                else:
                    count = min(count, entered + len(victims))  # if they are fewer, nothing else can be evicted
                    slots = self._replace(group, victims, left)
                found.append(slots)  # fewer than wanted if slots ran out: the next round makes space
                entered += len(slots)
        except BaseException:
            for slots in found:
                self.drop(slots[:, 0], MissReason.NO_SPACE)
            raise
        return found[0] if len(found) == 1 else np.concatenate([np.empty((0, max(1, ranks)), np.uint32), *found])

    def _within_quota(self, group: Group, count: int, below: float, older_than: int) -> int:
        """Return how many of ``count`` blocks the quota allows, after evicting blocks of the namespace if needed."""
        namespace, each = group.namespace, group.block_bytes
        quota = self.quotas[namespace.fingerprint]
        most, excess = count + MAX_OVER_QUOTA, namespace.held_bytes + count * each - quota
        if excess > 0 and self._dead:
            dead = [one for one in self._dead.values() if one.namespace is namespace]
            swept = self._sweep(dead, min(most, -(-excess // each)))
            most, excess = most - swept, excess - swept * each
        if excess > 0:
            victims = self._victims.of_namespace(self._current[namespace], excess, most, below, older_than)
            self._evict(victims, reason=MissReason.QUOTA)
        return max(0, min(count, (quota - namespace.held_bytes) // each))

    def no_space_cause(self, group: Group, prompt: int = ANY_PROMPT) -> str:
        """Return why a block of a group, for the prompt of this number, gets no space now, one of NO_SPACE_CAUSES."""
        if not group.sizes:
            return "unregistered"
        usage, quota = self.usage, self.quotas.get(group.namespace.fingerprint)
        if quota is not None and group.namespace.held_bytes + group.block_bytes > quota:
            return "quota"
        if group.block_bytes > self.slots.pool_bytes:
            return "too_large"
        if usage.free + usage.ready - usage.pinned >= group.block_bytes:
            return "prompt" if prompt < ANY_PROMPT and self._victims.spares(prompt) else "sizes"
        return "pinned" if usage.pinned >= usage.writing else "writing"

    def _evict_for(self, group: Group, count: int, below: float, older_than: int) -> BlockIds | None:
        """Return up to ``count`` blocks to replace; empty if space was made otherwise; None if none can be evicted."""
        if not group.namespace.evicts_others:
            return None
        if self._partial:
            # Blocks that only some ranks store must not crowd out readable blocks.
            crowded = self._bytes_in[WRITING] > self.slots.pool_bytes // MAX_WRITING_DIVISOR
            partial = self._partial_since(self._clock() - (0.0 if crowded else PARTIAL_GRACE_S))
            if unpinned := list(islice((block for block in partial if not self.blocks.pins[block]), count)):
                self._drop_partial(unpinned)
                return _NOTHING
        if (own := self._victims.own(group, count, below, older_than)) is not None:
            return own if own.size else None
        if not (victims := self._victims.for_space(group, count, below, older_than)).size:
            return None
        self._evict(victims)
        return _NOTHING

    def _waiting(self, blocks: BlockIds) -> npt.NDArray[np.bool_] | None:
        """Return which of the blocks wait to be written to a tier; None if none does."""
        return None if self.tiers is None else self.tiers.waiting(blocks)

    def _settled(self, blocks: BlockIds) -> npt.NDArray[np.bool_]:
        """Return which of the READY blocks tiers have, or do not want."""
        return np.zeros(len(blocks), np.bool_) if self.tiers is None else self.tiers.settled(blocks)

    def _replace(self, group: Group, victims: BlockIds, keys: bytes) -> npt.NDArray[np.uint32]:
        """Evict READY blocks of a group, and make WRITING ones for the keys in their slots. Returns these slots."""
        if self.tiers is not None:
            self.tiers.evicted(victims)
        group.namespace.counters.evicted_blocks += len(victims)
        slots, packed_keys, unverified = self.blocks.replace(group, victims, keys, MissReason.EVICTED)
        self.unverified_slots -= unverified
        self._report_removed(group, victims, packed_keys)
        self._count(group, READY, WRITING, len(victims))
        return slots

    def _partial_since(self, until: float) -> Iterator[int]:
        return (block for block, since in takewhile(lambda item: item[1] <= until, self._partial.items()))

    # --- ends -----------------------------------------------------------------------------------

    def _evict(self, blocks: BlockIds, reason: MissReason = MissReason.EVICTED) -> None:
        """Evict READY, unpinned blocks."""
        if self.tiers is not None and blocks.size:
            self.tiers.evicted(blocks)
        for group, members in self.by_group(blocks):
            if not group.dead:
                group.namespace.counters.evicted_blocks += len(members)
            self._remove(group, READY, members, reason)

    def invalidate(self, namespace: Namespace, groups: Sequence[tuple[int, bytes]]) -> int:
        """Forget keys, also in the tiers. Blocks in use keep their slots. Returns how many blocks the pool had.

        Raises BadGeometry, BadKeys.
        """
        for number, keys in groups:
            namespace.check(number, keys)
        dropped = 0
        for number, keys in groups:
            states, blocks = self.blocks.find(self.group(namespace, number), keys)
            there = np.array(sorted(set(blocks[np.frombuffer(states, np.uint8) != FREE].tolist())), np.uint32)
            dropped += len(there)
            self.drop(there, MissReason.INVALIDATED)
            if self.tiers is not None:
                self.tiers.remove(namespace, number, keys, MissReason.INVALIDATED)
        return dropped

    def drop(self, blocks: BlockIds | Sequence[int], reason: MissReason) -> None:
        """Take WRITING and READY blocks out of the index. Their slots are freed once nothing uses them."""
        for group, members in self.by_group(np.asarray(blocks, np.uint32)):
            if not group.dead:  # otherwise counted when it was reset
                group.namespace.counters.invalidated_blocks += len(members)
            for state in (READY, WRITING):
                self._remove(group, state, members[self.blocks.state[members] == state], reason)

    def _forget_sole(self, blocks: BlockIds) -> None:
        """Forget that blocks were begun by the store of one number, before it ends or when their slots are reused."""
        for block in blocks.tolist() if self._sole else ():
            self._sole.pop(block, None)

    def _drop_partial(self, blocks: Sequence[int]) -> None:
        """Drop blocks that lack a shard which was not stored in time."""
        for group, members in self.by_group(np.array(blocks, np.uint32)):
            if not group.dead:
                group.namespace.counters.partial_blocks += len(members)
            self.drop(members, MissReason.PARTIAL)

    def _remove(self, group: Group, state: int, blocks: BlockIds, reason: MissReason | None = None) -> None:
        """Take blocks of one state out of index and policy, and free the slots of those that are not in use."""
        if not blocks.size:
            return
        packed_keys, slots, unverified, corrupt = self.blocks.drop(group, blocks, reason or 0)
        if group.dead and group.namespace in self._current:
            now = self._current[group.namespace][group.index]
            self.blocks.record_misses(now, packed_keys, MissReason.INVALIDATED)
        if state == READY:
            self._report_removed(group, blocks, packed_keys)
        for block in blocks.tolist() if self._partial else ():
            self._partial.pop(block, None)
        self._forget_sole(blocks)
        in_use = len(blocks) - len(slots) // len(group.sizes)
        if in_use and not group.dead:
            self._count(group, state, DROPPED, in_use)
        self._free_ended(group, DROPPED if group.dead else state, slots, unverified, corrupt)

    def _report_removed(self, group: Group, blocks: BlockIds, packed_keys: bytes) -> None:
        """Report to policy and listener that READY blocks are gone."""
        self._ready_removed = True
        self.order.remove(group, blocks, packed_keys)
        keys = np.frombuffer(packed_keys, group.namespace.key_type)
        if self._to_announce.size:  # some may never have been reported
            silent = self.unannounced[blocks]
            self.unannounced[blocks] = False
            keys = keys[~silent]
        if keys.size and not group.dead:
            self._events.removed(group.namespace, group.index, keys.tolist())

    def _free_dropped(self, blocks: BlockIds) -> None:
        """Free the slots of DROPPED blocks that are not in use."""
        for group, members in self.by_group(blocks):
            self._free_ended(group, DROPPED, *self.blocks.release(members, len(group.sizes)))

    def _free_ended(self, group: Group, state: int, slots: SlotIds, unverified: int, corrupt: int) -> None:
        """Free the slots of ended blocks, which were counted with this state."""
        self.unverified_slots -= unverified
        self._count(group, state, FREE, len(slots) // len(group.sizes))
        if corrupt:  # they stay allocated, so that nobody else gets them
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
        """Set some retained blocks aside, and do one step of what is left: unpin blocks of ended leases, else count
        prompts of closed sessions, else free reset blocks. Returns whether more remains."""
        more = self.order.set_aside_some()
        if self._ended:
            self._unpin_some()
        elif self._uncounted.has_ended:
            for prompt in self._uncounted.take_some():
                self._count_prompt(prompt, None)
        elif self._dead:
            group = next(iter(self._dead.values()))
            self._sweep([group], max(1, self.swept_at_once // len(group.sizes)))
        return bool(more or self._ended or self._dead or self._uncounted.has_ended)

    def _sweep(self, groups: Sequence[Group], count: int) -> int:
        """Free up to ``count`` blocks of groups that were reset. Returns how many."""
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
        """Group blocks, which have slots, by their group; each keeps its order."""
        return self.blocks.by_group(blocks, self._groups)

    def _of_block(self, block: int) -> Group:
        return self._groups[int(self.blocks.group[block])]

    def _count(self, group: Group, before: int, after: int, count: int) -> None:
        """Move blocks from the counts of one state to those of another."""
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
        """Set the checksum of a slot's record if it has none yet. Otherwise compare; if they differ, drop the block and
        return False.

        Does nothing if the slot was freed or rewritten since ``generation``. A slot that another check found wrong
        stays wrong: memory that changes is not trusted.
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
            packed_keys = self.blocks.keys(head, group.key_bytes)
            if self.blocks.state[head[0]] != DROPPED:
                self.drop(head, MissReason.CORRUPT)
            if self.tiers is not None and not group.dead:
                self.tiers.remove(group.namespace, group.index, packed_keys, MissReason.CORRUPT)
            return False
        if self.blocks.shard[slot] & UNVERIFIED:
            self.blocks.shard[slot] &= ~np.uint8(UNVERIFIED)
            self.unverified_slots -= 1
        return True

    def checks(self, slots: SlotIds) -> list[Check]:
        """Return the checks that these slots need now; free, unfinished and known corrupt slots need none."""
        shards = self.blocks.shard[slots]
        slots = slots[(shards & SHARD_STATE == WRITTEN) & (shards & CORRUPT == 0)]
        records = self.table.records[slots]
        columns = records["generation"], self.slots.offsets(slots), records["length"], records["checksum"]
        return list(map(Check, slots.tolist(), *(column.tolist() for column in columns)))

    def checks_of_load(self, ticket: LoadTicket, every: bool, first_block: int = 0) -> list[Check]:
        """Return the checks before a load: of shards that are not verified yet, or of ``every`` shard.

        A shard that is read from its middle is checked too, because its reader lacks bytes that the checksum covers.
        Shards whose checksum is still to be computed are loaded unchecked.
        """
        wanted = (self.blocks.shard[ticket.slots] & UNVERIFIED != 0) | every
        wanted[:1] |= first_block > 0
        return [check for check in self.checks(ticket.slots[wanted]) if check.checksum]

    def corrupt_keys(self, ticket: LoadTicket) -> bytes:
        """Return the keys of a load's blocks whose slots hold wrong bytes."""
        bad = self.blocks.shard[ticket.slots] & CORRUPT != 0
        return self.blocks.keys(ticket.blocks[bad], ticket.group.key_bytes)

    def next_unverified(self, limit: int) -> SlotIds:
        """Return up to ``limit`` slots that an earlier daemon wrote and nobody has compared, or whose checksum is still
        to be computed. They come again unless they are checked."""
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

    def describe_block(self, namespace: Namespace, group: int, key: bytes) -> tuple[KeyState, int, bytes]:
        """Return a block's state in the pool and, if it is READY, its first stored engine block and the checksums of
        its shards, 8 bytes each, big-endian. Nothing is counted.

        A key of another length than the namespace's has no block. Raises BadGeometry.
        """
        known = self.group(namespace, group)
        if len(key) != namespace.key_bytes:
            return KeyState.ABSENT, 0, b""
        states, blocks = self.blocks.find(known, key)
        if states[0] != READY:
            return KeyState.ABSENT if states[0] == FREE else KeyState.WRITING, 0, b""
        records = self.table.records[self.blocks.slots(blocks, len(known.sizes))[0]]
        return KeyState.READY, int(records["first_block"].max()), records["checksum"].astype(">u8").tobytes()

    def list_blocks(self, namespace: Namespace, group: int, position: int, limit: int) -> tuple[bytes, int]:
        """Return keys of READY blocks of a group, and the next position; 0 at the end.

        Looks at LISTED_SLOTS slots from ``position`` on, which is 0 at first. A block that exists from the first page
        to the last is on exactly one. Raises BadGeometry.
        """
        known, end = self.group(namespace, group), len(self.blocks.state)
        place, position = slice(position, position + LISTED_SLOTS), position + LISTED_SLOTS
        ready = (self.blocks.group[place] == known.number) & (self.blocks.state[place] == READY)
        blocks = (np.flatnonzero(ready) + place.start).astype(np.uint32)
        if len(blocks) > limit:
            blocks, position = blocks[:limit], int(blocks[limit])
        return self.blocks.keys(blocks, namespace.key_bytes), position if position < end else 0

    @property
    def usage(self) -> PoolUsage:
        writing, ready, dropped = (self._bytes_in[state] for state in (WRITING, READY, DROPPED))
        pinned = self.blocks.pinned_bytes, self.blocks.pinned_blocks
        return PoolUsage(self.slots.free_bytes, writing, ready, dropped, self.quarantined_bytes, *pinned)


def _select_keys(keys: bytes, numbers: Sequence[int] | npt.NDArray[np.intp], size: int) -> bytes:
    """Return the keys with these ascending numbers, concatenated; consecutive ones, which are common, are one slice."""
    if len(numbers) and numbers[-1] - numbers[0] == len(numbers) - 1:
        return keys[numbers[0] * size : (numbers[-1] + 1) * size]
    return np.frombuffer(keys, np.dtype((np.void, size)))[numbers].tobytes()


def _ready_of(found: Sequence[Found]) -> BlockIds:
    return found[0].ready if len(found) == 1 else np.concatenate([_NOTHING, *[one.ready for one in found]])


def _limit_ready(found: Found, fresh: npt.NDArray[np.bool_], most: int) -> Found:
    """Keep READY the keys that the lease has, and the first ``most`` of the ``fresh`` ones."""
    states, ready = np.frombuffer(found.states, np.uint8).copy(), ~fresh
    ready[np.flatnonzero(fresh)[:most]] = True
    reasons, beyond = np.frombuffer(found.reasons, np.uint8).copy(), np.flatnonzero(states == READY)[~ready]
    states[beyond], reasons[beyond] = ABSENT, MissReason.LEASE_LIMIT
    run = min(found.run, int(np.append(ready, False).argmin()))
    return found._replace(states=states.tobytes(), ready=found.ready[ready], run=run, reasons=reasons.tobytes())


def _with_pending(found: Found, states: bytes) -> Found:
    """Return a lookup's result with the states of keys that tiers bring up, which are COMING."""
    if states == found.states:
        return found
    shown = np.frombuffer(states, np.uint8)
    reasons = np.frombuffer(found.reasons, np.uint8).copy()
    reasons[(shown == PENDING) | (shown == SHARED)] = COMING
    return found._replace(states=states, reasons=reasons.tobytes())
