"""What a connector adds to vLLM's scheduler for long prompts: kvoffd's against vLLM's own in-process CPU manager."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from kvoffd_client.session import Closing
from kvoffd_client.testing import FakeEngine
from kvoffd_client.vllm.connector_metadata import WorkerReport
from tests.bench.overhead.scheduler_harness import BLOCK_TOKENS, RequestRun, SchedulerHarness
from tests.bench.report_file import markdown_table, spread

PAGE_BYTES = 8192
"""One block of one layer; the bytes are the daemon's business and not the scheduler's."""
CREDIT_BYTES = 1 << 30
IDLE, NATIVE, KVOFFD = "does nothing", "vLLM's OffloadingConnector", "KvoffdConnector"
CASES = ("miss", "hit")
TARGET = 1.2
Runs = dict[str, dict[str, list[RequestRun]]]
"""By case, by connector, one a round; rounds correspond."""


class StepsBench(Closing):
    """Three schedulers over the same prompts. Needs a daemon with room for a prompt's blocks."""

    def __init__(self, directory: Path, model: Path, blocks: int, rounds: int) -> None:
        self._blocks = blocks
        # Room for everything, so that neither side evicts within a step. (The daemon evicts in its own process.)
        room = (rounds + 2) * blocks * PAGE_BYTES
        self._harnesses = {
            IDLE: SchedulerHarness(model, "IdleConnector", blocks, module="tests.bench.idle_connector"),
            NATIVE: SchedulerHarness(model, "OffloadingConnector", blocks, extra_config={"cpu_bytes_to_use": room}),
            KVOFFD: SchedulerHarness(
                model,
                "KvoffdConnector",
                blocks,
                module="kvoffd_client.vllm.connector",
                # A late answer on a busy machine would be another case.
                extra_config={"directory": str(directory), "do_no_harm": False},
                report=partial(WorkerReport, credit_bytes=CREDIT_BYTES),
            ),
        }
        self._workers = FakeEngine(directory, "steps", layers=1, blocks=blocks, page_bytes=PAGE_BYTES)
        manager = self._harnesses[KVOFFD].connector.connector_scheduler.manager
        manager.namespace.join(self._workers.namespace)  # there are no workers to report it
        assert manager.namespace.client.wait_ready(10.0), "the connector did not reach the daemon"

    def measure(self, rounds: int, say: Callable[[str], None]) -> Runs:
        """One uncounted round, then ``rounds``; in each every connector takes its turn, in changing order."""
        runs: Runs = {case: {name: [] for name in self._harnesses} for case in CASES}
        order = list(self._harnesses)
        for number in range(rounds + 1):
            if number % 10 == 0:
                say(f"scheduler steps, round {number} of {rounds}")
            tokens = random.choices(range(3, 1000), k=self._blocks * BLOCK_TOKENS + 1)
            random.shuffle(order)
            for name in order:
                for case, run in zip(CASES, self._turn(name, number, tokens), strict=True):
                    if number > 0:
                        runs[case][name].append(run)
        return runs

    def _turn(self, name: str, number: int, tokens: list[int]) -> tuple[RequestRun, RequestRun]:
        harness = self._harnesses[name]
        first, second = (harness.request(f"{name} {number} {case}", tokens) for case in CASES)
        harness.clear_prefix_cache()
        miss = harness.run(first)
        harness.clear_prefix_cache()
        if name == KVOFFD:  # as the engine's workers would have done
            assert self._workers.store(second.block_hashes, range(self._blocks)).ok
        hit = harness.run(second)
        found = 0 if name == IDLE else self._blocks
        assert (miss.loaded_tokens, miss.stored_blocks) == (0, found), (name, miss)
        assert (hit.loaded_tokens, hit.stored_blocks) == (found * BLOCK_TOKENS, 0), (name, hit)
        return miss, hit

    def close(self) -> None:
        self._workers.close()
        for harness in self._harnesses.values():
            harness.close()


def ratios(runs: Runs, case: str) -> list[float]:
    """What kvoffd's connector adds over what the in-process manager's adds, round by round."""
    pairs = zip(runs[case][KVOFFD], runs[case][NATIVE], strict=True)
    return [own.connector_s / other.connector_s for own, other in pairs]


def steps_table(runs: Runs, blocks: int) -> str:
    """The scheduler's part as Markdown."""
    rows = [["prompt", "connector", "in the connector, ms", "all steps, ms", "steps"]]
    for case in CASES:
        for name, found in runs[case].items():
            cells = (spread([1e3 * of(run) for run in found]) for of in (_connector_s, _scheduler_s))
            rows.append([case, name, *cells, f"{median(run.steps for run in found):g}"])
    verdicts = []
    for case in CASES:
        met = "met" if median(ratios(runs, case)) <= TARGET else "MISSED"
        times = spread(ratios(runs, case))
        verdicts.append(f"* {case}: {KVOFFD} adds {times} times what vLLM's adds; {met} (target at most {TARGET}).")
    rounds = len(runs[CASES[0]][KVOFFD])
    title = f"## Scheduler, one request of {blocks:,} blocks, {rounds} rounds, median (quartiles)"
    return "\n\n".join([title, markdown_table(rows), "\n".join(verdicts)])


def _connector_s(run: RequestRun) -> float:
    return run.connector_s


def _scheduler_s(run: RequestRun) -> float:
    return run.scheduler_s
