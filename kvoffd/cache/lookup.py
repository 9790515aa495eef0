"""Lookups, the leases that keep what they found, and the one way to the blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvoffd.cache.blocks import Blocks
from kvoffd.cache.namespace import Block, BlockState, MissReason, Namespace
from kvoffd.cache.pins import Lease, LeaseBounds, LeaseTable
from kvoffd.cache.policies import Chain, EvictionPolicy
from kvoffd.errors import UnknownLease
from kvoffd_proto.messages import ABSENT

READY, WRITING = BlockState.READY, BlockState.WRITING
_READY_BYTE, _ABSENT_BYTE = bytes([READY]), bytes([ABSENT])
MAX_DEFERRED_REQUESTS = 64
"""More than lookups that are answered before what they leave behind is done."""
UNPINNED_AT_ONCE, LEASE_PINS = 4000, 10
"""Less than a millisecond's work, ten where the blocks were dropped meanwhile; a lease's end counts as so many pins."""
LEASES_AT_ONCE = 2_000
"""Leases that are ended in one step."""
_COUNT_AGAIN_S = 5e-6
"""Pause per key of a session between two exact counts of what it has leased, a hundred times what a count takes."""


class LookupAnswer(NamedTuple):
    states: list[bytes]
    """By group of the request, the state of each key, one byte. READY keys are under the lease."""
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

    def __init__(
        self,
        blocks: Blocks,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        lease_ttl_s: float,
        bounds: LeaseBounds | None,
    ) -> None:
        self.policy = policy
        self.shortened_lookups = 0
        """Lookups that were told of fewer ready keys, since their session may not lease more."""
        self.watchers: list[Callable[[Sequence[Chain]], None]] = []
        """Told of each request once, as the policy is, and after it."""
        self._clock = clock
        self._bounds = bounds or LeaseBounds(2**62, 2**62)
        self.__blocks = blocks
        self.ended: deque[Lease] = deque()
        """Leases that ended and whose pins ``unpin_some`` takes back: what ended them waits for no more."""
        self.__leases = LeaseTable(lease_ttl_s)
        self.__deferred_pins: _DeferredPins | None = None
        self.__deferred_requests: dict[int, tuple[Namespace, Sequence[tuple[int, bytes]]]] = {}
        """By lease id: namespace and groups of requests that the policy has not been told of."""

    @property
    def blocks(self) -> Blocks:
        """All blocks of the pool, their pins up to date."""
        if self.__deferred_pins is not None:
            self._apply_deferred_pins(self.__deferred_pins)
        return self.__blocks

    @property
    def leases(self) -> LeaseTable:
        """The live leases, their pins up to date."""
        if self.__deferred_pins is not None:
            self._apply_deferred_pins(self.__deferred_pins)
        return self.__leases

    def _apply_deferred_pins(self, deferred: _DeferredPins) -> None:
        self.__deferred_pins = None
        lease = deferred.lease
        for (group, keys), states in zip(deferred.groups, deferred.states, strict=True):
            index = lease.namespace.index[group]
            if (ready := states.count(READY)) == len(states) - len(states.lstrip(_READY_BYTE)):
                keys = keys[: ready * lease.namespace.key_bytes]
            else:
                split = lease.namespace.split(group, keys)
                keys = b"".join([key for key, state in zip(split, states, strict=True) if state == READY])
            blocks = index.all(keys)
            if blocks:
                self.__blocks.pin(blocks)
                lease.add(group, blocks)
                lease.untouched.setdefault(group, []).extend(blocks)

    def lookup(
        self,
        namespace: Namespace,
        lease_id: int,
        owner: int,
        groups: Sequence[tuple[int, bytes]],
        again: bool = False,
        extend: bool = False,
    ) -> LookupAnswer:
        """Say which keys are ready, and pin those under the lease. ``groups``: (group, keys end to end, root first).

        What a tier below has is requested from it, and pending. ``again``: the request was counted before. Under
        a lease that lives already nothing is pinned, requested nor counted, and only its own blocks are called ready,
        unless the lookup is to ``extend`` it by other keys. Where the session may not lease so much, each group's last
        ready keys are called absent. Raises BadGeometry, BadKeys; UnknownLease where the lease is another session's or
        namespace's.
        """
        found = [namespace.states_of(group, keys) for group, keys in groups]
        blocks, leases = self.blocks, self.__leases
        lease = leases.get(lease_id)
        if lease is not None and (lease.owner != owner or lease.namespace is not namespace):
            raise UnknownLease(f"The lease {lease_id} belongs to another session or namespace; choose a new lease id.")
        if lease is not None and not extend:
            states = [
                _states_under(leases.by_key(lease, group), namespace.split(group, keys), one)
                for (group, keys), one in zip(groups, found, strict=True)
            ]
            return LookupAnswer(states, lease.keys)
        states = found
        asked, ready = sum(map(len, found)), sum([one.count(_READY_BYTE) for one in found])
        tiering = blocks.tiering
        if tiering is not None and ready < asked and not namespace.clearing and tiering.may_have(namespace):
            split = [(group, namespace.split(group, keys)) for group, keys in groups]
            states = tiering.find(namespace, owner, split, found, again)
        if ready:
            nbytes = _block_bytes(namespace, groups, states)
            if (part := self._leasable(owner, ready, nbytes, namespace, groups, states)) < 1.0:
                self.shortened_lookups += 1
                states = [_shortened(one, part) for one in states]
                ready, nbytes = sum(one.count(READY) for one in states), _block_bytes(namespace, groups, states)
        if ready:
            if lease is None:
                lease = Lease(lease_id, owner, namespace)
                leases.add(lease, self._clock())
            leases.count(lease, ready, nbytes)
            self.__deferred_pins = _DeferredPins(lease, groups, states)
        if again:
            return LookupAnswer(states, ready)
        if len(self.__deferred_requests) >= MAX_DEFERRED_REQUESTS:
            self.__deferred_requests.clear()
        self.__deferred_requests[lease_id] = namespace, groups
        counters = namespace.counters
        counters.lookups += 1
        counters.keys_asked += asked
        counters.keys_ready += ready
        counters.asked_tokens += max(
            [len(one) * namespace.groups[part[0]].tokens_per_block for part, one in zip(groups, states, strict=True)],
            default=0,
        )
        counters.prefix_keys_ready += sum([len(one) - len(one.lstrip(_READY_BYTE)) for one in states])
        if ready < asked:
            self.__blocks.misses.asked(namespace, groups, found, states)
        return LookupAnswer(states, ready)

    def _leasable(
        self,
        owner: int,
        keys: int,
        nbytes: int,
        namespace: Namespace,
        groups: Sequence[tuple[int, bytes]],
        states: Sequence[bytes],
    ) -> float:
        """The part of so many more ready keys, with blocks of so many bytes, that a session may lease: 1.0 for all.

        Only bytes of blocks that nothing pins yet are taken from others.
        """
        bounds = self._bounds
        part = (bounds.max_keys - self.__leases.held(owner).keys) / keys
        if self.__blocks.pinned_bytes + nbytes > bounds.max_bytes // 2:
            loose = 0
            for (group, names), one in zip(groups, states, strict=True):
                blocks = zip(namespace.index[group].find(names), one, strict=True)
                loose += sum(b.slot_bytes for b, state in blocks if state == READY and b is not None and not b.pins)
            if loose:
                part = min(part, self._share_left(owner, loose) / loose)
        return max(0.0, part)

    def _share_left(self, owner: int, wanted: int) -> int:
        """Bytes that the session may lease beside what it has, below 0 where it has too much."""
        leases = self.__leases
        held = leases.held(owner)
        share = self._bounds.max_bytes // (leases.owners + (not held.leases))
        now = self._clock()
        if held.nbytes - held.shared_bytes + wanted > share and now >= held.counted_until:
            held.counted_until = now + held.keys * _COUNT_AGAIN_S
            every = {block for lease in leases.of_owner(owner) for blocks in lease.blocks.values() for block in blocks}
            held.shared_bytes = held.nbytes - sum(block.slot_bytes for block in every)
        return share - (held.nbytes - held.shared_bytes)

    def count_misses(self) -> None:
        """Count by reason what lookups missed since the last call. For when the reply is out."""
        self.__blocks.misses.count()

    def touch(self, lease_id: int) -> None:
        """Tell the policy of a lookup, and note the use of what its lease got by it; no lookup, no harm.

        For when the reply is out.
        """
        blocks, lease = self.blocks, self.__leases.get(lease_id)
        ready: dict[int, list[Block]] = {}
        if lease is not None:
            untouched, lease.untouched = lease.untouched, {}
            for group, found in untouched.items():
                ready[group] = [block for block in found if block.state is READY]
                if blocks.tiering is not None:
                    blocks.tiering.used(ready[group])
        if (request := self.__deferred_requests.pop(lease_id, None)) is not None:
            namespace, groups = request
            for group, found in ready.items():
                blocks.used(namespace, group, found)
            if namespace.of_bench:
                return  # what a bench asks for teaches nothing
            chains = [Chain(namespace, *part, ready.get(part[0], ())) for part in groups]
            self.policy.requested(chains)
            for watch in tuple(self.watchers):
                watch(chains)

    def forget_requests(self, namespace: Namespace) -> None:
        """Tell the policy nothing more of what was asked for in a namespace."""
        self.__deferred_requests = {
            at: request for at, request in self.__deferred_requests.items() if request[0] is not namespace
        }

    def release(self, owner: int, lease_ids: Iterable[int], unused: MissReason | None = None) -> int:
        """End leases of the owner; those that are not alive are no error. Returns how many ended.

        ``unused``: why what they hold was not loaded, which makes it a miss.
        """
        found = [self.leases.owned(owner, lease_id) for lease_id in dict.fromkeys(lease_ids)]
        leases = [lease for lease in found if lease is not None]
        if unused is not None:
            for lease in leases:
                lease.namespace.counters.misses[unused] += 0 if lease.loaded else lease.keys
        return self._end(leases)

    def end_owner(self, owner: int) -> int:
        """End all leases of a session that is gone. Returns how many. Its tickets end when its copies have."""
        return self._end(self.leases.of_owner(owner))

    def _end(self, leases: Sequence[Lease]) -> int:
        for lease in leases:
            self.leases.remove(lease)
        self.ended += leases
        self.unpin_some()
        return len(leases)

    def unpin_some(self) -> bool:
        """Take back pins of leases that ended, at most ``UNPINNED_AT_ONCE``. Returns whether some are left."""
        blocks, count = self.blocks, 0
        while self.ended and count < UNPINNED_AT_ONCE:
            lease = self.ended[0]
            if not lease.blocks:
                self.ended.popleft()
                count += LEASE_PINS
                continue
            group, pinned = next(iter(lease.blocks.items()))
            some = pinned[count - UNPINNED_AT_ONCE :]
            del pinned[count - UNPINNED_AT_ONCE :]
            if not pinned:
                del lease.blocks[group]
            blocks.unpin(some)
            count += len(some)
        return bool(self.ended)


def _block_bytes(namespace: Namespace, groups: Sequence[tuple[int, bytes]], states: Sequence[bytes]) -> int:
    return sum(
        [one.count(_READY_BYTE) * namespace.block_bytes(group) for (group, _), one in zip(groups, states, strict=True)]
    )


def _shortened(states: bytes, part: float) -> bytes:
    """The states with only this part of the ready keys, the first ones, called ready."""
    ready = np.flatnonzero(np.frombuffer(states, dtype=np.uint8) == READY)
    keep = int(ready.size * part)
    if keep == ready.size:
        return states
    end = int(ready[keep])
    return states[:end] + states[end:].replace(_READY_BYTE, _ABSENT_BYTE)


def _states_under(held: Mapping[bytes, Block], keys: Sequence[bytes], states: bytes) -> bytes:
    """The states a lookup tells that is asked again. A block that became ready since is not under the lease: absent."""
    others = states.replace(_READY_BYTE, _ABSENT_BYTE)
    return bytes([READY if key in held else state for key, state in zip(keys, others, strict=True)])
