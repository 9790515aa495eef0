"""Stores, and fills from tiers: which keys get blocks, and what is written into them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_life import BlockLife
from kvoffd.cache.block_table import NO_BLOCKS, BlockIds, ChainStart, StoreVerdict, select_keys
from kvoffd.cache.hooks import NO_TOKENS, BlockTokens
from kvoffd.cache.namespace import Group, MissReason, Namespace
from kvoffd.cache.policy import REJECTED, Policy
from kvoffd.cache.space import Space
from kvoffd.cache.states import FREE, NO_BLOCK, READY, WRITING
from kvoffd.cache.tickets import FillTicket, StorePart, StoreTicket
from kvoffd.cache.victims import ANY_PROMPT
from kvoffd.errors import BadGeometry

WITHOUT_SPACE = MissReason.NO_SPACE, MissReason.QUOTA
"""Reasons why a store's keys got no blocks, so that nothing behind them is stored. What is behind a rejected key is for
the policy to reject."""
_ABSENT = bytes([StoreVerdict.ABSENT])
_FROM_ROOT = (ChainStart(0, NO_BLOCK),)
"""The chain of a store that begins its prompt with a block that it makes: there is none before it."""
PromptNumbers: TypeAlias = npt.NDArray[np.uint64]
"""[keys] number of each key's prompt; see ``BlockTable.prompt``. 0: nothing of it is to be stored."""


class _Offer(NamedTuple):
    """A part of a store, compared with the blocks that are there."""

    ticket: StoreTicket
    """The shards that existing blocks lack. Blocks that are made for absent keys are added to it."""
    absent: Sequence[int]
    """Indices of the keys without a block."""
    prompts: PromptNumbers
    """Those of the absent keys."""
    existing: BlockIds
    """Blocks of the other keys."""


class _Run(NamedTuple):
    """Absent keys that follow one another and have one score: indices of the first, and behind the last."""

    begin: int
    end: int
    score: float
    """See ``Admission.runs``."""


class BlockStores:
    """Begins and ends stores and fills. End each ticket exactly once, after the last byte of its copy has moved.

    A store asks, in this order: of which prompts its keys are (``_prompts_of``), so that none evicts its own beginning;
    which keys lack this rank's shard (``_compare``, for all groups before the first block goes); which of the absent
    ones the policy wants (``_runs_of``); for which of these there is space (``_make_blocks``).
    """

    def __init__(self, life: BlockLife, space: Space, policy: Policy) -> None:
        self._life, self._blocks, self._order = life, life.blocks, life.order
        self._space, self._policy = space, policy

    def begin(self, namespace: Namespace, rank: int, parts: Sequence[StorePart], sole: int = 0) -> list[StoreTicket]:
        """Allocate slots for the missing blocks, evicting if needed. Returns a ticket for each part.

        Existing blocks that begin later than the offered ones, and are not in use, are dropped first. The other
        existing blocks of these keys are not evicted, nor are those of the same prompts or of newer ones that no tier
        has. Each group occurs once; groups, keys and rank must be valid.

        ``sole``: number of the only stores that may add shards to blocks that this one begins, or 0; see
        ``BlockLife.set_sole``.
        """
        offers, begun = list[_Offer](), list[StoreTicket]()
        try:
            try:
                for part, prompts in zip(parts, self._prompts_of(namespace, parts), strict=True):
                    offer = self._compare(namespace.groups[part.group], rank, part, prompts, sole)
                    if offer.existing.size:  # no other part of this store may evict them
                        self._blocks.pin(offer.existing)
                    offers.append(offer)
                for offer in offers:
                    begun.append(offer.ticket)
                    self._allocate(rank, offer, sole)
            finally:
                for offer in offers:
                    if offer.existing.size:
                        self._life.unpin(offer.existing)
            for offer in offers:  # after the unpinning: the store's own pins must not count as the cause
                if offer.ticket.no_space or offer.ticket.rejected:
                    self._record_lost(offer)
        except BaseException:
            self.abort(begun)
            raise
        return begun

    def _compare(self, group: Group, rank: int, part: StorePart, prompts: PromptNumbers, sole: int) -> _Offer:
        """Compare what is offered with what is there, and drop what must not stay. ``prompts``: of all keys."""
        offered = group, part.keys, rank, part.first_blocks
        verdicts, blocks = self._blocks.judge(*offered)
        if verdicts == _ABSENT * len(verdicts):
            ticket = StoreTicket(group, part, NO_BLOCKS, NO_BLOCKS)
            return _Offer(ticket, range(len(verdicts)), prompts, NO_BLOCKS)
        narrow = blocks[np.frombuffer(verdicts, np.uint8) == StoreVerdict.NARROW]
        self._drop_narrow(group, narrow)
        any_abandoned = self._life.drop_abandoned(blocks, sole)
        if narrow.size or any_abandoned:  # the dropped ones are absent now
            verdicts, blocks = self._blocks.judge(*offered)
        of_key = np.frombuffer(verdicts, np.uint8)
        absent, joined, duplicates = (
            np.flatnonzero(of_key == verdict).tolist()
            for verdict in (StoreVerdict.ABSENT, StoreVerdict.JOIN, StoreVerdict.DUPLICATE)
        )
        # The keys of unjoinable blocks count as present, repeats included: if A's block is one, and B is absent, the
        # store of A, A, B, B has the duplicate B alone.
        if unjoinable := {*self._life.unjoinable(blocks[joined], sole)}:
            joined = [index for index in joined if int(blocks[index]) not in unjoinable]
            split = np.frombuffer(part.keys, group.namespace.key_type).tolist()
            wanted = {split[index] for index in (*absent, *joined)}
            duplicates = [index for index in duplicates if split[index] in wanted]
        existing = blocks[are_present := blocks != NO_BLOCK]
        np.maximum.at(self._blocks.prompt, existing, prompts[are_present])  # a block may be there twice
        ticket = StoreTicket(group, part, blocks[joined], NO_BLOCKS, joined, duplicates=duplicates)
        return _Offer(ticket, absent, prompts[absent], existing)

    def _drop_narrow(self, group: Group, blocks: BlockIds) -> None:
        """Drop blocks that begin later than what is offered, and the copies in tiers, which are as narrow."""
        if blocks.size:
            packed_keys = self._blocks.keys(blocks, group.key_bytes)
            self._life.drop(blocks, MissReason.PARTIAL)
            if self._life.tiers is not None:
                self._life.tiers.remove(group.namespace, group.index, packed_keys, MissReason.PARTIAL)

    # --- which prompts ---------------------------------------------------------------------------

    def _prompts_of(self, namespace: Namespace, parts: Sequence[StorePart]) -> list[PromptNumbers]:
        """Return the number of each key's prompt, by part.

        A prompt continues with the number of the block before one of its chains, in any group. It gets a new one if no
        such block is known, and 0, so that nothing of it is stored, if that block got no space. If the blocks
        before its chains have several numbers, it continues with the lowest: 0, or that for which the fewest blocks may
        be evicted. Chains of one label in ``StorePart.prompts`` are one prompt's.
        """
        size, labels_of_chains = namespace.key_bytes, list[list[int]]()
        continued: dict[int, int] = {}
        """Numbers of prompts that continue, by the labels that they have in ``StorePart.prompts``."""
        for part in parts:
            labels = list(part.prompts or range(len(part.starts)))  # by default those of one index are one prompt's
            before = self._prompts_before(namespace.groups[part.group], part.before) if part.before else {}
            for at, start in enumerate(part.starts):
                if at and part.before.get(start) == part.keys[(start - 1) * size : start * size]:
                    labels[at] = labels[at - 1]  # the chain before it ends there: both are one prompt's, in two jobs
                elif start in before:  # 0 if any of its groups got no space
                    continued[labels[at]] = min(before[start], continued.get(labels[at], ANY_PROMPT))
            labels_of_chains.append(labels)
        new, found = self._blocks.last_prompt + 1, list[PromptNumbers]()
        self._blocks.last_prompt = new  # the number of all that begin here
        for part, labels in zip(parts, labels_of_chains, strict=True):
            chain_lengths = np.diff([*part.starts, len(part.keys) // size])
            numbers = np.array([continued.get(label, new) for label in labels], np.uint64)
            found.append(np.repeat(numbers, chain_lengths))
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

    def _allocate(self, rank: int, offer: _Offer, sole: int) -> None:
        """Make blocks for the absent keys that get some, and begin the writes of all that is to be copied."""
        ticket, joined = offer.ticket, len(offer.ticket.copy)
        try:
            self._make_blocks(offer)
        finally:  # allocated slots belong to the store even if this fails
            if sole:
                self._life.set_sole(ticket.blocks[joined:], sole)
            if ticket.copy != sorted(ticket.copy):  # joined blocks come first, and those of newer prompts
                order = np.argsort(ticket.copy)
                ticket.copy, ticket.blocks = np.array(ticket.copy)[order].tolist(), ticket.blocks[order]
            ticket.slots, ticket.offsets = self._life.begin_writes(ticket.blocks, rank)
            if ticket.part.first_blocks:
                ticket.first_blocks = [ticket.part.first_blocks.get(index, 0) for index in ticket.copy]

    def _make_blocks(self, offer: _Offer) -> None:
        """Make blocks for the absent keys as far as policy and space allow. Each key's index goes into ``ticket.copy``,
        ``rejected`` or ``no_space``.

        A run of keys with one score may evict blocks that have a lower score, and are of older prompts than all of its
        own. If that is too little for a run of several prompts, each of them tries again by itself, the newest first.
        What got too little even so limits the rest: a run with the same or a lower score, of the same or older prompts,
        may evict no more, and gets nothing.
        """
        ticket, absent, prompts = offer.ticket, offer.absent, offer.prompts
        if not prompts.all():  # nothing of the prompts with 0: keys behind one without a block are never found
            ticket.no_space += [index for index, prompt in zip(absent, prompts.tolist(), strict=True) if not prompt]
            absent, prompts = np.array(absent)[prompts != 0].tolist(), prompts[prompts != 0]
        if not absent:
            return
        group, size, keys = ticket.group, ticket.group.key_bytes, ticket.part.keys
        if len(absent) * size < len(keys):
            keys = select_keys(keys, absent, size)
        runs, limit_score = self._runs_of(group, ticket.part, keys, absent)
        limit_prompt, newest, are_any_left = ANY_PROMPT, int(prompts.max()), True
        # Every admitted block gets space if tiers are written, because only blocks in the pool are written to them.
        takes_all = self._life.tiers is not None and self._life.tiers.are_written
        while runs:
            begin, end, score = runs.pop()
            if score == REJECTED:
                ticket.rejected += absent[begin:end]
                continue
            below, of_run = inf if takes_all else score, prompts[begin:end]
            # Else no more may be evicted for it than for the last that got too little.
            if below > limit_score or int(of_run.max()) > limit_prompt:
                oldest = int(of_run.min())
                blocks = self._space.take(group, keys[begin * size : end * size], below, oldest)[:, 0]
                made = begin + len(blocks)
                self._blocks.prompt[blocks] = prompts[begin:made]
                ticket.blocks = np.concatenate([ticket.blocks, blocks])
                ticket.copy += absent[begin:made]
                if made == end:
                    continue
                begin = made
                if (prompts[begin:end] > oldest).any():  # by themselves these may evict more
                    runs += _by_prompt(_Run(begin, end, score), prompts)
                    continue
                limit_score, limit_prompt = below, oldest
            # It got too little. It is rejected if its score has kept it out: blocks are left that may go for a higher
            # one. If none are, or if its score was infinite, there is no space.
            lost = ticket.no_space
            if limit_score < inf and are_any_left:  # once none are, none are for the rest
                are_any_left = self._space.victims.are_evictable(newest)
                lost = ticket.rejected if are_any_left else ticket.no_space
            lost += absent[begin:end]

    def _runs_of(self, group: Group, part: StorePart, keys: bytes, absent: Sequence[int]) -> tuple[list[_Run], float]:
        """Return the absent keys as runs, the last one first, and the score up to which none gets space: in a full
        pool, the lowest of its blocks. The policy judges no blocks of a bench, and none that will get no slots."""
        if not group.sizes or group.namespace.of_bench:
            return [_Run(0, len(absent), inf)], -inf
        starts = list(part.starts)
        if len(starts) > 1:  # indices of all keys become those of the absent ones
            starts = sorted({*np.searchsorted(absent, starts).tolist()})
        admission, slots = self._order.admit(group, keys, starts), self._life.slots
        runs, end = list[_Run](), 0
        for count, score in admission.runs:
            runs.append(_Run(end, end + count, score))
            end += count
        is_full = slots.free_bytes < group.block_bytes and not self._life.unswept and not self._life.partial
        return runs[::-1], admission.lowest if is_full else -inf

    def _record_lost(self, offer: _Offer) -> None:
        """Count the keys that got no space or were rejected, and remember why they have no block."""
        ticket, keys = offer.ticket, offer.ticket.part.keys
        group, size = ticket.group, ticket.group.key_bytes
        ticket.no_space.sort()  # the keys of newer prompts come first
        ticket.rejected.sort()
        if ticket.no_space:
            cause = self._space.no_space_cause(group, int(offer.prompts.max()))
            reason = MissReason.QUOTA if cause == "quota" else MissReason.NO_SPACE
            self._blocks.record_misses(group, select_keys(keys, ticket.no_space, size), reason)
            group.namespace.counters.no_space[cause] += len(ticket.no_space)
        if ticket.rejected:
            packed_keys = select_keys(keys, ticket.rejected, size)
            self._policy.rejected(group, packed_keys)
            self._blocks.record_misses(group, packed_keys, MissReason.REJECTED)
            group.namespace.counters.rejected_keys += len(ticket.rejected)

    # --- ends ------------------------------------------------------------------------------------

    def commit(
        self,
        tickets: Sequence[StoreTicket],
        checksums: Sequence[Iterable[int]],
        tokens: Sequence[Mapping[bytes, BlockTokens]] = (),
    ) -> int:
        """End a store whose bytes are all written. Returns how many blocks became READY.

        ``checksums``: by ticket, of each copied key; 0 if it is still to be computed. ``tokens``: by ticket, of the
        keys whose store sent them; may be empty.
        """
        every, of_tickets = 0, tokens or [NO_TOKENS] * len(tickets)
        for ticket, sums, of_keys in zip(tickets, checksums, of_tickets, strict=True):
            part, written = ticket.part, (ticket.group, ticket.blocks, ticket.slots)
            # One chain, with no key named before it, whose first key got a block: nothing is to be looked up.
            begins_prompt = not part.before and ticket.copy[:1] == [0] and len(part.starts) == 1
            chains = _FROM_ROOT if begins_prompt else self._chains_of(ticket)
            ready = self._life.publish(*written, ticket.first_blocks, sums, of_keys, chains)
            if not ready.size:
                continue
            every += len(ready)
            if self._life.tiers is not None:
                self._life.tiers.stored(ready)
            if not begins_prompt:
                self._order_behind(ticket, chains)
        return every

    def _chains_of(self, ticket: StoreTicket) -> list[ChainStart]:
        """Return where the chains of a store begin among its blocks, if they have any there."""
        part, copy, size = ticket.part, ticket.copy, ticket.group.key_bytes
        begins = [*(bisect_left(copy, start) for start in part.starts), len(copy)]
        keys_before: dict[int, bytes] = {}
        for start, (begin, end) in zip(part.starts, pairwise(begins), strict=True):
            if begin < end:
                first = copy[begin]
                if first > start:  # the key before it is one of this store, which is not copied
                    keys_before[begin] = part.keys[(first - 1) * size : first * size]
                else:
                    keys_before[begin] = part.before.get(start, b"")
        if not any(keys_before.values()):
            return [ChainStart(begin, NO_BLOCK) for begin in keys_before]
        _, blocks = self._blocks.find(ticket.group, b"".join(keys_before.values()))
        found = iter(blocks.tolist())
        return [ChainStart(begin, next(found) if key else NO_BLOCK) for begin, key in keys_before.items()]

    def _order_behind(self, ticket: StoreTicket, chains: Sequence[ChainStart]) -> None:
        """Make what became READY of chains older than the blocks before them, which earlier stores made, or which were
        found. Their order of eviction is then that of one store of the whole prompt, in which its tail goes first."""
        state, ends = self._blocks.state, [*[one.at for one in chains[1:]], len(ticket.copy)]
        for (begin, block), end in zip(chains, ends, strict=True):
            if block == NO_BLOCK or state[block] != READY:
                continue
            own = ticket.blocks[begin:end]
            ready = own[state[own] == READY]
            if ready.size and block not in ready:  # a client may name any key
                self._order.follow(block, ready)

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

    def begin_fills(self, group: Group, keys: Sequence[bytes]) -> list[FillTicket]:
        """Allocate slots of all ranks for different keys without a block. Returns a ticket for each of the first keys,
        as far as there is space. Raises BadGeometry."""
        if not group.sizes:
            raise BadGeometry("Not all ranks of the namespace have registered; register them first.")
        slots = self._space.take(group, b"".join(keys), inf, ANY_PROMPT)
        self._blocks.prompt[slots[:, 0]] = self._blocks.last_prompt
        self._life.begin_all_writes(slots)
        by_block = zip(slots, self._life.slots.offsets(slots).tolist(), strict=True)
        return [FillTicket(group, of_ranks[:1], of_ranks, offsets) for of_ranks, offsets in by_block]

    def commit_fill(self, ticket: FillTicket, first_blocks: Sequence[int], checksums: Sequence[int]) -> bool:
        """End a fill whose bytes are all there; both arguments are by rank. Returns whether its block became READY: it
        may have been dropped since."""
        shards = ticket.group, ticket.blocks.repeat(len(ticket.slots)), ticket.slots
        # Another node's prompts, or an earlier daemon's, may have stored it.
        return bool(self._life.publish(*shards, first_blocks, checksums, by_several=True).size)

    def abort_fill(self, ticket: FillTicket) -> None:
        """End a fill that did not get all bytes, and free its slots."""
        self._life.end_writes(ticket.group, ticket.blocks, ticket.slots)

    def order_chain(self, group: Group, keys: bytes) -> None:
        """Make the READY blocks of different keys of a chain, root first, each older than the one before it, for the
        next daemon too."""
        if group.retired:
            return
        ready = self._blocks.lookup(group, keys, lease=False).ready
        self._blocks.record_chain(ready)
        # If the first was used before, the policy `arc` moves none behind it: then the call for those behind the second
        # is what orders them. Otherwise that for those behind the first does, which comes last and includes them.
        for first in (1, 0):
            if len(ready) > first + 1:
                self._order.follow(int(ready[first]), ready[first + 1 :])


def _by_prompt(run: _Run, prompts: PromptNumbers) -> list[_Run]:
    """Divide a run by its keys' prompts: those of the newest last, and of each prompt the first keys last."""
    changes = run.begin + 1 + np.flatnonzero(np.diff(prompts[run.begin : run.end]))
    parts = [_Run(begin, end, run.score) for begin, end in pairwise([run.begin, *changes.tolist(), run.end])]
    return sorted(parts, key=lambda part: (int(prompts[part.begin]), -part.begin))
