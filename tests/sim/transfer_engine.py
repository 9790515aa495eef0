"""Copies in virtual time: in steps, they may be slow, fail, stall, hang, and are watched at every byte.

The queues are the daemon's own; what their threads would do is done here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvoffd.transfer.engine import CopyEngine, CopyQueue, CopyWork, Transfer
from kvoffd.transfer.plan import CopyEnd, Direction
from tests.sim.clock import Broken, Injected
from tests.sim.pool import Slot

if TYPE_CHECKING:
    from tests.sim.daemon import SimDaemon

NO_THREAD = 0
"""In the place of the thread that copies: it waits for no CPU, so that a copy hangs as soon as it is overdue."""


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
    pause_s: float = 0.0

    @property
    def nbytes(self) -> int:
        return sum(size for _, _, size in self.pieces)


class SimTransferEngine(CopyEngine):
    """One queue a direction, as HostEngine has."""

    def __init__(self, daemon: SimDaemon, rng: random.Random) -> None:
        self._queues = [SimQueue(direction, daemon, rng) for direction in Direction]
        super().__init__(dict(zip(Direction, self._queues, strict=True)))

    @property
    def idle(self) -> bool:
        return not any(queue.copies for queue in self._queues)


class SimQueue(CopyQueue):
    """The transfers of one direction, copied one after the other. Checksums may be taken later, as of a GPU's."""

    def __init__(self, direction: Direction, daemon: SimDaemon, rng: random.Random) -> None:
        super().__init__(direction.value, daemon.clock, CopyWork(), ())
        self._note, self._process, self._faults = daemon.clock.note, daemon.process, daemon.world.faults
        self._space, self._pool, self._rng = daemon.space, daemon.pool, rng
        self._deadline_s = daemon.config.limits.job_deadline_s
        self.copies: dict[Transfer, _Copy] = {}
        """Of all that were submitted and have not ended."""
        self._copying = False

    def submit(self, transfer: Transfer) -> None:
        copy = self.copies[transfer] = self._claim(transfer)
        transfer.on_done = partial(self._ended, copy, transfer.on_done)
        self._note(f"submit {transfer.direction.value} {copy.nbytes} in {len(copy.pieces)}")
        super().submit(transfer)
        if not self._copying and self._work.queued_jobs == 1:
            self._process.after(self._rng.uniform(0, 0.002), self._start)

    # --- what must hold --------------------------------------------------------------------------

    def _claim(self, transfer: Transfer) -> _Copy:
        """Check the whole plan before the first byte moves, as the daemon must have done."""
        plan = transfer.plan()
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
        if sum(size for _, _, size in pieces) != transfer.plan.__self__.nbytes:  # type: ignore[attr-defined]
            raise Broken("a plan's pieces are not as long as its job")
        for slot in slots.values():
            if storing and slot.transfers:
                raise Broken("two transfers use one slot that is being written")
            slot.transfers += 1
        for number in mappings:
            self._space.busy[number] = self._space.busy.get(number, 0) + 1
        return _Copy(transfer, list(slots.values()), list(mappings), pieces)

    def _ended(
        self, copy: _Copy, on_done: Callable[[Transfer, CopyEnd], None], transfer: Transfer, outcome: CopyEnd
    ) -> None:
        del self.copies[transfer]
        for slot in copy.slots:
            slot.transfers -= 1
        for number in copy.mappings:
            self._space.busy[number] -= 1
        self._note(f"copied {transfer.direction.value} {copy.moved} of {copy.nbytes} {outcome.value}")
        on_done(transfer, outcome)

    # --- the copy --------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._copying or not self._waiting:
            return
        transfer = self._take(NO_THREAD)
        self._copying, copy = True, self.copies[transfer]
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
        self._step(copy)

    def _step(self, copy: _Copy) -> None:
        transfer = copy.transfer
        if copy.step == copy.hangs_at:
            return  # its thread never comes back
        checksums, storing = transfer.checksums, transfer.direction is Direction.STORE
        if copy.step == 0 and self._clock() >= transfer.deadline:
            transfer.must_end(CopyEnd.DEADLINE)
        if transfer.ending is not None and not transfer.stop.value:  # C looks at the flag, and at nothing else
            raise Broken("a copy goes on although its transfer must end")
        if transfer.ending is None and copy.step == 0 and not storing and checksums is not None:
            transfer.complete_checksums()
        if transfer.ending is None:
            copy.step += 1
            until = copy.nbytes * copy.step // copy.steps
            fails = copy.step - 1 == copy.fails_at
            if fails:  # somewhere in the middle of this step
                until = self._rng.randint(copy.moved, until)
            try:
                self._move(copy, until)
            except Injected:  # as CopyQueue takes an exception of its copy function
                fails = True
            if fails:
                transfer.must_end(CopyEnd.FAILED)
            elif copy.step < copy.steps:
                self._process.after(copy.pause_s, lambda: self._step(copy))
                return
        self._copying = False
        if transfer.ending is not None or not storing or checksums is None:
            self._end_running(transfer)
        elif self._rng.random() < 0.5:
            self._finish_sums(transfer)
        else:
            self._running[transfer].clear()
            self._process.after(self._rng.choice((0.0001, 0.001, 0.01)), lambda: self._finish_sums(transfer))
        if self._waiting:
            self._process.after(self._rng.uniform(0, 0.0005), self._start)

    def _finish_sums(self, transfer: Transfer) -> None:
        transfer.complete_checksums()
        self._end_running(transfer)

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
