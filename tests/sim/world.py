"""One run of the simulator: engines, a daemon and faults, until all sessions have ended and nothing may be held."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvoffd_proto import admin as a
from kvoffd_proto import messages as m
from kvoffd_proto import stats as s
from tests.kit.open_files import open_files
from tests.sim.audit import Readable
from tests.sim.client import SimTransport
from tests.sim.clock import Broken, Clock, Process
from tests.sim.content import Content, Corpus
from tests.sim.daemon import FailureLog, SimDaemon, job_end_bound_s
from tests.sim.disk import Device
from tests.sim.engine import Engine
from tests.sim.hostile import Hostile
from tests.sim.network import Network
from tests.sim.parts import Operator, SavedPool
from tests.sim.scenario import Faults, Scenario
from tests.sim.shared import SharedObjects

OWN_WAITS_S = 10.0
"""The longest that the simulator itself keeps a request or a process waiting: pauses, a slow disk, a reconnection."""
MAX_STOP_S = 6.0
EMPTIED_S = 0.05
"""From one emptying of the pool to the next where most is to come up from tiers."""
MAX_STEPS = 200_000
LOAD_POLL_S = 0.002
"""Between two looks for a worker that loads."""
POOL_SIZES = (96 * 1024, 200 * 1024, 400 * 1024, 800 * 1024)


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    scenario: Scenario
    digest: str
    steps: int
    counts: Counter[str]
    longest_lookup_s: float
    """Seconds from a lookup to its answer, or to the client giving it up."""
    longest_job_s: float
    """Seconds from sending a job to its result."""
    problem: str | None = None
    trace: tuple[str, ...] = ()


class World:
    """The processes and the network of one run."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.clock = Clock()
        self.faults = Faults(scenario)
        rng = scenario.rng("world")
        self._rng = rng
        self.contents = [Content(number, rng) for number in range(rng.choice((1, 1, 2, 3)))]
        self.content_of = {content.spec.fingerprint: content for content in self.contents}
        self.corpora = [Corpus(content, rng) for content in self.contents]
        largest = max(
            content.shard_bytes(rank, group)
            for content in self.contents
            for rank in range(content.world_size)
            for group in content.groups
        )
        self.pool_bytes = rng.choice([size for size in POOL_SIZES if size >= min(largest, POOL_SIZES[-1])])
        largest_block = max(content.block_bytes(group) for content in self.contents for group in content.groups)
        has_disk = scenario.rng("has a disk").random() < 0.6
        self.written_state: list[bytes] = []
        self.device = Device(largest_block, self.pool_bytes, self.clock, self.faults.counts) if has_disk else None
        own_rng = scenario.rng("a shared store")
        self.shared = (
            SharedObjects(self.content_of, own_rng, self.faults.counts, self.clock)
            if self.device is not None and own_rng.random() < 0.5
            else None
        )
        self.promotes = self.device is not None and scenario.rng("promotes").random() < 0.5
        """Whether most prompts find their blocks in tiers alone: there are many, and the pool is emptied often."""
        self.log = FailureLog()
        self.longest_lookup_s = 0.0
        self.longest_job_s = 0.0
        self.last_prompt_at = self.clock.now
        """When an engine last began to serve a prompt. A new engine gets prompts for as long as a run lasts."""
        self.network = Network(self.clock, self.faults, scenario.rng("network"))
        self._lives = 0
        self._engines_made = 0
        self.engines: list[Engine] = []
        self._hostiles: list[Hostile] = []
        self._operator: Operator | None = None
        process = Process(self.clock, "operator")
        self._operator_transport = SimTransport(self.network, process, (), lambda: None)
        self._limits_rng = scenario.rng("limits")
        self._cuts_rng = scenario.rng("cuts")
        self._stops_rng = scenario.rng("stops")
        self._looks = 0
        """Steps that only looked for a worker that loads: most of a long run with few loads. They end with faults."""
        self._saved: SavedPool | None = None
        self._pools_to_lose = 0
        self.daemon = self._new_daemon()

    def _new_daemon(self) -> SimDaemon:
        self._lives += 1
        saved, self._saved = self._saved, None
        daemon = SimDaemon(self, self._lives, saved)
        self.network.daemon = daemon
        return daemon

    # --- lives and deaths ------------------------------------------------------------------------

    def daemon_died(self, saved: SavedPool, expected: dict[bytes, Readable] | None) -> None:
        """Somebody will start it again. Where the old pool is saved, all that could be read must be there again."""
        self._saved = saved
        if self._pools_to_lose:
            self._pools_to_lose -= 1
            self._forget_pool()
            expected = {}

        were = {name: one.generation for name, one in self.daemon.service.cache.namespaces.items()}

        def start() -> None:
            self.daemon = self._new_daemon()
            generations = self.daemon.service.state.generations
            # Where the clock was set back and the state was lost, a generation of the future voids its blocks.
            future = {name for name, number in were.items() if number > generations.now()}
            kept = {name: its for name, its in (expected or {}).items() if generations.of(name) == were[name]}
            if expected is not None and not expected.keys() - kept.keys() <= future:
                raise Broken("a new daemon with the old pool does not know a generation of the old one")
            if expected is not None and self.daemon.readable() != kept:
                raise Broken("a new daemon with the old pool serves other blocks than the old one did")
            for subscription in self.network.subscriptions:
                subscription.connect()

        self.clock.after(self._rng.uniform(0.005, 0.5), start)

    def _forget_pool(self) -> None:
        for fd in self._saved or ():
            os.close(fd)
        self._saved = None

    def engine_ended(self, engine: Engine) -> None:
        place = self.engines.index(engine)

        def start() -> None:
            self.engines[place] = self._new_engine(engine.content, engine.corpus)

        self.clock.after(self._rng.uniform(0.05, 0.5), start)

    def _new_engine(self, content: Content, corpus: Corpus) -> Engine:
        self._engines_made += 1
        engine = Engine(self, f"engine-{self._engines_made}", content, corpus)
        count = self._rng.randint(0, self.scenario.max_requests) if not self.faults.calm else 0
        for _ in range(3 * count if self.promotes else count):
            self.clock.after(self._rng.uniform(0.0, self.scenario.duration_s), engine.submit)
        return engine

    # --- the run ---------------------------------------------------------------------------------

    def play(self) -> None:
        """Play the whole run. Raises Broken where a promise does not hold."""
        scenario, start = self.scenario, self.clock.now
        for number in range(self._rng.randint(1, scenario.max_engines)):
            place = number % len(self.contents)
            self.engines.append(self._new_engine(self.contents[place], self.corpora[place]))
        for kind, at in self.faults.times():
            self.clock.at(start + at * scenario.duration_s, lambda kind=kind: self._inject(kind))  # type: ignore[misc]
        if self.promotes and "squeeze" not in scenario.without:
            for number in range(round(scenario.duration_s / EMPTIED_S)):
                self.clock.at(start + number * EMPTIED_S, self._squeeze)
        self._run_until(start + scenario.duration_s)
        self.faults.calm = True
        if self.daemon.tiers is not None:
            self.daemon.tiers.disk.takes_writes = False
        for hostile in self._hostiles:
            hostile.die()
        self._run_until_idle(self._why_not_idle)
        self.daemon.flush()  # a tick may have published something since the last one
        self.daemon.check_all()
        self.daemon.pool.verify_ready()
        for engine in self.engines:
            if not engine.ended:
                self._close(engine)
        if self._operator is not None:
            self._operator.close()
        self._run_until_idle(self._still_open)
        self.daemon.check_at_rest()
        stopped = self.daemon
        stopped.stop()
        while stopped.process.alive:
            self._step()

    def _close(self, engine: Engine) -> None:
        engine.ended = True
        for rank in engine.ranks:
            rank.client.close()
        engine.scheduler.close()

    def _why_not_idle(self) -> str | None:
        daemon = self.daemon
        if not daemon.process.alive or daemon.service.sessions.stopping:
            return "the daemon is down"
        if daemon.service.jobs.unfinished:
            return f"{daemon.service.jobs.unfinished} jobs run"
        for engine in self.engines:
            if engine.ended:
                return f"{engine.name} is not replaced yet"
            if reason := engine.why_not_idle():
                return reason
        usage = daemon.service.cache.life.usage
        if usage.pinned or usage.dropped or usage.writing:
            return f"something is held for nobody: {usage}"
        return None

    def _still_open(self) -> str | None:
        if self.daemon.service.cache.order.retentions.retained_bytes:
            return "blocks are retained"
        if self.daemon.tiers is not None and self.daemon.tiers.busy:
            return "the disk or the shared store is busy"
        sessions = self.daemon.service.sessions
        if sessions or self.daemon.lifelines:
            return f"{len(sessions)} sessions are open"
        if (
            dropped := self.daemon.service.cache.life.usage.dropped
        ):  # of a clear just now: they are freed in the background
            return f"{dropped} bytes are still to be freed"
        return None

    def _run_until_idle(self, reason: Callable[[], str | None]) -> None:
        config = self.daemon.config
        # A prompt's load and store may each take as long as a job may; then its lease and half-stored blocks time out.
        quiet_s = (
            2 * job_end_bound_s(config) + config.limits.lease_ttl_s + config.limits.partial_timeout_s + OWN_WAITS_S
        )
        began_at = self.clock.now
        count = 0
        while True:
            self._step()
            count += 1
            if count % 8 == 0:
                if (why := reason()) is None:
                    return
                if self.clock.now > max(began_at, self.last_prompt_at) + quiet_s:
                    raise Broken(f"after {quiet_s:.0f} quiet seconds {why}")

    def _run_until(self, when: float) -> None:
        while self.clock.next_at() <= when:
            self._step()

    def _step(self) -> None:
        if not self.clock.step():
            raise Broken("nothing will ever happen again")
        if self.log.failure is not None:
            raise Broken(f"the daemon logged a failure inside: {self.log.failure!r}") from self.log.failure
        if self.daemon.torn is not None and self.daemon.process.alive:
            self.daemon.die()
        if self.clock.steps - self._looks > MAX_STEPS:
            raise Broken("the run does not end")

    # --- faults ----------------------------------------------------------------------------------

    def _inject(self, kind: str) -> None:
        if self.faults.calm:
            return
        self.faults.counts[kind] += 1
        self.clock.note(f"fault {kind}")
        getattr(self, f"_{kind}")()

    def _daemon_crash(self) -> None:
        if self.daemon.process.alive:
            self.daemon.die()

    def _daemon_stop(self) -> None:
        if self.daemon.process.alive and not self.daemon.service.sessions.stopping:
            self.daemon.process.run(self.daemon.stop)

    def _lost_pool(self) -> None:
        self._pools_to_lose += 1

    def _squeeze(self) -> None:
        if self.daemon.process.alive:
            self.daemon.process.run(self.daemon.evict_all)

    def _daemon_pause(self) -> None:
        self.daemon.process.pause(self._rng.uniform(0.05, 1.2))

    def _some_engine(self) -> Engine:
        return self._rng.choice(self.engines)

    def _client_pause(self) -> None:
        engine = self._some_engine()
        processes = [engine.process, *[rank.process for rank in engine.ranks]]
        self._rng.choice(processes).pause(self._rng.uniform(0.05, 2.5))

    def _worker_crash(self) -> None:
        engine = self._some_engine()
        engine.crash(self._rng.randrange(len(engine.ranks)))

    def _worker_disconnect(self) -> None:
        """Have a worker that loads end its session, as where it cannot read what the daemon sent: the copy may run."""
        ranks = [rank for engine in self.engines for rank in engine.ranks if rank.process.alive]
        loading = [rank for rank in ranks if any(one.job.lease_id is not None for one in rank.client._jobs.values())]
        if loading:
            rank = self._cuts_rng.choice(loading)
            rank.process.run(lambda: rank.transport.act(lambda now: rank.client.disconnect("a fault", now)))
        elif not self.faults.calm:
            self._looks += 1
            self.clock.at(self.clock.now + LOAD_POLL_S, self._worker_disconnect)

    def _scheduler_crash(self) -> None:
        self._some_engine().crash(None)

    def _engine_leave(self) -> None:
        self._some_engine().leave()

    def _disk_stop(self) -> None:
        if self.device is not None:
            self.device.stops.due_s = self._stop_s()

    def _shared_stop(self) -> None:
        if self.shared is not None:
            self.shared.stops.due_s = self._stop_s()

    def _stop_s(self) -> float:
        """For how long a tier stops. It may come back while prompts wait, or once the faults are over."""
        return self._stops_rng.choice((self._stops_rng.uniform(0.3, 2.0), MAX_STOP_S))

    def _wrong_estimate(self) -> None:
        """What is known of the tiers' speed is wrong ten times over, for a while."""
        daemon, factor = self.daemon, self._stops_rng.choice((0.1, 10.0))
        if (tiers := daemon.tiers) is not None and daemon.process.alive:
            tiers.bend_speeds(factor)
            daemon.process.after(self._stops_rng.uniform(0.2, 2.0), lambda: tiers.bend_speeds(1.0))

    def _reset(self) -> None:
        engine = self._some_engine()
        engine.process.run(lambda: engine.transport.act(lambda _: engine.scheduler.reset(0.5)))

    def _invalidate(self) -> None:
        engine = self._some_engine()
        keys = engine.corpus.prompt()
        groups = [m.GroupKeys(group, b"".join(keys)) for group in engine.content.groups]

        def ask(now: float) -> None:
            scheduler = engine.scheduler
            if scheduler.ready and self.faults.counts["invalidate"] % 2:  # as who wants to know when it is noted
                request = m.Invalidate(scheduler._next_request_id(), engine.content.spec.fingerprint, groups)
                scheduler._send(request, now, lambda reply, now: None, 2.0)
            else:
                scheduler.invalidate(groups)

        engine.process.run(lambda: engine.transport.act(ask))

    def _lease_storm(self) -> None:
        engine = self._some_engine()

        def ask() -> None:
            futures = [engine.lookup(engine.corpus.prompt()) for _ in range(12)]
            for future in futures[::2]:
                engine.scheduler.release(future.lease_id)
            engine.process.after(1.0, lambda: [engine.scheduler.release(future.lease_id) for future in futures])  # type: ignore[arg-type,func-returns-value]

        engine.process.run(ask)

    def _limit(self) -> None:
        """Have an operator set the most that a namespace may have of the pool."""
        size, choice = self.pool_bytes, self._limits_rng.choice
        quota_bytes = choice((None, None, size // 2, size // 3, size // 8, 4096))
        name = choice(self.contents).spec.fingerprint
        self._have_operator_ask([lambda number: a.SetQuota(number, name, quota_bytes)])

    def _clear(self) -> None:
        which = self._rng.choice([None, self.contents[0].spec.fingerprint])
        self._have_operator_ask([s.Stats, a.Health, a.Sessions, a.Namespaces, lambda number: a.Clear(number, which)])

    def _have_operator_ask(self, requests: Sequence[Callable[[int], m.AnyRequest]]) -> None:
        transport = self._operator_transport
        if self._operator is None:
            self._operator = Operator(transport, self.scenario.rng("operator"))
        operator = self._operator

        def ask(now: float) -> None:
            for make in requests:
                operator.ask(make, now)

        transport._process.after(0.05, lambda: transport.act(ask))

    def _hostile(self) -> None:
        self._hostiles.append(Hostile(self, len(self._hostiles)))

    # --- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Free what the test's process holds for the run."""
        self.daemon.discard()
        self._forget_pool()


def run(scenario: Scenario) -> Outcome:
    """Play a scenario; never raises for what is broken, but tells it."""
    loggers = [logging.getLogger(name) for name in ("kvoffd", "kvoffd_client")]
    before = [(logger.propagate, logger.level) for logger in loggers]
    before_fds = open_files()
    world = World(scenario)
    for logger in loggers:
        logger.propagate = False
        logger.setLevel(logging.ERROR)
    loggers[0].addHandler(world.log)
    problem: str | None = None
    try:
        world.play()
    except Broken as broken:
        problem = str(broken)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    finally:
        world.close()
        loggers[0].removeHandler(world.log)
        for logger, (propagate, level) in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.setLevel(level)
    left = open_files() - before_fds  # other tests may close some of theirs at any time
    if problem is None and left:
        problem = f"descriptors are left open: {sorted(left)}"
    clock = world.clock
    trace = tuple(clock.trace) if problem else ()
    return Outcome(
        scenario,
        clock.digest(),
        clock.steps,
        world.faults.counts,
        world.longest_lookup_s,
        world.longest_job_s,
        problem,
        trace,
    )
