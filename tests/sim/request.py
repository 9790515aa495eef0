"""The stages of a prompt in an engine: look up, load, compute, store, hold its blocks, free them."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from kvoffd_client import LookupFuture
from kvoffd_proto import messages as m
from kvoffd_proto.messages import GroupTransfer
from tests.sim.clock import Broken
from tests.sim.rank import Place, Rank, ids

if TYPE_CHECKING:
    from tests.sim.engine import Engine

MIN_COMPUTED_S, ASK_SHARE, MIN_RETRY_PAUSE_S, MAX_RETRY_PAUSE_S = 0.02, 0.02, 0.002, 0.05
"""As the connector's, which needs vLLM to be imported."""


class Request:
    """A small state machine. ``advance`` goes on as far as it can; ``state`` is the method that comes next."""

    def __init__(self, engine: Engine, keys: list[bytes], blocks: list[list[int]]) -> None:
        self._engine = engine
        self._rng = engine.rng
        self._faults = engine.world.faults
        self.keys = keys
        self.blocks = blocks
        self.per_key = engine.content.blocks_per_key
        self._lookup: LookupFuture | None = engine.lookup(keys)
        engine.hint(keys)
        self._give_up_at = engine.clock.now + self._rng.uniform(0.05, 0.6)
        engine.wake_at(self._give_up_at)
        self._answer: LookupFuture | None = None
        """The last lookup that was answered; its lease is held."""
        self._waits_since, self._waits_until = 0.0, inf
        """When it began to wait for a tier, and when it stops at the latest."""
        self._hit = 0
        self._loads: list[tuple[Rank, int]] = []
        self._stores: list[tuple[Rank, int]] = []
        self._loaded: set[Place] = set()
        self._loading: list[Place] = []
        self._wait_until = 0.0
        self._fenced: list[Rank] = []
        self.state: Callable[[], bool] = self._looking_up
        self.done = False

    def advance(self) -> None:
        """Go on until something must be waited for."""
        while not self.done and self.state():
            pass

    def _sleep(self, seconds: float) -> None:
        self._wait_until = self._engine.clock.now + seconds
        self._engine.wake_at(self._wait_until)

    def _slept(self) -> bool:
        return self._engine.clock.now >= self._wait_until

    # --- load ------------------------------------------------------------------------------------

    def _looking_up(self) -> bool:
        future, now = self._lookup, self._engine.clock.now
        if future is None or future.failed:
            return self._use_answer()
        if not future.done:
            if now < (self._give_up_at if self._answer is None else self._waits_until):
                return False
            self._engine.scheduler.release(future.lease_id)
            return self._use_answer()
        if self._answer is not None:  # what it pinned the new lease pins
            self._engine.scheduler.release(self._answer.lease_id)
        self._answer = future
        if future.pending and future.alive | (not future.pinned) and self._waits_for_tier(future):
            expected_s = future.wait_s or now - self._waits_since
            pause_s = min(MAX_RETRY_PAUSE_S, max(MIN_RETRY_PAUSE_S, expected_s / 2))
            self._sleep(min(pause_s, self._waits_until - now))
            self.state = self._waiting_for_tier
            return True
        return self._use_answer()

    def _waits_for_tier(self, answer: LookupFuture) -> bool:
        """Whether to wait for what is on its way: the rule of the connector's ``RequestLookups._waits_for_tier``."""
        now = self._engine.clock.now
        missing = max(sum(map(states.count, m.COMING)) for states in answer.states)
        computed_s = max(MIN_COMPUTED_S, missing * self._engine.key_s)
        if self._waits_until == inf:
            self._waits_since, self._waits_until = now, now + computed_s
            self._faults.counts["tier_awaited"] += 1
            self._engine.wake_at(self._waits_until)
        if answer.asking and not any(m.PENDING in states for states in answer.states):
            computed_s = max(MIN_COMPUTED_S, ASK_SHARE * computed_s)
            if now - self._waits_since >= computed_s:
                return False
        expected_s = max(0.0, answer.answered_at + answer.wait_s - now)
        return now < self._waits_until and expected_s <= computed_s

    def _waiting_for_tier(self) -> bool:
        if not self._slept():
            return False
        if self._engine.clock.now >= self._waits_until:
            return self._use_answer()
        self._lookup = self._engine.lookup(self.keys, again=True)
        self.state = self._looking_up
        return True

    def _use_answer(self) -> bool:
        """Load what the last answer has, and wait for nothing any more."""
        answer, engine = self._answer, self._engine
        if engine.clock.now > self._waits_until and engine.process.paused_until < self._waits_since:
            raise Broken("a request waits for a tier longer than computing takes")
        if answer is None:
            return self._compute()
        self._faults.counts["tier_given_up"] += answer.pending
        self._hit = min(answer.leading_ready(index) for index in range(len(self.blocks)))
        if not self._hit or not answer.alive:
            engine.scheduler.release(answer.lease_id)
            return self._compute()
        # Scheduling takes its time; the lease must outlive it, or the load must fail.
        self._sleep(self._rng.uniform(0.5, 4.0) if self._faults.hit("late_answer") else self._rng.uniform(0, 0.01))
        self.state = self._scheduled
        return True

    def _scheduled(self) -> bool:
        if not self._slept():
            return False
        answer = self._answer
        assert answer is not None
        if self._faults.hit("stale_lease"):
            self._engine.scheduler.release(answer.lease_id)
        groups: list[GroupTransfer] = []
        first = tail = 0
        if self.per_key > 1 and self._faults.hit("partial_load"):
            first = self._rng.randrange(self.per_key)
            tail = self._rng.randrange(self.per_key - (first if self._hit == 1 else 0))
        span = range(first, self._hit * self.per_key - tail)
        for group, blocks in enumerate(self.blocks):
            keys = b"".join(self.keys[: self._hit])
            groups.append(GroupTransfer(group, keys, ids([blocks[at] for at in span]), first))
            self._loading += [self._place(group, at) for at in span]
        self._loads = [(rank, rank.load(answer.lease_id, groups, list(self._loading))) for rank in self._engine.ranks]
        if self._faults.hit("abort_request"):
            self._fence(self._loads)
        self.state = self._loading_blocks
        return True

    def _place(self, group: int, at: int) -> Place:
        return group, self.keys[at // self.per_key], at % self.per_key, self.blocks[group][at]

    def _loading_blocks(self) -> bool:
        if not all(rank.ended([job_id]) for rank, job_id in self._loads):
            return False
        assert self._answer is not None
        ok = all(rank.results[job_id].ok for rank, job_id in self._loads)
        if ok:
            self._loaded = set(self._loading)
        if not ok or not self._faults.hit("keep_lease"):
            self._engine.scheduler.release(self._answer.lease_id)
        return self._compute()

    # --- compute and store -----------------------------------------------------------------------

    def _compute(self) -> bool:
        missing = len(self.keys) - self._hit
        # Those that waited for nothing are computed quickly, so that a run has many.
        quickly_s = self._rng.uniform(0.0, 0.02)
        self._sleep(quickly_s if self._waits_until == inf else missing * self._engine.key_s)
        self.state = self._computing
        return True

    def _computing(self) -> bool:
        if not self._slept():
            return False
        for group in range(len(self.blocks)):
            for at in range(len(self.keys) * self.per_key):
                place = self._place(group, at)
                if place not in self._loaded:
                    for rank in self._engine.ranks:
                        rank.memory.compute(*place)
        self._store()
        self._sleep(0.0 if self._faults.hit("early_reuse") else self._rng.uniform(0.0, 0.4))
        self.state = self._holding
        return True

    def _store(self) -> None:
        begin = 0 if self._rng.random() < 0.3 else self._hit
        if begin == len(self.keys):
            return
        first = 0
        if self.per_key > 1 and self._faults.hit("partial_store"):
            first = self._rng.randrange(1, self.per_key)
        keys = b"".join(self.keys[begin:])
        content = self._engine.content
        parents = b"".join([bytes(content.spec.key_bytes), *self.keys][begin : len(self.keys)])
        tokens = b"".join([content.tokens(key) for key in self.keys[begin:]])
        groups = [
            GroupTransfer(group, keys, ids(blocks[begin * self.per_key + first :]), first, parents, tokens)
            for group, blocks in enumerate(self.blocks)
        ]
        for rank in self._engine.ranks:
            wanted = sum(content.shard_bytes(rank.memory.rank, group) for group in content.groups)
            wanted *= len(self.keys) - begin
            if wanted <= rank.client.credit_bytes or self._faults.hit("beyond_credit"):
                self._stores.append((rank, rank.store(groups)))

    # --- free ------------------------------------------------------------------------------------

    def _holding(self) -> bool:
        if not self._slept():
            return False
        self._fence(self._stores)
        self.state = self._freeing
        return True

    def _fence(self, jobs: list[tuple[Rank, int]]) -> None:
        for rank, job_id in jobs:
            if not rank.ended([job_id]):
                rank.fence([job_id], self._rng.choice((0.005, 0.05, 0.5)))

    def _freeing(self) -> bool:
        for rank in self._engine.ranks:
            mine = [job_id for of, job_id in self._stores if of is rank]
            if rank not in self._fenced and rank.ended(mine):
                # The moment its fence is through, another request writes over the blocks.
                self._fenced.append(rank)
                for group, blocks in enumerate(self.blocks):
                    for block in blocks:
                        rank.memory.scribble(group, block)
        if len(self._fenced) < len(self._engine.ranks):
            return False
        self._engine.give_back(self.blocks)
        self.done = True
        return False
