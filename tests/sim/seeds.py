"""The seeds of the ordinary run: some that together bring every kind of fault several times, and others.

``python -m tests.sim.seeds`` finds those that cover the faults, and records them in ``seeds.json``. Run it after a
change of the simulator.
"""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.sim.scenario import KINDS, Scenario
from tests.sim.shared import CHANCES as SHARED_CHANCES
from tests.sim.world import run

RECORD = Path(__file__).with_name("seeds.json")
SEARCHED = 800
COVERING, ALL = 60, 200
"""How many seeds cover the faults, and how many there are in all."""
EVENTS = (*KINDS, *(f"shared_{fault}" for fault in SHARED_CHANCES), "load_failed", "store_failed", "fence_gave_up")
"""What has to happen in the seeds that cover."""


def ordinary() -> list[int]:
    """The seeds of the ordinary run: those that cover the faults first."""
    covering: list[int] = json.loads(RECORD.read_text())["covering"]
    others = (seed for seed in range(SEARCHED) if seed not in covering)
    return [*covering, *(next(others) for _ in range(ALL - COVERING))]


def happens(seed: int) -> Counter[str]:
    """How often what happens in a seed's run, and its steps."""
    outcome = run(Scenario(seed))
    assert outcome.problem is None, f"seed {seed}: {outcome.problem}"
    return Counter({kind: outcome.counts[kind] for kind in EVENTS if outcome.counts[kind]})


def covering(runs: dict[int, Counter[str]]) -> list[int]:
    """Choose seeds one by one, each time the one whose faults are the rarest in those before it."""
    chosen: list[int] = []
    seen: Counter[str] = Counter()
    while len(chosen) < COVERING:
        seed = max(
            (seed for seed in runs if seed not in chosen),
            key=lambda seed: sum(0.5 ** seen[kind] for kind in runs[seed]),
        )
        chosen.append(seed)
        seen.update(dict.fromkeys(runs[seed], 1))
    print("seeds in which each happens:", ", ".join(f"{kind} {seen[kind]}" for kind in EVENTS))
    return sorted(chosen)


def main() -> None:
    """Run the seeds on all cores, and record those that cover the faults."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = dict(zip(range(SEARCHED), pool.map(happens, range(SEARCHED), chunksize=8), strict=True))
    record = {"made by": "python -m tests.sim.seeds", "covering": covering(runs)}
    RECORD.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
