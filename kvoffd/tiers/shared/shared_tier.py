"""The shared tier as the daemon's thread sees it: answers, bounds, counters. What waits for the store is in threads."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from kvoffd.system.newest import put_newest
from kvoffd.tiers.shared.answers import YES_S, Answers
from kvoffd.tiers.shared.breaker import Breaker
from kvoffd.tiers.shared.object_format import object_key
from kvoffd.tiers.shared.store import Server, Store
from kvoffd.tiers.shared.work import Ask, Raise, Read, Write
from kvoffd.tiers.shared.workers import READERS, Workers
from kvoffd.tiers.tier import Answer, AskedTier, Digest, OnDone, TierBlock, TierKey, TierListener, TierResult

logger = logging.getLogger(__name__)

MOST_ASKED = 65_536
"""Keys that may be being asked for at a time."""
POLLS = 0
"""Owner of asks that nobody waits for: whether a namespace was reset."""
MOST_READS, MOST_WRITES = 4096, 64
MOST_NAMESPACES = 65_536
"""Of which it is known when it was looked whether they were reset: as many as may be open."""
REFUSED_S = 60.0
"""How long operators are told of a refused write, unless one succeeds: there may be nothing more to write."""
FULL_PAUSE_S = 5.0
"""How long nothing is written after the store refused it: it is full, a replica, or gives us no right to."""
HANGS_S = 0.5
"""How long after its deadline an ask is to be begun at the latest."""
RAISE_S = 5.0
"""How long it may take to raise a generation, or to look whether another node did."""
MOST_OBJECT_BYTES = 500 * 2**20
"""Redis takes values of 512 MiB."""
DELIVER_S = 0.005
"""After which the daemon's thread does other work before it hears of more."""
STEADY_S = 5.0
"""How long it is reachable again until the log says so: what comes and goes does not fill it."""
OLD_WEIGHT = 0.9
"""Weight of earlier asks in the time that an ask takes."""


@dataclass
class SharedCounters:
    asked_keys: int = 0
    found_keys: int = 0
    unanswered_keys: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    present_blocks: int = 0
    dropped_writes: int = 0
    mismatches: int = 0
    ask_seconds: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)


class SharedTier(AskedTier):
    """A tier in a store that many nodes share.

    Args:
        name: for operators: the URL, which has no password.
        open_store: makes a connection, for one thread.
        pool: the pool's memory.
        clock: ``time.monotonic``, by which the threads measure deadlines too.
        post: has a call made in the daemon's thread.
        ask_deadline_s: 0 for what is usual for the store.
        generations: of namespaces, those that this node has followed; of others it has followed none.
        make_workers: what waits for the store; tests do without threads.
    """

    def __init__(
        self,
        name: str,
        open_store: Callable[[], Store],
        *,
        pool: memoryview,
        digest: Digest,
        clock: Callable[[], float],
        post: Callable[[Callable[[], None]], None],
        listener: TierListener,
        ask_deadline_s: float = 0.0,
        generations: Mapping[bytes, int] | None = None,
        make_workers: Callable[..., Workers] = Workers,
    ) -> None:
        self.name = name
        first = open_store()
        stores = [first, *(open_store() for _ in range(READERS + first.writers))]
        self.ask_deadline_s = ask_deadline_s or first.ask_deadline_s
        self._poll_s = first.poll_s
        self._believed_s = first.believed_s
        self.most_window_keys = first.most_window_keys
        self._servers = first.servers
        self.counters = SharedCounters()
        self.problem = ""
        """Why it failed last as a whole, a sentence."""
        self._refusal = ""
        self.breaker = Breaker(clock)
        self._pool = pool
        self._clock = clock
        self._post = post
        self._listener = listener
        self._answers = Answers(clock, self.ask_deadline_s)
        self._generations = dict(generations or {})
        self._polled_at: dict[bytes, float] = {}
        self._voided: set[bytes] = set()
        self._asked = Counter[int]()
        """By owner, keys that are being asked for."""
        self._reads: dict[Read, OnDone] = {}
        self._writes: dict[Write, OnDone] = {}
        self._writing: set[TierKey] = set()
        self._read_block: TierBlock | None = None
        self._write_at = self._steady_at = self._refused_until = 0.0
        self._logged_reachable = self._closed = False
        self._ended: deque[Callable[[], None]] = deque()
        self._workers = make_workers(
            stores, self.generation, digest, self.breaker, self, self._end, clock, self.ask_deadline_s
        )

    # --- AskedTier -------------------------------------------------------------------------------

    @property
    def reachable(self) -> bool:
        return not self.breaker.open

    @property
    def refusal(self) -> str:
        """Why it takes no writes, a sentence; empty where it does."""
        return self._refusal if self._clock() < self._refused_until else ""

    @property
    def servers(self) -> list[Server]:
        """The servers of the store, as far as it can tell."""
        found = list(self._servers or ())
        return found if len(found) != 1 else [Server(found[0].name, self.reachable, self.problem)]

    def ask(
        self, owner: int, fingerprint: bytes, group: int, lengths: Sequence[int], keys: Sequence[bytes], *, prefix: bool
    ) -> int:
        # No owner has more waiting than it leaves room for others, so that there is always some.
        wanted = keys[: max(0, MOST_ASKED - self._asked.total() - self._asked[owner]) // 2]
        if self.breaker.open or not wanted:
            return 0
        self._answers.set_lengths(fingerprint, group, lengths)
        self._answers.give(fingerprint, group, wanted, Answer.ASKED)
        deadline = self._clock() + self.ask_deadline_s
        self._asked[owner] += len(wanted)
        self.counters.asked_keys += len(wanted)
        self._workers.ask(Ask(owner, fingerprint, group, wanted, deadline, prefix))
        return len(wanted)

    def answers(self, fingerprint: bytes, group: int, keys: Sequence[bytes]) -> list[Answer]:
        return self._answers.of(fingerprint, group, keys)

    def groups(self) -> Collection[tuple[bytes, int]]:
        return ()

    def index(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        return self._answers.within(fingerprint, group, self._believed_s)

    def readable(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        return self._answers.within(fingerprint, group, YES_S) if self.reachable else {}

    def read(self, block_id: TierKey, offsets: Sequence[int], deadline: float, on_done: OnDone) -> bool:
        block = self.index(block_id.fingerprint, block_id.group).get(block_id.key)
        if block is None or self.breaker.open or len(self._reads) >= MOST_READS:
            return False
        read = Read(block_id, self._generation(block_id), self._views(block, offsets), deadline)
        self._reads[read] = on_done
        self._workers.read(read)
        return True

    def contents(self, block: TierBlock) -> TierBlock:
        assert self._read_block is not None
        assert self._read_block.id == block.id
        return self._read_block

    def write(self, block: TierBlock, offsets: Sequence[int], on_done: OnDone) -> bool:
        unwelcome = self._closed or self.breaker.open or self._clock() < self._write_at
        if unwelcome or block.nbytes > MOST_OBJECT_BYTES:
            self.counters.dropped_writes += 1
            return False
        if len(self._writes) >= MOST_WRITES:  # it is offered again when one of them has ended
            return False
        if block.id in self._writing or block.id.key in self.index(block.id.fingerprint, block.id.group):
            return False
        if block.id.fingerprint in self._voided:  # what the pool still has is of the generation before
            return False
        write = Write(block, self._generation(block.id), self._views(block, offsets))
        self._writes[write] = on_done
        self._writing.add(block.id)
        self._workers.write(write)
        return True

    def touch(self, block_ids: Iterable[TierKey]) -> None:
        """Nothing: what is offered again after ``Store.believed_s`` is touched by that (``Store.touch``)."""

    def remove(self, block_ids: Iterable[TierKey]) -> int:
        ids = list(block_ids)
        count = sum(key in self.index(fingerprint, group) for fingerprint, group, key in ids)
        self.forget(ids)
        self._workers.remove([object_key(block_id, self._generation(block_id)) for block_id in ids])
        return count

    def forget(self, block_ids: Iterable[TierKey]) -> None:
        for block_id in block_ids:
            self._answers.refuse(*block_id)

    def remove_namespace(self, fingerprint: bytes) -> int:
        self._answers.forget(fingerprint)
        return 0

    def tick(self) -> None:
        """Give the store up while the thread that asks hangs, as it may where names are looked up.

        Tell of the servers that it does without, and when it is reachable.
        """
        now = self._clock()
        if not self.reachable:
            self._logged_reachable, self._steady_at = False, now + (STEADY_S if self.breaker.opened else 0.0)
        elif not self._logged_reachable and now >= self._steady_at:
            self._logged_reachable = True
            logger.info("%s is reachable.", self.name)
        for name, error in self._servers.take_unraised() if self._servers is not None else ():
            self.failed(error.kind, error.sentence, name)
        overdue = self._workers.take_overdue_asks(now - HANGS_S)
        for ask in overdue:
            self.unanswered(ask)
        if overdue:
            self.breaker.failed("ask", at_once=True)
            self.failed("timeout", f"{self.name} is being connected to for too long; see its name and the network.")

    @property
    def queued_reads(self) -> int:
        """Reads that wait or run."""
        return len(self._reads)

    @property
    def queued_writes(self) -> int:
        """Writes that wait or run."""
        return len(self._writes)

    def close(self, deadline_s: float) -> bool:
        self._closed = True
        ended = self._workers.close(deadline_s)
        while self._ended:
            self._ended.popleft()()
        if ended:
            for on_done in [*self._reads.values(), *self._writes.values()]:
                on_done(TierResult.CANCELLED)
            self._reads.clear()
            self._writes.clear()
        return ended

    def _end(self, call: Callable[[], None]) -> None:
        self._ended.append(call)
        self._post(self._deliver)

    def _deliver(self) -> None:
        """Call what has ended, and the rest at a later turn of the loop: very many asks may end at once."""
        until = self._clock() + DELIVER_S
        while self._ended:
            self._ended.popleft()()
            if self._ended and self._clock() >= until:
                return self._post(self._deliver)

    # --- generations of namespaces ---------------------------------------------------------------

    def generation(self, fingerprint: bytes) -> int:
        """How often, by what is known here, a namespace's blocks were made void for all nodes; 0 for never."""
        return self._generations.get(fingerprint, 0)

    def raise_generation(self, fingerprint: bytes) -> Raise:
        """Begin to make a namespace's blocks void for all nodes; what is returned says when that has ended, and how."""
        one = Raise(fingerprint, self._clock() + RAISE_S)
        if self.breaker.open:
            one.ended, one.problem = True, self.problem or f"{self.name} has not been reached yet."
            return one
        self._workers.raise_generation(one)
        return one

    def poll(self, fingerprint: bytes) -> None:
        now = self._clock()
        if now >= self._polled_at.get(fingerprint, -inf) + self._poll_s:
            put_newest(self._polled_at, fingerprint, inf, MOST_NAMESPACES)  # until it is answered
            self._workers.ask(Ask(POLLS, fingerprint, 0, (), now + RAISE_S, True))

    def take_voided(self) -> list[bytes]:
        found, self._voided = list(self._voided), set()
        return found

    def raised(self, one: Raise, generation: int, problem: str) -> None:
        if not problem:
            self._note_generation(one.fingerprint, generation)
        one.ended, one.problem = True, problem

    def _note_generation(self, fingerprint: bytes, generation: int) -> None:
        if generation > self.generation(fingerprint):
            self._generations[fingerprint] = generation
            logger.info("The blocks of a namespace in %s are void: its generation is %d now.", self.name, generation)
            self._answers.forget(fingerprint)
            self._voided.add(fingerprint)

    def _generation(self, block_id: TierKey) -> int:
        return self.generation(block_id.fingerprint)

    # --- what the threads tell: see WorkListener -------------------------------------------------

    def asked(self, ask: Ask, generation: int, found: Sequence[bool], seconds: float) -> None:
        counters = self.counters
        self._answer(ask)
        counters.ask_seconds = (
            OLD_WEIGHT * counters.ask_seconds + (1 - OLD_WEIGHT) * seconds if counters.ask_seconds else seconds
        )
        fingerprint, group = ask.fingerprint, ask.group
        if generation < self.generation(fingerprint):  # answers about blocks that have become void meanwhile
            return self._publish(ask, [False] * len(found))
        self._note_generation(fingerprint, generation)
        counters.found_keys += sum(found)
        self._answers.answered(fingerprint, group, ask.keys, found)
        self._publish(ask, found)

    def _publish(self, ask: Ask, found: Sequence[bool]) -> None:
        if ask.prefix and False in found:
            found = [*found[: found.index(False)], *[False] * (len(found) - found.index(False))]
        self._listener.tier_answered(self, ask.fingerprint, ask.group, ask.keys, found)

    def _answer(self, ask: Ask) -> None:
        self._asked[ask.owner] -= len(ask.keys)
        if not self._asked[ask.owner]:
            del self._asked[ask.owner]
        if ask.owner == POLLS and ask.fingerprint in self._polled_at:
            self._polled_at[ask.fingerprint] = self._clock()

    def unanswered(self, ask: Ask) -> None:
        self._answer(ask)
        self.counters.unanswered_keys += len(ask.keys)
        absent = [False] * len(ask.keys)
        self._answers.answered(ask.fingerprint, ask.group, ask.keys, absent)
        self._publish(ask, absent)

    def read_ended(self, read: Read, result: TierResult, block: TierBlock | None) -> None:
        on_done = self._reads.pop(read)
        counters, (fingerprint, group, key) = self.counters, read.block_id
        if result is TierResult.DONE and read.generation != self._generation(read.block_id):
            result = TierResult.GONE
        if result is TierResult.DONE:
            assert block is not None
            counters.read_blocks += 1
            counters.read_bytes += block.nbytes
        elif result is TierResult.CORRUPT:
            counters.mismatches += 1
            self.remove([read.block_id])
            name = object_key(read.block_id, read.generation).decode()
            self.failed("mismatch", f"The object {name} is not the block that it should be; it is removed.")
        else:
            self._answers.refuse(fingerprint, group, key)
        self._read_block = block
        on_done(result)
        self._read_block = None

    def writing_refused(self, sentence: str) -> None:
        self._write_at, self._refused_until = self._clock() + FULL_PAUSE_S, self._clock() + REFUSED_S
        self._refusal = sentence

    def write_ended(self, write: Write, result: TierResult) -> None:
        on_done = self._writes.pop(write)
        self._writing.remove(write.block.id)
        counters, (fingerprint, group, key) = self.counters, write.block.id
        if result is TierResult.DONE:
            self._refused_until = 0.0
            counters.written_blocks += 1
            counters.written_bytes += write.block.nbytes
        elif result is TierResult.PRESENT:
            counters.present_blocks += 1
        else:
            counters.dropped_writes += 1
            return on_done(result)
        if write.generation == self._generation(write.block.id):
            self._answers.set_lengths(fingerprint, group, [shard.length for shard in write.block.shards])
            self._answers.give(fingerprint, group, [key], Answer.YES)
        on_done(result)

    def failed(self, kind: str, sentence: str, server: str = "") -> None:
        """``server``: which of several failed, each of which is told of."""
        self.counters.errors[kind] += 1
        if not server:
            self.problem = sentence
        self._listener.tier_error(self, f"{kind} {server}".strip(), sentence)

    def _views(self, block: TierBlock, offsets: Sequence[int]) -> list[memoryview]:
        return [self._pool[offset : offset + shard.length] for offset, shard in zip(offsets, block.shards, strict=True)]
