"""What leaves a disk stays away, and nothing else is lost, whatever the daemon's end was and whatever it left."""

from __future__ import annotations

from collections import Counter, deque
from copy import copy
from itertools import product
from random import Random

import pytest

from kvoffd.tiers.disk_file import INDEX_NAME
from kvoffd.tiers.header import Block, BlockGroup, make_block_group
from kvoffd.tiers.tier import Result
from tests.kit.amount import TIMES
from tests.kit.cases import case
from tests.kit.memory_disk import MemoryDisk, MemoryFile, names_of
from tests.tiers.disk_rig import ONE, OTHER, DiskRig, block_of

LENGTHS = (12_000,)
STEPS, SEEDS = 40, 7 * TIMES**2
SMALLEST_BATCH, LARGEST_BATCH = 4, 40
ENDS = "stop", "kill", "power cut", "power cut, older index"
SIZE_BYTES, REGION_BYTES = 4 << 20, 1 << 20
HOLDS = 180
"""About so many blocks are on such a disk when it is full. It evicts several at once, in each life."""

Name = tuple[BlockGroup, bytes]


class Life(DiskRig):
    """A daemon's life with a disk, two namespaces of which are stored, cleared, reset, invalidated and evicted."""

    def __init__(self, random: Random) -> None:
        super().__init__(size_bytes=SIZE_BYTES, region_bytes=REGION_BYTES)
        self.random, self.number = random, 0
        self.known: dict[Name, Block] = {}
        """Blocks that were ever written: each once, so that one found by two indexes is in the same slot."""
        self.left: Counter[str] = Counter()
        """What was done."""
        self.invalidated: set[Name] = set()
        self.indexes: list[tuple[MemoryFile, set[Name]]] = []
        """Earlier moments: the index, and what was there."""

    def group(self, fingerprint: bytes) -> BlockGroup:
        return make_block_group(fingerprint, self.generations.get(fingerprint, 0), 0, LENGTHS)

    def names(self) -> set[Name]:
        return {*names_of(self.tier)}

    def run(self) -> None:
        for _ in range(STEPS):
            self.step()
            if self.random.random() < 0.3:
                self.indexes.append((self.files.files[INDEX_NAME].copy(), self.names()))
        self.step_write()
        assert not {*self.outdated()} & self.names()

    def step(self) -> None:
        kind = self.random.choices(["write", "read", "invalidate", "reset", "clear", "tick"], [10, 4, 3, 0.7, 0.3, 2])[
            0
        ]
        self.left[kind] += 1
        self.left["evicted"] += any(self.tier._map.to_overwrite.values())
        if kind in ("reset", "clear", "invalidate") and self.random.random() < 0.5:
            self.begin_write(self.next_block(ONE))
        match kind:
            case "write":
                self.step_write()
            case "read":
                for group, key in self.random.sample(sorted(self.names()), min(4, len(self.names()))):
                    assert self.read(self.known[group, key]) is Result.DONE
            case "invalidate":
                of_one = [name for name in sorted(self.known) if name[0] == self.group(ONE)]
                gone = self.random.sample(of_one, min(3, len(of_one)))  # also evicted ones
                self.tier.remove(self.group(ONE), [key for _, key in gone])
                self.invalidated |= {*gone}
            case "reset":
                self.reset(self.random.choice((ONE, OTHER)))
            case "clear":
                self.generations.update({name: 1 + self.generations.get(name, 0) for name in (ONE, OTHER)})
                self.tier.remove_all(None)
            case "tick":
                self.clock.now += 100.0
                self.tier.tick()
        self.work()
        self.listener.blocks = {(group.tag, key) for group, key in self.names()}

    def step_write(self) -> None:
        fingerprint = self.random.choice((ONE, ONE, OTHER))
        for _ in range(self.random.randint(SMALLEST_BATCH, LARGEST_BATCH)):
            self.write(self.next_block(fingerprint))

    def next_block(self, fingerprint: bytes) -> Block:
        self.number += 1
        block = block_of(self.number, self.group(fingerprint))
        self.known[block.group, block.key] = block
        return block

    def next_over(self, files: MemoryDisk, generations: dict[bytes, int]) -> Life:
        """The next daemon's life, over what this one left, which may have several next ones."""
        after = copy(self)
        after.files, after.generations, after.known, after.posted = files, {**generations}, {**self.known}, deque()
        after.open()
        return after

    def outdated(self) -> list[Name]:
        return [name for name in self.known if name[0].generation < self.generations.get(name[0].fingerprint, 0)]

    def check_bytes(self) -> None:
        for group, key in self.names():
            assert self.read(self.known[group, key]) in (Result.DONE, Result.GONE, Result.CORRUPT, None)


def lives() -> list[int]:
    return [*range(SEEDS)]


@pytest.mark.timeout(600)
def test_what_left_a_disk_stays_away_and_the_rest_does_not() -> None:
    """All removals were carried out when the end came, so they hold without ``kvoffd.state`` too, but for an index that
    is older than they are: there the highest generation that is found counts."""
    done, came_back = Counter[str](), Counter[tuple[str, str]]()
    for seed in lives():
        with case(seed):
            life = Life(Random(seed))
            life.run()
            done += life.left
            before, generation_of = life.names(), dict(life.generations)
            evicted = {*life.known} - before - life.invalidated - {*life.outdated()}
            killed = life.files.copy()
            assert life.tier.close(1.0)
        for end, state in product(ENDS, ("kept", "lost")):
            with case(seed, end, state):
                (random := Random()).setstate(life.random.getstate())
                must_be_there = before
                files = (life.files if end == "stop" else killed).copy()
                if end == "power cut":
                    files.lose_power(random)
                    must_be_there = set()
                elif end == "power cut, older index":
                    index, were_there = random.choice(life.indexes)
                    files.files[INDEX_NAME] = index.copy()
                    must_be_there = before & were_there
                after = life.next_over(files, generation_of if state == "kept" else {})
                there = after.names()
                assert must_be_there <= there, "some are lost"
                came_back[end, state] += len(there)
                if state == "kept":
                    assert all(group.generation == generation_of.get(group.fingerprint, 0) for group, _ in there)
                of_each = Counter(group.fingerprint for group in {group for group, _ in there})
                assert all(count == 1 for count in of_each.values()), "two generations of a namespace"
                if end in ("stop", "kill"):
                    assert all(group.generation == generation_of.get(group.fingerprint, 0) for group, _ in there)
                    assert not there & life.invalidated
                if end == "stop":
                    assert there == before
                    assert not there & evicted
                after.check_bytes()
                assert after.write(after.next_block(ONE)) == [Result.DONE]
    assert min(done[kind] for kind in ("invalidate", "reset", "clear", "read", "evicted")) >= SEEDS / 4
    assert len(came_back) == 2 * len(ENDS)
    assert min(came_back.values()) > SEEDS * HOLDS / 4, "or it proves nothing"
