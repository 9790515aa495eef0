"""The shared tier in virtual time, over a store that may forget, lie, hang, answer late, be out of reach, and be reset.

What one life of the daemon wrote another one reads: the store outlives them, as it does nodes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvoffd.pool.checksums import digest
from kvoffd.tiers.answers import Ask
from kvoffd.tiers.fleet_clears import Poll
from kvoffd.tiers.header import HEADER_BYTES, Block, BlockGroup, decode_header, encode_header, make_block_group
from kvoffd.tiers.names import block_name, block_names
from kvoffd.tiers.shared import SharedTier
from kvoffd.tiers.store import GetRequest, PutRequest, Received, Store, StoreError, StoreFault
from kvoffd.tiers.store_health import Look
from kvoffd.tiers.tier import ReadEnd, Result
from tests.sim.clock import Broken, Clock, Stops
from tests.sim.content import Content
from tests.sim.disk import SimWorkers

if TYPE_CHECKING:
    from tests.sim.daemon import SimDaemon
    from tests.sim.tiers import SimTiers

MAX_OBJECTS = 64
CHANCES = {
    "late": 0.1,
    "slow": 0.15,
    "hang": 0.05,
    "fail": 0.05,
    "forget": 0.1,
    "lie": 0.1,
    "dark": 0.02,
    "reset": 0.01,
}
"""Of what may go wrong each time that it may. Half of them, others in each run, never happen."""


class SharedObjects:
    """Objects by name, as they would lie in Redis, and the generations of namespaces by fingerprint."""

    def __init__(
        self, contents: Mapping[bytes, Content], rng: random.Random, counts: Counter[str], clock: Clock
    ) -> None:
        self.stops = Stops(clock, counts)
        self.objects: dict[bytes, bytes] = {}
        self.generations: Counter[bytes] = Counter()
        self.raised: Counter[bytes] = Counter()
        """Generations that peers have raised, by the same keys."""
        self.dark_until = 0.0
        self.left: set[bytes] = set()
        """Namespaces of which an engine was told that they are reset: no later daemon may share them."""
        self.chances = {fault: chance * rng.choice((0, 1)) for fault, chance in CHANCES.items()}
        self.chances["elsewhere"] = rng.choice((0.0, 0.3, 0.8))
        self._contents = contents
        self.counts = counts

    def put(self, name: bytes, data: bytes) -> None:
        """Keep an object, and not too many: the oldest goes."""
        self.objects[name] = data
        if len(self.objects) > MAX_OBJECTS:
            del self.objects[next(iter(self.objects))]

    def put_by_another_node(self, fingerprint: bytes, group: int, key: bytes) -> None:
        """Keep a block as another node would have written it."""
        content = self._contents.get(fingerprint)
        if content is None:  # a hostile client's own
            return
        shards = [content.shard(rank, group, key).tobytes() for rank in range(content.world_size)]
        generation = self.generations[fingerprint]
        block_group = make_block_group(fingerprint, generation, group, tuple(map(len, shards)))
        block = Block(block_group, key, (0,) * len(shards), tuple(digest(memoryview(data)) for data in shards))
        self.put(block_name(block_group, key), encode_header(block) + b"".join(shards))


class SimStore(Store):
    """A connection to it."""

    poll_s = 0.2
    most_window_keys = 64
    keys_at_once = 16
    blocks_at_once = 2
    bytes_at_once = 1 << 20

    def __init__(self, tier: SimShared) -> None:
        self._tier = tier
        self._there = tier.objects.objects
        self._generations = tier.objects.generations

    def connect(self) -> None:
        if self._tier.clock() < self._tier.objects.dark_until:
            raise StoreError(StoreFault.UNREACHABLE, "It is dark.")

    def ping(self, deadline: float) -> None:
        """Connected, it serves."""

    def generation(self, fingerprint: bytes, deadline: float) -> int:
        return self._generations[fingerprint]

    def ask(self, group: BlockGroup, keys: Sequence[bytes], deadline: float, *, prefix: bool) -> tuple[int, list[bool]]:
        names = block_names(group, keys)
        return self._generations[group.fingerprint], [name in self._there or self._tier.hit("lie") for name in names]

    def touch(self, blocks: Sequence[Block], deadline: float) -> list[bool]:
        return [block_name(block.group, block.key) in self._there for block in blocks]

    def get(self, requests: Sequence[GetRequest], patience_s: float) -> Iterator[Received | None]:
        for group, key, views in requests:
            name = block_name(group, key)
            if self._tier.hit("fail"):
                raise StoreError(StoreFault.DISCONNECTED, "It failed.")
            if self._tier.hit("forget"):
                self._there.pop(name, None)
            if (data := self._there.get(name)) is None:
                yield None
                continue
            if self._tier.hit("lie"):
                place = self._tier.rng.randrange(len(data))
                wrong = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
                data = self._tier.rng.choice([wrong, data[:-1], *self._there.values()])
            at = HEADER_BYTES
            if len(data) != at + sum(map(len, views)):
                yield Received(None)
                return
            for view in views:
                view[:] = data[at : at + len(view)]
                at += len(view)
            yield Received(decode_header(data[:HEADER_BYTES]))

    def put(self, requests: Sequence[PutRequest], deadline: float) -> Sequence[bool]:
        if self._tier.hit("fail"):
            raise StoreError(StoreFault.TIMEOUT, "It failed.")
        for block, views in requests:
            self._tier.objects.put(block_name(block.group, block.key), b"".join([encode_header(block), *views]))
        return [True] * len(requests)

    def remove(self, group: BlockGroup, keys: Sequence[bytes], deadline: float) -> None:
        for name in block_names(group, keys):
            self._there.pop(name, None)

    def raise_generation(self, fingerprint: bytes, seen: int, generation: int, deadline: float) -> int:
        if generation > self._tier.objects.raised[fingerprint]:
            raise Broken("the daemon raises a generation that no administrator raised")
        self._generations[fingerprint] = max(generation, self._generations[fingerprint])
        return self._generations[fingerprint]

    def close(self) -> None: ...

    def interrupt(self) -> None: ...


class _Workers(SimWorkers):
    def put(self, task: Any) -> None:
        if isinstance(task, Look):  # this store has no bound, and would say nothing: recorded seeds stay as they are
            return
        if isinstance(task, Poll):
            for fingerprint in task.fingerprints:
                self._tier.before_ask(fingerprint, 0, ())  # type: ignore[union-attr]
        if isinstance(task, Ask):
            self._tier.before_ask(task.group.fingerprint, task.group.group_index, task.keys)  # type: ignore[union-attr]
        super().put(task)


class SimShared(SharedTier):
    """What one life of the daemon has of it: the tier itself, with a watch on who uses which slot."""

    def __init__(self, objects: SharedObjects, daemon: SimDaemon, rng: random.Random, tiers: SimTiers) -> None:
        self.objects, self.process, self.clock, self.rng = objects, daemon.process, daemon.clock, rng
        self._daemon, self._watched, self.stops = daemon, daemon.pool, objects.stops
        self.left = set(objects.left)
        """Namespaces that an engine has reset: nothing may come of them."""
        super().__init__(
            "redis://sim",
            lambda: SimStore(self),
            pool=memoryview(self._watched.data),
            clock=self.clock,
            post=daemon.post_of_tier,
            listener=tiers.tiering,
            ask_deadline_s=0.02,
            generations=daemon.service.state.generations,
            make_workers=partial(_Workers, self),
        )
        self.breaker._jitter = rng.random

    def hit(self, fault: str) -> bool:
        happens = not self._daemon.world.faults.calm and self.rng.random() < self.objects.chances[fault]
        self.objects.counts[f"shared_{fault}"] += happens
        return happens

    def before_ask(self, fingerprint: bytes, group: int, keys: Sequence[bytes]) -> None:
        """What other nodes and the network do until then."""
        objects = self.objects
        if self.hit("dark"):
            objects.dark_until = self.clock() + self.rng.uniform(0.05, 1.5)
        if self.hit("reset"):
            objects.generations[fingerprint] += 1
        for key in keys:
            if self.hit("elsewhere"):
                objects.put_by_another_node(fingerprint, group, key)

    def seconds_of(self, workers: object) -> float:
        asks = workers is self._asking
        seconds = self.rng.uniform(0.0002, 0.005 if asks else 0.003)
        for fault in filter(self.hit, ("late",) if asks else ("slow", "hang")):
            seconds = self.rng.uniform(1.0, 4.0) if fault == "hang" else self.rng.uniform(0.02, 0.3)
        return seconds

    def read(
        self,
        group: BlockGroup,
        key: bytes,
        offsets: Sequence[int],
        patience_s: float,
        on_end: ReadEnd,
        is_awaited: Callable[[], bool] = lambda: True,
    ) -> bool:
        end = self._daemon.promotions.watched(on_end)

        def ended(result: Result, block: Block | None) -> None:
            self.objects.counts["shared_read"] += result is Result.DONE
            end(result, block)

        begin = partial(super().read, group, key, offsets, patience_s, is_awaited=is_awaited)
        if not self._watched.lend(offsets, "writing", "the shared tier reads", begin, ended):
            return False
        self.stops.read_begins()
        self._daemon.promotions.begun(on_end)
        return self._watch(group, key, "reads")

    def write(self, block: Block, offsets: Sequence[int], on_end: Callable[[Result], None]) -> bool:
        begin = partial(super().write, block, offsets)
        return (
            not self._daemon.world.faults.calm
            and self._watched.lend(offsets, "ready", "the shared tier writes", begin, on_end)
            and self._watch(block.group, block.key, "writes")
        )

    def _watch(self, block_group: BlockGroup, key: bytes, does: str) -> bool:
        if block_group.fingerprint in self.left:
            raise Broken(f"the shared tier {does} a block of a namespace that an engine reset")
        self.clock.note(f"shared {does} {key.hex()[:8]}")
        return True
