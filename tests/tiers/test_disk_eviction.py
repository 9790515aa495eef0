"""What the hand of the real disk tier keeps, beside what an exact LRU would: hits, and blocks written."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvoffd.tiers.header import Block, make_block_group
from kvoffd.tiers.tier import Result
from tests.kit.made_up_loads import LOADS, Chain, Traffic
from tests.kit.memory_disk import MemoryDisk
from tests.tiers.disk_rig import DiskRig, key_of

GROUP = make_block_group(b"1" * 32, 0, 0, [1])
"""A slot of 8 KiB: the header and a page."""
SLOT_BYTES, REGION_SLOTS = 8192, 64
MOST_BELOW = 0.008
"""Of the blocks that are asked for, how many fewer hits there may be than with LRU."""


class KeptMemory(MemoryDisk):
    """Never loses power, and so need not know what was not synced."""

    def _put(self, fd: int, offset: int, data: bytes) -> None:
        super()._put(fd, offset, data)
        self._file(fd).pending.clear()


class Clock:
    """The real tier, written to by what leaves the pool."""

    def __init__(self, blocks: int) -> None:
        nbytes = blocks * SLOT_BYTES
        size = nbytes + nbytes // 64 + (1 << 20)  # with what is for the index, but not a region more
        self.rig = DiskRig(KeptMemory(), size - size % 4096, region_bytes=REGION_SLOTS * SLOT_BYTES)
        self.tier = self.rig.tier
        self.ends: list[Result] = []

    @property
    def slots(self) -> int:
        return self.tier._map.slots.regions * REGION_SLOTS

    def __contains__(self, number: int) -> bool:
        return bool(self.tier.find(GROUP, [key_of(number)], prefix=True)[0])

    def use(self, number: int) -> None:
        self.tier.spare(GROUP, [key_of(number)])

    def add(self, number: int) -> None:
        assert self.tier.write(Block(GROUP, key_of(number), (0,), (1,)), [0], self.ends.append)
        self.rig.work()
        assert self.ends.pop() is Result.DONE


class Lru(OrderedDict[int, None]):
    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots = slots

    def use(self, number: int) -> None:
        self.move_to_end(number)

    def add(self, number: int) -> None:
        self[number] = None
        if len(self) > self.slots:
            self.popitem(last=False)


def replay(requests: Sequence[Chain], pool_blocks: int, disk: Clock | Lru) -> tuple[float, float]:
    """Hits, and blocks written, of those asked for. What leaves an LRU pool is written, or counts as used."""
    pool: OrderedDict[int, None] = OrderedDict()
    hits = asked = written = 0
    for request in requests:
        asked += len(request)
        unbroken = True
        for number in request:
            if number in pool:
                hits += unbroken
            elif unbroken and number in disk:
                hits += 1
                disk.use(number)
            else:
                unbroken = False
        for number in reversed(request):
            pool[number] = None
            pool.move_to_end(number)
        while len(pool) > pool_blocks:
            number, _ = pool.popitem(last=False)
            if number in disk:
                disk.use(number)
            else:
                disk.add(number)
                written += 1
    return hits / asked, written / asked


def test_disk_eviction_is_as_good_as_lru() -> None:
    requests, asked = list[Chain](), 0
    for request in LOADS["agents"](Traffic(1)):
        requests.append(request)
        asked += len(request)
        if asked > 30_000:
            break
    clock = Clock(512)
    hits, written = replay(requests, 128, clock)
    lru_hits, lru_written = replay(requests, 128, Lru(clock.slots))
    assert clock.tier.stats().evicted_blocks > clock.slots, "the hand has not gone round"
    assert hits >= lru_hits - MOST_BELOW
    assert written <= lru_written + MOST_BELOW
