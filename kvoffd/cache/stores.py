"""Stores, and fills from tiers: which keys get blocks, and what is written into them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_life import BlockLife, select_keys
from kvoffd.cache.block_table import FREE, NO_BLOCK, NO_BLOCKS, WRITING, BlockIds, StoreVerdict
from kvoffd.cache.hooks import NO_TOKENS, BlockTokens
from kvoffd.cache.namespace import Group, MissReason, Namespace
from kvoffd.cache.policy import REJECTED, Policy
from kvoffd.cache.prompts import Prompts
from kvoffd.cache.space import Space
from kvoffd.cache.tickets import FillTicket, StorePart, StoreTicket
from kvoffd.cache.victims import ANY_PROMPT
from kvoffd.errors import BadGeometry

WITHOUT_SPACE = MissReason.NO_SPACE, MissReason.QUOTA
"""Reasons why a store's keys got no blocks."""
_ABSENT = bytes([StoreVerdict.ABSENT])
PromptNumbers: TypeAlias = npt.NDArray[np.uint64]
"""[keys] number of each key's prompt; see ``BlockTable.prompt``. 0: nothing of it is to be stored."""


class BlockStores:
    """Begins and ends stores and fills. End each ticket exactly once, after the last byte of its copy has moved.

    A store asks, in this order: which keys lack this rank's shard (``BlockTable.judge``); of which prompts they are, so
    that no prompt evicts its own beginning; which of the absent ones the policy wants (``HintedOrder.admit``); for
    which of these there is space (``Space.take``).
    """

    def __init__(self, life: BlockLife, space: Space, policy: Policy, prompts: Prompts) -> None:
        self._life, self._blocks, self._order, self._space = life, life.blocks, life.order, space
        self._policy, self._prompts = policy, prompts

    def begin(self, namespace: Namespace, rank: int, parts: Sequence[StorePart], sole: int = 0) -> list[StoreTicket]:
        """Allocate slots for the missing blocks, evicting if needed. Returns a ticket for each part.

        Existing blocks that begin later than the offered ones, and are not in use, are dropped first. The other
        existing blocks of these keys are not evicted, nor are those of the same prompts or of newer ones that no tier
        has. Each group occurs once; groups, keys and rank must be valid.

        ``sole``: a number of the store of all ranks; a block that was begun under another one gets no shard of it.
        """
        begun, pinned = list[StoreTicket](), list[BlockIds]()
        offers: list[tuple[StoreTicket, StorePart, Sequence[int], PromptNumbers]] = []
        try:
            try:
                for part, prompts in zip(parts, self._prompts_of(namespace, parts), strict=True):
                    group = namespace.groups[part.group]
                    if rank == 0 and not namespace.of_bench:
                        self._prompts.offered(group, part.keys)
                    ticket, absent, present = self._compare(group, rank, part, prompts, sole)
                    offers.append((ticket, part, absent, prompts if len(absent) == len(prompts) else prompts[absent]))
                    if present.size:
                        self._blocks.pin(present)
                        pinned.append(present)
                for ticket, part, absent, prompts in offers:
                    begun.append(ticket)
                    self._admit(rank, ticket, part, absent, prompts, sole)
            finally:
                for present in pinned:
                    self._life.unpin(present)
            for ticket, part, _, prompts in offers:  # only now: its own pins are no cause
                if ticket.no_space or ticket.rejected:
                    self._record_lost(ticket, part, prompts)
        except BaseException:
            self.abort(begun)
            raise
        return begun

    def _compare(
        self, group: Group, rank: int, part: StorePart, prompts: PromptNumbers, sole: int
    ) -> tuple[StoreTicket, Sequence[int], BlockIds]:
        """Compare what is offered with what is there. Returns the store of the shards that existing blocks lack, the
        indices of the absent keys, and the existing blocks."""
        offered = group, part.keys, rank, part.first_blocks
        verdicts, blocks = self._blocks.judge(*offered)
        if verdicts == _ABSENT * len(verdicts):
            return StoreTicket(group, NO_BLOCKS, NO_BLOCKS), range(len(verdicts)), NO_BLOCKS
        narrow = blocks[np.frombuffer(verdicts, np.uint8) == StoreVerdict.NARROW]
        if self._drop_narrow(group, narrow) | self._space.drop_abandoned(blocks, sole):
            verdicts, blocks = self._blocks.judge(*offered)
        of_key = np.frombuffer(verdicts, np.uint8)
        absent, joined, duplicates = (
            np.flatnonzero(of_key == verdict).tolist()
            for verdict in (StoreVerdict.ABSENT, StoreVerdict.JOIN, StoreVerdict.DUPLICATE)
        )
        if refused := {*self._life.unjoinable(blocks[joined], sole)}:
            joined = [index for index in joined if int(blocks[index]) not in refused]
            duplicates = self._repeats_of(group, part.keys, duplicates, [*absent, *joined])
        existing = blocks[are_present := blocks != NO_BLOCK]
        self._blocks.prompt[existing] = np.maximum(self._blocks.prompt[existing], prompts[are_present])
        return StoreTicket(group, blocks[joined], NO_BLOCKS, joined, duplicates=duplicates), absent, existing

    def _drop_narrow(self, group: Group, blocks: BlockIds) -> bool:
        """Drop blocks that begin later than what is offered, and the copies in tiers, which are as narrow. Returns
        whether there are any."""
        if blocks.size:
            packed_keys = self._blocks.keys(blocks, group.key_bytes)
            self._life.drop(blocks, MissReason.PARTIAL)
            if self._life.tiers is not None:
                self._life.tiers.remove(group.namespace, group.index, packed_keys, MissReason.PARTIAL)
        return bool(blocks.size)

    @staticmethod
    def _repeats_of(group: Group, keys: bytes, repeats: Sequence[int], indices: Sequence[int]) -> list[int]:
        """Return those of the ``repeats`` whose keys are at ``indices``."""
        split = np.frombuffer(keys, group.namespace.key_type).tolist()
        wanted = {split[index] for index in indices}
        return [index for index in repeats if split[index] in wanted]

    # --- which prompts ---------------------------------------------------------------------------

    def _prompts_of(self, namespace: Namespace, parts: Sequence[StorePart]) -> list[PromptNumbers]:
        """Return the number of each key's prompt, by part.

        A prompt continues with the number of the block before a chain, of any group. It gets a new one if there is no
        such block, and 0, so that nothing of it is stored, if that block got no space.
        """
        size, jobs, known = namespace.key_bytes, list[list[int]](), dict[int, int]()
        for part in parts:
            starts = part.starts or (0,)
            jobs.append(part_jobs := list(part.jobs or range(len(starts))))
            numbers = self._prompts_before(namespace.groups[part.group], part.before) if part.before else {}
            for at, start in enumerate(starts):
                if at and part.before.get(start) == part.keys[(start - 1) * size : start * size]:
                    part_jobs[at] = part_jobs[at - 1]  # it continues the chain before it
                elif start in numbers:
                    known[part_jobs[at]] = min(numbers[start], known.get(part_jobs[at], ANY_PROMPT))
        new, found = self._blocks.new_prompt(), []
        for part, part_jobs in zip(parts, jobs, strict=True):
            each = np.array([known.get(job, new) for job in part_jobs], np.uint64)
            found.append(np.repeat(each, np.diff([*(part.starts or (0,)), len(part.keys) // size])))
        return found

    def _prompts_before(self, group: Group, before: Mapping[int, bytes]) -> dict[int, int]:
        """Return the number of each key's prompt, as far as it is known; 0 if the key got no space."""
        keys = b"".join(before.values())
        states, blocks = self._blocks.find(group, keys)
        reasons = self._blocks.miss_reasons(group, keys) if FREE in states else bytes(len(states))
        numbers: dict[int, int] = {}
        for start, state, block, reason in zip(before, states, blocks.tolist(), reasons, strict=True):
            if state == FREE and reason in WITHOUT_SPACE:
                numbers[start] = 0
            elif state != FREE and (number := int(self._blocks.prompt[block])):  # a recovered one has none
                numbers[start] = number
        return numbers

    # --- which keys ------------------------------------------------------------------------------

    def _admit(
        self,
        rank: int,
        ticket: StoreTicket,
        part: StorePart,
        absent: Sequence[int],
        prompts: PromptNumbers,
        sole: int,
    ) -> None:
        """Make blocks for the absent keys that the policy admits, and fill in what to copy. ``prompts``: the number of
        each one's prompt."""
        joins = len(ticket.copy)
        try:
            self._make_admitted(ticket, part, absent, prompts)
        finally:  # allocated slots belong to the store even if this fails
            if sole:
                self._life.set_sole(ticket.blocks[joins:], sole)
            if ticket.copy != sorted(ticket.copy):  # joined blocks come first, and those of newer prompts
                order = np.argsort(ticket.copy)
                ticket.copy, ticket.blocks = np.array(ticket.copy)[order].tolist(), ticket.blocks[order]
            ticket.slots, ticket.offsets = self._life.begin_writes(ticket.blocks, rank)
            if part.first_blocks:
                ticket.first_blocks = [part.first_blocks.get(index, 0) for index in ticket.copy]

    def _make_admitted(
        self, ticket: StoreTicket, part: StorePart, absent: Sequence[int], prompts: PromptNumbers
    ) -> None:
        """Make blocks for the absent keys as far as policy and space allow. Each key's index goes into ``ticket.copy``,
        ``rejected`` or ``no_space``.

        A run of keys may evict only blocks with a lower score than its own. Once a run of one prompt got too little,
        runs with its score or a lower one get nothing: if nothing lower than 4 was left, nothing lower than 3 is.
        """
        if not prompts.all():  # keys behind one without a block would never be found
            ticket.no_space += [index for index, prompt in zip(absent, prompts.tolist(), strict=True) if not prompt]
            absent, prompts = np.array(absent)[prompts != 0].tolist(), prompts[prompts != 0]
        if not absent:
            return
        size, begin, packed_keys = ticket.group.key_bytes, 0, part.keys
        if len(absent) * size < len(packed_keys):
            packed_keys = select_keys(packed_keys, absent, size)
        runs, no_space_score = self._runs_of(ticket.group, part, packed_keys, absent)
        # Every admitted block gets space if tiers are written, because only blocks in the pool are written to them.
        takes_all = self._life.tiers is not None and self._life.tiers.are_written
        for count, score in runs:
            end, left = begin + count, list(absent[begin : begin + count])
            limit = inf if takes_all else score
            if score != REJECTED and limit > no_space_score:
                left = self._make_run(ticket, packed_keys[begin * size : end * size], left, prompts[begin:end], limit)
                if left and (prompts == prompts[0]).all():  # otherwise other prompts may still get some
                    no_space_score = limit
            if left:
                is_limited, newest = max(limit, no_space_score) < inf, int(prompts.max())
                is_outranked = is_limited and self._space.victims.are_evictable(newest)
                lost = ticket.rejected if score == REJECTED or is_outranked else ticket.no_space
                lost += left
            begin = end

    def _runs_of(
        self, group: Group, part: StorePart, keys: bytes, absent: Sequence[int]
    ) -> tuple[Sequence[tuple[int, float]], float]:
        """Return the absent keys as runs with a score each, and the score up to which none gets space."""
        if part.starts is None or not group.sizes or group.namespace.of_bench:
            return [(len(absent), inf)], -inf
        starts = list(part.starts)
        if len(starts) > 1:
            starts = sorted({*np.searchsorted(absent, starts).tolist()})
        (runs, lowest), slots = self._order.admit(group, keys, starts), self._life.slots
        is_full = slots.free_bytes < group.block_bytes and not self._life.unswept and not self._life.partial
        return runs, lowest if is_full else -inf

    def _make_run(
        self, ticket: StoreTicket, keys: bytes, indices: list[int], prompts: PromptNumbers, below: float
    ) -> list[int]:
        """Make blocks for absent keys as far as there is space. Returns the indices of those that got none.

        They may evict what the oldest of their prompts may. What gets no space then tries again with its own prompt,
        the newest first: it may evict all that an older one may, so once one gets too little, older ones get none.
        """
        made, left = self._make_first(ticket, keys, indices, prompts, below), list[int]()
        begins = [made, *(made + 1 + np.flatnonzero(np.diff(prompts[made:]))).tolist(), len(indices)]
        if made == len(indices) or (len(begins) == 2 and prompts[made] == prompts.min()):
            return indices[made:]
        size = ticket.group.key_bytes
        for begin, end in sorted(pairwise(begins), key=lambda each: int(prompts[each[0]]), reverse=True):
            made, of_prompt = 0, slice(begin, end)
            if not left:
                prompt_keys = keys[begin * size : end * size]
                made = self._make_first(ticket, prompt_keys, indices[of_prompt], prompts[of_prompt], below)
            left += indices[begin + made : end]
        return left

    def _make_first(
        self, ticket: StoreTicket, keys: bytes, indices: Sequence[int], prompts: PromptNumbers, below: float
    ) -> int:
        """Make blocks for the first absent keys. Returns how many got one."""
        blocks = self._space.take(ticket.group, keys, below, int(prompts.min()))[:, 0]
        self._blocks.prompt[blocks] = prompts[: len(blocks)]
        ticket.blocks = np.concatenate([ticket.blocks, blocks])
        ticket.copy += indices[: len(blocks)]
        return len(blocks)

    def _record_lost(self, ticket: StoreTicket, part: StorePart, prompts: PromptNumbers) -> None:
        """Count the keys that got no space or were rejected, and remember why they have no block."""
        group, size = ticket.group, ticket.group.key_bytes
        ticket.no_space.sort()
        if ticket.no_space:
            cause = self._space.no_space_cause(group, int(prompts.max()))
            reason = MissReason.QUOTA if cause == "quota" else MissReason.NO_SPACE
            self._blocks.record_misses(group, select_keys(part.keys, ticket.no_space, size), reason)
            group.namespace.counters.no_space[cause] += len(ticket.no_space)
        if ticket.rejected:
            packed_keys = select_keys(part.keys, ticket.rejected, size)
            self._policy.rejected(group, packed_keys)
            self._blocks.record_misses(group, packed_keys, MissReason.REJECTED)
            group.namespace.counters.rejected_keys += len(ticket.rejected)

    # --- ends ------------------------------------------------------------------------------------

    def commit(
        self,
        tickets: Sequence[StoreTicket],
        checksums: Sequence[Iterable[int]],
        tokens: Mapping[bytes, BlockTokens] = NO_TOKENS,
    ) -> int:
        """End a store whose bytes are all written. Returns how many blocks became READY.

        ``checksums``: by ticket, of each copied key; 0 if it is still to be computed.
        """
        return sum(
            self._life.publish(ticket.group, ticket.blocks, ticket.slots, ticket.first_blocks, sums, tokens)
            for ticket, sums in zip(tickets, checksums, strict=True)
        )

    def abort(self, tickets: Sequence[StoreTicket]) -> None:
        """End a store that did not copy everything: its shards are discarded, those of other ranks stay and wait."""
        for ticket in tickets:
            self._life.end_writes(ticket.group, ticket.blocks, ticket.slots)

    def drop_unfinished(
        self, tickets: Sequence[StoreTicket | FillTicket], reason: MissReason = MissReason.PARTIAL
    ) -> None:
        """Drop the blocks that lack a shard, so that their keys can be stored again. The store or fill must still be
        ended. Copies in a tier stay."""
        for ticket in tickets:
            if not ticket.group.retired:
                self._life.drop(ticket.blocks[self._blocks.state[ticket.blocks] == WRITING], reason)

    # --- fills -----------------------------------------------------------------------------------

    def begin_fill(self, group: Group, keys: Sequence[bytes]) -> dict[int, FillTicket | None]:
        """Allocate slots of all ranks for keys from a tier. Returns, by the index of each key without a block, a
        ticket, or None if there is no space. Raises BadGeometry."""
        if not group.sizes:
            raise BadGeometry("Not all ranks of the namespace have registered; register them first.")
        states, _ = self._blocks.find(group, b"".join(keys))
        first: dict[bytes, int] = {}
        for index, (key, state) in enumerate(zip(keys, states, strict=True)):
            if state == FREE:
                first.setdefault(key, index)
        slots = self._space.take(group, b"".join(first), inf, ANY_PROMPT)
        self._blocks.prompt[slots[:, 0]] = self._blocks.last_prompt
        self._life.begin_all_writes(slots)
        tickets: dict[int, FillTicket | None] = dict.fromkeys(first.values())
        for index, of_block, offsets in zip(
            first.values(), slots, self._life.slots.offsets(slots).tolist(), strict=False
        ):
            tickets[index] = FillTicket(group, of_block, offsets)
        return tickets

    def end_fill(self, ticket: FillTicket, first_blocks: Sequence[int], checksums: Sequence[int]) -> bool:
        """End a fill. Both arguments are by rank, and empty if the block was not read completely. Returns whether it
        became READY."""
        group, slots = ticket.group, ticket.slots
        if not checksums:
            self._life.end_writes(group, slots[:1], slots)
            return False
        is_ready = bool(self._life.publish(group, np.repeat(slots[:1], len(slots)), slots, first_blocks, checksums))
        if is_ready:
            self._order.share(slots[:1])  # it may be anybody's
        return is_ready
