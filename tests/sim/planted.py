"""Planted faults: one line of the real code made wrong, to show that the tests would find such a bug.

``planted.diff`` has them: the name, the promise of RELIABILITY.md that the fault breaks, the function, and the lines
that are replaced. Below the name stands the test of the door suite that finds it, where it shows at a border. The
simulator finds all but those marked ``door only``: it does not run processes, HTTP and real sockets. Where the code has
moved on, the lines are not found any more: plant the same fault in the new code. Two programs use the list:

* ``python -m tests.sim.planted`` searches the seeds that find each fault and records them in ``planted_seeds.json``,
  which the ordinary tests try. Run it after a change of the simulator or of a planted line.
* ``python -m tests.sim.planted_at_the_door`` runs the tests of the door suite with each fault planted.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import multiprocessing
import re
import textwrap
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

LIST = Path(__file__).with_name("planted.diff")
RECORD = Path(__file__).with_name("planted_seeds.json")
SEARCHED = 2500
"""So many seeds are searched for those that find a fault."""
RECORDED, RECORDED_IN = 4, 150
"""So many of them are recorded, those with the shortest runs first; of a rare fault those that so many seeds bring."""


@dataclass(frozen=True)
class Planted:
    """One fault: in ``function``, ``right`` is replaced by ``wrong``."""

    name: str
    promise: int
    function: str
    """Its module and, behind a space, its name in it."""
    right: str
    wrong: str
    door: str
    """The test of the door suite that finds it, or nothing."""
    simulated: bool

    @staticmethod
    def read(entry: str) -> Planted:
        head, *lines = entry.splitlines()
        name, promise, function, *door_only = head.split(" | ")
        of = {mark: [line[2:] for line in lines if line.startswith(mark)] for mark in "-+ "}
        assert sum(map(len, of.values())) == len(lines), entry
        right, wrong = "\n".join(of["-"]), "\n".join(of["+"])
        return Planted(name, int(promise), function, right, wrong, "".join(of[" "]), not door_only)

    @contextmanager
    def plant(self) -> Iterator[None]:
        """Make the code wrong for a while, wherever it is called from."""
        function = self._find()
        source = textwrap.dedent(inspect.getsource(function))
        source = source[re.search("^(async )?def ", source, re.MULTILINE).start() :]  # type: ignore[union-attr]
        assert source.count(self.right) == 1, (
            f"{self.name!r} finds its line {source.count(self.right)} times in {self.function}: "
            "plant it anew where it belongs now"
        )
        code = compile(
            source.replace(self.right, self.wrong),
            f"<planted: {self.name}>",
            "exec",
            flags=annotations.compiler_flag,
            dont_inherit=True,
        )
        scope: dict[str, object] = {}
        exec(code, function.__globals__, scope)  # noqa: S102 - that is what planting is
        wrong = scope[function.__name__]
        assert isinstance(wrong, FunctionType)
        right, function.__code__ = function.__code__, wrong.__code__
        try:
            yield
        finally:
            function.__code__ = right

    def _find(self) -> FunctionType:
        module, _, name = self.function.partition(" ")
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = inspect.getattr_static(found, part)
        found = found.fget if isinstance(found, property) else found
        assert isinstance(found, FunctionType)
        return found


PLANTED = tuple(map(Planted.read, LIST.read_text().strip().split("\n\n")))


def fault(name: str) -> Planted:
    return next(planted for planted in PLANTED if planted.name == name)


def recorded_seeds() -> dict[str, list[int]]:
    """By fault, the recorded seeds that find it."""
    found: dict[str, list[int]] = json.loads(RECORD.read_text())["seeds"]
    return found


def search(name: str, wanted: int = 1) -> list[tuple[int, int, str]]:
    """Seeds that find a fault, up to ``wanted``: the steps of the run, the seed, and what it says."""
    from tests.sim.scenario import Scenario
    from tests.sim.world import run

    found: list[tuple[int, int, str]] = []
    with fault(name).plant():
        for seed in range(SEARCHED):
            outcome = run(Scenario(seed))
            if outcome.problem is not None:
                found.append((outcome.steps, seed, outcome.problem))
            if len(found) >= (wanted if seed < RECORDED_IN else 1):
                break
    return found


def main() -> None:
    """Search for all faults, on all cores, and record what finds them. Names limit it to some."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", help="faults; all without one")
    names = parser.parse_args().names or [planted.name for planted in PLANTED if planted.simulated]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        searches = {pool.submit(search, name, RECORDED): name for name in names}
        for done in as_completed(searches):
            name, found = searches[done], sorted(done.result())
            seeds = (recorded_seeds() if RECORD.exists() else {}) | {name: [seed for _, seed, _ in found]}
            print(f"{name}: {seeds[name]} {found[0][2] if found else 'NOT FOUND'}", flush=True)
            there = {planted.name: seeds[planted.name] for planted in PLANTED if planted.name in seeds}
            lines = ",\n".join(f"    {json.dumps(name)}: {found}" for name, found in there.items())
            RECORD.write_text(f'{{\n  "made by": "python -m tests.sim.planted",\n  "seeds": {{\n{lines}\n  }}\n}}\n')


if __name__ == "__main__":
    main()
