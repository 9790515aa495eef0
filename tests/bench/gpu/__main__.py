"""``make gpu``: what only a GPU can tell, within ten minutes and without internet, into tests/bench/results.

Each part runs in a process of its own, and the results are written after each. With --double the parts run over the
tests' double of the CUDA driver, to see that they run; the results then lie in .gpu/double and mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvoffd_proto.cuda import LIBRARY_VARIABLE
from tests.bench.gpu.parts import PARTS, Setup
from tests.bench.report_file import markdown_table, run_facts

ROOT = Path(__file__).parents[3]
TAIL_CHARACTERS = 4000
DOUBLE = (
    "**Not a GPU.** This is the tests' double of the CUDA driver, over host memory: it shows that the programs run, "
    "and none of its figures means anything."
)


def run_part(name: str, setup: Setup) -> dict[str, Any]:
    """Run one part in a process; what it found, or the end of what it said."""
    began = time.monotonic()
    with TemporaryDirectory() as scratch:
        answer, said = Path(scratch) / "found.json", Path(scratch) / "said"
        command = [sys.executable, "-m", "tests.bench.gpu", "--inside", name, "--to", str(answer)]
        command += ["--library", setup.library]
        command += ["--double"] if setup.double else []
        with said.open("wb") as output:
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
            with suppress(subprocess.TimeoutExpired):
                process.wait(PARTS[name].most_s)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the daemons and engines that it has left
            with suppress(subprocess.TimeoutExpired):  # in a call of a driver that hangs it does not end
                process.wait(10.0)
        seconds = time.monotonic() - began
        tail = said.read_text(errors="replace")[-TAIL_CHARACTERS:]
        if not answer.exists():
            late = seconds >= PARTS[name].most_s
            return {"outcome": "not done in time" if late else "failed", "seconds": seconds, "found": tail}
        found = json.loads(answer.read_text())
    if PARTS[name].is_wrong(found):
        return {"outcome": "wrong", "seconds": seconds, "found": {**found, "said": tail.splitlines()}}
    return {"outcome": "done", "seconds": seconds, "found": found}


def inside(name: str, setup: Setup, to: Path) -> None:
    if setup.library:
        os.environ[LIBRARY_VARIABLE] = setup.library
    if setup.double:
        os.environ["STUB_DEVICES"] = "1"
    found = PARTS[name].run(setup)
    written = to.with_suffix(".part")
    written.write_text(json.dumps(found, indent=1, default=str))
    written.rename(to)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make gpu ARGS=...", description=__doc__)
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this one; may be given again")
    parser.add_argument("--library", default="", help="path of libcuda; nothing for the system's")
    parser.add_argument("--double", action="store_true", help="no GPU: run over the double, and say so")
    parser.add_argument("--out", type=Path, help="directory of the results [tests/bench/results]")
    parser.add_argument("--inside", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.inside, Setup(options.library, options.double), options.to)
        return 0
    library = options.library
    if options.double and not library:
        from tests.kit.stub_cuda import fresh_stub

        library = fresh_stub().path
        Path(library).parent.chmod(0o755)  # for another user's process
    out = options.out or (ROOT / ".gpu" / "double" if options.double else ROOT / "tests" / "bench" / "results")
    out.mkdir(parents=True, exist_ok=True)
    return measure(options.part or list(PARTS), Setup(library, options.double), out)


def measure(names: list[str], setup: Setup, out: Path) -> int:
    """Run the parts and write the results; 0 when all could be done and none found what must not be."""
    facts = run_facts("make gpu")
    parts: dict[str, Any] = {}
    look = run_part("driver", setup)  # first, alone too: it names the card
    card = "double" if setup.double else str(look["found"]["card"] if look["outcome"] == "done" else "unknown")
    slug = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    stem = f"gpu-{slug}-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    report = {"card": card, "double": setup.double, "date": facts["date"], "commit": facts["commit"], "parts": parts}
    for name in names:
        parts[name] = look if name == "driver" else run_part(name, setup)
        print(f"{name}: {parts[name]['outcome']} after {parts[name]['seconds']:.0f} s", flush=True)
        (out / f"{stem}.json").write_text(json.dumps(report, indent=1) + "\n")
        (out / f"{stem}.md").write_text(write_page(report) + "\n")
    print(f"{out / stem}.json and .md")
    return 0 if all(part["outcome"] == "done" for part in parts.values()) else 1


def write_page(report: Mapping[str, Any]) -> str:
    lines = [f"# {report['card']}, {report['date']}", ""]
    if report["double"]:
        lines += [DOUBLE, ""]
    lines += [f"Commit {report['commit']}. `make gpu`; the figures are in the JSON file beside this page.", ""]
    for name, part in report["parts"].items():
        lines += [f"## {name}: {part['outcome']}, {part['seconds']:.0f} s", ""]
        found = part["found"]
        if isinstance(found, dict):
            if "results" in found:
                lines += [_results_table(found["results"]), ""]
            found = json.dumps({name: value for name, value in found.items() if name != "results"}, indent=1)
        lines += ["```", found, "```", ""]
    return "\n".join(lines)


def _results_table(results: list[dict[str, Any]]) -> str:
    rows = [["case", "value", "floor", "of the floor", "daemon's CPU"]]
    for one in results:
        cpu = f"{one['cpu_s_per_gb']:.3f} s per GB" if "cpu_s_per_gb" in one else ""
        value, floor = f"{one['value']:.2f} {one['unit']}", f"{one['floor']:.2f}"
        rows.append([one["case"], value, floor, f"{one['ratio']:.0%}", cpu])
    return markdown_table(rows)


if __name__ == "__main__":
    sys.exit(main())
