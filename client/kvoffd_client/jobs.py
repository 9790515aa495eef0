"""Stores and loads as a worker's client is given them, and the messages in which they go out."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvoffd_proto import messages as m


class GroupTransfer(NamedTuple):
    """The part of a job that concerns one group. All bytes are as in ``GroupBlocks``, of one job.

    Key ``i`` covers the engine blocks ``[i * blocks_per_key, (i + 1) * blocks_per_key)`` counted from the start of
    key 0; ``block_ids`` begin ``first_block`` blocks into key 0. A store ends with its last key; a load may end inside
    it.
    """

    group: int
    keys: bytes
    block_ids: bytes
    first_block: int = 0
    parents: bytes = b""
    tokens: bytes = b""

    @classmethod
    def of(cls, keys: Sequence[bytes], block_ids: Sequence[int], group: int = 0, first_block: int = 0) -> GroupTransfer:
        """The transfer of a list of keys and the engine blocks that they cover. Raises ValueError for odd block ids."""
        try:
            ids = struct.pack(f"<{len(block_ids)}i", *block_ids)
        except struct.error as error:
            raise ValueError(f"Block ids are whole numbers below 2^31: {error}.") from error
        return cls(group, b"".join(keys), ids, first_block)


@dataclass(frozen=True, slots=True)
class Job:
    """A store, which copies engine blocks into the pool, or the load of blocks under a lease.

    Attributes:
        job_id: unique among the client's unfinished jobs.
        groups: each group once.
        lease_id: the lease of a load, from a scheduler's lookup; None makes it a store.
        keep_lease: whether the lease stays after a good load, since other workers load the same shards.
    """

    job_id: int
    groups: Sequence[GroupTransfer]
    lease_id: int | None = None
    keep_lease: bool = False

    @property
    def keys(self) -> list[m.GroupKeys]:
        return [m.GroupKeys(one.group, one.keys) for one in self.groups]

    def key_count(self, groups: int, key_bytes: int) -> int:
        """How many keys it has. Raises ValueError, TypeError where it does not fit so many groups and such keys."""
        for one in self.groups:
            if not isinstance(one.keys, bytes) or not isinstance(one.block_ids, bytes):
                raise TypeError("A GroupTransfer has bytes; GroupTransfer.of(keys, block_ids) makes it from lists.")
            if not 0 <= one.group < groups:
                raise ValueError(f"The namespace has {groups} groups; {one.group} is none of them.")
            if len(one.keys) % key_bytes or len(one.block_ids) % m.BLOCK_ID_BYTES:
                raise ValueError(
                    f"{len(one.keys)} bytes of keys and {len(one.block_ids)} of block ids are not a whole number of "
                    f"keys of {key_bytes} bytes and of int32 numbers."
                )
        return sum([len(one.keys) for one in self.groups]) // key_bytes


def submit_of(
    request_id: int, registration_id: bytes, key_bytes: int, jobs: Sequence[Job], acknowledged: int = 0
) -> m.Submit:
    """The message with these jobs: by group, the blocks of all stores, and those of all loads.

    Either all stores of a group tell their tokens, or none.
    """
    stores = [job for job in jobs if job.lease_id is None]
    loads = [job for job in jobs if job.lease_id is not None]
    of_stores, of_loads = list[m.GroupBlocks](), list[m.GroupBlocks]()
    for alike, found in (stores, of_stores), (loads, of_loads):
        by_group: dict[int, list[tuple[int, GroupTransfer]]] = {}
        for number, job in enumerate(alike):
            for one in job.groups:
                by_group.setdefault(one.group, []).append((number, one))
        numbers = f"<{len(alike)}I"
        for group, parts in by_group.items():
            keys, blocks, firsts = ([0] * len(alike) for _ in range(3))
            for number, one in parts:
                keys[number] = len(one.keys) // key_bytes
                blocks[number] = len(one.block_ids) // m.BLOCK_ID_BYTES
                firsts[number] = one.first_block
            found.append(
                m.GroupBlocks(
                    group,
                    struct.pack(numbers, *keys),
                    struct.pack(numbers, *blocks),
                    struct.pack(numbers, *firsts) if any(firsts) else b"",
                    b"".join([one.keys for _, one in parts]),
                    b"".join([one.block_ids for _, one in parts]),
                    b"".join([one.parents for _, one in parts]),
                    b"".join([one.tokens for _, one in parts]),
                )
            )
    leases, keep = [load.lease_id or 0 for load in loads], [load.keep_lease for load in loads]
    return m.Submit(
        request_id,
        registration_id,
        m.Stores([store.job_id for store in stores], of_stores),
        m.Loads([load.job_id for load in loads], leases, keep, of_loads),
        acknowledged,
    )
