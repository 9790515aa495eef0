"""Stores and loads as a worker's client is given them, and the messages in which they go out."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kvoffd_proto import messages as m


def split(counts: Sequence[int], most: int) -> list[list[tuple[int, int, int]]]:
    """Cut groups of so many keys into parts of at most ``most`` keys: of each part the groups' places, begins and ends.

    A group without keys is in one part too.
    """
    parts: list[list[tuple[int, int, int]]] = [[]]
    room = most
    for place, count in enumerate(counts):
        begin = 0
        while begin < count or not begin:
            if not room:
                parts.append([])
                room = most
            end = min(count, begin + room)
            parts[-1].append((place, begin, end))
            room -= end - begin
            begin = max(end, 1)
    return parts


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


Size: TypeAlias = tuple[int, int]
"""Keys of a job, and about how many bytes it takes in a frame."""


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

    def checked_size(self, groups: int, key_bytes: int) -> Size:
        """Its size. Raises ValueError, TypeError where it does not fit a namespace of so many groups and such keys."""
        keys, nbytes = 0, 32
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
            keys += len(one.keys) // key_bytes
            nbytes += len(one.keys) + len(one.block_ids) + len(one.parents) + len(one.tokens) + 32
        return keys, nbytes

    def parts(self, size: Size, key_bytes: int, blocks_per_key: int, most: Size, first_id: int) -> list[Job]:
        """The job as several of consecutive ids, none of them larger than ``most`` (but that each has a key).

        The lease ends with the last of them: the daemon has accepted the others by then, which hold their blocks.
        """
        keys = min(most[0], max(1, size[0] * most[1] // max(size[1], most[1])))
        parts = [
            [_slice(self.groups[place], begin, end, key_bytes, blocks_per_key) for place, begin, end in part if end]
            for part in split([len(one.keys) // key_bytes for one in self.groups], keys)
        ]
        return [
            Job(first_id + number, part, self.lease_id, self.keep_lease or part is not parts[-1])
            for number, part in enumerate(parts)
        ]


def _slice(one: GroupTransfer, begin: int, end: int, key_bytes: int, blocks_per_key: int) -> GroupTransfer:
    """Keys ``begin`` to ``end`` of a group, with their blocks; with the last key, all blocks that are left."""
    count = len(one.keys) // key_bytes
    start, stop = (max(0, key * blocks_per_key - one.first_block) * m.BLOCK_ID_BYTES for key in (begin, end))
    keys, tokens = slice(begin * key_bytes, end * key_bytes), len(one.tokens) // count
    return GroupTransfer(
        one.group,
        one.keys[keys],
        one.block_ids[start : None if end == count else stop],
        0 if begin else one.first_block,
        one.parents[keys],
        one.tokens[begin * tokens : end * tokens],
    )


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
