"""Which blocks are written to a tier, and when: never in the way of a reply, nor of an eviction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from itertools import islice

from kvoffd.cache.block import Block, BlockState
from kvoffd.cache.policies import EvictionPolicy
from kvoffd.tiering.budget import WriteBudget
from kvoffd.tiering.transfers import TierTransfers, WriteTicket, copy_of
from kvoffd.tiers.tier import Tier, TierResult

MAX_COLD_BLOCKS = 1024
"""Blocks at the cold end that are looked at in one tick."""
LEAST_SWEPT = 1024
"""Blocks that may wait before those that have left the pool are looked for among them."""


class WriteMode(StrEnum):
    """What is written."""

    ALWAYS = "always"
    """Every block, as soon as it is ready."""
    REUSE = "reuse"
    """A block that was found by a lookup, so that it has been of use twice; and while nothing else is to be done, what
    is next to be evicted."""
    EVICT = "evict"
    """What is next to be evicted."""
    NEVER = "never"
    """Nothing: what is there is read, and that is all."""


class Demoter:
    """Blocks that must go down wait in order; those at the policy's cold end follow when room in the pool is short.

    They are written ahead of their eviction, so that no eviction waits: a block that is evicted before its turn is
    gone.

    Args:
        under_way_bytes: bytes that may be read out of the pool at once, and are pinned that long.
        cold_bytes: how much of the cold end is kept written, while less than twice of it is free.
        idle: whether nobody waits for the tier to read.
        engines_busy: whether engines copy. They go first: writing takes memory bandwidth, cores and time of the
            interpreter from them.
        trickle_bytes: what is written all the same from one tick to the next, or one block.
    """

    def __init__(
        self,
        exchange: TierTransfers,
        tier: Tier,
        policy: EvictionPolicy,
        free_bytes: Callable[[], int],
        mode: WriteMode,
        budget: WriteBudget,
        under_way_bytes: int,
        cold_bytes: int,
        idle: Callable[[], bool],
        engines_busy: Callable[[], bool],
        trickle_bytes: int,
    ) -> None:
        self._exchange = exchange
        self._tier = tier
        self._policy = policy
        self._free_bytes = free_bytes
        self.mode = mode
        self.budget = budget
        self._under_way_limit = under_way_bytes
        self._cold_bytes = cold_bytes
        self._idle = idle
        self._engines_busy = engines_busy
        self._trickle_bytes = self._allowance = trickle_bytes
        self._due: dict[Block, None] = {}
        self._swept_at = LEAST_SWEPT
        self._cold: dict[Block, None] = {}
        self._moving: dict[Block, WriteTicket] = {}
        self.under_way_bytes = 0
        self.written_blocks = 0
        self.written_bytes = 0
        self.over_budget = 0
        """Times that something was to be written and the budget did not allow it."""

    @property
    def busy(self) -> bool:
        """Whether anything is being written."""
        return bool(self._moving)

    @property
    def waiting_blocks(self) -> int:
        """Blocks that wait for being written."""
        return len(self._due)

    def stored(self, blocks: Iterable[Block]) -> None:
        """These became ready."""
        if self.mode is WriteMode.ALWAYS:
            self._due.update(dict.fromkeys(blocks))

    def used(self, blocks: Sequence[Block]) -> None:
        """These were found by a lookup."""
        if self.mode is not WriteMode.REUSE or not blocks:
            return
        index = self._tier.index(blocks[0].namespace.fingerprint, blocks[0].group)
        self._due.update(dict.fromkeys([block for block in blocks if block.key not in index]))

    def stop(self) -> None:
        """Begin nothing any more."""
        self.mode = WriteMode.NEVER
        self._due.clear()
        self._cold.clear()

    def tick(self) -> None:
        """Look at the cold end, and go on."""
        self._cold.clear()
        self._sweep()
        if self.mode is not WriteMode.NEVER and self._free_bytes() < 2 * self._cold_bytes:
            nbytes = 0
            for block in islice(self._policy.candidates(), MAX_COLD_BLOCKS):
                if not self._is_there(block):
                    self._cold[block] = None
                nbytes += block.slot_bytes
                if nbytes >= self._cold_bytes:
                    break
        self._allowance = self._trickle_bytes
        self.pump()

    def pump(self) -> None:
        """Begin what may begin now."""
        busy = self._engines_busy()
        while self.under_way_bytes < self._under_way_limit and (not busy or self._allowance > 0):
            block = self._next()
            if block is None:
                return
            nbytes = copy_of(block).nbytes
            if not self.budget.take(nbytes):
                self._over_budget(block)
                return
            ticket = self._exchange.begin_write(block)
            if ticket is None:
                continue
            if not self._tier.write(ticket.copy, ticket.offsets, self._on_done(ticket)):
                self.budget.give_back(nbytes)
                self._exchange.end_write(ticket)
                if self._moving:  # there were too many at once
                    self._due[block] = None
                return
            self._moving[block] = ticket
            self.under_way_bytes += nbytes
            self._allowance -= nbytes if busy else 0

    # --- inside ----------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Let go of blocks that left the pool before their turn: where a tier hangs, no turn comes."""
        if len(self._due) > self._swept_at:
            self._due = {block: None for block in self._due if block.state is BlockState.READY}
            self._swept_at = 2 * len(self._due) + LEAST_SWEPT

    def _next(self) -> Block | None:
        """The next block to write, taken out of where it waits."""
        while self._due:
            block = next(iter(self._due))
            del self._due[block]
            if block.state is BlockState.READY and not self._is_there(block):
                return block
        while self._cold and (self.mode is not WriteMode.REUSE or self._idle()):
            block = next(iter(self._cold))
            del self._cold[block]
            if block.state is BlockState.READY and not self._is_there(block):
                return block
        return None

    def _is_there(self, block: Block) -> bool:
        return block in self._moving or block.key in self._tier.index(block.namespace.fingerprint, block.group)

    def _over_budget(self, block: Block) -> None:
        self.over_budget += 1
        if self.budget.spent:
            self._due.clear()  # they will be due again when they are used again, or as the next to be evicted
            self._cold.clear()
        else:
            self._due[block] = None

    def _on_done(self, ticket: WriteTicket) -> Callable[[TierResult], None]:
        def done(result: TierResult) -> None:
            if result is TierResult.DONE:
                self.written_blocks += 1
                self.written_bytes += ticket.copy.nbytes
            del self._moving[ticket.block]
            self.under_way_bytes -= ticket.copy.nbytes
            if not self._exchange.end_write(ticket) and result is TierResult.DONE:
                self._tier.remove([ticket.copy.id])
            self.pump()

        return done
