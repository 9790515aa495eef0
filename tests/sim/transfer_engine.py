"""A transfer engine in virtual time: copies in steps, may be slow, fail, stall, hang, and is watched at every byte."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvoffd.transfer.engine import OVERDUE_GRACE_S, CopyEngine, CopyStats, Transfer
from kvoffd.transfer.plan import Direction, Outcome
from tests.sim.clock import Broken, Injected
from tests.sim.pool import Slot

if TYPE_CHECKING:
    from tests.sim.daemon import SimDaemon


@dataclass(eq=False)
class _Copy:
    """A transfer that was submitted and has not ended."""

    transfer: Transfer
    slots: list[Slot]
    mappings: list[int]
    pieces: list[tuple[int, int, int]]
    moved: int = 0
    piece: int = 0
    step: int = 0
    steps: int = 1
    fails_at: int = -1
    hangs_at: int = -1
    overdue_since: float | None = None
    pause_s: float = 0.0


@dataclass
class _Queue:
    """The transfers of one direction."""

    waiting: dict[Transfer, _Copy] = field(default_factory=dict)
    running: _Copy | None = None
    unread: set[_Copy] = field(default_factory=set)
    """Stores that are copied and wait for their checksums, as on a GPU."""


class SimTransferEngine(CopyEngine):
    """One thread per direction, as HostEngine has, in the daemon's process."""

    def __init__(self, daemon: SimDaemon, rng: random.Random) -> None:
        self._clock, self._process, self._faults = daemon.clock, daemon.process, daemon.world.faults
        self._space, self._pool, self._rng = daemon.space, daemon.pool, rng
        self._deadline_s = daemon.config.limits.job_deadline_s
        self.queues = dict.fromkeys(Direction, self)  # type: ignore[assignment]
        self._queues = {direction: _Queue() for direction in Direction}
        self._closed = False

    # --- CopyEngine --------------------------------------------------------------------------

    def submit(self, transfer: Transfer) -> None:
        if self._closed:
            transfer.on_done(transfer, Outcome.CANCELLED)
            return
        copy = self._claim(transfer)
        queue = self._queues[transfer.direction]
        queue.waiting[transfer] = copy
        self._clock.note(f"submit {transfer.direction.value} {transfer.plan.nbytes} in {len(copy.pieces)}")
        if queue.running is None and len(queue.waiting) == 1:
            self._process.after(self._rng.uniform(0, 0.002), lambda: self._start(queue))

    def cancel(self, transfer: Transfer) -> bool:
        copy = self._queues[transfer.direction].waiting.pop(transfer, None)
        if copy is None:
            return False
        self._end(copy, Outcome.CANCELLED)
        return True

    def tick(self) -> None:
        now = self._clock.now
        for queue in self._queues.values():
            for transfer, copy in list(queue.waiting.items()):
                if now >= transfer.deadline:
                    del queue.waiting[transfer]
                    self._end(copy, Outcome.DEADLINE)
            for copy in queue.unread | ({queue.running} if queue.running else set()):
                if now >= copy.transfer.deadline:
                    copy.transfer.must_end(Outcome.DEADLINE)
            running = queue.running
            if running is None or running.overdue_since is not None:
                continue
            if now >= running.transfer.deadline + OVERDUE_GRACE_S:
                running.overdue_since = now
                self._clock.note(f"overdue {running.transfer.direction.value}")
                if running.transfer.on_overdue is not None:
                    running.transfer.on_overdue(running.transfer)

    def hangs_s(self) -> float:
        running = (queue.running for queue in self._queues.values())
        since = [copy.overdue_since for copy in running if copy is not None and copy.overdue_since is not None]
        return max((self._clock.now - at for at in since), default=0.0)

    def stats(self, direction: Direction) -> CopyStats:
        queue = self._queues[direction]
        return CopyStats(len(queue.waiting), int(queue.running is not None) + len(queue.unread))

    def close(self, timeout_s: float) -> bool:
        self._closed = True
        for queue in self._queues.values():
            waiting, queue.waiting = list(queue.waiting.values()), {}
            for copy in waiting:
                self._end(copy, Outcome.CANCELLED)
            for copy in queue.unread | ({queue.running} if queue.running else set()):
                copy.transfer.must_end(Outcome.FAILED)
        return not any(queue.running or queue.unread for queue in self._queues.values())

    @property
    def idle(self) -> bool:
        return not any(queue.waiting or queue.running or queue.unread for queue in self._queues.values())

    # --- the copy --------------------------------------------------------------------------------

    def _claim(self, transfer: Transfer) -> _Copy:
        """Check the whole plan before the first byte moves, as the daemon must have done."""
        plan = transfer.plan
        slots: dict[int, Slot] = {}
        mappings: dict[int, None] = {}
        pieces = list(zip(plan.destination.tolist(), plan.source.tolist(), plan.size.tolist(), strict=True))
        storing = transfer.direction is Direction.STORE
        for destination, source, size in pieces:
            pool_side, engine_side = (destination, source) if storing else (source, destination)
            mapping, offset = self._space.find(pool_side, size)
            if mapping is not self._pool.mapping:
                raise Broken("a plan's pool side lies outside the pool")
            for slot in self._pool.slots_at(offset, size):
                if slot.state != ("writing" if storing else "ready"):
                    raise Broken(f"a {transfer.direction.value} uses a slot that is {slot.state}")
                slots[slot.offset] = slot
            mapping, offset = self._space.find(engine_side, size)
            if mapping.segment is None or not mapping.segment.registered[offset : offset + size].all():
                raise Broken("a plan's engine side lies outside the registered tensors")
            mappings[self._space.number(engine_side)] = None
        if sum(size for _, _, size in pieces) != plan.nbytes:
            raise Broken("a plan's pieces are not as long as it says")
        for slot in slots.values():
            if storing and slot.transfers:
                raise Broken("two transfers use one slot that is being written")
            slot.transfers += 1
        for number in mappings:
            self._space.busy[number] = self._space.busy.get(number, 0) + 1
        return _Copy(transfer, list(slots.values()), list(mappings), pieces)

    def _start(self, queue: _Queue) -> None:
        if queue.running is not None or not queue.waiting:
            return
        transfer, copy = next(iter(queue.waiting.items()))
        del queue.waiting[transfer]
        queue.running = copy
        copy.steps = self._rng.choice((1, 1, 2, 3, 5))
        copy.pause_s = self._rng.choice((0.0001, 0.0005, 0.003))
        if self._faults.hit("copy_slow"):
            copy.steps += 3
            copy.pause_s = self._rng.uniform(0.01, 0.1)
        if self._faults.hit("copy_stall"):
            copy.steps += 1
            copy.pause_s = self._deadline_s * self._rng.uniform(0.3, 1.5)
        if self._faults.hit("copy_fail"):
            copy.fails_at = self._rng.randrange(copy.steps)
        if self._faults.hit("copy_hang"):
            copy.hangs_at = self._rng.randrange(copy.steps)
        self._step(queue, copy)

    def _step(self, queue: _Queue, copy: _Copy) -> None:
        transfer = copy.transfer
        if copy.step == copy.hangs_at:
            return  # its thread never comes back
        checksums, storing = transfer.checksums, transfer.direction is Direction.STORE
        if copy.step == 0 and self._clock.now >= transfer.deadline:
            transfer.must_end(Outcome.DEADLINE)
        outcome = transfer.ending if transfer.stop.value else None  # as C looks at the flag, and at nothing else
        if outcome is None and transfer.ending is not None:
            raise Broken("a copy goes on although its transfer must end")
        if outcome is None and copy.step == 0 and not storing and checksums is not None:
            transfer.read_slots()
            outcome = transfer.ending
        if outcome is None:
            copy.step += 1
            until = transfer.plan.nbytes * copy.step // copy.steps
            if copy.step - 1 == copy.fails_at:  # it fails somewhere in the middle of this step
                until = self._rng.randint(copy.moved, until)
                outcome = Outcome.FAILED
            try:
                self._move(copy, until)
            except Injected:  # as HostEngine takes an exception of its copy function
                outcome = Outcome.FAILED
            if outcome is None and copy.step == copy.steps:
                outcome = Outcome.DONE
        if outcome is None:
            self._process.after(copy.pause_s, lambda: self._step(queue, copy))
            return
        queue.running = None
        if outcome is Outcome.DONE and storing and checksums is not None:
            queue.unread.add(copy)
            if self._rng.random() < 0.5:
                self._finish_sums(queue, copy)
            else:
                self._process.after(self._rng.choice((0.0001, 0.001, 0.01)), lambda: self._finish_sums(queue, copy))
        else:
            self._end(copy, outcome)
        if queue.waiting:
            self._process.after(self._rng.uniform(0, 0.0005), lambda: self._start(queue))

    def _finish_sums(self, queue: _Queue, copy: _Copy) -> None:
        queue.unread.remove(copy)
        copy.transfer.read_slots()
        self._end(copy, copy.transfer.ending or Outcome.DONE)

    def _move(self, copy: _Copy, until: int) -> None:
        """Copy up to byte ``until`` of the plan."""
        done = sum(size for _, _, size in copy.pieces[: copy.piece])
        while copy.moved < until:
            destination, source, size = copy.pieces[copy.piece]
            start = copy.moved - done
            nbytes = min(size - start, until - copy.moved)
            to, to_at = self._space.find(destination + start, nbytes)
            of, of_at = self._space.find(source + start, nbytes)
            segment = to.segment
            reserved = segment is None or segment.owner_dead or segment.writable[to_at : to_at + nbytes].all()
            if not reserved:
                raise Broken("the daemon writes to engine memory that no unfinished load was promised")
            to.data[to_at : to_at + nbytes] = of.data[of_at : of_at + nbytes]
            copy.moved += nbytes
            if copy.moved == done + size:
                done += size
                copy.piece += 1

    def _end(self, copy: _Copy, outcome: Outcome) -> None:
        for slot in copy.slots:
            slot.transfers -= 1
        for number in copy.mappings:
            self._space.busy[number] -= 1
        transfer = copy.transfer
        self._clock.note(f"copied {transfer.direction.value} {copy.moved} of {transfer.plan.nbytes} {outcome.value}")
        transfer.on_done(transfer, outcome)
