"""Lookups, and the leases that keep what they found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvoffd.cache.block import Block, BlockState
from kvoffd.cache.blocks import Blocks
from kvoffd.cache.lease import Lease, LeaseBook
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.policies import EvictionPolicy
from kvoffd.errors import UnknownLease
from kvoffd_proto.messages import PENDING

READY, WRITING = BlockState.READY, BlockState.WRITING
_READY_BYTE = bytes([READY])


class LookupAnswer(NamedTuple):
    """What a lookup found."""

    states: list[bytes]
    """Per group of the request, one byte a key: ABSENT, WRITING, READY or PENDING. The ready ones are under the lease.
    """
    pinned: int
    """Blocks under the lease; where it is 0 there is no lease."""


class _Found(NamedTuple):
    """A lookup whose pins are not entered yet. By group of the request."""

    lease: Lease
    groups: Sequence[tuple[int, bytes]]
    states: list[bytes]


class Lookups:
    """Answers lookups, and pins what they find under leases. A part of the cache, which says what raises and when."""

    def __init__(self, blocks: Blocks, policy: EvictionPolicy, clock: Callable[[], float], lease_ttl_s: float) -> None:
        self.leases = LeaseBook(lease_ttl_s)
        self._blocks = blocks
        self._policy = policy
        self._clock = clock
        self._unsettled: _Found | None = None

    def lookup(
        self, namespace: Namespace, lease_id: int, owner: int, groups: Sequence[tuple[int, bytes]], again: bool = False
    ) -> LookupAnswer:
        """Say which keys are ready, and pin those under the lease. ``groups``: (group, keys end to end, root first).

        What a tier below has is asked for, and pending. ``again``: it was asked before, and counted then. Under a lease
        that lives already nothing is pinned, asked for nor counted, and only its own blocks are called ready.
        Raises BadGeometry, BadKeys; UnknownLease where the lease is another session's or namespace's.
        """
        states = [namespace.states_of(group, keys) for group, keys in groups]
        self.settle()
        lease = self._lease_to_fill(lease_id, owner, namespace)
        if lease is not None:
            states = [_states_under(lease, group, namespace.split(group, keys)) for group, keys in groups]
            return LookupAnswer(states, lease.pinned)
        ready = sum(told.count(READY) for told in states)
        if ready:
            lease = Lease(lease_id, owner, namespace)
            self.leases.add(lease, self._clock())
            self._unsettled = _Found(lease, groups, states)
        if self._blocks.tiering is not None and ready < sum(map(len, states)):
            split = [(group, namespace.split(group, keys)) for group, keys in groups]
            states = self._blocks.tiering.find(namespace, split, states)
            if not again:
                namespace.counters.keys_pending += sum(told.count(PENDING) for told in states)
        if again:
            return LookupAnswer(states, ready)
        counters = namespace.counters
        counters.lookups += 1
        counters.keys_asked += sum(map(len, states))
        counters.keys_ready += ready
        counters.prefix_keys_ready += sum(len(told) - len(told.lstrip(_READY_BYTE)) for told in states)
        return LookupAnswer(states, ready)

    def hold(self, namespace: Namespace, lease_id: int, owner: int, group: int, keys: bytes) -> list[Block | None]:
        """As a lookup of one group, but for an operator: nothing is counted, and the blocks themselves are returned.

        Under a lease that lives already only its own blocks are. Raises BadGeometry, BadKeys, UnknownLease.
        """
        split = namespace.split(group, keys)
        self.settle()
        lease = self._lease_to_fill(lease_id, owner, namespace)
        if lease is not None:
            return list(map(lease.by_key(group).get, split))
        index = namespace.index[group]
        found = [block if block is not None and block.state is READY else None for block in map(index.get, split)]
        blocks = [block for block in found if block is not None]
        if blocks:
            lease = Lease(lease_id, owner, namespace)
            lease.blocks[group] = blocks
            self.leases.add(lease, self._clock())
            self._blocks.pin(blocks)
        return found

    def _lease_to_fill(self, lease_id: int, owner: int, namespace: Namespace) -> Lease | None:
        """The lease that lives under this id, None where there is none yet. Raises UnknownLease if it is another's."""
        lease = self.leases.get(lease_id)
        if lease is not None and (lease.owner != owner or lease.namespace is not namespace):
            raise UnknownLease(f"The lease {lease_id} belongs to another session or namespace; choose a new lease id.")
        return lease

    def settle(self) -> None:
        """Enter the pins of the last lookup. Put off until anything else is asked for, so that the reply goes first.

        Whatever may take a ready block away, or tells about pins, settles before.
        """
        if self._unsettled is None:
            return
        (lease, groups, states), self._unsettled = self._unsettled, None
        for (group, all_keys), told in zip(groups, states, strict=True):
            keys = lease.namespace.split(group, all_keys)
            if told.count(READY) < len(keys):
                keys = [key for key, state in zip(keys, told, strict=True) if state == READY]
            blocks = list(map(lease.namespace.index[group].__getitem__, keys))
            self._blocks.pin(blocks)
            if blocks:
                lease.blocks.setdefault(group, []).extend(blocks)

    def touch(self, lease_id: int) -> None:
        """Note the use of a lease's blocks, each group's tail first."""
        self.settle()
        lease = self.leases.get(lease_id)
        if lease is not None:
            for blocks in lease.blocks.values():
                ready = [block for block in blocks if block.state is READY]
                self._policy.touch(ready)
                if self._blocks.tiering is not None:
                    self._blocks.tiering.used(ready)

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

    def end(self, leases: Sequence[Lease]) -> int:
        """Let go of what live leases hold. Returns how many they are."""
        self.settle()
        for lease in leases:
            self.leases.remove(lease)
            for blocks in lease.blocks.values():
                self._blocks.unpin(blocks)
        return len(leases)


def _states_under(lease: Lease, group: int, keys: Sequence[bytes]) -> bytes:
    """The states a lookup tells that is asked again. A block that became ready since is not under the lease: absent."""
    held = lease.by_key(group)
    index = lease.namespace.index[group]
    states = bytearray(len(keys))
    for number, key in enumerate(keys):
        if key in held:
            states[number] = READY
        elif (block := index.get(key)) is not None and block.state is WRITING:
            states[number] = WRITING
    return bytes(states)
