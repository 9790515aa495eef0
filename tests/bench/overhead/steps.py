"""What a connector adds to vLLM's scheduler for long prompts: kvoffd's against vLLM's own in-process CPU manager."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from vllm.v1.request import Request

from kvoffd_client.session import Closing
from kvoffd_client.testing import FakeEngine
from kvoffd_client.vllm.connector_metadata import WorkerReport
from tests.bench.overhead.scheduler_harness import BLOCK_TOKENS, RequestRun, SchedulerHarness

PAGE_BYTES = 8192
"""One block of one layer; the bytes are the daemon's business and not the scheduler's."""
CREDIT_BYTES = 1 << 30
IDLE, NATIVE, KVOFFD = "idle", "native", "kvoffd"
CASES = ("miss", "hit")
Say = Callable[[str], None]


@dataclass
class Steps:
    """Runs of all rounds: by case, by connector.

    Attributes:
        blocks: of each prompt.
        runs: ``runs[case][connector]``, one a round; rounds correspond.
    """

    blocks: int
    runs: dict[str, dict[str, list[RequestRun]]] = field(
        default_factory=lambda: {case: {name: [] for name in (IDLE, NATIVE, KVOFFD)} for case in CASES}
    )

    def added_ms(self, case: str, name: str) -> list[float]:
        """Milliseconds in the connector for one request, all steps together."""
        return [run.connector_s * 1e3 for run in self.runs[case][name]]

    def scheduler_ms(self, case: str, name: str) -> list[float]:
        """Milliseconds of scheduler steps for one request, connector included."""
        return [run.scheduler_s * 1e3 for run in self.runs[case][name]]

    def step_ms(self, case: str, name: str) -> list[float]:
        """Milliseconds of the longest step."""
        return [run.step_s * 1e3 for run in self.runs[case][name]]

    def ratios(self, case: str) -> list[float]:
        """What kvoffd's connector adds over what the in-process manager's adds, round by round."""
        pairs = zip(self.added_ms(case, KVOFFD), self.added_ms(case, NATIVE), strict=True)
        return [own / other for own, other in pairs]

    def growth(self, case: str) -> float:
        """As the ratio, from whole steps: their medians less those with a connector that does nothing."""
        own, other, bare = (median(self.scheduler_ms(case, name)) for name in (KVOFFD, NATIVE, IDLE))
        return (own - bare) / (other - bare)

    def calls_us(self, case: str, name: str) -> dict[str, float]:
        """Median microseconds of a request by call of the connector."""
        runs = self.runs[case][name]
        return {call: median(run.calls_s[call] for run in runs) * 1e6 for call in runs[0].calls_s}

    def to_object(self) -> dict[str, object]:
        return {
            case: {
                "ratio": median(self.ratios(case)),
                "ratios": self.ratios(case),
                "growth": self.growth(case),
                "connectors": {
                    name: {
                        "connector_ms": self.added_ms(case, name),
                        "scheduler_ms": self.scheduler_ms(case, name),
                        "longest_step_ms": self.step_ms(case, name),
                        "steps": [run.steps for run in self.runs[case][name]],
                        "calls_us": self.calls_us(case, name),
                    }
                    for name in self.runs[case]
                },
            }
            for case in CASES
        }


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

    def measure(self, rounds: int, say: Say) -> Steps:
        """One uncounted round, then ``rounds``; in each every connector takes its turn, in changing order."""
        steps = Steps(self._blocks)
        order = list(self._harnesses)
        for number in range(rounds + 1):
            if number % 10 == 0:
                say(f"scheduler steps, round {number} of {rounds}")
            tokens = random.choices(range(3, 1000), k=self._blocks * BLOCK_TOKENS + 1)
            random.shuffle(order)
            for name in order:
                miss, hit = self._turn(name, number, tokens)
                if number > 0:
                    steps.runs["miss"][name].append(miss)
                    steps.runs["hit"][name].append(hit)
        return steps

    def _turn(self, name: str, number: int, tokens: list[int]) -> tuple[RequestRun, RequestRun]:
        harness = self._harnesses[name]
        first, second = (harness.request(f"{name} {number} {case}", tokens) for case in CASES)
        harness.clear_prefix_cache()
        miss = harness.run(first)
        harness.clear_prefix_cache()
        if name == KVOFFD:
            self._store(second)
        hit = harness.run(second)
        found = 0 if name == IDLE else self._blocks
        assert (miss.loaded_tokens, miss.stored_blocks) == (0, found), (name, miss)
        assert (hit.loaded_tokens, hit.stored_blocks) == (found * BLOCK_TOKENS, 0), (name, hit)
        return miss, hit

    def _store(self, request: Request) -> None:
        """Bring the prompt's blocks into the daemon, as the engine's workers would have done."""
        assert self._workers.store(request.block_hashes, range(self._blocks)).ok

    def close(self) -> None:
        self._workers.close()
        for harness in self._harnesses.values():
            harness.close()
