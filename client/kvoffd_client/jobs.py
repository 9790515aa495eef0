"""Stores and loads as a worker's client is given them, and the messages in which they go out."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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

    def checked_size(self, groups: int, key_bytes: int) -> tuple[int, int]:
        """Bytes of its keys, and about what it takes in a frame.

        Raises ValueError, TypeError where it does not fit a namespace of so many groups and such keys.
        """
        if len(self.groups) > 1 and len({one.group for one in self.groups}) < len(self.groups):
            raise ValueError("A job names a group twice; put its keys into one GroupTransfer.")
        keys, others = 0, 32
        for one in self.groups:
            if not isinstance(one.keys, bytes) or not isinstance(one.block_ids, bytes):
                raise TypeError("A GroupTransfer has bytes; GroupTransfer.of(keys, block_ids) makes it from lists.")
            if not 0 <= one.group < groups:
                raise ValueError(f"The namespace has {groups} groups; {one.group} is none of them.")
            if len(one.keys) % key_bytes:
                raise ValueError(f"{len(one.keys)} bytes are not a whole number of the namespace's keys.")
            if len(one.block_ids) % m.BLOCK_ID_BYTES:
                raise ValueError(f"{len(one.block_ids)} bytes are not a whole number of int32 block ids.")
            keys += len(one.keys)
            others += len(one.block_ids) + len(one.parents) + len(one.tokens) + 32
        return keys, keys + others

    def parts(
        self, of_keys: int, in_frame: int, key_bytes: int, blocks_per_key: int, limits: m.Limits, first_id: int
    ) -> list[Job]:
        """What is more than a Submit may have, or half a frame, as several jobs of consecutive ids; else the job alone.

        The lease ends with the last of them: the daemon has accepted the others by then, which hold their blocks.
        ``of_keys`` and ``in_frame`` are its ``checked_size``.
        """
        keys, frame_bytes = of_keys // key_bytes, limits.max_frame_bytes // 2
        most = min(limits.max_keys_per_request, max(1, keys * frame_bytes // max(in_frame, frame_bytes)))
        if keys <= most:
            return [self]
        parts = [
            [_slice(self.groups[place], begin, end, key_bytes, blocks_per_key) for place, begin, end in part if end]
            for part in split([len(one.keys) // key_bytes for one in self.groups], most)
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
    request_id: int,
    registration_id: bytes,
    key_bytes: int,
    jobs: Sequence[Job],
    acknowledged: int = 0,
) -> m.Submit:
    """The message with these jobs: by group, the blocks of all stores, and those of all loads.

    A group comes twice where some of its jobs tell tokens and others do not.
    """
    stores = [job for job in jobs if job.lease_id is None]
    loads = [job for job in jobs if job.lease_id is not None]
    by_group: dict[tuple[bool, int, bool, bool], list[tuple[int, GroupTransfer]]] = {}
    for some in (stores, loads):
        for number, job in enumerate(some):
            for one in job.groups:
                named = some is loads, one.group, bool(one.parents), bool(one.tokens)
                by_group.setdefault(named, []).append((number, one))
    blocks_of_stores, blocks_of_loads = list[m.GroupBlocks](), list[m.GroupBlocks]()
    for (of_loads, group, *_), parts in by_group.items():
        count = len(loads if of_loads else stores)
        keys, blocks, firsts = [0] * count, [0] * count, [0] * count
        for number, one in parts:
            keys[number] = len(one.keys) // key_bytes
            blocks[number] = len(one.block_ids) // m.BLOCK_ID_BYTES
            firsts[number] = one.first_block
        numbers = f"<{count}I"
        (blocks_of_loads if of_loads else blocks_of_stores).append(
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
    return m.Submit(
        request_id,
        registration_id,
        m.Stores([store.job_id for store in stores], blocks_of_stores),
        m.Loads(
            [load.job_id for load in loads],
            [load.lease_id or 0 for load in loads],
            [load.keep_lease for load in loads],
            blocks_of_loads,
        ),
        acknowledged,
    )
