"""One worker process of an engine: its memory, its session, its jobs and fences."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvoffd_client import WorkerClient
from kvoffd_client.session import Phase
from kvoffd_client.worker_client import Job
from kvoffd_proto.messages import GroupTransfer, JobResult
from tests.sim.client import SimTransport
from tests.sim.clock import Broken, Process
from tests.sim.memory import WorkerMemory
from tests.sim.parts import make_worker

if TYPE_CHECKING:
    from tests.sim.world import World

Place = tuple[int, bytes, int, int]
"""(group, key, sub-block, engine block): what an engine block holds or is to hold."""


class Rank:
    """Everything of one rank. Jobs are numbered from 1 and every number has one result."""

    def __init__(
        self, world: World, name: str, memory: WorkerMemory, rng: random.Random, on_change: Callable[[], None]
    ) -> None:
        self._world = world
        self._clock = world.clock
        self.memory = memory
        self.process = Process(world.clock, name)
        self.results: dict[int, JobResult] = {}
        self._loads: dict[int, list[Place]] = {}
        self._sent_at: dict[int, float] = {}
        self._issued = 0
        self._on_change = on_change
        self._rng = rng
        self._unsent: list[Job] = []
        self.transport = SimTransport(world.network, self.process, memory.segments, self._take_results)
        self.client: WorkerClient = make_worker(self.transport, memory, name, rng)

    def store(self, groups: Sequence[GroupTransfer]) -> int:
        """Send a store. Returns its job id."""
        self._issued += 1
        job_id = self._issued
        self._sent_at[job_id] = self._clock.now
        self._clock.note(f"{self.process.name} stores, job {job_id}")
        self._unsent.append(Job(job_id, list(groups)))
        if self._rng.random() < 0.5:  # as in a step of an engine, several go out together
            self.process.after(0.0005, self._send)
        else:
            self._send()
        return job_id

    def _send(self) -> None:
        stores, self._unsent = self._unsent, []
        if stores:
            self._submit(stores)

    def _submit(self, jobs: Sequence[Job]) -> None:
        self.process.run(lambda: self.transport.act(lambda _: self.client.submit(jobs)))

    def load(self, lease_id: int, groups: Sequence[GroupTransfer], places: list[Place]) -> int:
        """Send a load into ``places``, which are the daemon's until its result; its number."""
        self._issued += 1
        job_id = self._issued
        self._loads[job_id] = places
        self._sent_at[job_id] = self._clock.now
        self._clock.note(f"{self.process.name} loads, job {job_id}")
        for group, _, _, block in places:
            self.memory.allow(group, block, True)
        self._submit([Job(job_id, list(groups), lease_id)])
        return job_id

    def fence(self, job_ids: Sequence[int], timeout_s: float) -> None:
        """As WorkerClient.fence, but for the waiting: ``ended`` tells when it is over."""

        def overdue() -> None:
            if self.client._phase is not Phase.CLOSED and self.client._has_any(job_ids, loads=False):
                self._world.faults.counts["fence_abandoned"] += 1
                self._clock.note(f"{self.process.name} ends its wait at a fence for {list(job_ids)}")
                self.transport.act(lambda now: self.client._abandon_stores(job_ids, now))
                if self.client._has_any(job_ids, loads=False):
                    raise Broken(f"{self.process.name}: a fence waits for stores beyond its deadline")

        self._send()
        self.process.run(lambda: self.transport.act(lambda _: self.client._cancel(job_ids)))
        self.process.after(timeout_s, overdue)

    def ended(self, job_ids: Sequence[int]) -> bool:
        return all(job_id in self.results for job_id in job_ids)

    def _take_results(self) -> None:
        for result in self.client.take_results():
            if result.job_id in self.results or not 0 < result.job_id <= self._issued:
                raise Broken(f"{self.process.name}: job {result.job_id} has a second result")
            self.results[result.job_id] = result
            took_s = self._clock.now - self._sent_at.pop(result.job_id)
            self._world.longest_job_s = max(self._world.longest_job_s, took_s)
            self._clock.note(f"{self.process.name} job {result.job_id} ok={result.ok} {result.error}")
            places = self._loads.pop(result.job_id, [])
            kind = "load" if places else "store"
            self._world.faults.counts[f"{kind}_ok" if result.ok else f"{kind}_failed"] += 1
            for group, key, sub, block in places:
                self.memory.allow(group, block, False)
                if result.ok:
                    self.memory.verify(group, key, sub, block)
        self._on_change()

    def die(self) -> None:
        self.process.alive = False
        self.memory.die()
        self.transport.disconnect(drain=False)


def ids(blocks: Sequence[int]) -> bytes:
    return np.array(blocks, dtype="<i4").tobytes()
