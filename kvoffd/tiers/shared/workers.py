"""The threads of a shared tier: one asks and probes, some read, some write. Each has a connection of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ParamSpec, TypeVar

from kvoffd.system.threads import DaemonThreads
from kvoffd.system.turns import Turns
from kvoffd.tiers.shared.breaker import Breaker
from kvoffd.tiers.shared.object_format import (
    decode_header,
    encode_header,
    generation_key,
    header_bytes,
    key_prefix,
    object_key,
)
from kvoffd.tiers.shared.store import GetRequest, Store, StoreError, bad_generation
from kvoffd.tiers.shared.work import Ask, Raise, Read, WorkListener, Write
from kvoffd.tiers.tier import Digest, TierBlock, TierResult

logger = logging.getLogger(__name__)

READERS = 2
ASK_PATIENCE_S = 0.08
"""An ask that takes so much longer than its deadline ends with its connection; beyond the deadline it is a failure."""
PROBE_S = 1.0
QUIET_S = 10.0
"""A store that nobody asks for so long is probed, so that operators hear of one that is gone."""
WRITE_S = 10.0
"""For a few objects, or for removing a thousand."""
IDLE_S = 1.0
"""How long a thread waits at most before it looks again whether it is to end."""
REMOVED_AT_ONCE = 1000
MOST_REMOVALS = 16_384
"""Objects that may wait to be removed."""
LOGGED_S = 60.0
MOST_AHEAD_S = 10 * 365 * 86_400
"""A generation is a time in seconds, or little more, by a clock that may be wrong."""
LOST = ("timeout", "disconnected", "unreachable", "tls", "internal")
"""Kinds of errors of writing that are no answer of the server's."""


_Block = TypeVar("_Block", Read, Write)
T = TypeVar("T")
P = ParamSpec("P")


class Workers:
    """Queues, and the threads that work them off. Deadlines are of ``clock``: ``time.monotonic``, but in tests.

    ``post`` has ``listener`` called in the daemon's thread.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        generations: Callable[[bytes], int],
        digest: Digest,
        breaker: Breaker,
        listener: WorkListener,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        ask_deadline_s: float,
    ) -> None:
        self._generations = generations
        self._digest = digest
        self._breaker = breaker
        self._listener = listener
        self._post = post
        self._clock = clock
        self._ask_deadline_s = ask_deadline_s
        # A condition for each kind of thread: to wake those that have nothing to do costs time of the interpreter.
        self._lock = threading.Lock()
        self._to_ask, self._to_read, self._to_write = (threading.Condition(self._lock) for _ in range(3))
        self.asks: Turns[Ask] = Turns()
        self._ask_taken_at = 0.0
        self._reads: deque[Read] = deque()
        self._writes: deque[Write] = deque()
        self._removals: deque[bytes] = deque()
        self._raises: deque[Raise] = deque()
        self._closed = False
        self._unexpected_at = -LOGGED_S
        self._stores = stores
        self._threads = self._start_threads()

    def _start_threads(self) -> DaemonThreads:
        works = [("ask", self._work_asks), *[("read", self._work_reads)] * READERS]
        works += [("write", self._work_writes)] * self._stores[0].writers
        return DaemonThreads(
            (f"kvoffd-shared-{name}", partial(work, store))
            for (name, work), store in zip(works, self._stores, strict=True)
        )

    def ask(self, ask: Ask) -> None:
        with self._lock:
            self.asks.put(ask.owner, ask)
            self._to_ask.notify()

    def read(self, read: Read) -> None:
        with self._lock:
            self._reads.append(read)
            self._to_read.notify()

    def write(self, write: Write) -> None:
        with self._lock:
            self._writes.append(write)
            self._to_write.notify()

    def raise_generation(self, one: Raise) -> None:
        with self._lock:
            self._raises.append(one)
            self._to_write.notify()

    def remove(self, keys: Sequence[bytes]) -> None:
        """Have objects removed, as many as there is room for in the queue."""
        with self._lock:
            self._removals += keys[: MOST_REMOVALS - len(self._removals)]
            self._to_write.notify()

    def _end(self, tell: Callable[P, None], *what: P.args, **named: P.kwargs) -> None:
        self._post(partial(tell, *what, **named))

    def take_overdue_asks(self, before: float) -> list[Ask]:
        """All asks that wait, where one should have ended by then and none was taken since: the thread hangs."""
        with self._lock:
            overdue = self._ask_taken_at < before and any(ask.deadline < before for ask in self.asks)
        return self._next_asks(len(self.asks)) if overdue else []

    def close(self, deadline_s: float) -> bool:
        """Interrupt what runs and begin nothing more. False where a thread still hangs."""
        until = time.monotonic() + deadline_s
        with self._lock:
            self._closed = True
            for condition in (self._to_ask, self._to_read, self._to_write):
                condition.notify_all()
        for store in self._stores:
            store.interrupt()
        return self._threads.join(until)

    def _work_asks(self, store: Store) -> None:
        heard_at = self._clock()
        while not self._closed:
            if self._breaker.open:
                self._ask_nothing()
                self._probe_when_due(store)
            elif self._wait(self._to_ask, lambda: bool(self.asks)):
                self._ask_next(store)
            elif self._clock() - heard_at < QUIET_S:
                continue
            elif not self._probe(store):
                self._breaker.failed("ask", at_once=True)
            heard_at = self._clock()
        store.close()

    def _ask_nothing(self) -> None:
        for ask in self._next_asks(len(self.asks)):
            self._end(self._listener.unanswered, ask)

    def _ask_next(self, store: Store) -> None:
        for ask in self._next_asks(1):
            self._ask(store, ask)

    def _probe_when_due(self, store: Store) -> None:
        pause_s = self._breaker.probe_in_s
        if pause_s:
            with self._lock:
                self._to_ask.wait(min(pause_s, IDLE_S))
            return
        if self._probe(store):
            self._breaker.probe_succeeded()
        else:
            self._breaker.probe_failed()

    def _probe(self, store: Store) -> bool:
        """Whether the store answers; what it fails by is told."""
        try:
            store.connect()
            store.ping(self._clock() + PROBE_S)
        except Exception as error:
            self._report(store, error)
            return False
        return True

    def _ask(self, store: Store, ask: Ask) -> None:
        started = self._clock()
        if started >= ask.deadline and ask.keys:
            self._end(self._listener.unanswered, ask)
            return
        most = store.keys_at_once
        part, rest = replace(ask, keys=ask.keys[:most]), replace(ask, keys=ask.keys[most:])
        try:
            store.connect()
            connected = self._clock()
            generation, found = self._exchange(store, part, connected + self._ask_deadline_s + ASK_PATIENCE_S)
        except Exception as error:
            self._fail(store, error, "ask")
            self._end(self._listener.unanswered, ask)
            return
        ended = self._clock()
        if ask.prefix and False in found:
            part, found = ask, [*found, *[False] * len(rest.keys)]
            rest = replace(ask, keys=())
        self._end(self._listener.asked, part, generation, found, ended - started)
        if rest.keys:
            with self._lock:
                self.asks.put(ask.owner, rest, first=True)
        # To look for one of several servers that is down takes time, which says nothing of the others.
        if ended - connected > self._ask_deadline_s:
            self._breaker.failed("ask")
        else:
            self._breaker.succeeded("ask")

    def _exchange(self, store: Store, ask: Ask, deadline: float) -> tuple[int, list[bool]]:
        own_key, known = generation_key(ask.fingerprint), self._generations(ask.fingerprint)
        generation, found = store.ask(own_key, _names(ask, known), deadline, prefix=ask.prefix)
        _check_generation(own_key, generation)
        if generation > known:
            known, found = store.ask(own_key, _names(ask, generation), deadline, prefix=ask.prefix)
        elif generation < known:
            # A store that forgot the number, and not the blocks of an older one, must not bring those back.
            try:
                store.raise_generation(own_key, generation, known, deadline)
            except StoreError as error:
                if error.kind in LOST:
                    raise
                self._fail(store, error, "write")  # whoever may write does it
        if len(found) != len(ask.keys):
            raise StoreError("protocol", f"{len(ask.keys)} keys were asked for, and {len(found)} answered.")
        return known, found

    def _work_reads(self, store: Store) -> None:
        while self._wait(self._to_read, lambda: bool(self._reads)) or not self._closed:
            self._read_next(store)
        store.close()

    def _read_next(self, store: Store) -> None:
        batch = self._next_blocks(store, self._reads)
        now = self._clock()
        late = [read for read in batch if read.deadline <= now]
        for read in late:
            self._end(self._listener.read_ended, read, TierResult.DEADLINE, None)
        if batch := [read for read in batch if read not in late]:
            self._read(store, deque(batch))

    def _read(self, store: Store, batch: deque[Read]) -> None:
        if self._breaker.open:
            for read in batch:
                self._end(self._listener.read_ended, read, TierResult.FAILED, None)
            return
        deadline = min(read.deadline for read in batch)
        requests = [
            GetRequest(
                object_key(read.block_id, read.generation), header_bytes(read.block_id, len(read.views)), read.views
            )
            for read in batch
        ]
        try:
            store.connect()
            for header in store.get(requests, deadline):
                self._breaker.succeeded("read")
                block = self._verified(batch[0], header) if header else None
                read = batch.popleft()
                if header is None:
                    self._end(self._listener.read_ended, read, TierResult.GONE, None)
                else:
                    self._end(self._listener.read_ended, read, TierResult.DONE if block else TierResult.CORRUPT, block)
                    if block is None:
                        # It may be the answer to another question, as what follows on the connection then is.
                        store.close()
                        break
        except Exception as error:
            self._fail(store, error, "read")
            if batch:
                read = batch.popleft()
                late = self._clock() >= read.deadline
                self._end(self._listener.read_ended, read, TierResult.DEADLINE if late else TierResult.FAILED, None)
        with self._lock:
            self._reads.extendleft(reversed(batch))

    def _verified(self, read: Read, header: bytes) -> TierBlock | None:
        """The block as it was read; None where header or bytes are not those of a whole object of this block."""
        block = decode_header(header, read.block_id, [len(view) for view in read.views], read.generation, self._digest)
        if block is None:
            return None
        right = all(self._digest(view) == shard.checksum for view, shard in zip(read.views, block.shards, strict=True))
        return block if right else None

    def _work_writes(self, store: Store) -> None:
        while self._wait(self._to_write, self._has_to_write) or not self._closed:
            self._write_next(store)
        store.close()

    def _write_next(self, store: Store) -> None:
        for one in self._next(self._raises, 1):
            self._raise(store, one)
        if keys := self._next(self._removals, REMOVED_AT_ONCE):
            self._remove(store, keys)
        if batch := self._next_blocks(store, self._writes):
            self._write(store, deque(batch))

    def _raise(self, store: Store, one: Raise) -> None:
        own_key = generation_key(one.fingerprint)
        try:
            store.connect()
            seen, _ = store.ask(own_key, [], one.deadline, prefix=True)
            _check_generation(own_key, seen)
            # The time, since a store that lost the number must not come to one that it had before.
            generation = max(seen + 1, self._generations(one.fingerprint) + 1, int(time.time()))
            generation = store.raise_generation(own_key, seen, generation, one.deadline)
        except Exception as error:
            self._fail(store, error, "write")
            self._end(self._listener.raised, one, 0, str(error) or repr(error))
        else:
            self._end(self._listener.raised, one, generation, "")

    def _remove(self, store: Store, keys: Sequence[bytes]) -> None:
        """Best effort: what stays is asked for again, and its checksum compared again."""
        if not self._breaker.open:
            try:
                store.connect()
                store.remove(keys, self._clock() + WRITE_S)
            except Exception as error:
                self._fail(store, error, "write")

    def _write(self, store: Store, batch: deque[Write]) -> None:
        try:
            if not self._breaker.open:
                store.connect()
                deadline = self._clock() + WRITE_S
                names = [object_key(write.block.id, write.generation) for write in batch]
                there = store.touch(names, deadline)
                absent: list[tuple[bytes, list[bytes | memoryview]]] = [
                    (name, [encode_header(write.block, write.generation, self._digest), *write.views])
                    for name, write, known in zip(names, batch, there, strict=True)
                    if not known
                ]
                stored = store.put(absent, deadline)
                if False in stored:
                    why = "It takes no more blocks now; see Redis's maxmemory-policy or the bucket's quota."
                    self._fail(store, StoreError("full", why), "write")
                self._breaker.succeeded("write")
                each = iter(stored)
                for known in there:
                    written = TierResult.PRESENT if known else TierResult.DONE if next(each) else TierResult.FAILED
                    self._end(self._listener.write_ended, batch.popleft(), written)
        except Exception as error:
            self._fail(store, error, "write")
        for write in batch:
            self._end(self._listener.write_ended, write, TierResult.FAILED)

    def _fail(self, store: Store, error: Exception, work: str) -> None:
        """Tell of a failure. It counts for the breaker, but where the server answers: that it takes no writes, or with
        a generation that is none."""
        reported = self._report(store, error)
        if self._closed:
            return
        if work == "write" and reported.kind not in LOST:
            self._end(self._listener.writing_refused, reported.sentence)
        elif reported.kind != "generation":
            self._breaker.failed(work, at_once=reported.final)

    def _report(self, store: Store, error: Exception) -> StoreError:
        if not isinstance(error, StoreError):  # a bug of the store's, which must not end its thread
            now = self._clock()
            if now - self._unexpected_at >= LOGGED_S:
                self._unexpected_at = now
                logger.error("A shared store failed unexpectedly.", exc_info=error)
            store.close()
            error = StoreError("internal", f"It failed unexpectedly: {error!r}; please report the log's traceback.")
        if not self._closed:
            self._end(self._listener.failed, error.kind, error.sentence)
        return error

    def _has_to_write(self) -> bool:
        return bool(self._writes or self._removals or self._raises)

    def _wait(self, condition: threading.Condition, there: Callable[[], bool]) -> bool:
        """Wait a while until something is there. False where nothing is, or all is to end."""
        with self._lock:
            if not self._closed:
                condition.wait_for(lambda: self._closed or there(), IDLE_S)
            return not self._closed and there()

    def _next(self, queue: deque[T], most: int) -> list[T]:
        with self._lock:
            return [queue.popleft() for _ in range(min(most, len(queue)))] if not self._closed else []

    def _next_asks(self, most: int) -> list[Ask]:
        taken: list[Ask] = []
        with self._lock:
            while len(taken) < most and not self._closed and (ask := self.asks.take()) is not None:
                self._ask_taken_at = self._clock()
                taken.append(ask)
        return taken

    def _next_blocks(self, store: Store, queue: deque[_Block]) -> list[_Block]:
        """Take what may be under way at once on a connection."""
        batch: list[_Block] = []
        room = store.bytes_at_once
        with self._lock:
            while queue and not self._closed and len(batch) < store.blocks_at_once:
                room -= sum(map(len, queue[0].views))
                if batch and room < 0:
                    break
                batch.append(queue.popleft())
        return batch


def _check_generation(own_key: bytes, generation: int) -> None:
    """Raise StoreError for a number that nobody can have raised it to: followed, it could hardly be raised again."""
    if generation > time.time() + MOST_AHEAD_S:
        raise bad_generation(f"{own_key.decode()}, {generation},")


def _names(ask: Ask, generation: int) -> list[bytes]:
    prefix = key_prefix(ask.fingerprint, generation, ask.group)
    return [prefix + key.hex().encode() for key in ask.keys]
