"""How many stores survive in an engine that has too few blocks.

``python -m tests.bench.fences`` has a real vLLM on CPU answer long prompts with fewer blocks than they all fill, so
that it pre-empts requests again and again and wants their blocks back at once. A store of such a block that the daemon
has not begun after 50 ms is cancelled. That is measured while nothing else runs, and beside processes that store and
load as fast as they can, with the daemon's counters and the engine's.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.daemon.load_generators import LoadGenerators
from tests.bench.report_file import add_report_options, markdown_table, publish_report, run_facts
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import BLOCK_TOKENS, EngineProcess, completions, prompt, wait_books, wait_connected
from tests.kit.models import make_tiny_llama
from tests.kit.wire import books

PROMPTS = 8
PROMPT_TOKENS = 700
ANSWER_TOKENS = 150
BLOCKS = 130
"""Of the about 215 that all prompts and their answers would fill: more prompts begin than there is room to answer."""
ROUND_S = 600.0
"""Most time for a round: on a quiet machine it takes some ten seconds."""
LOAD_KEYS = 8
"""Blocks of 1 MiB in each job of a process that stores and loads."""


@dataclass(frozen=True)
class Survival:
    """What became of the engine's stores.

    Attributes:
        preemptions: of its requests.
        blocks: that were filled, of prompts and answers.
        stored: of these, in the pool at the end.
        cancelled: stores that a fence cancelled before their copy began.
        unsent: stores that a fence dropped before they were sent; on CPU they are sent at once.
        failed: stores of which a block was not stored, as the engine counts them.
    """

    preemptions: int
    blocks: int
    stored: int
    cancelled: int
    unsent: int
    failed: int


def measure(model: Path, rounds: int, others: int) -> Survival:
    """Have an engine answer ``rounds`` times PROMPTS new prompts, beside ``others`` processes that store and load."""
    extra = {"offload_prompt_only": False}
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess("384MiB"))
        load = stack.enter_context(LoadGenerators("copies", daemon.directory, LOAD_KEYS, others))
        strangers = set(books(daemon.directory).namespaces)
        engine = stack.enter_context(EngineProcess(model, daemon.directory, num_blocks=BLOCKS, extra_config=extra))
        wait_connected(daemon.directory)
        load.start()
        filled = 0
        for number in range(rounds):
            seeds = range(number * PROMPTS, (number + 1) * PROMPTS)
            prompts = [prompt(seed, PROMPT_TOKENS) for seed in seeds]
            engine.begin("generate", prompts=prompts, max_tokens=ANSWER_TOKENS)
            answers = completions(engine.finish(ROUND_S))
            # The last token's keys and values are never computed.
            filled += sum((PROMPT_TOKENS + len(answer.tokens) - 1) // BLOCK_TOKENS for answer in answers)
        load.stop()
        engine.forget()
        found = wait_books(daemon.directory, lambda one: not one.stores.running + one.stores.queued)
        metrics = engine.metrics()
    (own,) = (one for name, one in found.namespaces.items() if name not in strangers)
    return Survival(
        int(metrics["vllm:num_preemptions"]),
        filled,
        own.stored_blocks,
        found.cancelled_stores,
        found.unsent_stores,
        int(metrics.get("vllm:kvoffd_failed_stores", 0)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help=f"of {PROMPTS} prompts (default 5)")
    parser.add_argument("--others", type=int, default=2, help="processes that store and load (default 2)")
    add_report_options(parser)
    options = parser.parse_args()
    found: dict[str, Survival] = {}
    with TemporaryDirectory() as directory:
        model = make_tiny_llama(Path(directory) / "model")
        for name, others in (("alone", 0), (f"beside {options.others} that store and load", options.others)):
            print(f"measuring: {name}", file=sys.stderr, flush=True)
            found[name] = measure(model, options.rounds, others)
    rows = [["the engine", "preemptions", "blocks filled", "stored", "stores cancelled", "unsent", "failed"]]
    for name, one in found.items():
        share = f"{one.stored} ({one.stored / one.blocks:.1%})"
        rows.append([name, *map(str, (one.preemptions, one.blocks, share, one.cancelled, one.unsent, one.failed))])
    command = f"python -m tests.bench.fences --rounds {options.rounds} --others {options.others}"
    facts = run_facts(command, load_average=os.getloadavg()[0])
    results: dict[str, object] = {"results": {name: asdict(one) for name, one in found.items()}}
    publish_report(options, "Stores of an engine with too few blocks", facts, results, markdown_table(rows))


if __name__ == "__main__":
    main()
