"""The functions that a reader follows on each way through the code: ``python -m tests.tools.ways [WAY...]``.

It drives a real ``Service``, or vLLM's real scheduler with the connector in it, without sockets, over blocks of one
group and one rank, and watches with ``sys.setprofile`` what is called. For each way it prints the functions of
``kvoffd``, ``kvoffd_client`` and ``kvoffd_proto`` in the order of their first calls, and two counts: how many there
are, and how often the next one is in another file. Left out are lambdas and comprehensions, which are read where they
stand, C, and the loops of threads, which began before.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

import kvoffd
import kvoffd_client
import kvoffd_proto
from kvoffd.cache.cache import Cache
from kvoffd.server.events import EventLog
from kvoffd.server.session import Session
from kvoffd.server.tier_supervisor import TierSupervisor, make_tiering
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiering.tiering import Tiering
from kvoffd.tiers.disk import DiskOptions, DiskTier
from kvoffd.tiers.shared import SharedTier
from kvoffd.tiers.store import Credentials, open_store
from kvoffd_client.scheduler_client import SchedulerClient
from kvoffd_client.worker_client import Job, submit_of
from kvoffd_proto import codec
from kvoffd_proto import messages as m
from kvoffd_proto.messages import GroupTransfer
from tests.client.test_session import PaperLink, connect
from tests.kit.clock import Clock
from tests.kit.models import make_tiny_llama
from tests.kit.redis_server import RedisServer
from tests.kit.waiting import wait_until
from tests.server.test_service import KEY, NAMESPACE, REGISTRATION, Bench

PACKAGES = {
    f"{Path(package.__file__ or '').parent}/": f"{package.__name__}/"
    for package in (kvoffd, kvoffd_client, kvoffd_proto)
}
ROUNDS = 3
"""Times that each way is gone; the last is shown. In the first, buffers grow and C functions are looked up."""
DEADLINE_S = 30.0
DISK_BYTES, REGION_BYTES = 16 << 20, 1 << 20
PROMPT_BLOCKS, BLOCK_TOKENS = 3, 32
"""Blocks of a prompt in the engine's way, and their tokens."""
STEPS = 50
"""Most steps in which such a prompt is loaded and computed."""


class Function(NamedTuple):
    file: str
    name: str


class Way(NamedTuple):
    """Functions in the order of their first calls."""

    functions: list[Function]

    @property
    def changes(self) -> int:
        """How often the next function is in another file."""
        return sum(one.file != following.file for one, following in pairwise(self.functions))

    def lines(self) -> Iterator[str]:
        before = ""
        for file, name in self.functions:
            yield f"  {'' if file == before else file:32} {name}"
            before = file


def _function_of(code: CodeType) -> Function | None:
    """Return the function of this code, if it is one that a reader opens."""
    if code.co_name.endswith(">"):
        return None
    for directory, package in PACKAGES.items():
        if code.co_filename.startswith(directory):
            return Function(package + code.co_filename.removeprefix(directory), code.co_qualname)
    return None


class Recorder:
    """Records the calls of this thread step by step, and what other threads call until they post something.

    It watches threads that are started within ``watching``.
    """

    def __init__(self) -> None:
        self._found: dict[Function, None] = {}
        self._running: dict[int, list[Function]] = {}
        """Calls since the step began, by other threads that have not posted since."""
        self._posted: list[Function] = []
        """The same of those that have."""
        self._is_on = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        threading.setprofile(self._in_thread)
        try:
            yield
        finally:
            threading.setprofile(None)

    def _in_thread(self, frame: FrameType, event: str, argument: object) -> None:
        if self._is_on and event == "call" and (found := _function_of(frame.f_code)) is not None:
            self._running.setdefault(threading.get_ident(), []).append(found)

    def posts(self) -> None:
        """The calling thread posts something: the step has its calls up to here."""
        self._posted += self._running.pop(threading.get_ident(), [])

    def step(self, do: Callable[[], object], within: str = "") -> None:
        """Do something, and record its calls; only those of the function ``within`` and what it calls, if given."""
        depth = 0

        def profile(frame: FrameType, event: str, argument: object) -> None:
            nonlocal depth
            if event == "call":
                found = _function_of(frame.f_code)
                if depth or not within or (found is not None and found.name == within):
                    depth += 1
                    if found is not None:
                        self._found[found] = None
            elif event == "return" and depth:
                depth -= 1

        self._running.clear()
        self._posted.clear()
        self._is_on = True
        sys.setprofile(profile)
        try:
            do()
        finally:
            sys.setprofile(None)

    def add_posted(self) -> None:
        """Add what other threads have called since the step began, until they posted."""
        self._is_on = False
        self._found.update(dict.fromkeys(self._posted))

    def take(self) -> Way:
        """Return what was recorded since the last call."""
        self._is_on = False
        found, self._found = list(self._found), {}
        return Way(found)


class Daemon:
    """A service with a scheduler's and a worker's session, whose calls are recorded.

    Attributes:
        tiering: None without tiers.
    """

    def __init__(self, recorder: Recorder, *, tiers: bool = False) -> None:
        self.recorder = recorder
        self.tiering: Tiering | None = None
        self.bench = Bench(make_tiers=self._make_tiers if tiers else None)
        self.service, self.cache = self.bench.service, self.bench.service.cache
        self.scheduler, self.worker = self.bench.session(m.Role.SCHEDULER), self.bench.session()
        self.numbers = count(1)

    def _make_tiers(self, bench: Bench, cache: Cache, events: EventLog) -> TierSupervisor:
        def clock() -> float:
            return bench.now

        self.tiering = make_tiering(bench.config, cache, events, clock, lambda: False, bench.state)
        return TierSupervisor(bench.config, self.tiering, cache, bench.pool, clock, bench.posted.append, bench.state)

    def post(self, call: Callable[[], None]) -> None:
        """What threads post."""
        self.recorder.posts()
        self.bench.posted.append(call)

    # --- requests --------------------------------------------------------------------------------

    def ask(self, session: Session, request: m.AnyRequest) -> Callable[[], None]:
        """Return what handles a request and collects its reply."""
        frame = codec.encode(request)

        def asked() -> None:
            self.service.handle(session.route, frame)
            self.service.outgoing()

        return asked

    def submit(self, key: bytes, *lease_id: int) -> Callable[[], None]:
        """Return what begins to store a key, or to load it under a lease. There is no reply."""
        number = next(self.numbers)
        job = Job(number, [GroupTransfer.of([key], [0])], *lease_id)
        frame = codec.encode(submit_of(number, REGISTRATION, len(KEY), [job]))
        return partial(self.service.handle, self.worker.route, frame)

    def key(self) -> bytes:
        """Return a new key."""
        return next(self.numbers).to_bytes(len(KEY), "big")

    def copy(self) -> None:
        """Do of a copy what comes before its end: a store's checksums."""
        if (checksums := self.bench.copies[0].checksums) is not None:
            for part in checksums.unread_parts():
                checksums.read(part)

    def end_copy(self) -> None:
        self.bench.end_copy()
        self.service.outgoing()

    def store(self) -> bytes:
        """Store a block. Returns its key."""
        self.submit(key := self.key())()
        self.copy()
        self.end_copy()
        return key

    def fill(self) -> None:
        """Store blocks until the pool has no space."""
        evicted = self.cache.namespaces[NAMESPACE].counters.evicted_blocks
        while self.cache.namespaces[NAMESPACE].counters.evicted_blocks == evicted:
            self.store()

    def lease(self) -> int:
        """Return a new lease's id."""
        return self.scheduler.id << 32 | next(self.numbers)

    def lookup(self, key: bytes, lease_id: int, *, again: bool = False) -> Callable[[], None]:
        """Return what looks a key up."""
        return self.ask(self.scheduler, m.Lookup(1, NAMESPACE, lease_id, [m.GroupKeys(0, key)], again=again))

    def is_ready(self, key: bytes) -> bool:
        namespace = self.cache.namespaces[NAMESPACE]
        return self.cache.describe_block(namespace, 0, key)[0] is m.KeyState.READY

    def evict(self, key: bytes) -> None:
        _, blocks = self.cache.blocks.find(self.cache.namespaces[NAMESPACE].group(0), key)
        self.cache.life.evict(np.array(blocks))

    # --- what threads do -------------------------------------------------------------------------

    def deliver(self, until: Callable[[], bool]) -> None:
        """Make the calls that threads post, and record them and what the threads did, until something is so."""
        while not until():
            wait_until(lambda: bool(self.bench.posted), DEADLINE_S)
            self.recorder.add_posted()
            self.recorder.step(self.bench.posted.popleft())

    def write(self) -> bytes:
        """Store a block, and have it written to the tier. Returns its key."""
        assert self.tiering is not None
        writer = next(writer for writer in self.tiering.writers if writer.available)
        self.submit(key := self.key())()
        self.copy()
        self.recorder.take()
        written = writer.written_blocks
        self.recorder.step(self.end_copy, "Tiering.stored")
        self.recorder.step(self.service.after_send, "Tiering.pump")
        self.deliver(lambda: writer.written_blocks > written)
        return key


class ClockedLink(PaperLink):
    """A link of paper with a clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.now = clock  # type: ignore[method-assign]


class Engine:
    """vLLM's scheduler with the connector in it, and a real client over a link of paper."""

    def __init__(self, recorder: Recorder, directory: Path) -> None:
        from tests.vllm.scheduler_harness import SchedulerHarness  # imports vLLM, which may not be installed
        from tests.vllm.vllm_config import make_config

        self.recorder = recorder
        config = make_config(make_tiny_llama(directory / "model"), {"directory": str(directory)}, max_model_len=1024)
        self.harness = SchedulerHarness(config, blocks=100)
        self.link = ClockedLink(self.harness.clock)
        namespace = self.harness.manager.namespace
        assert namespace.current is not None
        self.client = SchedulerClient("/paper", namespace.current, record_stored=True, transport=self.link)
        connect(self.client, self.link, self.link.now())
        namespace.client = self.client
        self.numbers = count(1)

    def reply(self) -> Callable[[], None]:
        """Return what handles the reply to the last lookup: all of its keys are ready."""
        asked = self.link.last(m.Lookup)
        states = [bytes([m.READY]) * PROMPT_BLOCKS for _ in asked.groups]
        frame = codec.encode(m.LookupReply(asked.request_id, asked.lease_id, states, PROMPT_BLOCKS, 60_000))
        return lambda: self.client.on_reply(codec.decode_reply(frame), self.link.now())


# --- the ways: each leaves what it called in the recorder --------------------------------------------


def lookup(daemon: Daemon) -> None:
    """A lookup that hits, from its frame to the reply."""
    look_up = daemon.lookup(daemon.store(), daemon.lease())
    daemon.service.after_send()
    daemon.recorder.step(look_up)


def store(daemon: Daemon) -> None:
    """A store that evicts, from its frame until its copy is queued."""
    daemon.fill()
    daemon.service.after_send()
    daemon.recorder.step(daemon.submit(daemon.key()))
    daemon.end_copy()


def store_end(daemon: Daemon) -> None:
    """The end of a store, from that of its copy to its result and KV event."""
    daemon.submit(daemon.key())()
    daemon.copy()
    daemon.recorder.step(daemon.end_copy)


def load(daemon: Daemon) -> None:
    """A load, from its frame until its copy is queued."""
    key, lease_id = daemon.store(), daemon.lease()
    daemon.lookup(key, lease_id)()
    daemon.service.after_send()
    daemon.recorder.step(daemon.submit(key, lease_id))
    daemon.end_copy()


def load_end(daemon: Daemon) -> None:
    """The end of a load, from that of its copy to its result. It ends the lease."""
    key, lease_id = daemon.store(), daemon.lease()
    daemon.lookup(key, lease_id)()
    daemon.service.after_send()
    daemon.submit(key, lease_id)()
    daemon.recorder.step(daemon.end_copy)


def reset(daemon: Daemon) -> None:
    """An engine's reset, from its frame to the reply, whose state file is saved at once."""
    daemon.store()
    daemon.service.after_send()
    daemon.recorder.step(daemon.ask(daemon.scheduler, m.Reset(1, NAMESPACE)))


def disk_write(daemon: Daemon) -> None:
    """A write to a disk, from the time when the block is READY until it is on the disk."""
    daemon.write()


def promotion(daemon: Daemon) -> None:
    """A promotion from a disk, from the lookup that does not find the key in the pool until the block is READY."""
    key, lease_id = daemon.write(), daemon.lease()
    daemon.evict(key)
    daemon.recorder.take()
    daemon.recorder.step(daemon.lookup(key, lease_id), "TierLookups.find")
    daemon.recorder.step(daemon.service.after_send, "Tiering.pump")
    daemon.deliver(lambda: daemon.is_ready(key))


def redis_promotion(daemon: Daemon) -> None:
    """A promotion from Redis, from the lookup that asks it, and the same again once it has answered."""
    assert daemon.tiering is not None
    key, lease_id = daemon.write(), daemon.lease()
    daemon.evict(key)
    tier = daemon.tiering.stores[0].tier
    assert isinstance(tier, SharedTier)
    tier._answers.clear()
    wait_until(lambda: tier.idle, DEADLINE_S)
    daemon.recorder.take()
    daemon.recorder.step(daemon.lookup(key, lease_id), "TierLookups.find")
    found = tier.counters.found_keys
    daemon.deliver(lambda: tier.counters.found_keys > found)
    daemon.recorder.step(daemon.lookup(key, lease_id, again=True), "TierLookups.find")
    daemon.recorder.step(daemon.service.after_send, "Tiering.pump")
    daemon.deliver(lambda: daemon.is_ready(key))


def connector_lookup(engine: Engine) -> None:
    """A lookup that hits, from a prompt's arrival at the connector to the frame, and from the reply to vLLM's load."""
    name, harness = str(next(engine.numbers)), engine.harness
    add = partial(harness.add, name, [int(name)] * (PROMPT_BLOCKS * BLOCK_TOKENS + 1))
    engine.recorder.step(add, "KvoffdConnector.on_new_request")
    engine.recorder.step(engine.reply())
    request = harness.scheduler.requests[name]
    engine.recorder.step(harness.step, "KvoffdConnector.get_num_new_matched_tokens")
    assert harness.loaded[-1] == name
    harness.end([request], STEPS)


@contextmanager
def without_tiers() -> Iterator[Daemon]:
    daemon = Daemon(Recorder())
    try:
        yield daemon
    finally:
        daemon.bench.pool.close()


@contextmanager
def with_disk() -> Iterator[Daemon]:
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as directory, recorder.watching():
        daemon = Daemon(recorder, tiers=True)
        assert daemon.tiering is not None
        tier = DiskTier(
            Path(directory),
            DISK_BYTES,
            pool=daemon.bench.pool.buffer,
            clock=time.monotonic,
            post=daemon.post,
            listener=daemon.tiering,
            generation=daemon.bench.state.generations.of,
            options=DiskOptions(region_bytes=REGION_BYTES),
        )
        try:
            daemon.tiering.add_disk(tier)
            yield daemon
        finally:
            tier.close(DEADLINE_S)
            daemon.bench.pool.close()


@contextmanager
def with_redis() -> Iterator[Daemon]:
    recorder = Recorder()
    with RedisServer() as server, recorder.watching():
        daemon = Daemon(recorder, tiers=True)
        assert daemon.tiering is not None
        tier = SharedTier(
            server.url,
            open_store(server.url, Credentials()),
            pool=daemon.bench.pool.buffer,
            clock=time.monotonic,
            post=daemon.post,
            listener=daemon.tiering,
            ask_deadline_s=DEADLINE_S,
        )
        try:
            daemon.tiering.add_store(tier, TieringSettings(WriteMode.ALWAYS))
            daemon.deliver(tier.available)
            yield daemon
        finally:
            tier.close(DEADLINE_S)
            daemon.bench.pool.close()


@contextmanager
def with_engine() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as directory:
        engine = Engine(Recorder(), Path(directory))
        try:
            yield engine
        finally:
            engine.harness.close()


WAYS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[Any], None]]] = {
    "lookup": (without_tiers, lookup),
    "store": (without_tiers, store),
    "store-end": (without_tiers, store_end),
    "load": (without_tiers, load),
    "load-end": (without_tiers, load_end),
    "reset": (without_tiers, reset),
    "disk-write": (with_disk, disk_write),
    "promotion": (with_disk, promotion),
    "redis-promotion": (with_redis, redis_promotion),
    "connector-lookup": (with_engine, connector_lookup),
}


def go(name: str) -> Way:
    """Go a way, and return it."""
    make_rig, do = WAYS[name]
    with make_rig() as rig:
        for _ in range(ROUNDS):
            rig.recorder.take()
            do(rig)
        way: Way = rig.recorder.take()
        return way


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.ways", description=__doc__)
    parser.add_argument("way", nargs="*", help=f"one of {', '.join(WAYS)}; without any, all")
    for name in parser.parse_args().way or WAYS:
        way, (_, do) = go(name), WAYS[name]
        print(f"{name}: {len(way.functions)} functions, {way.changes} changes of file. {do.__doc__}")
        print(*way.lines(), sep="\n")


if __name__ == "__main__":
    main()
