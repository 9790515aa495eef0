"""The cache: one pool's blocks, by owner, and what concerns several of them: lookups, loads, resets, steps of time.

| owner | has |
|---|---|
| ``stores`` (stores.py) | running stores, and fills from tiers |
| ``space`` (space.py) | where slots for new blocks come from; ``Victims`` (victims.py) chooses what goes |
| ``leases`` (leases.py) | what is pinned for whom, and the limits |
| ``prompts`` (prompts.py) | what prompts asked for: counters, reports to policy, curve and tiers |
| ``_prefetches`` (prefetches.py) | what hints have tiers bring up, which nothing pins |
| ``namespaces`` (open_namespaces.py) | open namespaces, their numbers and groups |
| ``integrity`` (integrity.py) | checksums |
| ``life`` (block_life.py) | each block's state, and who hears of a change; the rules of access |
| ``order`` (hints.py), ``Policy`` (policy.py) | which block is evicted next |
| ``order.retentions`` (retentions.py) | what hints keep, for whom, until when |
| ``blocks`` (block_table.py) | the arrays of slots, the index, and the counts by state, in C |

An owner calls only those below it and, by hooks.py, the tiers and a listener.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress, islice
from typing import NamedTuple

import numpy as np
import numpy.ma  # otherwise the loop's first np.unique or np.isin imports it, in 20 ms or more

from kvoffd.cache.asked_keys import AskedKeys
from kvoffd.cache.block_life import BlockLife
from kvoffd.cache.block_table import BlockTable, FoundKeys
from kvoffd.cache.hooks import CacheListener, TierHooks
from kvoffd.cache.integrity import Integrity
from kvoffd.cache.leases import Leases
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.cache.open_namespaces import OpenNamespaces
from kvoffd.cache.policy import Policy
from kvoffd.cache.prefetches import NO_SESSION, Prefetches
from kvoffd.cache.prompts import Prompts
from kvoffd.cache.space import Space
from kvoffd.cache.states import FREE, READY
from kvoffd.cache.stores import BlockStores
from kvoffd.cache.tickets import Lease, LoadTicket
from kvoffd.errors import UnknownLease
from kvoffd.pool.allocator import SlotAllocator
from kvoffd.pool.slot_table import SlotTable
from kvoffd_proto.messages import HintAction, KeyState

SWEPT_AT_ONCE = 512
"""Slots of reset namespaces that one step returns."""
DROPPED_AT_ONCE = 256
"""Blocks, partial for too long, that one step drops."""
LISTED_SLOTS = 1 << 20
"""Slots that a page of a listing looks at, which takes about a millisecond."""


class LookupResult(NamedTuple):
    """Answer to a lookup."""

    states: list[bytes]
    """[groups] state of each key."""
    lease: Lease | None
    """The lease if it is active: a new one that pins nothing, and for which nothing comes up, is not."""


class BlockFacts(NamedTuple):
    """A block as operators see it."""

    state: KeyState
    """State in the pool."""
    first_block: int = 0
    """First engine block that is stored; 0 if it is not READY."""
    checksums: bytes = b""
    """Checksums of its shards, 8 bytes each, big-endian; empty if it is not READY."""


class BlocksPage(NamedTuple):
    """A page of a listing."""

    keys: bytes
    next_position: int
    """Position at which the next page begins; 0 at the end."""


class Cache:
    """Blocks of all namespaces in one pool. Not thread-safe.

    A method, also an owner's, that raises KvoffdError has changed nothing.

    Args:
        partial_timeout_s: age at which partial blocks are dropped.
        leased_share: the most of the pool that all leases together may pin; see ``Leases``.
        max_leased_keys, max_leases: limits for one session.

    Attributes:
        quotas: limits of pool bytes, set by an operator, by fingerprint; the namespace need not be open.
        swept_at_once: slots of reset namespaces that one step returns.
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
        max_leases: int = 1 << 14,
    ) -> None:
        self.slots, self.table, self.policy = slots, table, policy
        slots.save_sizes_in(table.region_sizes)
        self.quotas: dict[bytes, int] = {}
        self.blocks = BlockTable(table.records)
        self.life = BlockLife(slots, self.blocks, policy, self.quotas, events, clock)
        self.order = self.life.order
        self.namespaces = OpenNamespaces(self.life, table, events)
        limits = int(leased_share * slots.pool_bytes), max_leased_keys, max_leases
        self.leases = Leases(self.life, clock, lease_ttl_s, *limits)
        self.space = Space(self.life, self.quotas, clock)
        self.prompts = Prompts(self.life, clock)
        self.stores = BlockStores(self.life, self.space, policy)
        self.integrity = Integrity(self.life, table)
        self._prefetches = Prefetches(self.life, clock, lease_ttl_s)
        self._events, self._clock, self._partial_timeout_s = events, clock, partial_timeout_s
        self.swept_at_once = SWEPT_AT_ONCE
        self._may_be_overdue = False
        """Whether the last step that ends leases, and drops what is partial for too long, may have left some."""

    # --- lookups --------------------------------------------------------------------------------

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
    ) -> LookupResult:
        """Find keys, and pin the READY blocks under a lease, which is a new one if it is not active.

        Keys from a disk are PENDING, those from a store SHARED. If leases may not pin all blocks, each group's last
        READY keys are ABSENT.

        Args:
            again: the request was counted before.
            reported: the engine will report the prompt's outcome: ``Prompts.count`` counts its keys then, not now.
            peer: see ``Lease``.
            giver: number of the owner of the prompt's hints; 0 if unknown.

        Raises:
            BadGeometry, BadKeys
            UnknownLease, KvoffdError (TOO_MANY): see ``Leases.open``.
        """
        lease, before = self.leases.open(session, lease_id, namespace), self.leases.pinned
        for index, keys in groups:
            namespace.check(index, keys)
        is_new = not lease.active
        if is_new:
            # Else the report counts the keys, or the lease of the first lookup did.
            lease.covers_at_end = not (again or reported)
        else:
            lease.forget_unanswered()  # stores are asked for these keys again
        lease.peer = peer
        asked = None if again else [AskedKeys(namespace, reported=reported) for _ in groups]
        found = list[FoundKeys]()
        self.blocks.last_prompt += 1  # above those of all stores, which evict no blocks of newer prompts (``Victims``)
        try:
            for index, keys in groups:
                group = namespace.groups[index]
                of_group = self.blocks.lookup(group, keys, lease=is_new)  # a new lease pins them by the same call of C
                found.append(of_group)  # before what may raise: ``discard`` ends the leases of all that is in it
                if group.predecessors:  # of what a reset took, C knows no reason
                    reasons = self.life.reasons_with_resets(group, keys, of_group.reasons)
                    found[-1] = of_group = of_group._replace(reasons=reasons)
                self.blocks.prompt[of_group.ready] = self.blocks.last_prompt
                self.order.record_askers(group, keys, of_group.states, of_group.ready, giver)
            if self.life.tiers is not None:
                found = self._find_below(self.life.tiers, lease, groups, found, asked)
        except BaseException:
            if is_new:  # an active one keeps what it had; nothing more was leased for it
                self.leases.discard(lease, found)
            raise
        found = self.leases.give(lease, found, before, is_new=is_new)
        if asked is not None:
            self.prompts.looked_up(lease, groups, found, asked, reported=reported)
        return LookupResult([of_group.states for of_group in found], lease if lease.active else None)

    def _find_below(
        self,
        tiers: TierHooks,
        lease: Lease,
        groups: Sequence[tuple[int, bytes]],
        found: list[FoundKeys],
        asked: list[AskedKeys] | None,
    ) -> list[FoundKeys]:
        """Request what the pool lacks from the tiers, which record in ``asked`` why keys do not come, or may not.
        Returns what was found, with the states of keys that come up."""
        states = [of_group.states for of_group in found]
        is_complete = sum([len(of_group.ready) for of_group in found]) == sum(map(len, states))
        if is_complete and not lease.coming:  # while some are coming, the tiers must estimate its ``wait_s`` again
            return found
        tier_states = tiers.find(lease, groups, states, asked)
        return [of_group.with_coming(shown) for of_group, shown in zip(found, tier_states, strict=True)]

    # --- loads ----------------------------------------------------------------------------------

    def begin_load(
        self,
        namespace: Namespace,
        rank: int,
        lease_id: int,
        group_index: int,
        keys: bytes,
        first_block: int = 0,
        *,
        tokens: int = 0,
    ) -> LoadTicket:
        """Pin READY blocks and return a rank's slots of them. The first key is read from ``first_block`` on.

        The load counts for the lease, with the ``tokens`` of its group. Its blocks need not be the lease's: a key may
        have been stored again since. End the ticket exactly once, after the last byte of its copy has moved. Rank,
        group and keys must be valid.

        Raises UnknownLease, and NotReady with the indices of keys that are not READY, are corrupt, or whose written
        range begins later.
        """
        lease = self.leases.get(lease_id)
        if lease is None or lease.namespace is not namespace:
            raise UnknownLease(f"The lease {lease_id} is unknown, ended or of another namespace; look up again.")
        group, size = namespace.groups[group_index], namespace.key_bytes
        pinned = self.blocks.begin_load(self.slots, group, keys, rank, first_block)
        return LoadTicket(rank, lease, group, keys[:size], *pinned, tokens)

    def end_load(self, tickets: Sequence[LoadTicket], *, is_success: bool = False, ends_lease: bool = False) -> None:
        """End the tickets of one job. ``ends_lease``: end the lease too, once every rank's job has asked for it."""
        for ticket in tickets:
            if is_success and ticket.blocks.size:
                if self.life.tiers is not None:
                    keys_by_source = self.life.tiers.loaded(ticket)  # only they know which keys they had brought up
                    self.prompts.loaded(ticket, keys_by_source)
                ticket.lease.count_load(ticket)
            self.life.unpin(ticket.blocks)
        if tickets and ends_lease and (lease := tickets[0].lease).active:
            lease.ranks_done.add(tickets[0].rank)
            if len(lease.ranks_done) == lease.namespace.world_size:
                self.leases.end_all([lease])

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

        ``giver``: number of the hint's owner, whose releases end what it retains; 0 if unknown: then no release does.

        Raises BadGeometry, BadKeys.
        """
        for index, keys in groups:
            namespace.check(index, keys)
        if action is HintAction.PREFETCH:
            return self._prefetches.add(namespace, groups, session)
        wish, count = None, 0
        if action is HintAction.RETAIN:  # priority and time; one for all groups, whose blocks are retained together
            wish = self.order.retentions.wish(namespace, session, giver, priority, ttl_s)
        for index, keys in groups:
            group, different = namespace.groups[index], list(dict.fromkeys(namespace.split(index, keys)))
            packed_keys = b"".join(different)
            states, blocks = self.blocks.find(group, packed_keys)
            is_ready = np.frombuffer(states, np.uint8) == READY
            ready = blocks[is_ready]
            absent = list(compress(different, (~is_ready).tolist()))
            count += len(ready)
            if wish is None:  # RELEASE
                self.order.release(giver, group, ready, absent)
            else:  # who retains blocks uses them, as a prompt that asks for them: no other giver may release them
                self.order.record_askers(group, packed_keys, states, ready, giver)
                self.order.retain(wish, group, ready, absent)
        return count

    # --- what is not to be found any more -------------------------------------------------------

    def reset(self, *namespaces: Namespace, generation: int | None = None) -> int:
        """Forget all blocks of namespaces in the pool, and what comes up to it. Returns their number.

        Each namespace gets a new number, so that no daemon finds them; ``background`` returns the slots. All leases
        end. ``generation``: that of later blocks, by which tiers find none of the earlier ones; None: it stays.
        """
        dropped = 0
        for namespace in namespaces:
            dropped += self.namespaces.renumber(namespace)
            if generation is not None:
                namespace.generation = generation
        self.leases.end_namespaces(namespaces)
        if namespaces:
            self.namespaces.save()
        for namespace in namespaces:
            if self.life.tiers is not None:
                self.life.tiers.cancel_promotions(namespace)
            self._events.cleared(namespace)
        return dropped

    def invalidate(self, namespace: Namespace, groups: Sequence[tuple[int, bytes]]) -> int:
        """Drop keys, also in the tiers. Blocks in use keep their slots. Returns how many blocks the pool had.

        Raises BadGeometry, BadKeys.
        """
        for index, keys in groups:
            namespace.check(index, keys)
        dropped = 0
        for index, keys in groups:
            states, blocks = self.blocks.find(namespace.groups[index], keys)
            there = np.array(sorted(set(blocks[np.frombuffer(states, np.uint8) != FREE].tolist())), np.uint32)
            dropped += len(there)
            self.life.drop(there, MissReason.INVALIDATED)
            if self.life.tiers is not None:
                self.life.tiers.remove(namespace, index, keys, MissReason.INVALIDATED)
        return dropped

    # --- steps of time --------------------------------------------------------------------------

    def end_session(self, session: int) -> int:
        """End all leases of a closed session, and count its prompts later. Returns how many leases ended."""
        self.prompts.uncounted.session_ended(session)
        return self.leases.end_session(session)

    def tick(self) -> int:
        """End some overdue leases, or else drop some blocks that were partial for too long. Returns how many.

        ``background`` does the rest.
        """
        self.order.retentions.tick()
        self._prefetches.tick()
        return self._end_overdue()

    def _end_overdue(self) -> int:
        ended = self.leases.end_overdue()
        if not ended:
            since = self._clock() - self._partial_timeout_s
            partial = list(islice(self.life.partial_since(since), DROPPED_AT_ONCE))
            self.life.drop_partial(partial)
            ended = len(partial)
        # Ended leases stay in ``by_id`` until they are unpinned, and ``end_overdue`` looks at its first ones only: they
        # may hide overdue ones.
        self._may_be_overdue = ended > 0 or self.leases.has_to_unpin
        return ended

    def background(self) -> bool:
        """End some lapsed hints, set some retained blocks aside, and do one step of what is left: unpin blocks of ended
        leases, else end what is overdue, else count prompts of closed sessions, else return slots of reset namespaces.
        Returns whether more remains."""
        more = self.order.background()
        if self.leases.has_to_unpin:
            self.leases.unpin_some()
        elif self._may_be_overdue:
            self._end_overdue()
        elif self.prompts.uncounted.has_ended:
            self.prompts.count_some_ended()
        elif self.life.unswept:
            group = next(iter(self.life.unswept.values()))
            self.life.sweep([group], max(1, self.swept_at_once // len(group.sizes)))
        more = more or self._may_be_overdue or self.leases.has_to_unpin
        return bool(more or self.prompts.uncounted.has_ended or self.life.unswept)

    # --- facts ----------------------------------------------------------------------------------

    def describe_block(self, namespace: Namespace, group: int, key: bytes) -> BlockFacts:
        """Describe a key's block. Nothing is counted. A key of another length than the namespace's has none. Raises
        BadGeometry."""
        known = namespace.group(group)
        if len(key) != namespace.key_bytes:
            return BlockFacts(KeyState.ABSENT)
        states, blocks = self.blocks.find(known, key)
        if states[0] != READY:
            return BlockFacts(KeyState.ABSENT if states[0] == FREE else KeyState.WRITING)
        records = self.table.records[self.blocks.slots(blocks, len(known.sizes))[0]]
        checksums = records["checksum"].astype(">u8").tobytes()
        return BlockFacts(KeyState.READY, int(records["first_block"].max()), checksums)

    def list_blocks(self, namespace: Namespace, group: int, position: int, limit: int) -> BlocksPage:
        """Return keys of READY blocks of a group.

        Looks at LISTED_SLOTS slots from ``position`` on, which is 0 at first. A block that exists from the first page
        to the last is on exactly one. Raises BadGeometry.
        """
        known, following = namespace.group(group), position + LISTED_SLOTS
        page = slice(position, following)
        ready = (self.blocks.group[page] == known.number) & (self.blocks.state[page] == READY)
        blocks = (np.flatnonzero(ready) + position).astype(np.uint32)
        if len(blocks) > limit:
            blocks, following = blocks[:limit], int(blocks[limit])
        keys = self.blocks.keys(blocks, namespace.key_bytes)
        return BlocksPage(keys, following if following < len(self.blocks.state) else 0)
