"""A batch of prompts about some documents, of which vLLM's KV cache holds a few: which of them are computed again.

200 prompts arrive at once, each one of 20 documents and a question of its own, sorted by document or in random order.
They are answered by vLLM alone, by vLLM with kvoffd and the connector's defaults, both with a KV cache of five
documents, and by vLLM alone with a KV cache of all documents, whose hits nobody can exceed. Besides: prompts that are
sorted but have random priorities, and prompts with several samples each. The model is a Llama with random weights whose
answers are real. ``python -m tests.bench.batch`` prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvoffd_client import AdminClient
from tests.bench.report_file import ROOT, markdown_table, number, print_report, run_facts
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import BLOCK_TOKENS, EngineProcess, completions, tokens, wait_connected, wait_stored
from tests.kit.models import VOCABULARY, make_demo_llama

ALONE, KVOFFD, UNBOUNDED = "vLLM", "kvoffd", "unbounded"
SIDES = (ALONE, KVOFFD, UNBOUNDED)
SORTED, RANDOM, PRIORITY, SAMPLES = "sorted", "random", "priority", "samples"
ORDERS = (SORTED, RANDOM, PRIORITY, SAMPLES)
TITLE = "A batch about more documents than the KV cache holds"
TEXT = """\
* **of tokens**: part of the prompts' tokens that was not computed (`num_cached_tokens` of vLLM's answers).
* **by kvoffd**: part of the prompts' tokens that was loaded.
* **of unbounded**: tokens that were not computed with kvoffd, of those with the unbounded KV cache. The aim is at least
  95 %.
* **seconds**: from the call of `LLM.generate` to its return. The sides ran one after the other.
* **late**: lookups of which the engine no longer waited for the answer. **pre-empted**: requests, with kvoffd.
* `sorted`, `random`: the order of the prompts. `priority`: sorted, with random priorities and vLLM's priority
  scheduling. `samples`: {sampled} prompts about a document of their own with {samples} samples each of {sample_tokens}
  tokens, each prompt twice, the second time after all others.

{prompts} prompts of {document_tokens} + {question_tokens} tokens about {documents} documents, {max_tokens} tokens
answered, greedy; a KV cache of {held} such prompts, or of all. Float32, blocks of {block_tokens} tokens, model runner
{runner}."""
HEADER = [
    "max_num_seqs",
    "order",
    "of tokens: vLLM",
    "kvoffd",
    "unbounded",
    "by kvoffd",
    "of unbounded",
    "seconds: vLLM",
    "kvoffd",
    "unbounded",
    "late",
    "pre-empted",
]
DEADLINE_S = 3600.0
"""Longest time that a batch may take."""
SAMPLE_TOKENS = 32
WARM_UP_TOKENS = 1100
"""Tokens of two prompts that each engine computes first, as one that serves has."""


@dataclass(frozen=True)
class Workload:
    """The batch.

    Attributes:
        documents: number of documents.
        prompts: number of prompts, of which each document has as many as the others.
        held: number of prompts that the KV cache holds.
        document_tokens, question_tokens: tokens of each.
        max_tokens: tokens answered.
        sampled: documents that have prompts with several samples.
        samples: samples of each.
    """

    documents: int = 20
    prompts: int = 200
    held: int = 5
    document_tokens: int = 640
    question_tokens: int = 32
    max_tokens: int = 4
    sampled: int = 10
    samples: int = 4

    @property
    def prompt_blocks(self) -> int:
        """Blocks of a prompt and its answer."""
        return -(-(self.document_tokens + self.question_tokens + self.max_tokens) // BLOCK_TOKENS)

    def num_blocks(self, side: str) -> int:
        """Return the blocks of a side's KV cache, with vLLM's null block."""
        return 1 + self.prompt_blocks * (self.held if side != UNBOUNDED else self.documents + self.prompts)

    def batch(self, order: str) -> list[list[int]]:
        """Return the prompts in an order. Each order has documents of its own."""
        source = random.Random(order)

        def made(count: int) -> list[int]:
            return source.choices(range(3, VOCABULARY), k=count)

        if order == SAMPLES:
            return [made(self.document_tokens + self.question_tokens) for _ in range(self.sampled)] * 2
        documents = [made(self.document_tokens) for _ in range(self.documents)]
        batch = [documents[at * self.documents // self.prompts] for at in range(self.prompts)]
        batch = [document + made(self.question_tokens) for document in batch]
        if order == RANDOM:
            source.shuffle(batch)
        return batch

    def arguments(self, order: str) -> dict[str, Any]:
        """Return the other arguments of ``generate`` for an order."""
        if order == SAMPLES:
            # The likeliest token, but by sampling: answers of all sides are equal.
            sampling = {"n": self.samples, "temperature": 1.0, "top_k": 1}
            return {"max_tokens": SAMPLE_TOKENS, "sampling": sampling}
        if order == PRIORITY:
            source = random.Random(order)
            priorities = [{"priority": source.randrange(1000)} for _ in range(self.prompts)]
            return {"max_tokens": self.max_tokens, "transfer": priorities}
        return {"max_tokens": self.max_tokens}


@dataclass
class Found:
    """What a side did with a batch: tokens, seconds and counts."""

    prompt_tokens: int
    cached: int
    loaded: int
    seconds: float
    preempted: int
    late: int
    skipped: int
    answers: list[list[int]]


class BatchEngine(EngineProcess):
    """An engine that may take long over a batch."""

    def finish(self) -> Any:
        kind, value = self._receive(DEADLINE_S)
        assert kind == "ok", f"{value}\n{self.log[-4000:]}"
        return value


class Bench:
    """Engines and a daemon, one engine at a time."""

    def __init__(self, work: Workload, model: Path, *, v2: bool) -> None:
        self._work, self._model, self._v2 = work, model, v2

    def run(self, side: str, most_running: int, orders: Sequence[str]) -> dict[str, Found]:
        """Have one side answer the batch in these orders, each from empty caches."""
        found = {}
        usual = [order for order in orders if order != PRIORITY]
        for some, by_priority in ((usual, False), ([one for one in orders if one == PRIORITY], True)):
            if some:
                with self._engine(side, most_running, by_priority) as (engine, directory):
                    for order in some:
                        found[order] = self._measure(engine, directory, order)
        return found

    @contextmanager
    def _engine(self, side: str, most_running: int, by_priority: bool) -> Iterator[tuple[EngineProcess, Path | None]]:
        settings: dict[str, Any] = {}
        if by_priority:
            scheduler = "tests.bench.batch_scheduler.PriorityScheduler"
            settings = {"scheduling_policy": "priority", "scheduler_cls": scheduler}
        with ExitStack() as stack:
            directory = stack.enter_context(DaemonProcess("1GiB")).directory if side == KVOFFD else None
            engine = BatchEngine(
                self._model,
                directory,
                v2=self._v2,
                num_blocks=self._work.num_blocks(side),
                max_model_len=max(WARM_UP_TOKENS // 2, self._work.prompt_blocks * BLOCK_TOKENS) + SAMPLE_TOKENS,
                max_num_seqs=most_running,
                environ={"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "4"},
                **settings,
            )
            stack.enter_context(engine)
            if directory:
                wait_connected(directory)
            for seed in (1, 2):
                source = random.Random(seed)
                prompt = source.choices(range(3, VOCABULARY), k=WARM_UP_TOKENS // 2)
                engine.generate([prompt], max_tokens=1, **({"transfer": [{"priority": 0}]} if by_priority else {}))
            yield engine, directory

    def _measure(self, engine: EngineProcess, directory: Path | None, order: str) -> Found:
        if directory:
            wait_stored(directory)
            with AdminClient(directory) as admin:
                admin.clear()
        engine.forget()
        before = engine.metrics()
        began = time.perf_counter()
        answers = completions(engine.call("generate", prompts=self._work.batch(order), **self._work.arguments(order)))
        seconds = time.perf_counter() - began
        after = engine.metrics()

        def count(name: str) -> int:
            return int(after.get(f"vllm:{name}", 0) - before.get(f"vllm:{name}", 0))

        cached = count("prompt_tokens_cached")
        assert order == SAMPLES or cached == sum(answer.cached for answer in answers), "vLLM counts differ"
        return Found(
            prompt_tokens=count("prompt_tokens"),
            cached=cached,
            loaded=count("external_prefix_cache_hits"),
            seconds=seconds,
            preempted=count("num_preemptions"),
            late=count("kvoffd_late_lookups"),
            skipped=count("kvoffd_slow_loads_skipped"),
            answers=tokens(answers),
        )


def row(most_running: int, order: str, found: dict[str, Found]) -> list[str]:
    """Return a row of the table."""

    def part(side: str) -> str:
        return f"{found[side].cached / found[side].prompt_tokens:.1%}" if side in found else "-"

    kvoffd, unbounded = found.get(KVOFFD), found.get(UNBOUNDED)
    return [
        str(most_running),
        order,
        *map(part, SIDES),
        f"{kvoffd.loaded / kvoffd.prompt_tokens:.1%}" if kvoffd else "-",
        f"{kvoffd.cached / unbounded.cached:.1%}" if kvoffd and unbounded else "-",
        *(number(found[side].seconds) if side in found else "-" for side in SIDES),
        str(kvoffd.late) if kvoffd else "-",
        str(kvoffd.preempted) if kvoffd else "-",
    ]


def differing(found: dict[str, Found]) -> int:
    """Return how many answers of the sides differ, of which loads must be no cause."""
    sides = [one.answers for one in found.values()]
    return sum(any(each != first for each in others) for first, *others in zip(*sides, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.batch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--max-num-seqs", default="256", help="vLLM's setting, one or several (default 256; 1,4,256)")
    parser.add_argument("--orders", default=",".join(ORDERS), help=f"default {','.join(ORDERS)}")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"default {','.join(SIDES)}")
    parser.add_argument("--prompts", type=int, default=Workload.prompts, help=f"default {Workload.prompts}")
    parser.add_argument("--v2", action="store_true", help="vLLM's second model runner, over an emulated stream")
    parser.add_argument("--json", type=Path, help="file for all counts, to which they are added")
    given = parser.parse_args()
    orders, sides = given.orders.split(","), given.sides.split(",")
    for name, some, known in (("orders", orders, ORDERS), ("sides", sides, SIDES)):
        if unknown := set(some) - set(known):
            parser.error(f"--{name} has {', '.join(sorted(unknown))}; it may have {', '.join(known)}")
    work = Workload(prompts=given.prompts)
    facts = run_facts(f"python -m tests.bench.batch {' '.join(sys.argv[1:])}".strip())
    rows, others = [HEADER], 0
    with TemporaryDirectory() as place:
        bench = Bench(work, make_demo_llama(Path(place) / "demo"), v2=given.v2)
        for most_running in map(int, given.max_num_seqs.split(",")):
            by_side = {}
            for side in sides:
                print(f"measuring: {side}, max_num_seqs {most_running}", file=sys.stderr, flush=True)
                by_side[side] = bench.run(side, most_running, orders)
            for order in orders:
                found = {side: by_side[side][order] for side in sides}
                rows.append(row(most_running, order, found))
                others += differing(found)
                if given.json:
                    note(given.json, facts | {"max_num_seqs": most_running, "order": order}, found)
            print(markdown_table(rows), file=sys.stderr, flush=True)
    text = TEXT.format(
        **asdict(work), sample_tokens=SAMPLE_TOKENS, block_tokens=BLOCK_TOKENS, runner="V2" if given.v2 else "V1"
    )
    load = f"Load average at the end: {os.getloadavg()[0]:.1f}. Answers that differ between the sides: {others}."
    print_report(TITLE, facts, "\n\n".join([text, markdown_table(rows), load]))
    return 0


def note(file: Path, facts: dict[str, Any], found: dict[str, Found]) -> None:
    """Append a row's counts to a file of JSON lines."""
    counts = {side: asdict(one) for side, one in found.items()}
    for one in counts.values():
        del one["answers"]
    with file.open("a") as lines:
        lines.write(json.dumps(facts | {"sides": counts}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
