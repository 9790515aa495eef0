"""A prompt in an engine: look up, load, compute, store, hold its blocks, free them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvoffd_client import Lookup
from kvoffd_client.jobs import GroupTransfer
from tests.sim.rank import Place, Rank, ids

if TYPE_CHECKING:
    from tests.sim.engine import Engine

Jobs = list[tuple[Rank, int]]


class Request:
    """``advance`` goes on as far as it can: its stages yield where something must be waited for."""

    def __init__(self, engine: Engine, keys: list[bytes], blocks: list[list[int]]) -> None:
        self._engine = engine
        self._rng = engine.rng
        self._faults = engine.world.faults
        self.keys = keys
        self.blocks = blocks
        self.per_key = engine.content.blocks_per_key
        self._hit = 0
        self._loaded: set[Place] = set()
        self._stores: Jobs = []
        self.done = False
        lookup = engine.lookup(keys)
        self._give_up_at = engine.clock.now + self._rng.uniform(0.05, 0.6)
        engine.wake_at(self._give_up_at)
        self._stages = self._serve(lookup)

    def advance(self) -> None:
        """Go on until something must be waited for."""
        next(self._stages, None)

    def _serve(self, lookup: Lookup) -> Iterator[None]:
        yield from self._load(lookup)
        yield from self._sleep(self._rng.uniform(0.0, 0.02))
        self._compute()
        self._store()
        yield from self._sleep(0.0 if self._faults.hit("early_reuse") else self._rng.uniform(0.0, 0.4))
        yield from self._let_go()
        self._engine.give_back(self.blocks)
        self.done = True

    def _sleep(self, seconds: float) -> Iterator[None]:
        until = self._engine.clock.now + seconds
        self._engine.wake_at(until)
        while self._engine.clock.now < until:
            yield

    def _load(self, lookup: Lookup) -> Iterator[None]:
        engine = self._engine
        while True:
            while not lookup.done and not lookup.failed and engine.clock.now < self._give_up_at:
                yield
            if lookup.failed:
                return
            if not lookup.done:
                engine.release(lookup.lease_id)
                return
            if not lookup.pending or engine.clock.now >= self._give_up_at or not (lookup.alive | (not lookup.pinned)):
                break
            # A disk may have it soon.
            yield from self._sleep(self._rng.uniform(0.001, 0.02))
            before, lookup = lookup, engine.lookup(self.keys, again=True)
            engine.release(before.lease_id)
        self._hit = min(lookup.leading_ready(index) for index in range(len(self.blocks)))
        if not self._hit or not lookup.alive:
            engine.release(lookup.lease_id)
            return
        # Scheduling takes its time; the lease must outlive it, or the load must fail.
        late = self._faults.hit("late_answer")
        yield from self._sleep(self._rng.uniform(0.5, 4.0) if late else self._rng.uniform(0, 0.01))
        if self._faults.hit("stale_lease"):
            engine.release(lookup.lease_id)
        first = tail = 0
        if self.per_key > 1 and self._faults.hit("partial_load"):
            first = self._rng.randrange(self.per_key)
            tail = self._rng.randrange(self.per_key - (first if self._hit == 1 else 0))
        span, keys = range(first, self._hit * self.per_key - tail), b"".join(self.keys[: self._hit])
        groups = [
            GroupTransfer(group, keys, ids([blocks[at] for at in span]), first)
            for group, blocks in enumerate(self.blocks)
        ]
        places = [self._place(group, at) for group in range(len(self.blocks)) for at in span]
        loads = [(rank, rank.load(lookup.lease_id, groups, list(places))) for rank in engine.ranks]
        if self._faults.hit("abort_request"):
            self._fence(loads)
        while not all(rank.ended([job_id]) for rank, job_id in loads):
            yield
        ok = all(rank.results[job_id].ok for rank, job_id in loads)
        if ok:
            self._loaded = set(places)
        if not ok or not self._faults.hit("keep_lease"):
            engine.release(lookup.lease_id)

    def _place(self, group: int, at: int) -> Place:
        return group, self.keys[at // self.per_key], at % self.per_key, self.blocks[group][at]

    def _compute(self) -> None:
        for group in range(len(self.blocks)):
            for at in range(len(self.keys) * self.per_key):
                place = self._place(group, at)
                if place not in self._loaded:
                    for rank in self._engine.ranks:
                        rank.memory.compute(*place)

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

    def _fence(self, jobs: Jobs) -> None:
        for rank, job_id in jobs:
            if not rank.ended([job_id]):
                rank.fence([job_id], self._rng.choice((0.005, 0.05, 0.5)))

    def _let_go(self) -> Iterator[None]:
        """The moment a rank's fence is through, another request writes over its blocks."""
        self._fence(self._stores)
        waiting = list(self._engine.ranks)
        while True:
            for rank in list(waiting):
                if rank.ended([job_id for of, job_id in self._stores if of is rank]):
                    waiting.remove(rank)
                    for group, blocks in enumerate(self.blocks):
                        for block in blocks:
                            rank.memory.scribble(group, block)
            if not waiting:
                return
            yield
