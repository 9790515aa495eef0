"""The policy ``arc`` evicts the blocks that the paper's algorithm evicts, though whole stores evict at once."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pytest

from kvoffd.cache.namespace import Group, Namespace
from kvoffd.cache.policies import make_policy
from kvoffd.cache.policy import Chain
from kvoffd_proto.messages import GroupSpec
from tests.kit.amount import TIMES
from tests.kit.slot_cache import keys_of

BLOCK_BYTES = 1 << 20
REQUESTS = 600


class Paper:
    """Figure 4 of N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, with its
    names. It differs in one thing: pages of the present store are not evicted for it."""

    def __init__(self, size: int) -> None:
        self.c, self.p = size, 0.0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict[int, None]() for _ in range(4))
        self.stored: set[int] = set()
        self.evicted: list[int] = []

    def __contains__(self, key: int) -> bool:
        return key in self.t1 or key in self.t2

    def use(self, key: int) -> None:
        for queue in (self.t1, self.t2):
            queue.pop(key, None)
        self.t2[key] = None

    def store(self, keys: Sequence[int]) -> list[int]:
        """Insert absent keys one by one. Returns which ones were evicted."""
        self.stored, self.evicted = set(), []
        for key in keys:
            self.insert(key)
            self.stored.add(key)
        return self.evicted

    def insert(self, key: int) -> None:
        t1, t2, b1, b2 = self.t1, self.t2, self.b1, self.b2
        if key in b1:
            self.p = min(self.c, self.p + max(1, len(b2) / len(b1)))
            self.replace(in_b2=False)
            del b1[key]
            t2[key] = None
        elif key in b2:
            self.p = max(0, self.p - max(1, len(b1) / len(b2)))
            self.replace(in_b2=True)
            del b2[key]
            t2[key] = None
        else:
            full = len(t1) + len(b1) == self.c
            if not full and len(t1) + len(t2) + len(b1) + len(b2) == 2 * self.c:
                b2.popitem(last=False)
            self.replace(in_b2=False)
            if full:
                b1.popitem(last=False)  # the paper's "delete the LRU page of T1" is the case of no other in B1
            t1[key] = None

    def replace(self, *, in_b2: bool) -> None:
        if len(self.t1) + len(self.t2) < self.c:
            return
        takes_t1 = len(self.t1) > self.p or (in_b2 and len(self.t1) == self.p)
        queues = [(self.t1, self.b1), (self.t2, self.b2)]
        for queue, ghosts in queues if takes_t1 else reversed(queues):
            if (key := next((key for key in queue if key not in self.stored), None)) is not None:
                del queue[key]
                ghosts[key] = None
                self.evicted.append(key)
                return


class Pool:
    """A pool of ``size`` blocks, whose policy decides as the daemon asks it to."""

    def __init__(self, size: int) -> None:
        self._group = Group(1, Namespace(bytes(32), "arc", 1, 8, [GroupSpec("full", 512)], "{}"), 0)
        self._group.set_sizes([BLOCK_BYTES], [BLOCK_BYTES])
        self._policy = make_policy("arc", size * BLOCK_BYTES, size)
        self._free = list(range(size))
        self.block_of: dict[int, int] = {}
        self._key_in: dict[int, int] = {}

    def use(self, keys: Sequence[int]) -> None:
        blocks = np.array([self.block_of[key] for key in keys], np.uint32)
        self._policy.requested([Chain(self._group, keys_of(*keys), blocks, len(keys))])

    def offer(self, keys: Sequence[int]) -> list[int]:
        """Make space for a store of a chain of absent keys. Returns what is evicted for it."""
        self._policy.admit(self._group, keys_of(*keys), [0])
        victims = self._policy.first(max(0, len(keys) - len(self._free)))
        evicted = [self._key_in[block] for block in victims.tolist()]
        self._policy.remove(self._group, victims, keys_of(*evicted))
        self._free += [self.block_of.pop(key) for key in evicted]
        return evicted

    def insert(self, keys: Sequence[int]) -> None:
        blocks = [self._free.pop(0) for _ in keys]
        self.block_of.update(zip(keys, blocks, strict=True))
        self._key_in.update(zip(blocks, keys, strict=True))
        self._policy.insert(self._group, np.array(blocks[::-1], np.uint32), keys_of(*keys[::-1]))


def requests(seed: int) -> list[list[int]]:
    """Chains of up to 40 keys: some come often, others are a scan, and each leaves a common root at some key."""
    chance = random.Random(seed)
    made = []
    for number in range(REQUESTS):
        family = int(chance.paretovariate(0.7)) if chance.random() < 0.7 else 10_000 + number
        made.append([1_000 * min(family, 20_000) + at for at in range(chance.randint(1, 40))])
    return made


@pytest.mark.parametrize("seed", range(3 * TIMES))
@pytest.mark.parametrize("step", [1, 4, 16])
@pytest.mark.parametrize("size", [60, 200, 1000])
def test_a_store_of_several_blocks_evicts_what_as_many_stores_of_one_would(size: int, step: int, seed: int) -> None:
    paper, pool, stores = Paper(size), Pool(size), 0
    for keys in requests(seed):
        present = [key for key in keys if key in paper]
        assert present == [key for key in keys if key in pool.block_of]
        for key in reversed(present):
            paper.use(key)
        pool.use(present)
        absent = [key for key in keys if key not in paper]
        for begin in range(0, len(absent), step):
            part = absent[begin : begin + step]
            assert pool.offer(part) == paper.store(part[::-1])
            pool.insert(part)
            stores += bool(paper.evicted)
    assert stores > 20
