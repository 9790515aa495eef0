"""The contest at work: each side's engine and cache, the workloads one after the other, and a row for each."""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.bench.contest import programs
from tests.bench.contest.caches import KINDS, NONE, Cache, Tiers
from tests.bench.contest.client import Traffic, send
from tests.bench.contest.engine import Engine
from tests.bench.contest.model import FIRST_TOKEN, VOCABULARY
from tests.bench.contest.rows import MAX_CAUSE, Row
from tests.bench.contest.traces import Slice, slice_of
from tests.kit.closing import Starting
from tests.kit.open_traces import open_trace
from tests.kit.redis_server import RedisServer
from tests.kit.slow_link import SlowLink
from tests.kit.waiting import wait_until
from tests.tiers.faulty_bucket import FaultyBucket

BATCH, PREFIXES, TRACES, AGENTS, LMCACHE_BENCH = "batch", "prefixes", "traces", "agents", "lmcache-bench"
RESTARTS, STORES = "restarts", "stores"
SHARED = (BATCH, PREFIXES, TRACES, AGENTS, LMCACHE_BENCH)
"""Parts of which one engine of a side serves all workloads, each from empty caches."""
PARTS = (*SHARED, RESTARTS, STORES)
OPEN_TRACES = {name: open_trace(name) for name in ("conversation", "synthetic")}
RESTART_ROWS = ("new prompts", "engine restarted", "cache restarted", "node restarted", "another node, by Redis")
STORE_ROWS = ("slow store, new prompts", "slow store, from it", "store hangs, new prompts")
WORKLOAD_S = 150.0
"""Deadline of a workload: four times what computing everything takes on two cores."""
LEFT_S = 10.0
"""Time for an engine to end requests whose client has gone."""
WARM_UP_TOKENS = 550
STORE_BYTES_PER_S, STORE_DELAY_S, STORE_REFUSES = 25e6, 0.05, 0.01
DISK_DIRECTORY, MEMORY_DIRECTORY = Path("/var/tmp"), Path("/dev/shm")


@dataclass(frozen=True)
class Size:
    """How much is asked.

    Attributes:
        documents, prompts, document_tokens, question_tokens: of the batch; each prompt is a document and a question.
        sampled, samples, sample_tokens: prompts of the rollout, answers to each, and their tokens.
        trace_requests, trace_s: requests of a trace's slice, and seconds in which they come.
        prefix_prompts, prefixes: of ``prefix_repetition``.
        long_prompts, long_tokens: prompts that are sent after restarts, and their tokens.
        stored_prompts: prompts of the batch that is sent before a slow store.
    """

    documents: int = 16
    prompts: int = 80
    document_tokens: int = 1024
    question_tokens: int = 48
    answer_tokens: int = 8
    sampled: int = 10
    samples: int = 4
    sample_tokens: int = 32
    trace_requests: int = 56
    trace_s: float = 30.0
    prefix_prompts: int = 48
    prefixes: int = 12
    long_prompts: int = 8
    long_tokens: int = 2_000
    stored_prompts: int = 40


FULL = Size()
QUICK = Size(
    documents=4,
    prompts=12,
    document_tokens=512,
    sampled=3,
    sample_tokens=8,
    trace_requests=8,
    trace_s=4.0,
    prefix_prompts=6,
    prefixes=3,
    long_prompts=2,
    long_tokens=1_000,
    stored_prompts=8,
)


class Node(Starting):
    """One side at work: its cache outside the engine and its engine."""

    def __init__(self, model: Path, side: str, tiers: Tiers | None = None) -> None:
        self.cache: Cache = KINDS[side](tiers or Tiers())
        self.engine = Engine(model, self.cache)

    def start(self) -> Node:
        self.cache.start()
        return self.start_engine()

    def start_engine(self) -> Node:
        self.engine.start()
        self.cache.wait_connected(self.engine.pids)
        return self

    def forget(self) -> None:
        """Store what was computed, then empty vLLM's own cache."""
        self.cache.settle()
        self.engine.forget()

    def empty(self) -> None:
        """Empty vLLM's own cache, and then that outside."""
        self.forget()
        self.cache.clear()

    def warm_up(self) -> None:
        """Have it answer two prompts, as an engine that serves has."""
        source = random.Random("warm up")
        send(self.engine, [tokens(source, WARM_UP_TOKENS) for _ in range(2)], max_tokens=4, at_once=1, deadline_s=60.0)

    def close(self) -> None:
        self.engine.close()
        self.cache.close()


class Bench:
    """The contest.

    Args:
        model: the model's directory.
        size: how much is asked.
        keep: called with each row at its end.
        traces: files of traces by the workload's name.
    """

    def __init__(self, model: Path, size: Size, keep: Callable[[Row], None], traces: dict[str, Path]) -> None:
        self._model, self._size, self._keep, self._traces = model, size, keep, traces
        self._own = Path(tempfile.mkdtemp(prefix="contest-", dir="/tmp"))

    def run(self, side: str, parts: Sequence[str], number: int) -> None:
        """Have a side do these parts, in round ``number``."""
        shared = [part for part in SHARED if part in parts]
        if shared:
            self._run_shared(side, shared, number)
        for part, run, names in (
            (RESTARTS, self._run_restarts, RESTART_ROWS[: 2 if side == NONE else None]),
            (STORES, self._run_stores, STORE_ROWS),
        ):
            if part in parts:
                rows = [Row(part, name, side, number) for name in names]
                try:
                    run(side, rows)
                except Exception as error:
                    say(f"{side}, {part} ended: {error}")
                    for row in rows:
                        row.lost = cause(f"an earlier step failed: {error}")
                        self._keep(row)

    def close(self) -> None:
        shutil.rmtree(self._own, ignore_errors=True)

    # --- one engine for all workloads ---

    def _run_shared(self, side: str, parts: Sequence[str], number: int) -> None:
        workloads = [(part, name, run) for part in parts for name, run in self._workloads(part)]
        while workloads:
            with self._started(Node(self._model, side), workloads, number) as node:
                while node and workloads:
                    part, name, run = workloads.pop(0)
                    if not self._measure(node, Row(part, name, side, number), run, again=name.endswith("again")):
                        break

    @contextmanager
    def _started(
        self, node: Node, workloads: list[tuple[str, str, Callable[[Engine], Traffic]]], number: int
    ) -> Iterator[Node | None]:
        """Start and warm up; if that fails, all workloads are lost."""
        side = node.cache.name
        say(f"{side}, round {number}: starting")
        with node_closing(node):
            try:
                node.start()
                node.warm_up()
            except Exception as error:
                for part, name, _ in workloads:
                    self._keep(Row(part, name, side, number, lost=cause(f"it did not start: {error}")))
                workloads.clear()
                yield None
                return
            yield node

    def _workloads(self, part: str) -> Iterator[tuple[str, Callable[[Engine], Traffic]]]:
        size, place = self._size, self._own
        if part == BATCH:
            for name in ("sorted", "random", "random, again"):
                prompts = batch(size, shuffled=name != "sorted")
                prompts = prompts[: size.prompts // 2] if name.endswith("again") else prompts
                yield (
                    f"batch, {name}",
                    partial(
                        send,
                        prompts=prompts,
                        max_tokens=size.answer_tokens,
                        at_once=len(prompts),
                        deadline_s=WORKLOAD_S,
                    ),
                )
            yield "rollout", self._rollout
        elif part == PREFIXES:
            prompts, prefixes = size.prefix_prompts, size.prefixes
            yield (
                "prefix_repetition",
                partial(
                    programs.prefix_repetition, place=place, deadline_s=WORKLOAD_S, prompts=prompts, prefixes=prefixes
                ),
            )
        elif part == TRACES:
            for name in self._traces:
                yield f"timed_trace, {name}", partial(self._replay, name)
        elif part == AGENTS:
            for name in programs.CACHE_PRESSURE:
                yield name, partial(programs.cache_pressure, place=place, deadline_s=WORKLOAD_S, program=name)
        elif part == LMCACHE_BENCH:
            for name in programs.LMCACHE_BENCH:
                yield name, partial(programs.lmcache_bench, place=place, deadline_s=WORKLOAD_S, workload=name)

    def _rollout(self, engine: Engine) -> Traffic:
        """Send each prompt twice, the second time after all others, for several answers of the likeliest tokens."""
        size, source = self._size, random.Random("rollout")
        prompts = [tokens(source, size.document_tokens + size.question_tokens) for _ in range(size.sampled)] * 2
        sampling = {"n": size.samples, "temperature": 1.0, "top_k": 1}
        return send(
            engine, prompts, max_tokens=size.sample_tokens, at_once=len(prompts), deadline_s=WORKLOAD_S, **sampling
        )

    def _replay(self, name: str, engine: Engine) -> Traffic:
        return programs.timed_trace(engine, self._own, WORKLOAD_S, self.slice(name))

    def slice(self, name: str) -> Slice:
        """Write the slice of a trace."""
        size, file = self._size, self._own / f"{name}.jsonl"
        return slice_of(self._traces[name], file, most=size.trace_requests, max_tokens=3_000, seconds=size.trace_s)

    # --- restarts ---

    def _run_restarts(self, side: str, rows: list[Row]) -> None:
        """Restart the engine, the cache, both with what is in memory lost, and go to another node by a Redis.

        Each row that is measured is taken out of ``rows``.
        """
        size, source = self._size, random.Random("restarts")
        prompts = [tokens(source, size.long_tokens) for _ in range(size.long_prompts)]
        ask = partial(send, prompts=prompts, max_tokens=size.answer_tokens, at_once=1, deadline_s=WORKLOAD_S)

        with (
            tempfile.TemporaryDirectory(prefix="contest-", dir=DISK_DIRECTORY) as disk,
            tempfile.TemporaryDirectory(prefix="contest-", dir=MEMORY_DIRECTORY) as memory,
            RedisServer() as redis,
        ):
            tiers = Tiers(disk=Path(disk), redis=redis.port, memory=Path(memory))
            node = Node(self._model, side, tiers if side != NONE else Tiers())
            say(f"{side}: starting, for restarts")
            with node_closing(node):
                node.start()
                node.warm_up()
                self._measure(node, rows.pop(0), ask)
                node.forget()
                ask(node.engine)  # used again, as what is worth keeping is
                node.forget()
                self._measure_restarted(node, rows.pop(0), ask, node.engine)
                if side == NONE:
                    return
                self._measure_restarted(node, rows.pop(0), ask, node.cache)
                node.cache.settle()
                node.engine.stop()
                node.cache.stop()
                for left in Path(memory).iterdir():
                    left.unlink()
                self._measure_restarted(node, rows.pop(0), ask, node.cache, node.engine)
                node.cache.settle()
                node.engine.stop()
                node.cache.stop()
                node.cache.tiers = Tiers(redis=redis.port)
                self._measure_restarted(node, rows.pop(0), ask, node.cache, node.engine)

    def _measure_restarted(
        self, node: Node, row: Row, ask: Callable[[Engine], Traffic], *restarted: Engine | Cache
    ) -> None:
        """Restart these and measure what is sent as soon as the engine serves."""
        for one in restarted:
            one.stop()
        for one in sorted(restarted, key=lambda one: one is node.engine):  # as a node starts them
            one.start()
        if node.engine not in restarted:
            node.engine.forget()
        self._measure(node, row, ask, empty=False)

    # --- stores ---

    def _run_stores(self, side: str, rows: list[Row]) -> None:
        """Send prompts with an S3 behind the cache that is slow, read from it, and then have it hang.

        Each row that is measured is taken out of ``rows``.
        """
        size = self._size
        prompts = batch(size, shuffled=True)[: size.stored_prompts]
        others = batch(size, shuffled=True, seed="others")[: size.stored_prompts]

        def ask(some: list[list[int]]) -> Callable[[Engine], Traffic]:
            return partial(send, prompts=some, max_tokens=size.answer_tokens, at_once=len(some), deadline_s=WORKLOAD_S)

        with FaultyBucket() as bucket, SlowLink(bucket.port, STORE_BYTES_PER_S) as link:
            bucket.delay_s, bucket.refused_part = STORE_DELAY_S, STORE_REFUSES
            node = Node(self._model, side, Tiers(s3=link.port) if side != NONE else Tiers())
            say(f"{side}: starting, for stores")
            with node_closing(node):
                node.start()
                node.warm_up()
                self._measure(node, rows.pop(0), ask(prompts))
                node.forget()
                self._measure_restarted(node, rows.pop(0), ask(prompts), node.engine, node.cache)
                node.forget()
                link.hang_after(0)
                self._measure(node, rows.pop(0), ask(others), empty=False)
                link.resume()

    # --- a row ---

    def _measure(
        self, node: Node, row: Row, run: Callable[[Engine], Traffic], *, again: bool = False, empty: bool = True
    ) -> bool:
        """Measure a row, from empty caches unless ``again`` or not ``empty``; return whether the engine still serves.

        ``again``: vLLM's own cache is emptied alone.
        """
        say(f"{row.side}, round {row.round}: {row.workload}")
        try:
            if again:
                node.forget()
            elif empty:
                node.empty()
            before = node.engine.counts()
            traffic = run(node.engine)
            row.fill(traffic, node.engine.counts().since(before))
        except Exception as error:
            row.lost = cause(error)
            say(f"lost: {row.lost}")
        self._keep(row)
        return not row.lost or self._serves(node)

    @staticmethod
    def _serves(node: Node) -> bool:
        """Return whether it answers, and nothing of the lost row is left in it."""
        try:
            node.warm_up()
            wait_until(lambda: not node.engine.counts().requests, LEFT_S, interval_s=0.2)
        except Exception:
            return False
        return True


@contextmanager
def node_closing(node: Node) -> Iterator[None]:
    """Close a node at the end; the logs' ends are printed if it ends by an error."""
    try:
        yield
    except Exception:
        say(f"{node.engine.log[-1500:]}\n--- the cache:\n{node.cache.log[-1500:]}")
        raise
    finally:
        node.engine.kill()
        node.close()


def batch(size: Size, *, shuffled: bool, seed: str = "batch") -> list[list[int]]:
    """Return prompts, each a document and a question of its own; sorted by document, or in random order."""
    source = random.Random(seed)
    documents = [tokens(source, size.document_tokens) for _ in range(size.documents)]
    prompts = [
        documents[at * size.documents // size.prompts] + tokens(source, size.question_tokens)
        for at in range(size.prompts)
    ]
    if shuffled:
        source.shuffle(prompts)
    return prompts


def tokens(source: random.Random, count: int) -> list[int]:
    return source.choices(range(FIRST_TOKEN, VOCABULARY), k=count)


def cause(error: object) -> str:
    """Return why a row is lost, in one line: the beginning and the end of a long one."""
    text = " ".join(str(error).split()) or type(error).__name__
    half = MAX_CAUSE // 2
    return text if len(text) <= MAX_CAUSE else f"{text[:half]} ... {text[-half:]}"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
