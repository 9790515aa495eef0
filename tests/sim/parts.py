"""Makes the real parts of daemon and clients: only this file of the simulator calls their constructors."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from kvoffd.cache import POLICY_NAMES
from kvoffd.cache.cache import Cache
from kvoffd.cache.policies import make_policy
from kvoffd.config import Config, ServerLimits
from kvoffd.pool.backing import MemfdBacking
from kvoffd.pool.memory import PoolMemory
from kvoffd.pool.pool import Pool
from kvoffd.server.events import EventLog
from kvoffd.server.host import Host
from kvoffd.server.persistence import RETRY_S, PolicyFile, State, StateFile
from kvoffd.server.pool_opening import restore
from kvoffd.server.service import Service
from kvoffd.server.tier_supervisor import TierSupervisor
from kvoffd.system.limits import MemoryLimit
from kvoffd.tiering import WriteMode
from kvoffd.transfer.cuda.gpus import Gpus
from kvoffd.transfer.engine import CopyEngine, new_work
from kvoffd_client import Registration, SchedulerClient, WorkerClient
from kvoffd_client.session import Session
from kvoffd_proto.messages import AnyRequest, Role
from tests.sim.client import OPTIONS, SimTransport
from tests.sim.clock import Process
from tests.sim.content import Content
from tests.sim.memory import WorkerMemory
from tests.sim.pool import SlotOwner, WatchedPool, records_of

DIRECTORY = "/simulated"
REGION_BYTES = 96 * 1024
NO_LIMIT = MemoryLimit(2**60, "nothing")


MODES = [WriteMode.AUTO.value, WriteMode.ALWAYS.value]


def make_config(rng: random.Random) -> Config:
    """The configuration of a daemon with short times and small bounds."""
    return Config(
        directory=Path(DIRECTORY),
        pool_bytes=1 << 20,
        eviction_policy=rng.choice(POLICY_NAMES),
        shutdown_deadline_s=rng.choice((0.0, 0.2)),
        max_sessions=rng.choice((16, 64, 64)),
        verify_share=rng.choice((0.0, 1 / 64, 1.0)),
        limits=ServerLimits(
            credit_bytes=rng.choice((0, 0, 40_000)),
            lease_ttl_s=rng.choice((0.8, 2.0, 5.0)),
            partial_timeout_s=rng.choice((0.5, 2.0)),
            job_deadline_s=rng.choice((0.4, 1.5)),
            max_frame_bytes=1 << 16,
            max_jobs_in_flight=rng.choice((2, 64, 64)),
            max_keys_per_request=(most_keys := rng.choice((3, 256, 256))),
            max_keys_per_submit=most_keys,
            max_leases=rng.choice((4, 64, 64)),
        ),
    )


def with_tiers(config: Config, rng: random.Random) -> Config:
    """The same, with what one life of the daemon has of tiers."""
    return replace(
        config,
        disk_write=rng.choice(MODES),
        disk_deadline_s=rng.choice((0.4, 1.5)),
        shared_write=rng.choice((WriteMode.ALWAYS.value, WriteMode.ALWAYS.value, *MODES)),
        shared_deadline_s=rng.choice((0.3, 1.0)),
    )


SavedPool = tuple[int, int]
"""Descriptors of a pool and its table that outlive a daemon. Their owner closes them."""


def make_pool(pool_bytes: int, saved: SavedPool | None) -> Pool:
    """The real pool: sealed memory, allocator and slot table; an earlier daemon's where that was kept."""
    backing = MemfdBacking(saved)
    try:
        return Pool(pool_bytes, region_bytes=min(REGION_BYTES, pool_bytes), limit=NO_LIMIT, backing=backing)
    finally:
        backing.close()


def save(pool: Pool) -> SavedPool:
    """Duplicate the pool's descriptors, as systemd's descriptor store does."""
    memory, table = pool.memory_fds
    return os.dup(memory), os.dup(table)


def save_copy(pool: Pool) -> SavedPool:
    """The pool as it is at this instant, as if its daemon were killed here."""
    memory, table = pool.memory_fds
    return _copy(memory, pool.pool_bytes), _copy(table, pool.table_bytes)


def _copy(fd: int, size: int) -> int:
    copy = PoolMemory.create(size, "kvoffd-sim")
    try:
        os.pwrite(copy.fd, os.pread(fd, size, 0), 0)
        return os.dup(copy.fd)
    finally:
        copy.close()


def ready_records(pool: Pool) -> list[tuple[int, SlotOwner, int, int]]:
    """What a successor of the daemon would find in the pool, as ``records_of``."""
    saved = save_copy(pool)
    found = make_pool(pool.pool_bytes, saved)
    try:
        config = make_config(random.Random(0))
        cache = make_cache(config, found, EventLog(lambda: 0.0), lambda: 0.0)
        restore(cache, found, NoPolicyFile(), State(NoStateFile()), config.limits.max_namespaces)
        return records_of(cache)
    finally:
        found.close()


def make_cache(config: Config, pool: Pool, events: EventLog, clock: Callable[[], float]) -> Cache:
    return Cache(
        pool.slots,
        pool.table,
        make_policy(config.eviction_policy, pool.pool_bytes, pool.table.geometry.slots),
        events,
        clock,
        partial_timeout_s=config.limits.partial_timeout_s,
        lease_ttl_s=config.limits.lease_ttl_s,
        max_leases=config.limits.max_leases,
    )


def make_service(
    config: Config,
    pool: Pool,
    watched: WatchedPool | None,
    engine: CopyEngine,
    host: Host,
    state: State,
    make_tiers: Callable[[Cache, EventLog, Pool], TierSupervisor] | None = None,
) -> Service:
    """The daemon's core as ``Daemon`` puts it together, over the pool or what stands before it. Without ``make_tiers``
    there is no tier."""
    events = EventLog(host.now)
    cache = make_cache(config, pool, events, host.now)
    restore(cache, pool, NoPolicyFile(), state, config.limits.max_namespaces)
    if watched is not None:
        watched.watch(cache)
    seen = pool if watched is None else cast(Pool, watched)
    work = new_work()
    gpus = Gpus(seen.mapping.address, pool.pool_bytes, work, library="/no/driver")
    if make_tiers is not None:
        tiers = make_tiers(cache, events, seen)
    else:
        tiers = TierSupervisor(config, None, cache, seen, host.now, host.post, state)
    return Service(config, cache, events, engine, gpus, work, seen, host, state, tiers)


class NoStateFile(StateFile):
    """Nothing outlived the daemon, and nothing will, which is all the same."""

    outlives_reboot = True
    requested, tried, written, _problem, _began_at = 0, 0, 0, "", None

    def __init__(self) -> None:
        pass

    def save(self, content: bytes) -> None:
        pass


class NoPolicyFile(PolicyFile):
    """Each life's policy begins anew."""

    def __init__(self) -> None:
        pass

    def restore(self) -> None:
        pass


class SimStateFile(StateFile):
    """``kvoffd.state``: written a moment later, unless the daemon is dead by then, or that fails."""

    outlives_reboot = True

    def __init__(self, kept: list[bytes], process: Process, rng: random.Random) -> None:
        self.path = "kvoffd.state"
        self._kept = kept
        """What outlives daemons, last."""
        self._process = process
        self._rng = rng
        self._content, self._problem, self._began_at = b"", "", None
        self.requested = self.tried = self.written = 0
        self._longest_s = rng.choice((0.0, 0.01, 0.6))
        self._fails = rng.choice((0.0, 0.0, 0.0, 0.5))

    def read(self) -> bytes:
        if not self._kept:
            raise FileNotFoundError
        return self._kept[-1]

    def save(self, content: bytes) -> None:
        self._content = content
        self.requested += 1
        self._process.after(self._rng.uniform(0.0, self._longest_s), partial(self._put, self.requested))

    def _put(self, number: int) -> None:
        if number < self.requested:
            return
        self.tried = number
        if self._rng.random() < self._fails:
            self._problem = "it cannot be written"
            self._process.after(RETRY_S, partial(self._put, number))
        else:
            self._problem = ""
            self._kept[:], self.written = [self._content], number


def make_state(kept: list[bytes], process: Process, rng: random.Random) -> State:
    slow_s = rng.choice((0, 0, 0, 3600))
    """How far behind the clock of this life's machine is."""
    state = State(SimStateFile(kept, process, rng), lambda: 1_700_000_000 - slow_s + process.now)
    state.restore()
    return state


def make_scheduler(transport: SimTransport, content: Content, name: str, rng: random.Random) -> SchedulerClient:
    """A scheduler's client that follows the namespace's events."""
    return SchedulerClient(
        DIRECTORY, content.spec, name=name, subscribe_events=True, options=OPTIONS, transport=transport, rng=rng
    )


def make_worker(transport: SimTransport, memory: WorkerMemory, name: str, rng: random.Random) -> WorkerClient:
    """A worker's client over its memory; a segment's number stands for its descriptor."""
    content = memory.content
    registration = Registration(
        memory.rank,
        content.blocks_per_key,
        tuple((number, segment.data.size) for number, segment in enumerate(memory.segments)),
        tuple(memory.tensors),
        tuple(memory.groups),
    )
    return WorkerClient(DIRECTORY, content.spec, registration, name=name, options=OPTIONS, transport=transport, rng=rng)


class Operator(Session):
    """An administrator's session: what it asks for is answered, or is not."""

    def __init__(self, transport: SimTransport, rng: random.Random) -> None:
        super().__init__(DIRECTORY, Role.ADMIN, None, "admin", "", OPTIONS, transport, rng)
        transport.start(self)

    def ask(self, make: Callable[[int], AnyRequest], now: float) -> None:
        """Send a request, if there is a session. With the lock held."""
        if self.ready:
            self._send(make(self._next_request_id()), now, lambda reply, now: None, 0.5)
