"""Stores and loads in parts: the daemon takes jobs of a bounded size, so that none keeps it from others for long."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import BLOCK_ID_BYTES, PIECES_PER_KEY, GroupKeys, GroupTransfer, JobResult, Limits

FIRST_PART_ID = 2**62
"""Job ids from here on are those of parts; a job that is sent whole keeps its own."""

JOB_BYTES, GROUP_BYTES = 64, 32
"""More than a job, and a group in it, take in a frame besides keys, block ids, parents and tokens."""


class Part(NamedTuple):
    """What goes out as one job, the pieces that the daemon counts for it, and about how long it is in a frame."""

    groups: list[GroupTransfer]
    pieces: int
    nbytes: int


def _part(groups: list[GroupTransfer], pieces: int) -> Part:
    nbytes = sum([len(one.keys) + len(one.block_ids) + len(one.parents) + len(one.tokens) for one in groups])
    return Part(groups, pieces, JOB_BYTES + GROUP_BYTES * len(groups) + nbytes)


@dataclass(slots=True)
class Job:
    """A store or load that has no result yet.

    Attributes:
        lease_id: the lease of a load; None for a store.
        waiting: parts that were not sent yet.
        sent: parts that were sent and have no result.
        outcome: what is known of the result: of the parts that ended.
    """

    job_id: int
    lease_id: int | None
    keep_lease: bool
    groups: Sequence[GroupTransfer]
    sent_at: float
    waiting: deque[Part]
    sent: int = 0
    outcome: JobResult | None = None

    @property
    def is_load(self) -> bool:
        return self.lease_id is not None

    def add(self, result: JobResult) -> None:
        """Take in the result of a part. What was not sent yet of a load that failed is not sent any more."""
        self.sent -= 1
        known = self.outcome
        if known is None:
            how = result.ok, result.bytes, result.seconds, result.error, result.failed, result.declined
            self.outcome = JobResult(self.job_id, *how)
        else:
            self.outcome = JobResult(
                self.job_id,
                known.ok and result.ok,
                known.bytes + result.bytes,
                known.seconds + result.seconds,
                known.error if known.error is not None else result.error,
                [*known.failed, *result.failed],
                [*known.declined, *result.declined],
            )
        if not result.ok and self.is_load:
            self.waiting.clear()

    def withdraw(self) -> None:
        """Send no more of it: what was not sent counts as cancelled."""
        if not self.waiting:
            return
        failed = [GroupKeys(one.group, one.keys) for part in self.waiting for one in part.groups]
        self.waiting.clear()
        self.sent += 1
        self.add(JobResult(self.job_id, False, 0, 0.0, ErrorCode.CANCELLED, failed))


@dataclass(frozen=True)
class PartSizes:
    """How jobs of one registration are cut.

    Attributes:
        key_bytes: length of a block hash.
        blocks_per_key: engine blocks that one key covers.
        pages: per group, the pages of a block.
    """

    key_bytes: int
    blocks_per_key: int
    pages: tuple[int, ...]

    def fit(self, named: Iterable[GroupKeys]) -> bool:
        """Whether these can be keys of the registration's groups."""
        return all(one.group < len(self.pages) and len(one.keys) % self.key_bytes == 0 for one in named)

    def keys_in(self, part: Part) -> int:
        return sum([len(one.keys) for one in part.groups]) // self.key_bytes

    def cut(self, groups: Sequence[GroupTransfer], limits: Limits | None) -> deque[Part]:
        """The parts of a job, in its order; one where all of it may be sent at once."""
        keys = sum([len(one.keys) for one in groups]) // self.key_bytes
        pieces = sum([len(one.block_ids) // BLOCK_ID_BYTES * self.pages[one.group] for one in groups])
        if limits is None or (keys <= limits.max_keys_per_job and pieces <= limits.max_pieces_per_job):
            return deque((_part(list(groups), max(pieces, keys * PIECES_PER_KEY)),))
        parts: deque[Part] = deque()
        open_groups: list[GroupTransfer] = []
        room_keys, room_pieces = limits.max_keys_per_job, limits.max_pieces_per_job

        def close() -> None:
            nonlocal room_keys, room_pieces
            taken = limits.max_pieces_per_job - room_pieces
            parts.append(_part(list(open_groups), max(taken, (limits.max_keys_per_job - room_keys) * PIECES_PER_KEY)))
            open_groups.clear()
            room_keys, room_pieces = limits.max_keys_per_job, limits.max_pieces_per_job

        for one in groups:
            count, begin = len(one.keys) // self.key_bytes, 0
            per_key = self.blocks_per_key * self.pages[one.group]
            while begin < count:
                take = min(count - begin, room_keys, room_pieces // per_key)
                if take < 1 and open_groups:
                    close()
                    continue
                end = begin + max(1, take)
                piece = self._slice(one, begin, end, last=end == count)
                open_groups.append(piece)
                room_keys -= end - begin
                room_pieces -= len(piece.block_ids) // BLOCK_ID_BYTES * self.pages[one.group]
                begin = end
        close()
        return parts

    def _slice(self, one: GroupTransfer, begin: int, end: int, last: bool) -> GroupTransfer:
        """Keys ``begin`` to ``end`` of a group's part, with their blocks."""
        start = max(0, begin * self.blocks_per_key - one.first_block) * BLOCK_ID_BYTES
        stop = (end * self.blocks_per_key - one.first_block) * BLOCK_ID_BYTES
        keys = slice(begin * self.key_bytes, end * self.key_bytes)
        per_key = len(one.tokens) * self.key_bytes // len(one.keys)
        return GroupTransfer(
            one.group,
            one.keys[keys],
            one.block_ids[start:] if last else one.block_ids[start:stop],
            0 if begin else one.first_block,
            one.parents[keys],
            one.tokens[begin * per_key : end * per_key],
        )
