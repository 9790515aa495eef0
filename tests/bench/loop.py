"""``make bench ARGS=loop``: for how long single turns keep the daemon's loop, at a pool of 1 TiB.

Each case grows what it needs in a process of its own, over the daemon's real classes: a service without sockets, whose
pool is never touched, and whose copies end at once. A turn is what the loop does before it looks for others: a request
with its replies and a step of what is done in the background, the end of a copy, or a tick. Printed is the longest turn
of a case in milliseconds of CPU, and what its turns take together.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_table import BlockIds
from kvoffd.cache.namespace import MissReason
from kvoffd.cache.prefetches import MAX_PREFETCHES
from kvoffd.config import Config, ServerLimits
from kvoffd.pool.pool import Pool
from kvoffd.server.persistence import State
from kvoffd.server.session import ClientProcess, Session
from kvoffd.server.traffic import COUNTED
from kvoffd.system.limits import MemoryLimit
from kvoffd.system.mappings import HostMapping
from kvoffd.system.threads import Workers
from kvoffd.tiering import TieringSettings
from kvoffd.tiering.tiering import Tiering
from kvoffd.tiers.answers import Answer, Ask
from kvoffd.tiers.shared import SharedTier
from kvoffd.tiers.store import Credentials, open_store
from kvoffd.transfer.engine import CopyEngine, Transfer
from kvoffd.transfer.plan import CopyEnd, Direction
from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.worker_client import Job, Size, submit_of
from kvoffd_proto import admin as a
from kvoffd_proto import codec
from kvoffd_proto import messages as m
from kvoffd_proto.messages import GroupTransfer
from kvoffd_proto.stats import Stats
from tests.bench.report_file import in_child, markdown_table, print_report, run_facts
from tests.bench.scale import KEY_BYTES, keys_of
from tests.sim.parts import NoStateFile, make_service

POOL = "1TiB"
MIB, GIB = 1 << 20, 1 << 30
LONGEST_MS = 5.0
LARGE, SMALL = 2 * MIB, 1 * MIB
"""Bytes of a block of the two sizes: 16 tokens of a model of 8 billion parameters, and of half its layers."""
TINY = 256 * 1024
"""Bytes of a block of a small model, of which a namespace has very many."""
ENGINES = 16
STORED = 64
"""Blocks of a usual store."""
FILLED_AT_ONCE = 2048
STORES = 8
ADDRESS = 1 << 45
ENGINE_BLOCKS = 8192
DESCRIPTION_BYTES, LAYERS = 4096, 64
"""What a namespace says of itself."""
Result = dict[str, Any]


CASES: dict[str, Callable[[int], Result]] = {}


def case(measured: Callable[[int], Result]) -> Callable[[int], Result]:
    """Enter a case, which takes the pool's bytes, into CASES."""
    CASES[measured.__name__] = measured
    return measured


class Daemon:
    """A service over a pool whose pages are never touched, and what its loop does."""

    def __init__(self, pool_bytes: int, policy: str = "learned") -> None:
        self.posted = deque[Callable[[], None]]()
        queue: Any = SimpleNamespace(submit=self._copy, hangs_s=lambda: 0.0)
        engine = CopyEngine(dict.fromkeys(Direction, queue))
        engine.tick = engine.hangs_s = lambda: 0.0  # type: ignore[method-assign]
        host: Any = SimpleNamespace(
            now=time.monotonic,
            post=self.posted.append,
            random=os.urandom,
            map_memfd=lambda fd, size: HostMapping(ADDRESS, size),
            unmap=lambda segments, then: then(),
        )
        self.pool = Pool(pool_bytes, limit=MemoryLimit(2**62, "nothing: no page is touched"))
        config = Config(pool_bytes=pool_bytes, eviction_policy=policy, max_sessions=128, limits=ServerLimits())
        self.service = make_service(config, self.pool, None, engine, host, State(NoStateFile()))
        self.cache = self.service.cache
        self.cache.blocks.misses.fill(0)  # whose pages are new otherwise
        self._turns_ms: list[float] = []
        self._next_key = 0

    def _copy(self, transfer: Transfer) -> None:
        if transfer.checksums is not None:
            transfer.checksums.sums[:] = [7] * len(transfer.checksums.sums)
        self.posted.append(lambda: transfer.on_done(transfer, CopyEnd.DONE))

    # --- turns ------------------------------------------------------------------------------------

    def turn(self, call: Callable[[], Any]) -> Any:
        began = time.thread_time()
        result = call()
        self._turns_ms.append(1000 * (time.thread_time() - began))
        return result

    def ask(self, session: Session, message: m.AnyRequest) -> m.AnyReply | None:
        """A request, its reply, and what follows until nothing is left to do; each a turn."""
        frame = codec.encode(message)
        replies = self.turn(lambda: self._answer(session, frame))
        self.turn(self.service.after_send)
        self.settle()
        answers = [codec.decode_reply(reply) for _, reply in replies]
        assert not any(isinstance(answer, m.Error) for answer in answers), answers
        return answers[0] if answers else None

    def _answer(self, session: Session, frame: bytes) -> list[tuple[bytes, bytes]]:
        self.service.handle(session.route, frame)
        replies = self.service.outgoing()[1]
        self.service.background()
        return replies

    def settle(self) -> None:
        more = True
        while more or self.posted:
            if self.posted:
                self.turn(lambda: (self.posted.popleft()(), self.service.outgoing()))
            more = self.turn(self.service.background)
        self.tick()

    def tick(self) -> None:
        self.turn(lambda: (self.service.tick(), self.service.outgoing()))

    # --- what it has ------------------------------------------------------------------------------

    def session(
        self, role: m.Role, number: int = 0, block_bytes: int = LARGE, facts: str = "{}", rank: int = 0, ranks: int = 1
    ) -> Session:
        """In the namespace of this number; a worker with its memory registered."""
        lifeline: Any = SimpleNamespace(alive=lambda: True, close_descriptor=os.close)
        session = self.service.sessions.open(lifeline, ClientProcess(0, 1, 1))
        self.ask(session, m.Hello(1, m.PROTOCOL_VERSION, role, "loop", "loop"))
        if role is m.Role.ADMIN:
            return session
        fingerprint, groups = name_of(number), [m.GroupSpec("full_attention", 16)]
        self.ask(session, m.OpenNamespace(1, fingerprint, fingerprint[:8].hex(), ranks, KEY_BYTES, groups, facts))
        if role is m.Role.WORKER:
            self.service.sessions.attach(session, 0, os.open(os.devnull, os.O_RDONLY))
            page = block_bytes // LAYERS
            tensors = [m.TensorLayout(0, layer * page * ENGINE_BLOCKS, page, ENGINE_BLOCKS) for layer in range(LAYERS)]
            layers = [m.PageRef(at, page) for at in range(LAYERS)]
            memory = [m.MemfdHandle(0, ENGINE_BLOCKS * block_bytes)]
            self.ask(session, m.Register(1, fingerprint, b"r" * 16, rank, 1, memory, tensors, [layers]))
        return session

    def keys(self, count: int) -> bytes:
        self._next_key += count
        return keys_of(self._next_key - count, count)

    def store(self, worker: Session, keys: bytes) -> None:
        """Store keys, in as many messages as a client takes."""
        ids = np.arange(len(keys) // KEY_BYTES, dtype="<i4").tobytes()
        most = Size(self.service.config.limits.max_keys_per_submit, 1 << 20)
        job = Job(1, [GroupTransfer(0, keys, ids)])
        for part in job.parts(NamespaceSpec.named("loop", key_bytes=KEY_BYTES), 1, most, 1):
            self.ask(worker, submit_of(1, b"r" * 16, KEY_BYTES, [part], 1 << 40))

    def fill(self, worker: Session, nbytes: int | None = None) -> int:
        """Store blocks of these bytes, or until one is lost. Returns the number of the first."""
        (namespace,) = worker.namespaces.values()
        group, first = namespace.group(0), self._next_key
        nbytes = self.pool.slots.free_bytes if nbytes is None else nbytes
        while nbytes >= group.block_bytes and self.pool.slots.free_bytes >= group.block_bytes:
            count = min(FILLED_AT_ONCE, nbytes // group.block_bytes)
            self.store(worker, self.keys(count))
            nbytes -= count * group.block_bytes
        return first

    def shuffle(self, worker: Session) -> None:
        """Have the blocks of a namespace, in the order in which they were stored, lie all over the pool, as after days.

        A search makes those that are pinned the newest: a half of them at random, again and again.
        """
        (namespace,) = worker.namespaces.values()
        group, blocks, drawn = namespace.group(0), self.cache.blocks, np.random.default_rng(1)
        own = np.flatnonzero(blocks.group == group.number).astype(np.uint32)
        blocks._grow(len(own))
        for _ in range(len(own).bit_length()):
            half = own[drawn.random(len(own)) < 0.5]
            blocks.pin(half)
            blocks._native.blocks_oldest(blocks.address, group.packed, len(own), len(own), True)
            blocks.unpin(half)

    def lookup(self, scheduler: Session, lease: int, keys: bytes) -> None:
        """Not measured."""
        (fingerprint,) = scheduler.namespaces
        self._answer(scheduler, codec.encode(m.Lookup(1, fingerprint, (1 << 32) + lease, [m.GroupKeys(0, keys)])))

    def measure(self, call: Callable[[], Any], times: int = 1) -> Result:
        """The turns of some calls."""
        gc.collect()
        gc.freeze()
        self._turns_ms = ms = []
        for _ in range(times):
            call()
        return {"longest": max(ms), "together": sum(ms), "turns": len(ms)}


def name_of(number: int) -> bytes:
    return number.to_bytes(4, "big").ljust(32, b"\1")


class Waits:
    """Tiers that want the blocks that were stored before all others written."""

    are_written = True

    def __init__(self, blocks: BlockIds) -> None:
        self._waiting = np.zeros(int(blocks.max()) + 1, np.bool_)
        self._waiting[blocks] = True

    def waiting(self, blocks: BlockIds) -> npt.NDArray[np.bool_]:
        return self._waiting[np.minimum(blocks, len(self._waiting) - 1)] & (blocks < len(self._waiting))

    def safe_to_evict(self, blocks: BlockIds) -> npt.NDArray[np.bool_]:
        return ~self.waiting(blocks)

    def find(self, lease: Any, groups: Any, states: list[bytes], again: bool) -> list[bytes]:
        return states

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


# --- cases ----------------------------------------------------------------------------------------


@case
def reset(pool_bytes: int) -> Result:
    """A namespace with an eighth of a full pool is cleared, with leases on it; the first store of another follows."""
    daemon = Daemon(pool_bytes)
    operator = daemon.session(m.Role.ADMIN)
    other = daemon.session(m.Role.WORKER, 0, SMALL)
    daemon.fill(other, pool_bytes * 5 // 8)
    scheduler = daemon.session(m.Role.SCHEDULER, 1)
    cleared = daemon.session(m.Role.WORKER, 1)

    first = daemon.fill(cleared)
    for lease in range(1, 2001):
        daemon.lookup(scheduler, lease, keys_of(first + 8 * lease, 8))

    def clear() -> None:
        frame = codec.encode(a.Clear(1, name_of(1)))
        daemon.turn(lambda: daemon._answer(operator, frame))  # the store comes before the next step
        daemon.store(other, daemon.keys(STORED))

    return daemon.measure(clear)


@case
def reset_leases(pool_bytes: int) -> Result:
    """A namespace is cleared on which four sessions have 16,000 leases each, then one with many incomplete blocks."""
    daemon = Daemon(pool_bytes)
    operator, worker = daemon.session(m.Role.ADMIN), daemon.session(m.Role.WORKER)
    half, _ = (daemon.session(m.Role.WORKER, 1, rank=rank, ranks=2) for rank in range(2))
    first = daemon.fill(worker, pool_bytes // 2)
    daemon.fill(half, pool_bytes // 8)
    for number in range(4):
        scheduler = daemon.session(m.Role.SCHEDULER)
        for lease in range(1, 16_001):
            daemon.lookup(scheduler, lease + (number << 20), keys_of(first + 16 * lease, 16))

    def clear() -> None:
        for namespace in range(2):
            daemon.ask(operator, a.Clear(1, name_of(namespace)))

    return daemon.measure(clear)


def _at_its_quota(pool_bytes: int) -> tuple[Daemon, Session, Session, int]:
    """A namespace of small blocks at its quota, an eighth of a full pool; others' blocks come first in the order."""
    daemon = Daemon(pool_bytes)
    other = daemon.session(m.Role.WORKER)
    daemon.fill(other, pool_bytes * 7 // 8)
    scheduler, worker = daemon.session(m.Role.SCHEDULER, 1), daemon.session(m.Role.WORKER, 1, TINY)
    first = daemon.fill(worker)
    daemon.shuffle(worker)
    daemon.cache.quotas[name_of(1)] = pool_bytes // 8
    return daemon, scheduler, worker, first


@case
def quota(pool_bytes: int) -> Result:
    """A store of a namespace at its quota, others' blocks first in the order."""
    daemon, _, worker, _ = _at_its_quota(pool_bytes)
    return daemon.measure(lambda: daemon.store(worker, daemon.keys(STORED)), STORES)


@case
def leased(pool_bytes: int) -> Result:
    """The same, while nearly all of its own blocks are pinned, as by leases."""
    daemon, _, worker, _ = _at_its_quota(pool_bytes)
    own = np.flatnonzero(daemon.cache.blocks.group == daemon.cache.namespaces[name_of(1)].group(0).number)
    daemon.cache.blocks.pin(own[STORED * (STORES + 2) :].astype(np.uint32))
    return daemon.measure(lambda: daemon.store(worker, daemon.keys(STORED)), STORES)


@case
def over_quota(pool_bytes: int) -> Result:
    """A store of as many blocks as fit a message, of a namespace whose quota was lowered to half of what it has."""
    daemon, _, worker, _ = _at_its_quota(pool_bytes)
    daemon.cache.quotas[name_of(1)] //= 2
    most = daemon.service.config.limits.max_keys_per_submit
    return daemon.measure(lambda: daemon.store(worker, daemon.keys(most)), STORES)


@case
def scattered(pool_bytes: int) -> Result:
    """A store while the free slots are a few of each region."""
    daemon = Daemon(pool_bytes)
    worker = daemon.session(m.Role.WORKER)
    daemon.fill(worker)
    slots = daemon.pool.slots
    first = np.arange(slots.regions, dtype=np.uint32) * slots.slots_per_region
    daemon.cache.life.drop(np.concatenate([first, first + 1]), MissReason.INVALIDATED)
    return daemon.measure(lambda: daemon.store(worker, daemon.keys(STORED)), STORES)


@case
def waiting(pool_bytes: int) -> Result:
    """A store of one block in a full pool, while all blocks wait for a disk."""
    daemon = Daemon(pool_bytes)
    worker = daemon.session(m.Role.WORKER)
    daemon.fill(worker)
    daemon.cache.life.tiers = Waits(np.flatnonzero(daemon.cache.blocks.state).astype(np.uint32))  # type: ignore[assignment]
    return daemon.measure(lambda: daemon.store(worker, daemon.keys(1)), STORES)


@case
def session_end(pool_bytes: int) -> Result:
    """A session ends that has 16,000 leases of 16 blocks each, while another one has as many."""
    daemon = Daemon(pool_bytes)
    worker = daemon.session(m.Role.WORKER)
    first = daemon.fill(worker, pool_bytes // 2)
    scheduler, staying = (daemon.session(m.Role.SCHEDULER) for _ in range(2))
    for lease in range(1, 16_001):
        for number, session in enumerate((scheduler, staying)):
            daemon.lookup(session, lease + (number << 20), keys_of(first + 16 * lease, 16))

    def end() -> None:
        daemon.turn(lambda: daemon.service.sessions.end(scheduler, lambda: None))
        daemon.settle()

    return daemon.measure(end)


@case
def overdue(pool_bytes: int) -> Result:
    """The deadline of 16,000 leases of 16 blocks each passes, and that of an eighth of the pool in blocks that one of
    two ranks has stored.
    """
    daemon = Daemon(pool_bytes)
    worker = daemon.session(m.Role.WORKER)
    half, _ = (daemon.session(m.Role.WORKER, 1, rank=rank, ranks=2) for rank in range(2))
    first = daemon.fill(worker, pool_bytes // 2)
    scheduler = daemon.session(m.Role.SCHEDULER)
    daemon.fill(half, pool_bytes // 8)
    daemon.cache.leases.ttl_s = daemon.cache._partial_timeout_s = 0.0
    for lease in range(1, 16_001):
        daemon.lookup(scheduler, lease, keys_of(first + 16 * lease, 16))

    def expire() -> None:
        while daemon.cache.leases.by_id or daemon.cache.life.partial:
            daemon.settle()

    return daemon.measure(expire)


@case
def two_sizes(pool_bytes: int) -> Result:
    """A store of 4,096 keys in a full pool, of the size that has the later half of it."""
    daemon = Daemon(pool_bytes)
    small, large = daemon.session(m.Role.WORKER, 0, SMALL), daemon.session(m.Role.WORKER, 1)
    while daemon.pool.slots.free_bytes >= LARGE:  # mixed in the order of use
        daemon.fill(small, 64 * SMALL)
        daemon.fill(large, 32 * LARGE)
    return daemon.measure(lambda: daemon.store(large, daemon.keys(4096)), STORES)


@case
def large_store(pool_bytes: int) -> Result:
    """A store of 8,192 blocks in a full pool."""
    daemon = Daemon(pool_bytes)
    worker = daemon.session(m.Role.WORKER)
    daemon.fill(worker)
    return daemon.measure(lambda: daemon.store(worker, daemon.keys(ENGINE_BLOCKS)), STORES)


def _with_namespaces(pool_bytes: int, count: int) -> Daemon:
    """So many namespaces, which have blocks and have counted something."""
    daemon = Daemon(pool_bytes)
    for number in range(count):
        facts = json.dumps({"model": os.urandom(DESCRIPTION_BYTES // 2).hex()})
        worker = daemon.session(m.Role.WORKER, number, facts=facts)
        scheduler = daemon.session(m.Role.SCHEDULER, number)
        daemon.store(worker, daemon.keys(2))
        daemon.lookup(scheduler, 1, daemon.keys(2))
        counters = daemon.cache.namespaces[name_of(number)].counters
        for name in COUNTED:
            setattr(counters, name, 1 + getattr(counters, name))
        counters.partial_blocks = 0  # else the daemon warns of them
        counters.misses.update(MissReason)
        for session in (worker, scheduler):
            daemon.service.sessions.end(session, lambda: None)
    daemon.service.traffic.total()
    return daemon


class Unasked(Workers[Any, Any]):
    """Threads of a store that do nothing: the case ends what was asked."""

    def _start(self) -> None: ...


def _with_store(daemon: Daemon) -> SharedTier:
    """A shared store whose threads do nothing."""
    service = daemon.service
    tiering = Tiering(service.cache, service.events, time.monotonic, TieringSettings())
    service.tier_supervisor.tiering = service.cache.life.tiers = tiering
    tier = SharedTier(
        "redis://nowhere",
        open_store("redis://nowhere", Credentials()),
        pool=memoryview(b""),
        clock=time.monotonic,
        post=daemon.posted.append,
        listener=tiering,
        ask_deadline_s=1.0,
        make_workers=Unasked,
    )
    tiering.add_store(tier, TieringSettings())
    tier.breaker.probed(True)
    return tier


@case
def unknown(pool_bytes: int) -> Result:
    """Lookups of 8,192 keys that neither the pool nor a shared store has, and the store's answers."""
    daemon = Daemon(pool_bytes)
    service, scheduler = daemon.service, daemon.session(m.Role.SCHEDULER)
    daemon.session(m.Role.WORKER)
    tier, leases = _with_store(daemon), itertools.count(1)

    def look_up() -> None:
        keys = daemon.keys(daemon.service.config.limits.max_keys_per_request)
        daemon.ask(scheduler, m.Lookup(1, name_of(0), (1 << 32) + next(leases), [m.GroupKeys(0, keys)]))
        asked = tier._answers.asked_keys
        assert asked == len(keys) // KEY_BYTES
        answer = Answer(0.001, 0, [False] * asked)
        daemon.turn(lambda: (tier._asking.end(answer, lambda one: isinstance(one, Ask)), service.outgoing()))
        daemon.settle()

    look_up()  # buffers grow once
    return daemon.measure(look_up, STORES)


@case
def stats(pool_bytes: int) -> Result:
    """Stats, with 64 namespaces."""
    daemon = _with_namespaces(pool_bytes, 63)
    operator = daemon.session(m.Role.ADMIN)
    return daemon.measure(lambda: daemon.ask(operator, Stats(1)), STORES)


@case
def opening(pool_bytes: int) -> Result:
    """A namespace is opened, registered in, and stored to, with 63 known: each gives up the oldest."""
    daemon = _with_namespaces(pool_bytes, 63)
    numbers = itertools.count(2000)
    return daemon.measure(lambda: daemon.store(daemon.session(m.Role.WORKER, next(numbers)), daemon.keys(1)), 4)


def _hint(daemon: Daemon, scheduler: Session, action: m.HintAction, keys: bytes) -> None:
    daemon.ask(scheduler, m.Hint(1, name_of(0), action, [m.GroupKeys(0, keys)], 50, 600.0, giver=1))


@case
def hints(pool_bytes: int) -> Result:
    """The blocks that are next to go, a quarter of a full pool, are retained, as many others are released; stores
    follow, also once the hints have lapsed. The hints are given faster than steps set blocks aside.
    """
    daemon = Daemon(pool_bytes)
    scheduler, worker = daemon.session(m.Role.SCHEDULER), daemon.session(m.Role.WORKER)
    first = daemon.fill(worker)
    count = (daemon._next_key - first) // 4
    daemon.cache.order.retentions.hint_of.fill(0)  # whose pages are new otherwise
    daemon.cache.order._askers._of.fill(1)  # all were asked for by the giver alone
    at_once, background = range(first, first + count, m.MAX_HINT_KEYS), daemon.service.background

    def hint() -> None:
        daemon.service.background = lambda: False  # type: ignore[method-assign]
        for at in at_once:
            _hint(daemon, scheduler, m.HintAction.RETAIN, keys_of(at, m.MAX_HINT_KEYS))
        daemon.service.background = background  # type: ignore[method-assign]
        daemon.store(worker, daemon.keys(ENGINE_BLOCKS))
        for at in at_once:
            _hint(daemon, scheduler, m.HintAction.RELEASE, keys_of(at + 2 * count, m.MAX_HINT_KEYS))
        daemon.store(worker, daemon.keys(ENGINE_BLOCKS))
        daemon.cache.order.retentions._clock = lambda: time.monotonic() + 700.0
        for _ in range(STORES):
            daemon.store(worker, daemon.keys(ENGINE_BLOCKS))

    return daemon.measure(hint)


@case
def prefetches(pool_bytes: int) -> Result:
    """Prefetches of 1,024 keys each, as many as may wait for a shared store, which does not answer; their end."""
    daemon = Daemon(pool_bytes)
    scheduler = daemon.session(m.Role.SCHEDULER)
    daemon.session(m.Role.WORKER)
    _with_store(daemon)
    _hint(daemon, scheduler, m.HintAction.PREFETCH, daemon.keys(m.MAX_HINT_KEYS))  # buffers grow once

    def wait() -> None:
        for _ in range(MAX_PREFETCHES):
            _hint(daemon, scheduler, m.HintAction.PREFETCH, daemon.keys(m.MAX_HINT_KEYS))
        daemon.cache._prefetches._clock = lambda: time.monotonic() + 60.0
        daemon.settle()

    return daemon.measure(wait)


def child(name: str, pool: str = POOL) -> Result:
    """What a case finds in a process of its own."""
    return {"case": name, **in_child("loop", "--inside", name, "--pool", pool)}


def page(results: Sequence[Result]) -> str:
    rows = [[one["case"], f"{one['longest']:.1f}", f"{one['together']:.1f}", str(one["turns"])] for one in results]
    text = f"The longest turn of the loop, in milliseconds of CPU; at most {LONGEST_MS:g} is promised."
    whats = "\n".join(f"* `{name}`: {one.__doc__}" for name, one in CASES.items())
    return "\n\n".join([text, markdown_table([["case", "longest turn", "all turns", "turns"], *rows]), whats])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make bench ARGS=loop", description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all of them if none is given")
    parser.add_argument("--pool", default=POOL, help=f"size of the pool in TiB or GiB (default {POOL})")
    parser.add_argument("--inside", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.inside:
        pool_bytes = int(given.pool[:-3]) * {"TiB": 1 << 40, "GiB": 1 << 30}[given.pool[-3:]]
        print(json.dumps(CASES[given.inside](pool_bytes)))
        return 0
    found = []
    for name in given.cases or CASES:
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        found.append(child(name, given.pool))
    facts = run_facts(f"make bench ARGS='{' '.join(['loop', *arguments])}'")
    print_report("How long single turns keep the loop", facts, page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
