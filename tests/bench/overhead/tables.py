"""Tables of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from tests.bench.overhead.steps import CASES, IDLE, KVOFFD, NATIVE, Steps
from tests.bench.overhead.throughput import Throughput, Turn
from tests.bench.overhead.worker_steps import CASES as WORKER_CASES
from tests.bench.overhead.worker_steps import WorkerSteps
from tests.bench.report_file import markdown_table, number

NAMES = {IDLE: "does nothing", NATIVE: "vLLM's OffloadingConnector", KVOFFD: "KvoffdConnector"}
STEPS_TARGET = 1.2
WORKERS_TARGET = 1.0
THROUGHPUT_TARGET = 0.98


def steps_table(steps: Steps, others: float) -> str:
    """Of the scheduler's part."""
    rows = [["prompt", "connector", "in the connector, ms", "all steps, ms", "longest step, ms", "steps"]]
    rows += [[case, NAMES[name], *_run_cells(steps, case, name)] for case in CASES for name in NAMES]
    ratios = [
        f"* {case}: KvoffdConnector adds {_spread(steps.ratios(case))} times what vLLM's adds "
        f"(whole steps: {number(steps.growth(case))}); {_met(median(steps.ratios(case)) <= STEPS_TARGET)}"
        f" (target at most {STEPS_TARGET})."
        for case in CASES
    ]
    rounds = len(steps.runs[CASES[0]][KVOFFD])
    title = f"## Scheduler, one request of {steps.blocks:,} blocks, {rounds} rounds, median (quartiles)"
    calls = [_calls(steps, case) for case in CASES]
    foot = f"Other processes used {others:.0%} of the cores meanwhile."
    return "\n\n".join([title, markdown_table(rows), "\n".join(ratios), *calls, foot])


def _run_cells(steps: Steps, case: str, name: str) -> list[str]:
    measured = (steps.added_ms(case, name), steps.scheduler_ms(case, name), steps.step_ms(case, name))
    return [*map(_spread, measured), f"{median(run.steps for run in steps.runs[case][name]):g}"]


def _calls(steps: Steps, case: str) -> str:
    own, other = (steps.calls_us(case, name) for name in (KVOFFD, NATIVE))
    rows = [[f"{case}: call, µs of a request", NAMES[KVOFFD], NAMES[NATIVE]]]
    rows += [[f"`{call}`", f"{own[call]:,.0f}", f"{other[call]:,.0f}"] for call in own]
    return markdown_table(rows)


def workers_table(found: WorkerSteps, others: float) -> str:
    rows = [["stores of a step", "layers", "worker", "in its calls, µs", "CPU of the process, µs"]]
    ratios = []
    for case in WORKER_CASES:
        stores, layers = case
        for name, label in ((NATIVE, "vLLM's CPUOffloadingWorker"), (KVOFFD, "KvoffdWorker")):
            spent = [[seconds * 1e6 for seconds in part[case][name]] for part in (found.calls, found.cpu)]
            rows.append([str(stores), str(layers), label, *map(_spread, spent)])
        ratio = found.ratio(case)
        ratios.append(
            f"* {stores} stores, {layers} layers: {number(ratio)}; {_met(ratio <= WORKERS_TARGET)} "
            f"(target at most {WORKERS_TARGET})."
        )
    rounds = len(found.calls[WORKER_CASES[0]][KVOFFD])
    title = f"## Worker, stores of one block each in a step, {rounds} rounds, median (quartiles)"
    foot = (
        "vLLM's worker has no GPU here: its streams, events and copies take no time. "
        f"Other processes used {others:.0%} of the cores meanwhile."
    )
    return "\n\n".join([title, markdown_table(rows), "\n".join(ratios), foot])


def throughput_table(found: Throughput, model: str) -> str:
    """Of the engine's part."""
    load = found.load
    rows = [["connector", "tokens/s", "CPU s of the engine", "CPU s of the daemon"]]
    rows += [[name, *_cells(turns)] for name, turns in ((NAMES[IDLE], found.idle), (NAMES[KVOFFD], found.kvoffd))]
    ratio = median(found.ratios)
    title = (
        f"## vLLM on CPU at 0 % hits, model {model}, float32, blocks of 32; a round: {load.prompts} prompts of "
        f"{load.prompt_tokens} tokens, {load.answer_tokens} answered; {len(found.ratios)} rounds, median (quartiles)"
    )
    verdict = (
        f"* Ratio, round by round: {_spread(found.ratios)}; {_met(ratio >= THROUGHPUT_TARGET)} "
        f"(target at least {THROUGHPUT_TARGET}). The daemon stored {found.stored_bytes / 2**20:,.0f} MiB."
    )
    others = f"{median(found.others):.0%} of the cores in the median round, {max(found.others):.0%} at most"
    return "\n\n".join([title, markdown_table(rows), verdict, f"Other processes used {others}."])


def _cells(turns: Sequence[Turn]) -> list[str]:
    return [
        _spread([turn.tokens_per_s for turn in turns]),
        _spread([turn.engine_cpu_s for turn in turns]),
        _spread([turn.daemon_cpu_s for turn in turns]),
    ]


def _met(met: bool) -> str:
    return "met" if met else "MISSED"


def _spread(values: Sequence[float]) -> str:
    """Median and quartiles: a round that something disturbed says nothing about the rest."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return f"{number(median(ordered))} ({number(ordered[quarter])} to {number(ordered[-1 - quarter])})"
