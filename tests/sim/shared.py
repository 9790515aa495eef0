"""A store that nodes share, in virtual time. It may forget, lie, hang, answer late, be out of reach, and be reset.

What one life of the daemon wrote another one reads: the store outlives them, as it does nodes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from kvoffd.pool.table_format import digest
from kvoffd.tiers.shared.answers import YES_S, Answers
from kvoffd.tiers.shared.object_format import decode_header, encode_header, header_bytes, object_key
from kvoffd.tiers.shared.store import Store
from kvoffd.tiers.tier import Answer, AskedTier, OnDone, TierBlock, TierKey, TierListener, TierResult, TierShard
from tests.sim.clock import Broken, Clock, Process
from tests.sim.content import Content
from tests.sim.pool import Slot, WatchedPool

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


class SharedStore:
    """Objects by name, as they would lie in Redis, and the generations of namespaces."""

    def __init__(self, contents: Mapping[bytes, Content], rng: random.Random, counts: Counter[str]) -> None:
        self.objects: dict[bytes, bytes] = {}
        self.generations: dict[bytes, int] = {}
        self.chances = {fault: chance * rng.choice((0, 1)) for fault, chance in CHANCES.items()}
        self.chances["elsewhere"] = rng.choice((0.0, 0.3, 0.8))
        self._contents = contents
        self.counts = counts

    def put(self, name: bytes, data: bytes) -> None:
        """Keep an object, and not too many: the oldest goes."""
        self.objects[name] = data
        if len(self.objects) > MOST_OBJECTS:
            del self.objects[next(iter(self.objects))]

    def put_by_another_node(self, block_id: TierKey, generation: int) -> None:
        """Keep a block as another node would have written it."""
        content = self._contents.get(block_id.fingerprint)
        if content is None:  # a hostile client's own
            return
        shards = [content.shard(rank, block_id.group, block_id.key).tobytes() for rank in range(content.world_size)]
        found = TierBlock(block_id, tuple(TierShard(len(data), 0, digest(memoryview(data))) for data in shards))
        self.put(object_key(block_id, generation), encode_header(found, generation, digest) + b"".join(shards))


class SimShared(AskedTier):
    """What one life of the daemon has of it."""

    name = "redis://sim"
    ask_deadline_s = 0.02
    most_window_keys = 64

    def __init__(
        self,
        store: SharedStore,
        pool: WatchedPool,
        clock: Clock,
        process: Process,
        rng: random.Random,
        calm: Callable[[], bool],
    ) -> None:
        self.store = store
        self._pool = pool
        self._clock = clock
        self._process = process
        self._rng = rng
        self._calm = calm
        self._answers = Answers(clock, self.ask_deadline_s)
        self._generations: dict[bytes, int] = {}
        self._dark_until = 0.0
        self._voided: set[bytes] = set()
        self.left: set[bytes] = set()
        """Namespaces that an engine has reset: nothing may come of them."""
        self.jobs = 0
        self._writing: set[TierKey] = set()
        self._read_block: TierBlock | None = None
        self.on_turn: Callable[[], None] = lambda: None
        self.listener: TierListener | None = None

    def _hit(self, fault: str) -> bool:
        happens = not self._calm() and self._rng.random() < self.store.chances[fault]
        self.store.counts[f"shared_{fault}"] += happens
        return happens

    @property
    def reachable(self) -> bool:
        return self._clock.now >= self._dark_until

    def _generation(self, fingerprint: bytes) -> int:
        return self._generations.get(fingerprint, 0)

    # --- asking ----------------------------------------------------------------------------------

    def ask(
        self, owner: int, fingerprint: bytes, group: int, lengths: Sequence[int], keys: Sequence[bytes], *, prefix: bool
    ) -> int:
        if self._hit("dark"):
            self._dark_until = self._clock.now + self._rng.uniform(0.05, 1.5)
        if not self.reachable:
            return 0
        self._answers.set_lengths(fingerprint, group, lengths)
        self._answers.give(fingerprint, group, keys, Answer.ASKED)
        delay = self._rng.uniform(0.02, 0.3) if self._hit("late") else self._rng.uniform(0.0002, 0.005)
        self._process.after(delay, lambda: self._answer(fingerprint, group, keys))
        return len(keys)

    def _answer(self, fingerprint: bytes, group: int, keys: Sequence[bytes]) -> None:
        if self._hit("reset"):  # by another node
            self.store.generations[fingerprint] = self.store.generations.get(fingerprint, 0) + 1
        self._look(fingerprint)
        generation = self._generation(fingerprint)
        ids = [TierKey(fingerprint, group, key) for key in keys]
        for block_id in ids:
            if self._hit("elsewhere"):
                self.store.put_by_another_node(block_id, generation)
        names = [object_key(block_id, generation) for block_id in ids]
        found = [name in self.store.objects or self._hit("lie") for name in names]
        self._answers.answered(fingerprint, group, keys, found)
        if self.listener is not None:
            self.listener.tier_answered(self, fingerprint, group, keys, found)
        self.on_turn()

    def _look(self, fingerprint: bytes) -> None:
        known = self._generations.get(fingerprint, 0)
        self._generations[fingerprint] = now = self.store.generations.get(fingerprint, 0)
        if now > known:
            self._answers.forget(fingerprint)
            self._voided.add(fingerprint)

    def answers(self, fingerprint: bytes, group: int, keys: Sequence[bytes]) -> list[Answer]:
        return self._answers.of(fingerprint, group, keys)

    def poll(self, fingerprint: bytes) -> None:
        self._look(fingerprint)

    def take_voided(self) -> Collection[bytes]:
        found, self._voided = sorted(self._voided), set()
        return found

    def groups(self) -> Collection[tuple[bytes, int]]:
        return ()

    def index(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        return self._answers.within(fingerprint, group, Store.believed_s)

    def readable(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        return self._answers.within(fingerprint, group, YES_S) if self.reachable else {}

    # --- reading and writing ---------------------------------------------------------------------

    def read(self, block_id: TierKey, offsets: Sequence[int], deadline: float, on_done: OnDone) -> bool:
        block = self.index(block_id.fingerprint, block_id.group).get(block_id.key)
        if block is None or not self.reachable:
            return False
        if block_id.fingerprint in self.left:
            raise Broken("a block of a namespace that an engine reset is read from the shared store")
        slots, generation = self._claim(offsets, "writing"), self._generation(block_id.fingerprint)
        lengths = [shard.length for shard in block.shards]

        def finish() -> None:
            result, found = self._read(block_id, generation, offsets, lengths, deadline)
            self.store.counts["shared_read"] += result is TierResult.DONE
            self._let_go(slots)
            if result is TierResult.CORRUPT:
                self.remove([block_id])
            elif result is not TierResult.DONE:
                self._answers.refuse(*block_id)
            elif generation != self._generation(block_id.fingerprint):
                result = TierResult.GONE
            self._read_block = found
            on_done(result)
            self._read_block = None
            self.on_turn()

        self._clock.note(f"shared reads {block_id.key.hex()[:8]}")
        self._process.after(self._delay(), finish)
        return True

    def _read(
        self, block_id: TierKey, generation: int, offsets: Sequence[int], lengths: Sequence[int], deadline: float
    ) -> tuple[TierResult, TierBlock | None]:
        if self._clock.now >= deadline:
            return TierResult.DEADLINE, None
        if not self.reachable or self._hit("fail"):
            return TierResult.FAILED, None
        name = object_key(block_id, generation)
        if self._hit("forget"):
            self.store.objects.pop(name, None)
        data = self.store.objects.get(name)
        if data is None:
            return TierResult.GONE, None
        if self._hit("lie"):
            place = self._rng.randrange(len(data))
            wrong = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
            data = self._rng.choice([wrong, data[:-1], *self.store.objects.values()])
        at = header_bytes(block_id, len(lengths))
        if len(data) != at + sum(lengths):
            return TierResult.CORRUPT, None
        block = decode_header(data[:at], block_id, lengths, generation, digest)
        for number, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            self._pool.data[offset : offset + length] = bytearray(data[at : at + length])
            if block is not None and digest(memoryview(data)[at : at + length]) != block.shards[number].checksum:
                block = None
            at += length
        return (TierResult.DONE if block is not None else TierResult.CORRUPT), block

    def contents(self, block: TierBlock) -> TierBlock:
        assert self._read_block is not None
        return self._read_block

    def write(self, block: TierBlock, offsets: Sequence[int], on_done: OnDone) -> bool:
        fingerprint, group, key = block.id
        known = block.id in self._writing or key in self.index(fingerprint, group)
        if self._calm() or known or not self.reachable or self._hit("fail"):
            return False
        if fingerprint in self.left:
            raise Broken("a block of a namespace that an engine reset is written to the shared store")
        slots, generation = self._claim(offsets, "ready"), self._generation(fingerprint)
        self._writing.add(block.id)

        def finish() -> None:
            parts = [
                self._pool.data[offset : offset + shard.length].tobytes()
                for offset, shard in zip(offsets, block.shards, strict=True)
            ]
            self._let_go(slots)
            self._writing.remove(block.id)
            done = self.reachable and not self._hit("fail")
            if done:
                data = encode_header(block, generation, digest) + b"".join(parts)
                self.store.put(object_key(block.id, generation), data)
                if generation == self._generation(fingerprint):
                    self._answers.set_lengths(fingerprint, group, [shard.length for shard in block.shards])
                    self._answers.give(fingerprint, group, [key], Answer.YES)
            on_done(TierResult.DONE if done else TierResult.FAILED)
            self.on_turn()

        self._clock.note(f"shared writes {key.hex()[:8]}")
        self._process.after(self._delay(), finish)
        return True

    def _delay(self) -> float:
        if self._hit("hang"):
            return self._rng.uniform(1.0, 4.0)
        return self._rng.uniform(0.02, 0.3) if self._hit("slow") else self._rng.uniform(0.0002, 0.003)

    def _claim(self, offsets: Sequence[int], state: str) -> list[Slot]:
        slots = [self._pool.slots[offset] for offset in offsets]
        for slot in slots:
            if slot.state != state:
                raise Broken(f"the shared store uses a slot that is not {state}")
            slot.transfers += 1
        self.jobs += 1
        return slots

    def _let_go(self, slots: Iterable[Slot]) -> None:
        self.jobs -= 1
        for slot in slots:
            slot.transfers -= 1

    # --- the rest --------------------------------------------------------------------------------

    def touch(self, block_ids: Iterable[TierKey]) -> None: ...

    def remove(self, block_ids: Iterable[TierKey]) -> int:
        for block_id in block_ids:
            self._answers.refuse(*block_id)
            self.store.objects.pop(object_key(block_id, self._generation(block_id.fingerprint)), None)
        return 0

    def forget(self, block_ids: Iterable[TierKey]) -> None:
        for block_id in block_ids:
            self._answers.refuse(*block_id)

    def remove_namespace(self, fingerprint: bytes) -> int:
        self._answers.forget(fingerprint)
        return 0

    def tick(self) -> None: ...
