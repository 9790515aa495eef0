"""What is compared, in which order. Both sides take turns in every round, and the floors are measured in between."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

from kvoffd_client.cli.bench import echo_process, memcpy_of
from tests.bench.cpu_time import OthersShare
from tests.bench.peers.client import Client
from tests.bench.peers.player import BLOCK_TOKENS, Copy, Geometry, Prompt
from tests.bench.peers.servers import POOL_GIB, KvoffdServer, LMCacheServer
from tests.bench.peers.table import Row

T = TypeVar("T")
F = TypeVar("F")
KIB, MIB, GIB = 2**10, 2**20, 2**30
PROMPT_TOKENS = 16_384
DEFAULT_CHUNK_TOKENS = 256
"""LMCache's default."""
JOB_BYTES = 64 * MIB
JOB_GB = JOB_BYTES / 1e9
LAYERS = 16
PIECES = (64 * KIB, 256 * KIB)
LOOKUP = Geometry(layers=1, blocks=1 + PROMPT_TOKENS // BLOCK_TOKENS, page_bytes=4 * KIB)
"""Lookups ask for many small blocks. Block 0 is nobody's: LMCache takes it for no block, as vLLM does."""
WARM_UP_JOBS = 15 * GIB * POOL_GIB // (16 * JOB_BYTES)
"""As many as fit in 15/16 of the pool: LMCache's client maps it anew for each engine, and a page at its first touch."""
WARM_UPS = 3
"""Rounds before those that count."""

Say = Callable[[str], None]
Turn = Callable[[], T]


@dataclass(frozen=True)
class Effort:
    """How much of everything.

    Attributes:
        rounds: that count.
        samples: lookups in a round.
        others_share: of all cores, 0 to 1: what other processes may use in a round that counts.
        patience: rounds that may not count before the comparison gives up.
    """

    rounds: int = 9
    samples: int = 20
    others_share: float = 0.04
    patience: int = 500


class Disturbed(Exception):
    """Other processes disturbed more rounds than one can do again."""


class Comparison:
    """Runs all parts and collects the rows, and what the sides say of themselves."""

    def __init__(self, rival_python: Path, effort: Effort, say: Say) -> None:
        self._python, self._effort, self._say = rival_python, effort, say
        self.rows: list[Row] = []
        self.facts: dict[str, dict[str, str]] = {}
        self.commands: list[str] = []
        self.shares: list[float] = []
        self.disturbed = 0

    def run(self) -> None:
        """All parts; some minutes."""
        with ExitStack() as stack:
            kvoffd, lmcache = self._pair(stack, BLOCK_TOKENS, "NHD")
            self._lookups(kvoffd, lmcache, Prompt(PROMPT_TOKENS, PROMPT_TOKENS // BLOCK_TOKENS))
            for piece in PIECES:
                self._copies(kvoffd, lmcache, piece, "16-token chunks")
        with ExitStack() as stack:
            kvoffd, lmcache = self._pair(stack, DEFAULT_CHUNK_TOKENS, "NHD")
            self._lookups(kvoffd, lmcache, Prompt(PROMPT_TOKENS, PROMPT_TOKENS // DEFAULT_CHUNK_TOKENS))
            for piece in PIECES:
                self._copies(kvoffd, lmcache, piece, "256-token chunks")
        with ExitStack() as stack:
            kvoffd, lmcache = self._pair(stack, DEFAULT_CHUNK_TOKENS, "HND")
            for piece in PIECES:
                self._copies(kvoffd, lmcache, piece, "256-token chunks, heads before tokens")

    def _pair(self, stack: ExitStack, chunk_tokens: int, layout: str) -> tuple[Client, Client]:
        servers = KvoffdServer(), LMCacheServer(self._python, chunk_tokens, layout)
        kvoffd, lmcache = (stack.enter_context(Client(stack.enter_context(server))) for server in servers)
        for server, client in zip(servers, (kvoffd, lmcache), strict=True):
            if server.name not in self.facts:
                self.facts[server.name] = client.ask("facts")
                self.commands.append(" ".join([Path(server.command[0]).name, *server.command[1:]]))
        return kvoffd, lmcache

    def _lookups(self, kvoffd: Client, lmcache: Client, prompt: Prompt) -> None:
        for client in (kvoffd, lmcache):
            client.open(LOOKUP)
            client.ask("fill", prompt=asdict(prompt))
        with echo_process() as echo:
            for hit in (False, True):
                case = f"lookup of {prompt.tokens:,} tokens, {prompt.keys:,} keys, {'hit' if hit else 'miss'}"
                self._say(case)
                found = self._rounds(
                    partial(kvoffd.lookups, prompt, hit, self._effort.samples),
                    partial(lmcache.lookups, prompt, hit, self._effort.samples),
                    lambda: [echo(96 + 32 * prompt.keys, 64 + prompt.keys) for _ in range(self._effort.samples)],
                )
                ours, theirs, floors = ([1000 * median(seconds) for seconds in side] for side in found)
                self.rows.append(Row(case, "ms", ours, theirs, floors))

    def _copies(self, kvoffd: Client, lmcache: Client, piece: int, chunks: str) -> None:
        blocks = JOB_BYTES // (LAYERS * piece)
        geometry = Geometry(LAYERS, 1 + 2 * blocks, piece)
        for client in (kvoffd, lmcache):
            client.open(geometry)
            client.ask("verify", blocks=blocks)
            client.ask("warm", order=list(range(1, 1 + blocks)), jobs=WARM_UP_JOBS)
        own_orders, other_orders = _orders(geometry.blocks, blocks), _orders(geometry.blocks, blocks)
        self._say(f"copies in pieces of {piece // KIB} KiB, {chunks}")
        with memcpy_of(JOB_BYTES) as memcpy:
            ours, theirs, floors = self._rounds(
                lambda: kvoffd.copies(next(own_orders)),
                lambda: lmcache.copies(next(other_orders)),
                lambda: JOB_GB / memcpy(),
            )
        for index, what in enumerate(("store", "load")):
            case = f"{what} of {JOB_BYTES // MIB} MiB, pieces of {piece // KIB} KiB, {chunks}"
            columns = [[item[index] for item in side] for side in (ours, theirs)]
            own, other = ([JOB_GB / item.seconds for item in side] for side in columns)
            self.rows.append(Row(case, "GB/s", own, other, floors, more_is_better=True))
            own, other = ([_both_cpu_s(item) / JOB_GB for item in side] for side in columns)
            self.rows.append(Row("... CPU of client and server", "s/GB", own, other))
            own, other = ([item.server_cpu_s / JOB_GB for item in side] for side in columns)
            self.rows.append(Row("... of it in the server", "s/GB", own, other))

    def _rounds(self, ours: Turn[T], theirs: Turn[T], floor: Turn[F]) -> tuple[list[T], list[T], list[F]]:
        """Each of the three in every round; the first ones warm up, and who begins changes from round to round.

        A round in which other processes used the machine too is done again: LMCache copies with as many threads as
        there are cores, and suffers from others far more than anything else here does.
        """
        found: list[tuple[T, T, F]] = []
        for number in range(WARM_UPS + self._effort.rounds):
            turns = partial(_forwards if number % 2 else _backwards, ours, theirs, floor)
            found.append(turns() if number < WARM_UPS else self._quietly(turns))
        own, other, floors = zip(*found[WARM_UPS:], strict=True)
        return list(own), list(other), list(floors)

    def _quietly(self, work: Turn[T]) -> T:
        """Do ``work`` until others leave the machine alone while it is done. Raises Disturbed."""
        while True:
            with OthersShare() as others:
                result = work()
            if others.share <= self._effort.others_share:
                self.shares.append(others.share)
                return result
            self.disturbed += 1
            if self.disturbed > self._effort.patience:
                raise Disturbed("The machine is too busy to measure on; try again when it is quiet.")


def _forwards(ours: Turn[T], theirs: Turn[T], floor: Turn[F]) -> tuple[T, T, F]:
    own, least, other = ours(), floor(), theirs()
    return own, other, least


def _backwards(ours: Turn[T], theirs: Turn[T], floor: Turn[F]) -> tuple[T, T, F]:
    other, least, own = theirs(), floor(), ours()
    return own, other, least


def _orders(blocks: int, count: int) -> Iterator[list[int]]:
    """``count`` blocks of an engine, scattered, again and again; the same for everybody who asks."""
    chooser = random.Random(1)
    while True:
        yield chooser.sample(range(1, blocks), count)


def _both_cpu_s(copy: Copy) -> float:
    return copy.client_cpu_s + copy.server_cpu_s


def load_average() -> str:
    """Of the last minute."""
    return f"{os.getloadavg()[0]:.2f}"
