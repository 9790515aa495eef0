"""The shared tier in virtual time, over a store that may forget, lie, hang, answer late, be out of reach, and be reset.

What one life of the daemon wrote another one reads: the store outlives them, as it does nodes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from kvoffd.pool.checksums import digest
from kvoffd.system.threads import DaemonThreads
from kvoffd.tiers.shared.object_format import encode_header, generation_key, object_key
from kvoffd.tiers.shared.shared_tier import SharedTier
from kvoffd.tiers.shared.store import GetRequest, Store, StoreError
from kvoffd.tiers.shared.work import Ask, Read, Write
from kvoffd.tiers.shared.workers import Workers
from kvoffd.tiers.tier import OnDone, TierBlock, TierKey, TierListener, TierResult, TierShard
from tests.sim.clock import Broken, Clock, Process
from tests.sim.content import Content
from tests.sim.pool import WatchedPool

MOST_OBJECTS = 64
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
    """Objects by name, as they would lie in Redis, and the generations of namespaces by theirs."""

    def __init__(self, contents: Mapping[bytes, Content], rng: random.Random, counts: Counter[str]) -> None:
        self.objects: dict[bytes, bytes] = {}
        self.generations: Counter[bytes] = Counter()
        self.dark_until = 0.0
        self.chances = {fault: chance * rng.choice((0, 1)) for fault, chance in CHANCES.items()}
        self.chances["elsewhere"] = rng.choice((0.0, 0.3, 0.8))
        self._contents = contents
        self.counts = counts

    def put(self, name: bytes, data: bytes) -> None:
        """Keep an object, and not too many: the oldest goes."""
        self.objects[name] = data
        if len(self.objects) > MOST_OBJECTS:
            del self.objects[next(iter(self.objects))]

    def put_by_another_node(self, block_id: TierKey) -> None:
        """Keep a block as another node would have written it."""
        generation = self.generations[generation_key(block_id.fingerprint)]
        content = self._contents.get(block_id.fingerprint)
        if content is None:  # a hostile client's own
            return
        shards = [content.shard(rank, block_id.group, block_id.key).tobytes() for rank in range(content.world_size)]
        found = TierBlock(block_id, tuple(TierShard(len(data), 0, digest(memoryview(data))) for data in shards))
        self.put(object_key(block_id, generation), encode_header(found, generation, digest) + b"".join(shards))


class SimStore(Store):
    """A connection to it."""

    ask_deadline_s = 0.02
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
            raise StoreError("unreachable", "It is dark.", final=True)

    def ping(self, deadline: float) -> None:
        """Connected, it serves."""

    def ask(self, own_key: bytes, keys: Sequence[bytes], deadline: float, *, prefix: bool) -> tuple[int, list[bool]]:
        return self._generations[own_key], [key in self._there or self._tier.hit("lie") for key in keys]

    def touch(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return [key in self._there for key in keys]

    def get(self, requests: Sequence[GetRequest], deadline: float) -> Iterator[bytes | None]:
        for key, header_bytes, views in requests:
            if self._tier.hit("fail"):
                raise StoreError("disconnected", "It failed.")
            if self._tier.hit("forget"):
                self._there.pop(key, None)
            if (data := self._there.get(key)) is None:
                yield None
                continue
            if self._tier.hit("lie"):
                place = self._tier.rng.randrange(len(data))
                wrong = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
                data = self._tier.rng.choice([wrong, data[:-1], *self._there.values()])
            at = header_bytes
            if len(data) != at + sum(map(len, views)):
                yield b""
                return
            for view in views:
                view[:] = data[at : at + len(view)]
                at += len(view)
            yield data[:header_bytes]

    def put(self, objects: Sequence[tuple[bytes, Sequence[bytes | memoryview]]], deadline: float) -> Sequence[bool]:
        if self._tier.hit("fail"):
            raise StoreError("timeout", "It failed.")
        for key, parts in objects:
            self._tier.objects.put(key, b"".join(parts))
        return [True] * len(objects)

    def remove(self, keys: Sequence[bytes], deadline: float) -> None:
        for key in keys:
            self._there.pop(key, None)

    def raise_generation(self, own_key: bytes, seen: int, generation: int, deadline: float) -> int:
        raise Broken("the daemon raises a generation that no administrator raised")

    def close(self) -> None: ...

    def interrupt(self) -> None: ...


class SimWorkers(Workers):
    """Does what the threads do, each thing some time after it was asked for."""

    def __init__(self, tier: SimShared, *given: Any) -> None:
        self._tier = tier
        super().__init__(*given)

    def _start_threads(self) -> DaemonThreads:
        return DaemonThreads(())

    def ask(self, ask: Ask) -> None:
        objects, hit = self._tier.objects, self._tier.hit
        if hit("dark"):
            objects.dark_until = self._clock() + self._tier.rng.uniform(0.05, 1.5)
        if hit("reset"):  # by another node
            objects.generations[generation_key(ask.fingerprint)] += 1
        for key in ask.keys:
            if hit("elsewhere"):
                objects.put_by_another_node(TierKey(ask.fingerprint, ask.group, key))
        super().ask(ask)
        self._later(self._ask_next, 0.005, "late")

    def read(self, read: Read) -> None:
        super().read(read)
        self._later(self._read_next, 0.003, "slow", "hang")

    def write(self, write: Write) -> None:
        super().write(write)
        self._later(self._write_next, 0.003, "slow", "hang")

    def remove(self, keys: Sequence[bytes]) -> None:
        super().remove(keys)
        self._later(self._write_next, 0.003)

    def _later(self, work: Callable[[Store], None], most_s: float, *faults: str) -> None:
        delay = self._tier.rng.uniform(0.0002, most_s)
        for fault in filter(self._tier.hit, faults):
            delay = self._tier.rng.uniform(1.0, 4.0) if fault == "hang" else self._tier.rng.uniform(0.02, 0.3)
        self._tier.process.after(delay, lambda: self._turn(work))

    def _turn(self, work: Callable[[Store], None]) -> None:
        if self._breaker.open:
            self._ask_nothing()
        work(self._stores[0])
        if self.asks:  # of one that was done in part, the rest
            self._later(self._ask_next, 0.005)

    def probe(self) -> None:
        if self._breaker.open and not self._breaker.probe_in_s:
            self._ask_nothing()
            self._probe_when_due(self._stores[0])


class SimShared(SharedTier):
    """What one life of the daemon has of it: the tier itself, and who uses which slot meanwhile is watched."""

    def __init__(
        self,
        objects: SharedObjects,
        pool: WatchedPool,
        process: Process,
        clock: Clock,
        rng: random.Random,
        calm: Callable[[], bool],
        listener: TierListener,
        on_turn: Callable[[], None],
    ) -> None:
        self.objects, self.process, self.clock, self.rng = objects, process, clock, rng
        self._watched = pool
        self._calm = calm
        self._on_turn = on_turn
        self.left: set[bytes] = set()
        """Namespaces that an engine has reset: nothing may come of them."""
        super().__init__(
            "redis://sim",
            lambda: SimStore(self),
            pool=memoryview(pool.data),
            digest=digest,
            clock=clock,
            post=self._in_loop,
            listener=listener,
            make_workers=partial(SimWorkers, self),
        )
        self.breaker._jitter = rng.random

    def hit(self, fault: str) -> bool:
        happens = not self._calm() and self.rng.random() < self.objects.chances[fault]
        self.objects.counts[f"shared_{fault}"] += happens
        return happens

    def _in_loop(self, call: Callable[[], None]) -> None:
        def turn() -> None:
            call()
            self._on_turn()

        self.process.after(0.0, turn)

    def tick(self) -> None:
        super().tick()
        assert isinstance(self._workers, SimWorkers)
        self._workers.probe()

    def read(self, block_id: TierKey, offsets: Sequence[int], deadline: float, on_done: OnDone) -> bool:
        def ended(result: TierResult) -> None:
            self.objects.counts["shared_read"] += result is TierResult.DONE
            on_done(result)

        begin = partial(super().read, block_id, offsets, deadline)
        return self._watched.lend(offsets, "writing", "the shared tier reads", begin, ended) and self._note(
            block_id, "reads"
        )

    def write(self, block: TierBlock, offsets: Sequence[int], on_done: OnDone) -> bool:
        begin = partial(super().write, block, offsets)
        return (
            not self._calm()
            and self._watched.lend(offsets, "ready", "the shared tier writes", begin, on_done)
            and self._note(block.id, "writes")
        )

    def _note(self, block_id: TierKey, does: str) -> bool:
        if block_id.fingerprint in self.left:
            raise Broken(f"the shared tier {does} a block of a namespace that an engine reset")
        self.clock.note(f"shared {does} {block_id.key.hex()[:8]}")
        return True
