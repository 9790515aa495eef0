"""An inference engine: a scheduler and its workers, serving prompts that share prefixes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvoffd_client import HintAction, LookupFuture, SchedulerClient
from kvoffd_proto.events import BlockStored, KvEvent
from kvoffd_proto.messages import GroupKeys
from tests.sim.audit import Readable, fold
from tests.sim.client import SimTransport
from tests.sim.clock import Broken, Process
from tests.sim.content import Content, Corpus
from tests.sim.memory import WorkerMemory
from tests.sim.parts import make_scheduler
from tests.sim.rank import Rank
from tests.sim.request import Request

if TYPE_CHECKING:
    from tests.sim.world import World

MAX_ACTIVE = 3


def giver_of(keys: list[bytes]) -> int:
    """The giver of a prompt's hints: of two, by the prompt's end."""
    return 1 + keys[-1][-1] % 2


class Engine:
    """One life of an engine."""

    def __init__(self, world: World, name: str, content: Content, corpus: Corpus) -> None:
        self.world = world
        self.clock = world.clock
        self.name = name
        self.content = content
        self.corpus = corpus
        self.rng: random.Random = world.scenario.rng(name)
        self.waiting = 0
        """The number of prompts that wait for free blocks."""
        self._active: list[Request] = []
        self._asked: list[tuple[LookupFuture, float]] = []
        self._poking = False
        self._poke_again = False
        self._leaving = False
        self.key_s = world.scenario.rng(f"{name} computes").choice((0.005, 0.05, 0.3))
        """Seconds in which it computes the tokens of a key."""
        self._hints = world.scenario.rng(f"{name} hints") if world.scenario.rng("hints").random() < 0.15 else None
        """What chooses the hints of prompts, in some runs."""
        self.ended = False
        """True once a process of it died or it has left; nothing is asked of it any more."""
        blocks = self.rng.randint(6, 16) * content.blocks_per_key
        self._free = [list(range(blocks)) for _ in content.groups]
        for free in self._free:
            self.rng.shuffle(free)
        self.ranks: list[Rank] = []
        self.readable: Readable = set()
        self.process = Process(world.clock, f"{name}.scheduler")
        self.transport = SimTransport(world.network, self.process, (), self._scheduler_changed)
        own = world.scenario.rng(f"{name}.scheduler")
        self.scheduler: SchedulerClient = make_scheduler(self.transport, content, self.process.name, own)
        for rank in range(content.world_size):
            memory = WorkerMemory(content, rank, blocks, self.rng)
            own = world.scenario.rng(f"{name}.{rank}")
            self.ranks.append(Rank(world, f"{name}.{rank}", memory, own, self.poke))

    # --- what requests ask for -------------------------------------------------------------------

    def lookup(self, keys: list[bytes], again: bool = False) -> LookupFuture:
        groups = [GroupKeys(group, b"".join(keys)) for group in self.content.groups]
        future = self.scheduler.lookup(groups, again, giver=giver_of(keys))
        self._asked.append((future, self.clock.now))
        return future

    def hint(self, keys: list[bytes]) -> None:
        if self._hints is not None:
            action, ttl_s = self._hints.choice(list(HintAction)), self._hints.uniform(0.0, 2.0)
            groups = [GroupKeys(group, b"".join(keys)) for group in self.content.groups]
            self.scheduler.hint(action, groups, self._hints.randrange(101), ttl_s, giver=giver_of(keys))
            self.world.faults.counts[f"hint_{action}"] += 1

    def give_back(self, blocks: list[list[int]]) -> None:
        for free, given in zip(self._free, blocks, strict=True):
            free.extend(given)

    def wake_at(self, when: float) -> None:
        """Let the requests go on at that time."""
        self.clock.at(when, lambda: self.process.run(self.poke))

    # --- serving ---------------------------------------------------------------------------------

    def submit(self) -> None:
        self.waiting += 1
        self.process.run(self.poke)

    def poke(self) -> None:
        """Something changed: let every request go on as far as it can."""
        if self._poking:
            self._poke_again = True
            return
        if self.ended:
            return
        self._poking = True
        try:
            self._poke_again = True
            while self._poke_again:
                self._poke_again = False
                self._admit()
                for request in self._active:
                    request.advance()
                if any(request.done for request in self._active):
                    self._active = [request for request in self._active if not request.done]
                    self._poke_again = True
        finally:
            self._poking = False
        if self._leaving and not self._active:
            self._unregister()

    def _admit(self) -> None:
        while self.waiting and len(self._active) < MAX_ACTIVE and not self._leaving:
            keys = self.corpus.prompt()
            count = len(keys) * self.content.blocks_per_key
            if any(len(free) < count for free in self._free):
                if not self._active:
                    self.waiting -= 1  # it is too long for this engine
                return
            self.waiting -= 1
            self.world.last_prompt_at = self.clock.now
            blocks = []
            for free in self._free:
                blocks.append(free[:count])
                del free[:count]
            self._active.append(Request(self, keys, blocks))

    def _scheduler_changed(self) -> None:
        for future, asked_at in self._asked:
            if future.done:
                self.world.longest_lookup_s = max(self.world.longest_lookup_s, self.clock.now - asked_at)
        self._asked = [item for item in self._asked if not item[0].done]
        events = self.scheduler.take_events()
        fold(events, self.readable, strict=False)
        self._check_tokens(events)
        self.poke()

    # --- the end ---------------------------------------------------------------------------------

    def leave(self) -> None:
        """Finish the active requests, unregister the memory, and exit."""
        self._leaving = True
        self.waiting = 0
        self.process.run(self.poke)

    def _unregister(self) -> None:
        self.ended = True
        for rank in self.ranks:
            self._unregister_rank(rank)

        def close() -> None:
            self.scheduler.close()
            self.process.alive = False

        self.process.after(0.0, close)
        self.world.engine_ended(self)

    def _unregister_rank(self, rank: Rank) -> None:
        outcome: list[bool] = []

        def begin(now: float) -> None:
            rank.client._unregister(outcome, now, 0.5)

        def close() -> None:
            busy = self.world.daemon.space.busy_segments()
            if outcome == [True] and any(segment in busy for segment in rank.memory.segments):
                raise Broken("a transfer uses memory that was unregistered")
            rank.client.close()
            rank.die()

        rank.process.run(lambda: rank.transport.act(begin))
        rank.process.after(0.6, close)

    def crash(self, first: int | None) -> None:
        """A process dies, the scheduler (None) or a worker; the others follow soon."""
        if self.ended:
            return
        self.ended = True
        self.clock.note(f"{self.name} loses {'its scheduler' if first is None else f'rank {first}'}")
        for number, rank in enumerate(self.ranks):
            self.clock.after(0.0 if number == first else self.rng.uniform(0.0, 0.2), rank.die)
        self.clock.after(0.0 if first is None else self.rng.uniform(0.0, 0.2), self._scheduler_dies)
        self.world.engine_ended(self)

    def _scheduler_dies(self) -> None:
        self.process.alive = False
        self.transport.disconnect(drain=False)

    def why_not_idle(self) -> str | None:
        """The reason why the engine is not idle yet; None when it is."""
        scheduler = self.scheduler
        if self.ended:
            return None
        if self._active or self.waiting:
            return f"{self.name} has {len(self._active)} requests, {self.waiting} wait"
        service = self.world.daemon.service
        clients = [scheduler, *[rank.client for rank in self.ranks]]
        if not all(one.ready and one.epoch == service.sessions.epoch for one in clients):
            return f"{self.name} is not connected: {scheduler.problem} {[rank.client.problem for rank in self.ranks]}"
        leases = [found for found in scheduler._leases.values() if found.alive]
        if leases or any(rank.client.unfinished for rank in self.ranks):
            return f"{self.name} has {len(leases)} leases, jobs {[r.client.unfinished for r in self.ranks]}"
        audit, topic = self.world.daemon.audit, scheduler._events_topic
        seen_all = scheduler._next_events_sequence == audit.next_event_message[topic]
        if seen_all and not self.readable <= audit.folded(self.content.spec.fingerprint):
            raise Broken(f"{self.name} knows of blocks that are not there by the KV events that were published")
        return None

    def _check_tokens(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            if not isinstance(event, BlockStored) or not event.parents:
                continue
            if len(event.parents) != len(event.block_hashes):
                raise Broken("an event has as many parents as blocks, or none")
            if event.token_ids != b"".join([self.content.tokens(key) for key in event.block_hashes]):
                raise Broken("an event has other tokens than its store")
