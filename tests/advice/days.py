"""Ten made-up days: prompts of engines, and the daemon that serves them. Each shows one thing that goes right or wrong.

All are random numbers of one seed. A day takes seconds: its blocks are small, and engines compute nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import NamedTuple

BLOCK_TOKENS, BLOCK_BYTES = 16, 4096
PAGE_BYTES = 4096
"""Bytes of a slot, or of a place on a disk, besides its block."""
DOCUMENT_BLOCKS = 16
ONE_TENANT = ("tenant",)


class Prompt(NamedTuple):
    """A prompt: numbers of its whole blocks' contents, and the tokens after them."""

    blocks: tuple[int, ...]
    tail_tokens: int

    @property
    def tokens(self) -> int:
        return len(self.blocks) * BLOCK_TOKENS + self.tail_tokens


Round = Sequence[tuple[int, Prompt]]
"""Prompts that come at the same time, each to an engine by its number."""


@dataclass(frozen=True)
class Day:
    """A day of requests.

    Attributes:
        name: as in the table of results.
        rounds: the requests.
        pool_blocks: size of the pool.
        settings: further settings of the daemon.
        tenants: namespaces of the engines, one for each engine.
        own_blocks: blocks in the prefix cache of each engine.
        events: whether engines send the tokens of blocks.
        store: whether there is a shared store, which holds all blocks.
        store_bytes_per_second: speed of the network to it; None for the machine's own.
        patience_s: time for which an engine waits for a prompt's blocks.
        block_bytes: bytes of a block.
        prefill_rate: tokens per second that engines report; they compute nothing.
    """

    name: str
    rounds: Sequence[Round]
    pool_blocks: int
    settings: dict[str, str] = field(default_factory=dict)
    tenants: Sequence[str] = ONE_TENANT
    own_blocks: int = 0
    events: bool = False
    store: bool = False
    store_bytes_per_second: float | None = None
    patience_s: float = 5.0
    block_bytes: int = BLOCK_BYTES
    prefill_rate: float = 4000.0

    @property
    def pool_bytes(self) -> int:
        return self.pool_blocks * (self.block_bytes + PAGE_BYTES)

    @property
    def prompts(self) -> int:
        return sum(map(len, self.rounds))


class Maker:
    """Makes prompts. ``size``: about the number of prompts of a day."""

    def __init__(self, size: int, seed: int = 76) -> None:
        self.size, self.random, self._contents = size, Random(seed), count(1)

    def blocks(self, number: int = DOCUMENT_BLOCKS) -> tuple[int, ...]:
        """Return contents that no other block has."""
        return tuple(next(self._contents) for _ in range(number))

    def documents(self, number: int) -> list[tuple[int, ...]]:
        return [self.blocks() for _ in range(number)]

    def prompt(self, *parts: Sequence[int]) -> Prompt:
        return Prompt(tuple(one for part in parts for one in part), self.random.randrange(1, BLOCK_TOKENS))

    def about(self, documents: Sequence[tuple[int, ...]]) -> Prompt:
        """A prompt about one of the documents, the first ones more often, and a question of its own."""
        weights = [1 / (1 + number) ** 0.5 for number in range(len(documents))]
        (document,) = self.random.choices(documents, weights)
        return self.prompt(document, self.blocks(1))

    def times(self, part: float) -> int:
        """Return a number in proportion to the day."""
        return max(1, round(self.size * part))


def alone(prompts: Iterator[Prompt]) -> list[Round]:
    """Rounds of one prompt each, for the first engine."""
    return [[(0, one)] for one in prompts]


def too_small(make: Maker) -> Day:
    documents = make.documents(make.times(0.15))
    rounds = alone(make.about(documents) for _ in range(make.size))
    return Day("pool too small", rounds, len(documents) * DOCUMENT_BLOCKS // 4)


def too_large(make: Maker) -> Day:
    documents = make.documents(make.times(0.05))
    rounds = alone(make.about(documents) for _ in range(make.size))
    return Day("pool too large", rounds, 6 * (make.size + len(documents) * DOCUMENT_BLOCKS))


def all_unique(make: Maker) -> Day:
    return Day("all unique", alone(make.prompt(make.blocks()) for _ in range(make.size)), make.size * 2)


def two_at_once(make: Maker) -> Day:
    """Each new prompt comes to both engines at once, and a few come back."""
    documents = make.documents(make.times(0.4))
    rounds: list[Round] = []
    for number, document in enumerate(documents):
        rounds.append([(engine, make.prompt(document, make.blocks(1))) for engine in range(2)])
        if number % 4 == 3:
            again = make.random.choice(documents[: number + 1])
            rounds.append([(number % 2, make.prompt(again, make.blocks(1)))])
    pool_blocks = round(1.3 * len(documents) * (DOCUMENT_BLOCKS + 3))
    return Day("two engines at once", rounds, pool_blocks, tenants=("tenant", "tenant"))


def disk_never_read(make: Maker) -> Day:
    """What comes back is in the pool; what the pool evicts never comes back."""
    documents = make.documents(make.times(0.01))
    rounds = alone(
        make.prompt(make.random.choice(documents) if make.random.random() < 0.5 else make.blocks())
        for _ in range(make.size)
    )
    settings = {"disk_write": "always", "eviction_policy": "lru"}
    return Day("a disk never read", rounds, make.times(0.1) * DOCUMENT_BLOCKS, settings | {"disk": "16MiB"})


def store_only(make: Maker) -> Day:
    """The pool holds a few prompts; the store has all. Computing is so slow that loading is faster on any machine."""
    documents = make.documents(make.times(0.06))
    rounds = alone(make.about(documents) for _ in range(make.times(0.4)))
    settings = {"shared_write": "always"}
    return Day("a store only", rounds, make.times(0.4), settings, store=True, prefill_rate=5.0)


def own_suffices(make: Maker) -> Day:
    documents = make.documents(make.times(0.02))
    rounds = alone(make.about(documents) for _ in range(make.size))
    return Day("the engine's cache suffices", rounds, make.times(0.5), own_blocks=100 * make.size)


def three_tenants(make: Maker) -> Day:
    """Two tenants with documents that come back, and one whose prompts never do, but come fast."""
    documents = [make.documents(make.times(0.04)), make.documents(make.times(0.02))]
    rounds: list[Round] = []
    for number in range(make.size):
        tenant = min(2, number % 6)
        blocks = make.random.choice(documents[tenant]) if tenant < 2 else make.blocks()
        rounds.append([(tenant, make.prompt(blocks))])
    settings = {"eviction_policy": "lru"}
    return Day("three tenants", rounds, make.times(0.08) * DOCUMENT_BLOCKS, settings, ("a", "b", "flood"))


def dated_prefix(make: Maker) -> Day:
    return _dated(make, moved=False)


def moved_date(make: Maker) -> Day:
    """The day of ``dated_prefix`` with the date behind what all prompts share."""
    return _dated(make, moved=True)


def _dated(make: Maker, *, moved: bool) -> Day:
    greeting, system = make.blocks(1), make.blocks(12)
    dates = [make.blocks(1) for _ in range(make.times(0.2))]
    rounds: list[Round] = []
    for number in range(make.size):
        date = dates[number * len(dates) // make.size]
        parts = (greeting, system, date) if moved else (greeting, date, system)
        rounds.append([(0, make.prompt(*parts, make.blocks(2)))])
    return Day("a date in the prefix", rounds, make.size * 8, events=True)


def slow_store(make: Maker) -> Day:
    """Documents of one large block, which the store sends more slowly than engines wait for."""
    documents = [make.blocks(1) for _ in range(make.times(0.06))]
    rounds = alone(make.prompt(make.random.choice(documents), make.blocks(1)) for _ in range(make.times(0.3)))
    return Day(
        "a slow store", rounds, make.times(0.03), {"shared_write": "always"}, store=True, store_bytes_per_second=6e5,
        patience_s=0.01, block_bytes=1 << 16,
    )  # fmt: skip


DAYS: dict[str, Callable[[Maker], Day]] = {
    make.__name__: make
    for make in (
        too_small, too_large, all_unique, two_at_once, disk_never_read, store_only, own_suffices, three_tenants,
        dated_prefix, slow_store,
    )
}  # fmt: skip
