"""Lives of a disk tier, found by hypothesis: restarts, kills in the middle of a write, power cuts, faults."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvoffd.tiers.disk.disk_tier import DiskTier
from kvoffd.tiers.tier import TierBlock, TierKey
from tests.kit.memory_disk import Killed, MemoryDisk
from tests.tiers.makers import SteppedMaker, removals_are_durable, step
from tests.tiers.rig import ONE, OTHER, Ending, TierRig, block_of

SHAPES = ((3000,), (9000,), (20_000, 0, 3000))
SIZE_BYTES = (64 << 10) + 4 * (32 << 10)
NUMBERS = st.lists(st.integers(0, 19), min_size=1, max_size=6)
ERRORS = {"read": errno.EIO, "write": errno.ENOSPC, "sync": errno.EIO}


class DiskLife(RuleBasedStateMachine):
    """Every block is written in versions that differ in all bytes, so that an old one is seen when it comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.boots = 1
        """Of the machine; each has an id of its own."""
        self.boot_id = mock.patch("kvoffd.tiers.disk.file.read_boot_id", self.read_boot_id)
        self.boot_id.start()
        self.disk = MemoryDisk()
        # The directory need only be there: the file is in memory.
        self.rig = TierRig(SteppedMaker(Path(tempfile.gettempdir()), self.disk, SIZE_BYTES, 32 << 10))
        self.versions = 0
        self.written: dict[TierKey, dict[int, TierBlock]] = {}
        """Versions that the device may have, by id."""
        self.condemned: dict[TierKey, set[int]] = {}
        """Of those, what was removed: it may come back only until the removal is durable."""
        self.under_way: list[Ending] = []
        self.flipped = self.failing = False

    def read_boot_id(self) -> bytes:
        return self.boots.to_bytes(16, "big")

    @property
    def tier(self) -> DiskTier:
        return self.rig.tier

    def block(self, number: int, version: int) -> TierBlock:
        fingerprint = ONE if number % 3 else OTHER
        return block_of(number, SHAPES[number % len(SHAPES)], fingerprint, number % 2, version)

    @rule(numbers=NUMBERS)
    def write(self, numbers: list[int]) -> None:
        for number in numbers:
            self.versions += 1
            block = self.block(number, self.versions)
            ending = self.rig.write(block, self.versions)
            if ending is not None:
                self.written.setdefault(block.id, {})[self.versions] = block
                self.under_way.append(ending)

    @rule(numbers=NUMBERS, late=st.booleans())
    def read(self, numbers: list[int], late: bool) -> None:
        for number in numbers:
            block_id = self.block(number, 0).id
            block = self.tier.index(*block_id[:2]).get(block_id.key)
            if block is not None:
                ending = self.rig.read(block, self.version_of(block), self.rig.now + (0 if late else 100))
                assert ending is not None or self.tier.hangs
                self.under_way += [ending] if ending is not None else []

    @rule(numbers=NUMBERS)
    def touch(self, numbers: list[int]) -> None:
        self.tier.touch([self.block(number, 0).id for number in numbers])

    @rule(numbers=NUMBERS)
    def remove(self, numbers: list[int]) -> None:
        ids = [self.block(number, 0).id for number in numbers]
        self.tier.remove(ids)
        self.condemn(ids)

    @rule(fingerprint=st.sampled_from([ONE, OTHER]))
    def remove_namespace(self, fingerprint: bytes) -> None:
        self.tier.remove_namespace(fingerprint)
        self.condemn([block_id for block_id in self.written if block_id.fingerprint == fingerprint])

    def condemn(self, ids: list[TierKey]) -> None:
        for block_id in ids:
            self.condemned.setdefault(block_id, set()).update(self.written.get(block_id, {}))
            assert not self.rig.has(block_id)

    @rule(steps=st.integers(1, 8), turning=st.booleans())
    def step(self, steps: int, turning: bool) -> None:
        for _ in range(steps):
            step(self.tier)
            if turning:
                self.turn()

    @rule()
    def turn(self) -> None:
        while not self.rig.posted.empty():
            self.rig.posted.get()()

    @rule(seconds=st.sampled_from([0.3, 3.0, 70.0]))
    def tick(self, seconds: float) -> None:
        self.rig.now += seconds
        self.tier.tick()

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 60))
    def serve(self, seed: int, count: int) -> None:
        """Some time of ordinary work."""
        random = Random(seed)
        for _ in range(count):
            numbers = random.choices(range(20), k=random.randrange(1, 4))
            choice = random.random()
            if choice < 0.3:
                self.write(numbers)
            elif choice < 0.5:
                self.read(numbers, random.random() < 0.1)
            elif choice < 0.9:
                self.step(random.randrange(1, 4), random.random() < 0.7)
            else:
                self.tick(0.3)

    @rule()
    def settle(self) -> None:
        self.rig.settle()
        assert all(ending.result is not None for ending in self.under_way)
        self.under_way.clear()

    @rule()
    def restart(self) -> None:
        self.settle()
        known = self.rig.ids()
        truncations = self.disk.counts["truncate"]
        assert self.rig.close()
        for block_id, versions in self.condemned.items():
            self.strike(block_id, versions)
        self.condemned.clear()
        self.rig.open()
        if not self.failing:
            assert self.rig.ids() == known
            assert self.disk.counts["truncate"] == truncations
            assert not {"torn", "truncated", "started_anew"} & set(self.rig.fold.kinds)

    @rule(done=st.integers(0, 5), steps=st.integers(0, 5))
    def kill(self, done: int, steps: int) -> None:
        """The process ends within a write, of which so many pages are done."""
        before = self.disk.counts["write"]

        def fault(name: str, number: int) -> None:
            if name == "write" and number > before:
                raise Killed(done * 4096 + 512)

        with self.faults(fault):
            try:
                for _ in range(steps):
                    step(self.tier)
            except Killed:
                pass
        self.disk.locked = False
        self.reopen()

    @rule(seed=st.integers(0, 2**32))
    def lose_power(self, seed: int) -> None:
        self.disk.lose_power(Random(seed))
        self.boots += 1
        self.reopen()

    def reopen(self) -> None:
        self.under_way.clear()
        self.condemned.clear()  # what is back now was not forgotten in time, and may stay
        self.rig = self.rig.after_death()

    @rule(what=st.sampled_from(sorted(ERRORS)), steps=st.integers(1, 4))
    def fail(self, what: str, steps: int) -> None:
        """A call fails."""

        def fault(name: str, number: int) -> None:
            if name == what:
                raise OSError(ERRORS[what], os.strerror(ERRORS[what]))

        self.failing = True
        with self.faults(fault):
            for _ in range(steps):
                step(self.tier)

    @rule(seed=st.integers(0, 2**32))
    def flip(self, seed: int) -> None:
        """Bits change on the device, anywhere behind the heads."""
        random = Random(seed)
        self.flipped = self.failing = True
        for _ in range(8):
            self.disk.flip(random.randrange(64 << 10, len(self.disk.data)), random.randrange(8))

    def faults(self, fault: Callable[[str, int], None]) -> _Faults:
        return _Faults(self.disk, fault)

    @invariant()
    def what_can_be_read_was_written_and_not_forgotten(self) -> None:
        assert not self.rig.fold.wrong
        if removals_are_durable(self.tier):
            for block_id, versions in self.condemned.items():
                self.strike(block_id, versions)
            self.condemned.clear()
        for block_id in self.rig.ids():
            self.version_of(self.tier.index(*block_id[:2])[block_id.key])
        if not self.flipped:
            # What a crash tore is told from what the device spoilt.
            assert not self.tier.stats().errors.get("corrupt")

    def strike(self, block_id: TierKey, versions: set[int]) -> None:
        for version in versions:
            self.written.get(block_id, {}).pop(version, None)

    def version_of(self, block: TierBlock) -> int:
        """Which of the versions it is that may be there."""
        found = [version for version, known in self.written.get(block.id, {}).items() if known == block]
        assert found, "a block that was never written, or that was removed"
        return found[0]

    def teardown(self) -> None:
        try:
            self.rig.settle()
            assert self.rig.close()
        finally:
            self.boot_id.stop()


class _Faults:
    """While it lasts, calls fail."""

    def __init__(self, disk: MemoryDisk, fault: Callable[[str, int], int | None] | Callable[[str, int], None]) -> None:
        self._disk = disk
        self._fault = fault

    def __enter__(self) -> None:
        self._disk.fault = lambda name, number: self._fault(name, number)

    def __exit__(self, *_: object) -> None:
        self._disk.fault = lambda name, number: None


TestDiskLife = DiskLife.TestCase
TestDiskLife.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
