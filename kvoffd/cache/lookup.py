"""What a lookup finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvoffd.cache.block import BlockState
from kvoffd.cache.lease import Lease


class LookupAnswer(NamedTuple):
    """What a lookup found."""

    states: list[bytes]
    """Per group of the request, one byte a key: ABSENT, WRITING, READY or PENDING. The ready ones are under the lease.
    """
    pinned: int
    """Blocks under the lease; where it is 0 there is no lease."""


class Found(NamedTuple):
    """A lookup whose pins are not entered yet. By group of the request."""

    lease: Lease
    keys: Sequence[tuple[int, bytes]]
    states: list[bytes]


def states_under(lease: Lease, group: int, keys: Sequence[bytes]) -> bytes:
    """The states a lookup tells that is asked again. A block that became ready since is not under the lease: absent."""
    held = lease.by_key(group)
    index = lease.namespace.index[group]
    states = bytearray(len(keys))
    for number, key in enumerate(keys):
        if key in held:
            states[number] = BlockState.READY
        elif (block := index.get(key)) is not None and block.state is BlockState.WRITING:
            states[number] = BlockState.WRITING
    return bytes(states)
