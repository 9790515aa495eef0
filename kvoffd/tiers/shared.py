"""The shared tier: blocks in a store that many nodes write to and read from. Threads wait for the store."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from math import inf
from typing import Any

from kvoffd.pool.slot_table import MAX_KEY_BYTES
from kvoffd.system.fair_shares import FairShares
from kvoffd.system.threads import Workers
from kvoffd.tiers.answers import HIDDEN_S, NO_S, Answers, Ask
from kvoffd.tiers.asking_thread import Answered, AskingThread, Question
from kvoffd.tiers.block_threads import (
    BlockThread,
    ObjectRead,
    ObjectReadEnd,
    ObjectWrite,
    Removal,
    take_batch,
)
from kvoffd.tiers.breaker import Breaker
from kvoffd.tiers.fleet_clears import RAISE_S, FleetClears, Poll
from kvoffd.tiers.generations import Generations
from kvoffd.tiers.header import (
    Block,
    BlockGroup,
    fits_header,
    stored_group,
)
from kvoffd.tiers.store import (
    Server,
    Store,
    StoreError,
    StoreFault,
)
from kvoffd.tiers.store_health import StoreHealth
from kvoffd.tiers.tier import (
    READERS_NICE,
    Found,
    ReadEnd,
    Result,
    Tier,
    TierListener,
    TierStats,
    WriteEnd,
)

logger = logging.getLogger(__name__)

MAX_READS, MAX_WRITES = 4096, 64
"""Reads that may wait, and writes that may wait or run."""
MAX_REMOVALS, REMOVED_AT_ONCE = 16, 1000
"""Tasks that may wait beyond ``MAX_WRITES`` before removals are dropped, and objects of one removal."""
MAX_OBJECT_BYTES = 500 * 2**20
"""Limit of a block: Redis accepts values of 512 MiB."""
READERS = 2
"""Threads that read, each with a connection."""
ASKS_IN_TURN = 256
"""Asks, in the order in which they came, whose namespaces take turns."""

UNDONE_S = 10.0
"""Time for idle threads to end, when another one does not start."""
HANGS_S = 0.5
"""Time after its deadline by which an ask must have begun, unless a raise takes its time."""
OLD_WEIGHT = 0.9
"""Weight of earlier samples in the mean duration of asks."""


class SharedTier(Tier):
    """See ``Tier``. The store's contents are known only by asking: other nodes write to it too, and it may evict.

    Objects of a namespace have its fleet generation, which differs from that of the block group.

    Args:
        name: the URL, without a password, for operators; empty for a place that no peer has.
        open_store: makes a connection, for one thread.
        pool: the pool's memory.
        clock: ``time.monotonic``, by which the threads measure deadlines too.
        post: runs a call in the daemon's thread.
        ask_deadline_s: time in which the store must answer an ask.
        generations: of namespaces, as far as this node has heard of them.
        make_workers: replaced in tests, which have no threads.

    Raises NoMoreThreads. After any error no thread runs.
    """

    def __init__(
        self,
        name: str,
        open_store: Callable[[], Store],
        *,
        pool: memoryview,
        clock: Callable[[], float],
        post: Callable[[Callable[[], None]], None],
        listener: TierListener,
        ask_deadline_s: float,
        generations: Generations | None = None,
        make_workers: Callable[..., Workers[Any, Any]] = Workers,
    ) -> None:
        super().__init__(name, listener)
        self._store = first = open_store()
        """The asking thread's connection. Others use only its constants and ``servers``."""
        self._stores = [first, *(open_store() for _ in range(READERS + first.writers))]
        self.ask_deadline_s = ask_deadline_s
        self.breaker = Breaker(clock)
        self._pool = pool
        self._clock = clock
        self.post = post
        self.generations = generations or Generations()
        self.closed = False
        """Set when it is closed, or the daemon stops: its threads begin nothing more."""
        self._poll_next = False
        """Whether ``_next_question`` takes a poll next, if one waits."""
        self._ask_shares = FairShares[bytes]()
        """Keys that namespaces asked for while others waited."""
        self._writes: dict[tuple[int, bytes], ObjectWrite] = {}
        """Writes that have not ended, by tag and key."""
        make_threads = partial(make_workers, post=post, clock=clock)
        asker, threads = AskingThread(self, first, clock), [BlockThread(self, one, clock) for one in self._stores[1:]]
        with ExitStack() as started:  # if a later step fails, the threads that run are ended
            self._asking = make_threads(
                "kvoffd-shared-ask",
                [lambda questions: [question.run(asker) for question in questions]],
                failed=lambda error: error,
                on_end=self._question_ended,
                take=self._next_question,
            )
            started.callback(lambda: self._asking.close(time.monotonic() + UNDONE_S))
            self._reading = make_threads(
                "kvoffd-shared-read",
                [thread.reads for thread in threads[:READERS]],
                failed=lambda error: ObjectReadEnd(Result.FAILED),
                on_end=self._read_ended,
                take=partial(take_batch, first),
                nice=READERS_NICE,
            )
            started.callback(lambda: self._reading.close(time.monotonic() + UNDONE_S))
            self._writing = make_threads(
                "kvoffd-shared-write",
                [thread.writes for thread in threads[READERS:]],
                failed=lambda error: Result.FAILED,
                on_end=self._write_ended,
                take=partial(take_batch, first),
            )
            started.callback(lambda: self._writing.close(time.monotonic() + UNDONE_S))
            self._answers = Answers(self, listener, first, clock, self._asking.put)
            self._set_store(name)
            if name:
                self._put_due_questions()  # the first probe
            started.pop_all()

    def _set_store(self, name: str) -> None:
        """Set what belongs to one store, the one of this name, of which nothing is known. The rest stays when a place
        gets another peer (``become``)."""
        self.name, self.counters = name, TierStats()
        self.health = StoreHealth(self.breaker, self.counters, len(self._pool), self._clock)
        self.clears = FleetClears(self, self._store, self._clock, self._asking.put, self._answers.clear)
        self.found_at = -inf
        self._answers.is_unanswered = False

    def become(self, name: str) -> None:
        """Become the tier of another peer, or of none. Only while it is ``idle``, and after ``HelperProcess.connect``,
        by which the connections lead there."""
        self._set_store(name)
        self._answers.clear()
        self.health.assume_steady()
        self.breaker.reset()  # the first question waits for the connection

    @property
    def idle(self) -> bool:
        """Whether nothing is being asked, read or written, and all ends were handled."""
        threads = self._asking, self._reading, self._writing
        return not (self.clears.unfollowed or any(one.unfinished for one in threads))

    def _next_question(self, waiting: deque[Question]) -> list[Question]:
        """Take polls and other questions in turn, so that neither delays the other.

        Of several asks take the first of the namespace that has asked for the fewest keys while others waited. An ask
        passes polls, but no question of another kind: a clear that was put before it comes first.
        """
        polls = (isinstance(question, Poll) for question in waiting)
        # The first one of the kind whose turn it is; of the other kind if none of it waits.
        at = next((at for at, is_poll in enumerate(polls) if is_poll is self._poll_next), 0)
        self._poll_next = not self._poll_next
        if isinstance(question := waiting[at], Ask):
            firsts = {question.group.fingerprint: (at, question)}  # each namespace's first ask, and its place
            for place, later in enumerate(islice(waiting, at + 1, at + ASKS_IN_TURN), at + 1):
                if isinstance(later, Ask):
                    firsts.setdefault(later.group.fingerprint, (place, later))
                elif not isinstance(later, Poll):
                    break
            if len(firsts) > 1:
                fingerprint, *_ = self._ask_shares.order(firsts)
                at, question = firsts[fingerprint]
                if self._clock() < question.deadline:  # else its keys are not asked for
                    self._ask_shares.use(fingerprint, len(question.keys))
        del waiting[at]
        return [question]

    # --- answers of the store --------------------------------------------------------------------

    def find(self, group: BlockGroup, keys: Sequence[bytes], *, prefix: bool) -> Found:
        if not self.available():
            return Found(bytes(len(keys)))
        return self._answers.find(group, keys, prefix=prefix)

    # --- reading, writing, removing --------------------------------------------------------------

    def wants(self, group: BlockGroup, keys: Sequence[bytes]) -> list[bool]:
        tag, fits = group.tag, group.nbytes <= MAX_OBJECT_BYTES and fits_header(group, MAX_KEY_BYTES)
        there = self._answers.are_believed(tag, keys)
        return [fits and (tag, key) not in self._writes and not its for key, its in zip(keys, there, strict=True)]

    def read(
        self,
        group: BlockGroup,
        key: bytes,
        offsets: Sequence[int],
        patience_s: float,
        on_end: ReadEnd,
        is_awaited: Callable[[], bool] = lambda: True,
    ) -> bool:
        if (
            not self.available()
            or not all(self._answers.are_believed(group.tag, [key]))
            or self._reading.waiting >= MAX_READS
        ):
            return False
        stored, views = self._stored(group), self._views(group, offsets)
        self._reading.put(ObjectRead(group, stored, key, views, patience_s, on_end, is_awaited))
        return True

    def write(self, block: Block, offsets: Sequence[int], on_end: WriteEnd) -> bool:
        group, key = block.group, block.key
        most = 1 if self.refuses_writes() else MAX_WRITES
        if not (self.available() and self.health.tries_writes) or len(self._writes) >= most:
            return False
        if not self.takes(group, key) or not all(self.wants(group, [key])):
            return False
        stored = block._replace(group=self._stored(group))
        self._writes[group.tag, key] = write = ObjectWrite(group, stored, self._views(group, offsets), on_end)
        self._writing.put(write)
        return True

    def remove(self, group: BlockGroup, keys: Sequence[bytes], *, for_all_nodes: bool = False) -> None:
        self._answers.hide(group.tag, keys, HIDDEN_S)
        if for_all_nodes:
            self._remove_objects(self._stored(group), keys)

    def _remove_objects(self, stored: BlockGroup, keys: Sequence[bytes]) -> None:
        for at in range(0, len(keys), REMOVED_AT_ONCE):
            removal = Removal(stored, keys[at : at + REMOVED_AT_ONCE])
            if self._writing.waiting < MAX_WRITES + MAX_REMOVALS:
                self._writing.put(removal)
            else:
                self._write_ended(removal, Result.FAILED)

    def _stored(self, group: BlockGroup) -> BlockGroup:
        """Return the group as it is in the store now."""
        return stored_group(group, self.generations.fleet(group.fingerprint))

    def _views(self, group: BlockGroup, offsets: Sequence[int]) -> list[memoryview]:
        """Return the pool's memory of a block, one view per shard."""
        return [self._pool[at : at + length] for at, length in zip(offsets, group.lengths, strict=True)]

    # --- state and maintenance -------------------------------------------------------------------

    def available(self) -> bool:
        return bool(self.name) and not self.breaker.open and not self.closed

    def takes(self, group: BlockGroup, key: bytes) -> bool:
        # Of a namespace that was reset on all nodes the pool's blocks are void until they are dropped here. (Those that
        # are too large for a store are not wanted.)
        return group.fingerprint not in self.generations.voided

    def refuses_writes(self) -> bool:
        return bool(self.health.refusal)

    def is_down(self) -> bool:
        servers = self._store.servers
        is_whole = servers is None or servers.all_answer
        return self._answers.is_unanswered or not (is_whole and self.available())

    @property
    def lifetime_bytes(self) -> int:
        return self.health.fullness.lifetime_bytes

    @property
    def servers(self) -> list[Server]:
        """The servers of the store, as far as they are known. A single one is as this tier found the store: only a
        cluster's connections record how each server is."""
        found = list(self._store.servers or ())
        return found if len(found) != 1 else [Server(found[0].name, self.available(), self.health.problem)]

    def tick(self) -> None:
        """End waiting reads while the breaker is open. Put questions that are due. Report unreachable servers, when the
        store is reachable, and an asking thread that hangs.
        """
        if not self.name:  # no peer has this place yet
            return
        self.clears.tick()
        if self.breaker.open:
            self._reading.end(ObjectReadEnd(Result.FAILED))
        if self.health.follow_breaker() and not self.may_be_away:
            logger.info("%s is reachable.", self.name)
        self._put_due_questions()
        if self._store.servers is not None:
            for name, error in self._store.servers.take_skipped().items():
                self._error(f"{error.kind} {name}", error.sentence)
        if self._asking.longest_s > HANGS_S + (RAISE_S if self.clears.raises else 0.0):
            self._end_overdue()

    def _end_overdue(self) -> None:
        """End what the asking thread should have begun: it hangs, as in name resolution. Open the breaker."""
        begun_by = self._clock() - HANGS_S
        overdue = self._asking.end(None, lambda question: question.deadline < begun_by)
        if overdue and not self.breaker.open:
            self.breaker.failed("ask", at_once=True)
            why = f"Connecting to {self.name} takes too long; check its name and the network."
            self.failed(StoreError(StoreFault.TIMEOUT, why), refuses_writes=False)

    def _put_due_questions(self) -> None:
        for question in self.health.take_questions():
            self._asking.put(question)

    def stats(self) -> TierStats:
        reads = self._reading.waiting + self._reading.running
        return replace(
            self.counters,
            size_bytes=self.health.fullness.usage.size_bytes,
            used_bytes=self.health.fullness.usage.used_bytes,
            queued_reads=reads,
            queued_writes=len(self._writes),
            errors=self.counters.errors.copy(),
        )

    def close(self, deadline_s: float) -> bool:
        until = time.monotonic() + deadline_s
        self.closed = True
        for store in self._stores:
            store.interrupt()
        self._asking.end(StoreError(StoreFault.CLOSED, f"{self.name} is being closed."))
        self._reading.end(ObjectReadEnd(Result.CANCELLED))
        self._writing.end(Result.CANCELLED)
        ended = [one.close(until) for one in (self._asking, self._reading, self._writing)]
        if all(ended):
            for store in self._stores:
                store.close()
        return all(ended)

    # --- what has ended, in the daemon's thread --------------------------------------------------

    def _question_ended(self, question: Question, answer: Any) -> None:
        self.health.asked_at = self._clock()
        if isinstance(answer, Answered):
            earlier = self.counters.ask_seconds or answer.seconds
            self.counters.ask_seconds = OLD_WEIGHT * earlier + (1 - OLD_WEIGHT) * answer.seconds
        question.end(answer)

    def _read_ended(self, read: ObjectRead, end: ObjectReadEnd) -> None:
        result, block = end.result, end.block
        if result is Result.FAILED and not (read.retried or end.overloaded) and self.available():
            read.retried = True  # one lost or stalled connection should not cost the blocks of a prompt
            self._reading.put(read)
            return
        group, key, counters = read.group, read.key, self.counters
        if result is Result.DONE and read.stored.generation != self.generations.fleet(group.fingerprint):
            result, block = Result.GONE, None  # void since
        if result is Result.DONE:
            counters.read_blocks += 1
            counters.read_bytes += group.nbytes
        elif result is not Result.UNWANTED:
            seconds = HIDDEN_S if result is Result.CORRUPT else self._store.failed_s
            if end.overloaded or not self.available():  # nothing is wrong with this block
                seconds = NO_S
            self._answers.hide(group.tag, [key], seconds)
        if result is Result.CORRUPT:
            counters.mismatches += 1
            self._remove_objects(stored := read.stored, [key])  # not those of a clear since, by the same key
            which = f"{key.hex()} of {stored.fingerprint.hex()}/{stored.generation}/{stored.group_index}"
            self._error("mismatch", f"The block {which} has other bytes than were written; it is removed.")
        read.on_end(result, block._replace(group=group) if block is not None else None)

    def _write_ended(self, write: ObjectWrite | Removal, result: Result) -> None:
        if isinstance(write, Removal):
            if result is not Result.DONE:
                self.counters.dropped_removals += len(write.keys)
            return
        group, key, counters = write.group, write.stored.key, self.counters
        del self._writes[group.tag, key]
        if result is Result.DONE:
            self.health.wrote()
            counters.written_blocks += 1
            counters.written_bytes += group.nbytes
        elif result is Result.EXISTED:
            counters.already_stored += 1
        else:
            counters.dropped_writes += 1
        there = result in (Result.DONE, Result.EXISTED)
        if there and write.stored.group.generation == self.generations.fleet(group.fingerprint):  # else void since
            self._answers.record(group.tag, [key], [True])
        write.on_end(result)

    def failed(self, error: StoreError, *, refuses_writes: bool) -> None:
        """Record a failure, and report it. ``refuses_writes``: the server answers, but refuses a write."""
        self.health.failed(error, refuses_writes=refuses_writes)
        if self.may_be_away:
            self.counters.errors[error.kind] += 1
        else:
            self._error(error.kind, error.sentence)
