"""Lookups, the leases that keep what they found, and the one way to the blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvoffd.cache.blocks import Blocks
from kvoffd.cache.namespace import Block, BlockState, Namespace
from kvoffd.cache.pins import Lease, LeaseTable
from kvoffd.cache.policies import EvictionPolicy
from kvoffd.errors import UnknownLease
from kvoffd_proto.messages import PENDING

READY, WRITING = BlockState.READY, BlockState.WRITING
_READY_BYTE = bytes([READY])


class LookupAnswer(NamedTuple):
    """What a lookup found."""

    states: list[bytes]
    """By group of the request, one byte a key: ABSENT, WRITING, READY or PENDING. READY keys are under the lease."""
    pinned: int
    """Blocks under the lease; where it is 0 there is no lease."""


class _DeferredPins(NamedTuple):
    """A lookup whose pins are not entered yet: its lease, and by group of the request the keys and their states."""

    lease: Lease
    groups: Sequence[tuple[int, bytes]]
    states: list[bytes]


class LeasedBlocks:
    """Answers lookups, and pins what they find under leases.

    The pins of a lookup are entered late, so that its reply goes out first. Until then its blocks look as if nothing
    held them. So the blocks and the leases are private here, and everybody else, the rest of the cache included, gets
    them from the properties ``blocks`` and ``leases``, which enter deferred pins before they return: a method cannot
    forget to.
    """

    def __init__(self, blocks: Blocks, policy: EvictionPolicy, clock: Callable[[], float], lease_ttl_s: float) -> None:
        self.policy = policy
        self._clock = clock
        self.__blocks = blocks
        self.__leases = LeaseTable(lease_ttl_s)
        self.__deferred: _DeferredPins | None = None

    @property
    def blocks(self) -> Blocks:
        """All blocks of the pool, their pins up to date."""
        if self.__deferred is not None:
            self._apply_deferred_pins(self.__deferred)
        return self.__blocks

    @property
    def leases(self) -> LeaseTable:
        """The live leases, their pins up to date."""
        if self.__deferred is not None:
            self._apply_deferred_pins(self.__deferred)
        return self.__leases

    def _apply_deferred_pins(self, deferred: _DeferredPins) -> None:
        self.__deferred = None
        lease, index = deferred.lease, self.__blocks.index[deferred.lease.namespace]
        for (group, all_keys), states in zip(deferred.groups, deferred.states, strict=True):
            keys = lease.namespace.split(group, all_keys)
            if states.count(READY) < len(keys):
                keys = [key for key, state in zip(keys, states, strict=True) if state == READY]
            blocks = list(map(index[group].__getitem__, keys))
            self.__blocks.pin(blocks)
            if blocks:
                lease.blocks.setdefault(group, []).extend(blocks)

    def lookup(
        self, namespace: Namespace, lease_id: int, owner: int, groups: Sequence[tuple[int, bytes]], again: bool = False
    ) -> LookupAnswer:
        """Say which keys are ready, and pin those under the lease. ``groups``: (group, keys end to end, root first).

        What a tier below has is requested from it, and pending. ``again``: it was asked before, and counted then. Under
        a lease that lives already nothing is pinned, requested nor counted, and only its own blocks are called ready.
        Raises BadGeometry, BadKeys; UnknownLease where the lease is another session's or namespace's.
        """
        found = [namespace.states_of(group, keys) for group, keys in groups]
        blocks, leases = self.blocks, self.__leases
        lease = _live_lease(leases, lease_id, owner, namespace)
        if lease is not None:
            index = blocks.index[namespace]
            states = [_states_under(lease, group, namespace.split(group, keys), index[group]) for group, keys in groups]
            return LookupAnswer(states, lease.pinned)
        states = found
        ready = sum(one.count(READY) for one in found)
        if blocks.tiering is not None and ready < sum(map(len, found)):
            split = [(group, namespace.split(group, keys)) for group, keys in groups]
            states = blocks.tiering.find(namespace, split, found)
            if not again:
                namespace.counters.keys_pending += sum(one.count(PENDING) for one in states)
        if ready:
            lease = Lease(lease_id, owner, namespace)
            leases.add(lease, self._clock())
            self.__deferred = _DeferredPins(lease, groups, found)
        if again:
            return LookupAnswer(states, ready)
        counters = namespace.counters
        counters.lookups += 1
        counters.keys_asked += sum(map(len, states))
        counters.keys_ready += ready
        counters.prefix_keys_ready += sum(len(one) - len(one.lstrip(_READY_BYTE)) for one in states)
        return LookupAnswer(states, ready)

    def lease_blocks(
        self, namespace: Namespace, lease_id: int, owner: int, group: int, keys: bytes
    ) -> list[Block | None]:
        """As a lookup of one group, but for an operator: nothing is counted, and the blocks themselves are returned.

        Under a lease that lives already only its own blocks are. Raises BadGeometry, BadKeys, UnknownLease.
        """
        split = namespace.split(group, keys)
        lease = _live_lease(self.leases, lease_id, owner, namespace)
        if lease is not None:
            return list(map(lease.by_key(group).get, split))
        index = self.blocks.index[namespace][group]
        found = [block if block is not None and block.state is READY else None for block in map(index.get, split)]
        blocks = [block for block in found if block is not None]
        if blocks:
            lease = Lease(lease_id, owner, namespace)
            lease.blocks[group] = blocks
            self.leases.add(lease, self._clock())
            self.blocks.pin(blocks)
        return found

    def touch(self, lease_id: int) -> None:
        """Note the use of a lease's blocks, each group's tail first. For when the reply is out; no lease, no harm."""
        lease, tiering = self.leases.get(lease_id), self.blocks.tiering
        if lease is not None:
            for blocks in lease.blocks.values():
                ready = [block for block in blocks if block.state is READY]
                self.policy.touch(ready)
                if tiering is not None:
                    tiering.used(ready)

    def renew(self, owner: int, lease_ids: Iterable[int]) -> list[int]:
        """Give leases their full time again; returns those that are not alive, or not the owner's."""
        now = self._clock()
        ended: list[int] = []
        for lease_id in lease_ids:
            if (lease := self.leases.owned(owner, lease_id)) is None:
                ended.append(lease_id)
            else:
                self.leases.renew(lease, now)
        return ended

    def release(self, owner: int, lease_ids: Iterable[int]) -> int:
        """End leases of the owner; those that are not alive are no error. Returns how many ended."""
        leases = [self.leases.owned(owner, lease_id) for lease_id in dict.fromkeys(lease_ids)]
        return self._end([lease for lease in leases if lease is not None])

    def end_owner(self, owner: int) -> int:
        """End all leases of a session that is gone. Returns how many. Its tickets end when its copies have."""
        return self._end(self.leases.of_owner(owner))

    def _end(self, leases: Sequence[Lease]) -> int:
        for lease in leases:
            self.leases.remove(lease)
            for blocks in lease.blocks.values():
                self.blocks.unpin(blocks)
        return len(leases)


def _live_lease(leases: LeaseTable, lease_id: int, owner: int, namespace: Namespace) -> Lease | None:
    """The lease that lives under this id, None where there is none yet. Raises UnknownLease if it is another's."""
    lease = leases.get(lease_id)
    if lease is not None and (lease.owner != owner or lease.namespace is not namespace):
        raise UnknownLease(f"The lease {lease_id} belongs to another session or namespace; choose a new lease id.")
    return lease


def _states_under(lease: Lease, group: int, keys: Sequence[bytes], index: Mapping[bytes, Block]) -> bytes:
    """The states a lookup tells that is asked again. A block that became ready since is not under the lease: absent."""
    held = lease.by_key(group)
    states = bytearray(len(keys))
    for number, key in enumerate(keys):
        if key in held:
            states[number] = READY
        elif (block := index.get(key)) is not None and block.state is WRITING:
            states[number] = WRITING
    return bytes(states)
