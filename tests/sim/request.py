"""The stages of a prompt in an engine: look up, load, compute, store, hold its blocks, free them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvoffd_client import Lookup
from kvoffd_client.worker_client import GroupTransfer
from tests.sim.rank import Place, Rank, ids

if TYPE_CHECKING:
    from tests.sim.engine import Engine


class Request:
    """A small state machine. ``advance`` goes on as far as it can; ``state`` is the method that comes next."""

    def __init__(self, engine: Engine, keys: list[bytes], blocks: list[list[int]]) -> None:
        self._engine = engine
        self._rng = engine.rng
        self._faults = engine.world.faults
        self.keys = keys
        self.blocks = blocks
        self.per_key = engine.content.blocks_per_key
        self._lookup: Lookup | None = engine.lookup(keys)
        self._give_up_at = engine.clock.now + self._rng.uniform(0.05, 0.6)
        engine.wake_at(self._give_up_at)
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
        future = self._lookup
        if future is None or future.failed:
            return self._compute()
        if not future.done:
            if self._engine.clock.now < self._give_up_at:
                return False
            self._engine.release(future.lease_id)
            return self._compute()
        if future.pending and self._engine.clock.now < self._give_up_at and future.alive | (not future.pinned):
            self._sleep(self._rng.uniform(0.001, 0.02))
            self.state = self._waiting_for_disk
            return True
        self._hit = min(future.leading_ready(index) for index in range(len(self.blocks)))
        if not self._hit or not future.alive:
            self._engine.release(future.lease_id)
            return self._compute()
        # Scheduling takes its time; the lease must outlive it, or the load must fail.
        self._sleep(self._rng.uniform(0.5, 4.0) if self._faults.hit("late_answer") else self._rng.uniform(0, 0.01))
        self.state = self._scheduled
        return True

    def _waiting_for_disk(self) -> bool:
        if not self._slept():
            return False
        before = self._lookup
        assert before is not None
        self._lookup = self._engine.lookup(self.keys, again=True)
        self._engine.release(before.lease_id)
        self.state = self._looking_up
        return True

    def _scheduled(self) -> bool:
        if not self._slept():
            return False
        future = self._lookup
        assert future is not None
        if self._faults.hit("stale_lease"):
            self._engine.release(future.lease_id)
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
        self._loads = [(rank, rank.load(future.lease_id, groups, list(self._loading))) for rank in self._engine.ranks]
        if self._faults.hit("abort_request"):
            self._fence(self._loads)
        self.state = self._loading_blocks
        return True

    def _place(self, group: int, at: int) -> Place:
        return group, self.keys[at // self.per_key], at % self.per_key, self.blocks[group][at]

    def _loading_blocks(self) -> bool:
        if not all(rank.ended([job_id]) for rank, job_id in self._loads):
            return False
        assert self._lookup is not None
        ok = all(rank.results[job_id].ok for rank, job_id in self._loads)
        if ok:
            self._loaded = set(self._loading)
        if not ok or not self._faults.hit("keep_lease"):
            self._engine.release(self._lookup.lease_id)
        return self._compute()

    # --- compute and store -----------------------------------------------------------------------

    def _compute(self) -> bool:
        self._sleep(self._rng.uniform(0.0, 0.02))
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
