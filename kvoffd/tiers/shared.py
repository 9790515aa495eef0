"""The shared tier: blocks in a store that many nodes write to and read from. Threads wait for the store."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from math import inf
from typing import Any

from kvoffd.pool.slot_table import MAX_KEY_BYTES
from kvoffd.system.newest import put_newest
from kvoffd.system.threads import Workers
from kvoffd.tiers.answers import HIDDEN_S, NO_S, UNKNOWN, Answers
from kvoffd.tiers.asking_thread import (
    Answer,
    Ask,
    AskingThread,
    Look,
    Poll,
    PollAnswer,
    Probe,
    Question,
    Raise,
    Unfollowed,
)
from kvoffd.tiers.block_threads import (
    BlockThread,
    ObjectRead,
    ObjectWrite,
    Removal,
    take_batch,
)
from kvoffd.tiers.breaker import Breaker
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
)
from kvoffd.tiers.store_health import StoreHealth
from kvoffd.tiers.tier import (
    ABSENT,
    ASKED,
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

_IS_UNKNOWN = bytes(state == UNKNOWN for state in range(256))
MAX_ASKED = 65_536
"""Keys whose answers may be outstanding."""
MAX_READS, MAX_WRITES = 4096, 64
MAX_REMOVALS, REMOVED_AT_ONCE = 16, 1000
"""Tasks that may wait beyond ``MAX_WRITES`` before removals are dropped, and objects of one removal."""
MAX_NAMESPACES = 65_536
"""Limit of the namespaces whose last poll for a reset is remembered."""
POLLED_AT_ONCE = 1024
"""Namespaces of one poll."""
MAX_OBJECT_BYTES = 500 * 2**20
"""Limit of a block: Redis accepts values of 512 MiB."""
READERS = 2

HANGS_S = 0.5
"""Time after its deadline by which an ask must have begun, unless a raise takes its time."""
RAISE_S = 5.0
"""Limit for raising a generation, or for checking whether another node did."""
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
        self._stores = [first, *(open_store() for _ in range(READERS + first.writers))]
        self.ask_deadline_s = ask_deadline_s
        self.breaker = Breaker(clock)
        self._pool = pool
        self._clock = clock
        self.post = post
        self._answers = Answers(clock, ask_deadline_s, first.believed_s)
        self.generations = generations or Generations()
        self._poll_next = self.closed = False
        """``_poll_next``: whether a poll is taken next, if one waits."""
        self._unfollowed: list[Raise] = []
        """Raises that a peer has not followed yet: ``tick`` asks again."""
        self._raises = 0
        """Raises that the asking thread has, which may take ``RAISE_S`` each."""
        self._asked_keys = 0
        self._writes: dict[tuple[int, bytes], ObjectWrite] = {}
        self._know_nothing(name)
        threads = [BlockThread(self, store, clock) for store in self._stores[1:]]
        asks = [AskingThread(self, first, clock).asks]
        reads, writes = [one.reads for one in threads[:READERS]], [one.writes for one in threads[READERS:]]
        ends = post, clock
        self._asking = make_workers(
            "kvoffd-shared-ask", asks, lambda error: error, self._question_ended, *ends, self._next_question
        )
        failed, take = (Result.FAILED, None), partial(take_batch, first)
        self._reading = make_workers(
            *("kvoffd-shared-read", reads, lambda error: failed, self._read_ended, *ends, take),
            nice=READERS_NICE,
        )
        self._writing = make_workers(
            "kvoffd-shared-write", writes, lambda error: Result.FAILED, self._write_ended, *ends, take
        )
        if name:
            self._put_due_questions()

    def _know_nothing(self, name: str) -> None:
        """Start without knowledge of the store of this name."""
        self.name, self.counters = name, TierStats()
        self.health = StoreHealth(self.breaker, self.counters, len(self._pool), self._clock)
        self.found_at = -inf
        self._unanswered = False
        """Whether the last question about keys was not answered."""
        self._polled_at: dict[bytes, float] = {}
        """Time of the last poll's answer about each namespace; inf while one is polled."""
        self._answered_about: dict[bytes, float] = {}
        """Time of the last answer about each namespace, whose generation is followed since."""

    def become(self, name: str) -> None:
        """Become the tier of another store, while idle."""
        self._know_nothing(name)
        self._answers.clear()
        self.health.assume_steady()
        self.breaker.reset()  # the first question waits for the connection

    @property
    def idle(self) -> bool:
        """Whether nothing is being asked, read or written, and all ends were handled."""
        return not (self._unfollowed or any(one.unfinished for one in (self._asking, self._reading, self._writing)))

    def _next_question(self, waiting: deque[Question]) -> list[Question]:
        """Take polls and other questions in turn, so that neither delays the other."""
        polls = (isinstance(question, Poll) for question in waiting)
        at = next((at for at, is_poll in enumerate(polls) if is_poll is self._poll_next), 0)
        self._poll_next = not self._poll_next
        question = waiting[at]
        del waiting[at]
        return [question]

    # --- answers of the store --------------------------------------------------------------------

    def find(self, group: BlockGroup, keys: Sequence[bytes], *, prefix: bool) -> Found:
        if not self.available():
            return Found(bytes(len(keys)))
        question: Ask | None = None
        states = self._answers.states(group.tag, keys)
        first, end = 0, len(keys)  # the keys that may be asked for
        if not prefix:  # the last ones, known or not: else each lookup that waits would ask further from the end
            first = max(0, end - self._store.most_window_keys)
        elif (gap := states.find(ABSENT)) >= 0:  # keys behind a gap are useless
            end = gap
        unknown = list(compress(range(first, end), states[first:end].translate(_IS_UNKNOWN)))
        if places := unknown[: MAX_ASKED - self._asked_keys]:
            span = slice(places[0], places[-1] + 1)  # all that are unknown in it are asked for
            states[span] = states[span].replace(bytes([UNKNOWN]), bytes([ASKED]))
            asks_all = len(places) == len(keys)
            asked = keys if asks_all else list(map(keys.__getitem__, places))
            self._answers.asked(group.tag, asked)
            self._asked_keys += len(asked)
            self.counters.asked_keys += len(asked)
            ask = Ask(group, asked, prefix, self._clock() + self.ask_deadline_s)
            self._asking.put(ask)
            question = ask if asks_all else None
        return Found(bytes(states).replace(bytes([UNKNOWN]), bytes([ABSENT])), question)

    # --- reading, writing, removing --------------------------------------------------------------

    def wants(self, group: BlockGroup, keys: Sequence[bytes]) -> list[bool]:
        tag, fits = group.tag, group.nbytes <= MAX_OBJECT_BYTES and fits_header(group, MAX_KEY_BYTES)
        believed = self._answers.are_believed(tag, keys)
        return [fits and (tag, key) not in self._writes and not its for key, its in zip(keys, believed, strict=True)]

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
        if not (self.available() and self.health.accepts_writes) or len(self._writes) >= most:
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
        return stored_group(group, self.generations.fleet(group.fingerprint))

    def _views(self, group: BlockGroup, offsets: Sequence[int]) -> list[memoryview]:
        return [self._pool[at : at + length] for at, length in zip(offsets, group.lengths, strict=True)]

    # --- state and maintenance -------------------------------------------------------------------

    def available(self) -> bool:
        return bool(self.name) and not self.breaker.open and not self.closed

    def takes(self, group: BlockGroup, key: bytes) -> bool:
        # Blocks of a namespace that was reset on all nodes belong to the earlier generation until they are dropped.
        return group.fingerprint not in self.generations.voided

    def refuses_writes(self) -> bool:
        return bool(self.health.refusal)

    def is_down(self) -> bool:
        servers = self._store.servers or ()
        return self._unanswered or not self.available() or not all(one.answers for one in servers)

    @property
    def lifetime_bytes(self) -> int:
        return self.health.fullness.lifetime_bytes

    @property
    def servers(self) -> list[Server]:
        """The servers of the store, as far as they are known."""
        found = list(self._store.servers or ())
        return found if len(found) != 1 else [Server(found[0].name, self.available(), self.health.problem)]

    def tick(self) -> None:
        """End waiting reads while the breaker is open. Put questions that are due. Report unreachable servers, when the
        store is reachable, and an asking thread that hangs.
        """
        if not self.name:  # no peer has this place yet
            return
        for request in self._unfollowed:
            self._put_raise(request)
        self._unfollowed.clear()
        if self.breaker.open:
            self._reading.end((Result.FAILED, None))
        if self.health.becomes_steady() and not self.may_be_away:
            logger.info("%s is reachable.", self.name)
        self._put_due_questions()
        if self._store.servers is not None:
            for name, error in self._store.servers.take_skipped().items():
                self._error(f"{error.kind} {name}", error.sentence)
        if self._asking.longest_s > HANGS_S + (RAISE_S if self._raises else 0.0):
            self._end_overdue()

    def _end_overdue(self) -> None:
        """End what the asking thread, which hangs, as in name resolution, should have begun; open the breaker."""
        begun_by = self._clock() - HANGS_S
        overdue = self._asking.end(None, lambda one: isinstance(one, Ask | Poll) and one.deadline < begun_by)
        if overdue and not self.breaker.open:
            self.breaker.failed("ask", at_once=True)
            why = f"Connecting to {self.name} takes too long; check its name and the network."
            self.failed(StoreError("timeout", why), refuses_writes=False)

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
        self._asking.end(StoreError("closed", f"{self.name} is being closed."))
        self._reading.end((Result.CANCELLED, None))
        self._writing.end(Result.CANCELLED)
        ended = [one.close(until) for one in (self._asking, self._reading, self._writing)]
        if all(ended):
            for store in self._stores:
                store.close()
        return all(ended)

    # --- generations of namespaces ---------------------------------------------------------------

    def raise_generation(self, fingerprint: bytes, generation: int, cleared_at: int) -> Raise:
        """Begin to void a namespace's blocks for all nodes; the result shows when that has ended, and how.
        ``cleared_at``: see ``Store.clear``."""
        request = Raise(fingerprint, generation, cleared_at, self._clock() + RAISE_S)
        if not (self.breaker.silent or self.closed):
            self._put_raise(request)
        else:
            request.ended, request.problem = True, self.health.problem or f"{self.name} has not been reached yet."
        return request

    def _put_raise(self, request: Raise) -> None:
        self._raises += 1
        self._asking.put(request)

    def poll(self, fingerprints: Iterable[bytes]) -> None:
        """Check whether namespaces' blocks were voided for all nodes, unless that was done recently. Once that is due
        for one of them, one question is about all."""
        if not self.name or self.breaker.silent or self.closed:
            return
        now = self._clock()
        polled_at = {one: at for one in fingerprints if (at := self._polled_at.get(one, -inf)) < inf}
        if any(now >= at + self._store.poll_s for at in polled_at.values()):
            self._put_polls(list(polled_at))

    def _put_polls(self, fingerprints: Sequence[bytes]) -> None:
        for first in range(0, len(fingerprints), POLLED_AT_ONCE):
            asked = fingerprints[first : first + POLLED_AT_ONCE]
            for one in asked:
                put_newest(self._polled_at, one, inf, MAX_NAMESPACES)
            self._asking.put(Poll(asked, self._clock() + RAISE_S))

    def tell(self, fingerprints: Iterable[bytes]) -> None:
        """Have a peer hear of the generations that namespaces have here now.

        A store hears of them from the node that cleared: all nodes at once would raise them several times.
        """
        if self._store.follows and self.name and not (self.breaker.silent or self.closed):
            self._put_polls(list(fingerprints))

    def answered_about(self, fingerprint: bytes) -> float:
        """Return the time of the store's last answer about a namespace; -inf without one."""
        return self._answered_about.get(fingerprint, -inf)

    def _record_generation(self, fingerprint: bytes, generation: int) -> None:
        if self.generations.hear(fingerprint, generation):
            logger.info("The blocks of a namespace in %s are void: its generation is %d now.", self.name, generation)
            self._answers.clear()  # of all namespaces: voiding is rare, and answers are short-lived

    # --- what has ended, in the daemon's thread --------------------------------------------------

    def _question_ended(self, question: Question, result: Any) -> None:
        self.health.question_ended()
        if isinstance(question, Probe):
            self.health.probed()
        elif isinstance(question, Look):
            self.health.looked(result)
        elif isinstance(question, Ask):
            self._ask_ended(question, result if isinstance(result, Answer) else None)
        elif isinstance(question, Poll):
            self._poll_ended(question, result if isinstance(result, PollAnswer) else None)
        else:
            self._raise_ended(question, result)

    def _raise_ended(self, request: Raise, result: int | Exception) -> None:
        self._raises -= 1
        if isinstance(result, int):
            self._record_generation(request.fingerprint, result)
            request.ended, request.problem = True, ""
            return
        request.problem = str(result) or repr(result)
        request.ended = not isinstance(result, Unfollowed) or self._clock() >= request.deadline
        if not request.ended:
            self._unfollowed.append(request)

    def _poll_ended(self, poll: Poll, answer: PollAnswer | None) -> None:
        now = self._clock()
        self._polled_at.update((one, now) for one in poll.fingerprints if one in self._polled_at)
        if answer is not None:
            self._record_duration(answer.seconds)
            for fingerprint, generation in zip(poll.fingerprints, answer.generations, strict=True):
                if generation is not None:
                    self._record_answer(fingerprint, generation)

    def _record_duration(self, seconds: float) -> None:
        earlier = self.counters.ask_seconds or seconds
        self.counters.ask_seconds = OLD_WEIGHT * earlier + (1 - OLD_WEIGHT) * seconds

    def _record_answer(self, fingerprint: bytes, generation: int) -> None:
        """Record that the store has answered about a namespace, and its generation there."""
        self._record_generation(fingerprint, generation)
        put_newest(self._answered_about, fingerprint, self._clock(), MAX_NAMESPACES)

    def _ask_ended(self, ask: Ask, answer: Answer | None) -> None:
        fingerprint, found = ask.group.fingerprint, [False] * len(ask.keys)
        self._asked_keys -= len(ask.keys)
        if answer is None:
            self.counters.unanswered_keys += len(ask.keys)
        else:
            self._record_duration(answer.seconds)
            self._record_answer(fingerprint, answer.generation)
            if answer.generation == self.generations.fleet(fingerprint):  # else the blocks are void by now
                found = answer.found
                if count := sum(found):
                    self.counters.found_keys += count
                    self.found_at = self._clock()
        self._unanswered = answer is None
        self._answers.record(ask.group.tag, ask.keys, found)
        if ask.prefix and False in found:
            gap = found.index(False)
            found = [True] * gap + [False] * (len(found) - gap)
        self._listener.answered(self, ask.group, ask.keys, found, ask)

    def _read_ended(self, read: ObjectRead, ended: tuple[Result, Block | None]) -> None:
        result, block = ended
        if result is Result.FAILED and not (read.retried or read.overloaded) and self.available():
            read.retried = True  # one lost or stalled connection should not cost the blocks of a prompt
            self._reading.put(read)
            return
        group, key, counters = read.group, read.key, self.counters
        if result is Result.DONE and read.stored.generation != self.generations.fleet(group.fingerprint):
            result, block = Result.GONE, None
        if result is Result.DONE:
            counters.read_blocks += 1
            counters.read_bytes += group.nbytes
        elif result is not Result.UNWANTED:
            seconds = HIDDEN_S if result is Result.CORRUPT else self._store.failed_s
            if read.overloaded or not self.available():  # nothing is wrong with this block
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
        if there and write.stored.group.generation == self.generations.fleet(group.fingerprint):
            self._answers.record(group.tag, [key], [True])
        write.on_end(result)

    def failed(self, error: StoreError, *, refuses_writes: bool) -> None:
        """Record a failure, and report it. ``refuses_writes``: the server answers, but refuses a write."""
        self.health.failed(error, refuses_writes=refuses_writes)
        if self.may_be_away:
            self.counters.errors[error.kind] += 1
        else:
            self._error(error.kind, error.sentence)
