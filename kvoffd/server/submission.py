"""Stores and loads of one message: each is judged by itself, and refused whole or accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffd.cache.session_memory import copy_bytes
from kvoffd.errors import BadBlockIds, BadKeys, KvoffdError, refusal_of
from kvoffd.server.engine_jobs import EngineJobs, LoadJob, StoredGroup, StoreJobs
from kvoffd.server.session import Registration, Session
from kvoffd.transfer.plan import blocks_outside, check_blocks, check_count, outside_error
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import (
    BLOCK_ID_BYTES,
    PIECES_PER_KEY,
    TOKEN_ID_BYTES,
    GroupTransfer,
    Load,
    Refusal,
    Store,
    Submit,
)

MAX_UNACKNOWLEDGED_RESULTS, MAX_UNACKNOWLEDGED_BYTES = 16_384, 2 << 20
"""Also because one ResultsReply has all of them."""


@dataclass(eq=False)
class Submission:
    """One Submit. ``run`` deals with it, and then ``refused`` is complete.

    Args:
        max_store_bytes: bound on the session's unfinished stores. Credits are a promise of the client; this is for one
            that does not keep it.
    """

    jobs: EngineJobs
    session: Session
    message: Submit
    max_store_bytes: int
    refused: list[Refusal] = field(default_factory=list, init=False)
    _part: dict[int, tuple[Store, int]] = field(default_factory=dict, init=False)
    """Stores that are to be planned together, with their pieces, by job id."""
    _part_pieces: int = field(default=0, init=False)

    def run(self) -> None:
        """Deal with all of it: ``refused`` is complete then."""
        for load in self.message.loads:
            try:
                self._load(load)
            except Exception as error:
                self._refuse([load], error)
        for store in self.message.stores:
            try:
                pieces = self.check(self._registration, store, storing=True)
            except Exception as error:
                self._refuse([store], error)
                continue
            self._part[store.job_id] = store, pieces
            self._part_pieces += pieces
        self._store_part()

    @property
    def _registration(self) -> Registration:
        return self.session.registration(self.message.registration_id)

    def _refuse(self, jobs: Sequence[Store | Load], error: Exception) -> None:
        refusal = refusal_of(error)
        self.refused += [Refusal(job.job_id, refusal.code, refusal.message) for job in jobs]

    def check(self, registration: Registration, job: Store | Load, *, storing: bool) -> int:
        """Return the pieces that a job counts as.

        Raises KvoffdError, before anything is allocated for the job, where it is too large, does not fit its
        registration, or the session has too much under way, or a job of this id. What its bytes say of keys and blocks
        is not looked at yet.
        """
        config, session, namespace = self.jobs.config, self.session, registration.namespace
        if job.job_id in session.jobs or job.job_id in self._part:
            raise KvoffdError.of(ErrorCode.DUPLICATE_JOB)
        if (unfinished := session.unfinished + len(self._part)) >= config.limits.max_jobs_in_flight:
            raise KvoffdError(f"The session has {unfinished} jobs in flight, its limit.", ErrorCode.TOO_MANY)
        log = session.completions
        if len(log) >= MAX_UNACKNOWLEDGED_RESULTS or log.keys_bytes >= MAX_UNACKNOWLEDGED_BYTES:
            raise KvoffdError("The session does not acknowledge its completions; each Submit may.", ErrorCode.TOO_MANY)
        if storing and session.store_bytes > self.max_store_bytes:
            raise KvoffdError(
                "The session's outstanding stores are far beyond its credit; wait for completions.", ErrorCode.TOO_MANY
            )
        all_keys = pieces = 0
        for part in job.groups:
            namespace.check_keys(part.group, part.keys)
            if len(part.block_ids) % BLOCK_ID_BYTES:
                raise BadBlockIds(f"Block ids are int32; {len(part.block_ids)} bytes are not a whole number of them.")
            keys, blocks = len(part.keys) // namespace.key_bytes, len(part.block_ids) // BLOCK_ID_BYTES
            if part.parents or part.tokens:
                _check_origins(part, keys, namespace.groups[part.group].tokens_per_block)
            all_keys += keys
            pieces += blocks * registration.layouts[part.group].page_bytes.size
        if len(job.groups) > 1 and len({part.group for part in job.groups}) < len(job.groups):
            raise BadKeys("A group is named twice in one job; put its keys into one part.")
        if all_keys > config.limits.max_keys_per_job or pieces > config.limits.max_pieces_per_job:
            raise KvoffdError(
                f"The job has {all_keys} keys and {pieces} pieces, and {config.limits.max_keys_per_job} and "
                f"{config.limits.max_pieces_per_job} are allowed; send it as several jobs.",
                ErrorCode.TOO_MANY,
            )
        for part in job.groups:
            keys, blocks = len(part.keys) // namespace.key_bytes, len(part.block_ids) // BLOCK_ID_BYTES
            check_count(registration.layouts[part.group], blocks, keys, part.first_block, storing)
        pieces = max(pieces, all_keys * PIECES_PER_KEY)
        known = session.pieces + self._part_pieces
        if known + pieces > config.limits.max_pieces_in_flight and known:
            raise KvoffdError(
                f"The session's unfinished jobs have {known} pieces; with this one's {pieces} they would be "
                f"more than the {config.limits.max_pieces_in_flight} allowed. Wait for completions.",
                ErrorCode.TOO_MANY,
            )
        self.jobs.cache.memory.check(session.id, copy_bytes(len(self._part) + 1, self._part_pieces + pieces))
        return pieces

    def _load(self, load: Load) -> int:
        """Accept a load, or raise and change nothing. Returns its pieces."""
        registration = self._registration
        pieces = self.check(registration, load, storing=False)
        block_ids = [_checked_ids(registration, part) for part in load.groups]
        job = LoadJob((load.job_id,), self.session, registration, self.jobs, load.lease_id, load.keep_lease)
        plan = job.begin(load.groups, block_ids)
        job.run(plan, pieces)
        return pieces

    def _store_part(self) -> None:
        """Accept the stores of a part that are in order; the others are refused."""
        part, self._part, self._part_pieces = self._part, {}, 0
        while part:
            stores = [store for store, _ in part.values()]
            wrong = self._start(stores, sum([pieces for _, pieces in part.values()]))
            for index, error in wrong.items():
                self._refuse([stores[index]], error)
                del part[stores[index].job_id]
            if not wrong:
                return

    def _start(self, stores: Sequence[Store], pieces: int) -> dict[int, Exception]:
        """Accept all of some stores, or none: return why, by the index of those that are to blame."""
        try:
            registration = self._registration
            groups = self._gather(registration, stores)
            if wrong := self._wrong(registration, groups):
                return wrong
            ids = [store.job_id for store in stores]
            job = StoreJobs(ids, self.session, registration, self.jobs, groups)
            plan = job.begin()
        except Exception as error:
            return dict.fromkeys(range(len(stores)), error)
        job.run(plan, pieces)
        return {}

    def _gather(self, registration: Registration, stores: Sequence[Store]) -> list[StoredGroup]:
        by_group: dict[int, tuple[list[int], list[GroupTransfer]]] = {}
        for index, store in enumerate(stores):
            for part in store.groups:
                indices, parts = by_group.setdefault(part.group, ([], []))
                indices.append(index)
                parts.append(part)
        return [_gathered(registration, group, *found) for group, found in by_group.items()]

    def _wrong(self, registration: Registration, groups: Sequence[StoredGroup]) -> dict[int, Exception]:
        """What is wrong with stores whose keys or block ids are not in order, by their index."""
        wrong: dict[int, Exception] = {}
        for part in groups:
            layout = registration.layouts[part.group]
            outside = blocks_outside(layout, part.block_ids)
            of_store = part.stores[np.searchsorted(part.first_id, outside, side="right") - 1]
            for at, index in zip(outside.tolist(), of_store.tolist(), strict=True):
                wrong.setdefault(index, outside_error(layout, int(part.block_ids[at])))
            if len(set(part.keys)) == len(part.keys):
                continue
            ends = [*part.first_key[1:].tolist(), len(part.keys)]
            for index, begin, end in zip(part.stores.tolist(), part.first_key.tolist(), ends, strict=True):
                if len(set(part.keys[begin:end])) < end - begin:
                    sentence = f"A key of group {part.group} occurs twice in one store; send each key once."
                    wrong.setdefault(index, BadKeys(sentence))
        return wrong


def _check_origins(part: GroupTransfer, keys: int, tokens_per_block: int) -> None:
    """Raise BadKeys where parents or token ids are not those of as many keys."""
    if part.parents and len(part.parents) != len(part.keys):
        raise BadKeys(f"{len(part.parents)} bytes of parents for {len(part.keys)} bytes of keys; tell all or none.")
    if part.tokens and len(part.tokens) != keys * tokens_per_block * TOKEN_ID_BYTES:
        raise BadKeys(
            f"{len(part.tokens)} bytes of token ids for {keys} keys of {tokens_per_block} tokens; tell all or none."
        )


def _gathered(
    registration: Registration, group: int, stores: Sequence[int], parts: Sequence[GroupTransfer]
) -> StoredGroup:
    per_key = registration.layouts[group].blocks_per_key
    keys = registration.namespace.split(group, b"".join([part.keys for part in parts]))
    block_ids = np.frombuffer(b"".join([part.block_ids for part in parts]), dtype="<i4")
    first_id = _begins([len(part.block_ids) // BLOCK_ID_BYTES for part in parts])
    key_bytes = registration.namespace.key_bytes
    first_key = _begins([len(part.keys) // key_bytes for part in parts])
    position = np.arange(block_ids.size, dtype=np.int64)
    first_blocks: dict[int, int] = {}
    if per_key > 1:
        counts = np.diff(first_id, append=block_ids.size)
        skipped = np.array([part.first_block for part in parts], dtype=np.int64)
        position += np.repeat(first_key * per_key + skipped - first_id, counts)
        first_blocks = {
            int(number): part.first_block for number, part in zip(first_key, parts, strict=True) if part.first_block
        }
    indices = np.array(stores, dtype=np.int64)
    told = parts if any(part.tokens for part in parts) else ()
    return StoredGroup(group, keys, block_ids, position, indices, first_key, first_id, first_blocks, told)


def _begins(counts: Sequence[int]) -> npt.NDArray[np.int64]:
    """Where each of some neighbouring ranges begins, by their sizes."""
    ends = np.cumsum(np.array(counts, dtype=np.int64))
    return np.concatenate((np.zeros(1, dtype=np.int64), ends[:-1]))


def _checked_ids(registration: Registration, part: GroupTransfer) -> npt.NDArray[np.int32]:
    """The block ids of a load (int32, [m]). Raises BadKeys, BadBlockIds."""
    keys = registration.namespace.split(part.group, part.keys, distinct=True)
    block_ids = np.frombuffer(part.block_ids, dtype="<i4")
    check_blocks(registration.layouts[part.group], block_ids, len(keys), part.first_block, exact=False)
    if np.unique(block_ids).size < block_ids.size:
        raise BadBlockIds(f"Group {part.group} loads into an engine block twice; name each block once.")
    return block_ids
