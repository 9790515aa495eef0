"""``make gpu``: what only a GPU can tell, within ten minutes and without internet, into tests/bench/results.

Each part runs in a process of its own, and the results are written after each. ``--part vllm`` runs those that have a
real vLLM, in eight minutes. With --double the parts run over the tests' double of the CUDA driver, and those of vLLM
over its build for CPU, to see that they run; the results then lie in .gpu/double and mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvoffd_proto.cuda import LIBRARY_VARIABLE
from tests.bench.gpu.parts import PARTS, VLLM_PARTS, VLLM_S
from tests.bench.gpu.setup import Setup
from tests.bench.gpu.vllm_models import SIZES
from tests.bench.gpu.vllm_parts import PATIENCE, place_of_models, take_left_logs
from tests.bench.report_file import ROOT, markdown_table, run_facts
from tests.kit.engine import session_pids

TAIL_CHARACTERS = 4000
ALL_PARTS = PARTS | VLLM_PARTS
MIN_S = 25.0
"""With less time left no part of vLLM is begun: its engine would not be up."""
DOUBLE = (
    "**Not a GPU.** This is the tests' double of the CUDA driver, over host memory: it shows that the programs run, "
    "or vLLM's build for CPU, and none of its figures means anything."
)


def run_part(name: str, setup: Setup, most_s: float) -> dict[str, Any]:
    """Run one part in a process; what it found, all of it or as far as it came, and the end of what it said."""
    part, began = ALL_PARTS[name], time.monotonic()
    with TemporaryDirectory() as scratch:
        answer, said = Path(scratch) / "found.json", Path(scratch) / "said"
        command = [sys.executable, "-m", "tests.bench.gpu", "--inside", name, "--to", str(answer)]
        command += ["--library", setup.library, "--model", setup.model, "--directory", str(setup.directory)]
        command += ["--double"] if setup.double else []
        with said.open("wb") as output:
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
            with suppress(subprocess.TimeoutExpired):
                process.wait(most_s)
            for pid in session_pids(process.pid):  # and the daemons and engines that it has left
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # in a call of a driver that hangs it does not end
                process.wait(10.0)
        seconds, found = time.monotonic() - began, json.loads(answer.read_text()) if answer.exists() else {}
        tail = said.read_text(errors="replace")[-TAIL_CHARACTERS:] + take_left_logs(setup)
    if process.returncode != 0:
        outcome = "not done in time" if seconds >= most_s else "failed"
    else:
        outcome = "wrong" if part.is_wrong(found) else "done"
    return {
        "outcome": outcome,
        "seconds": seconds,
        "found": found if outcome == "done" else {**found, "said": tail.splitlines()},
    }


def inside(name: str, setup: Setup, to: Path) -> None:
    if setup.library:
        os.environ[LIBRARY_VARIABLE] = setup.library
    if setup.double:
        os.environ["STUB_DEVICES"] = "1"

    def keep(found: Mapping[str, Any]) -> None:
        written = to.with_suffix(".part")
        written.write_text(json.dumps(found, indent=1, default=str))
        written.rename(to)

    keep(ALL_PARTS[name].run(dataclasses.replace(setup, keep=keep)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="make gpu ARGS=...", description=__doc__)
    parser.add_argument(
        "--part", action="append", choices=["vllm", *ALL_PARTS], help="only this one; may be given again"
    )
    parser.add_argument("--library", default="", help="path of libcuda; nothing for the system's")
    parser.add_argument("--double", action="store_true", help="no GPU: run over the double, and say so")
    parser.add_argument("--out", type=Path, help="directory of the results [tests/bench/results]")
    parser.add_argument("--model", choices=list(SIZES), default="3b", help="vLLM's: a Llama of this size [3b]")
    parser.add_argument("--inside", choices=list(ALL_PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.inside, Setup(options.library, options.double, options.model, options.directory), options.to)
        return 0
    library = options.library
    if options.double and not library:
        from tests.kit.stub_cuda import fresh_stub

        library = fresh_stub().path
        Path(library).parent.chmod(0o755)  # for another user's process
    out = options.out or (ROOT / ".gpu" / "double" if options.double else ROOT / "tests" / "bench" / "results")
    out.mkdir(parents=True, exist_ok=True)
    asked = options.part or list(PARTS)
    names = [name for one in asked for name in (VLLM_PARTS if one == "vllm" else [one])]
    setup = Setup(library, options.double, options.model)
    with TemporaryDirectory(prefix="kvoffd-bench-", dir=place_of_models(setup)) as directory:
        return measure(names, dataclasses.replace(setup, directory=Path(directory)), out)


def measure(names: list[str], setup: Setup, out: Path) -> int:
    """Run the parts and write the results; 0 when all could be done and none found what must not be."""
    facts = run_facts("make gpu")
    parts: dict[str, Any] = {}
    look = run_part("driver", setup, PARTS["driver"].most_s)  # first, alone too: it names the card
    card = "double" if setup.double else str(look["found"].get("card", "unknown"))
    slug = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    kind = "gpu-vllm" if any(name in VLLM_PARTS for name in names) else "gpu"
    stem = f"{kind}-{slug}-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    report = {"card": card, "double": setup.double, "date": facts["date"], "commit": facts["commit"], "parts": parts}
    until = time.monotonic() + VLLM_S
    for name in names:
        most_s = ALL_PARTS[name].most_s
        if name in VLLM_PARTS:
            most_s = most_s * PATIENCE if setup.double else min(most_s, until - time.monotonic())
        if most_s < MIN_S:
            found = {"said": [f"The {VLLM_S:.0f} s were over."]}
            parts[name] = {"outcome": "left out", "seconds": 0.0, "found": found}
        else:
            parts[name] = look if name == "driver" else run_part(name, setup, most_s)
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
        found = dict(part["found"])
        if results := found.pop("results", None):
            lines += [_results_table(results), ""]
        if times := list(_first_tokens(found)):
            lines += [markdown_table([["TTFT, ms", "prompts", "mean", "p50", "p99"], *times]), ""]
        lines += ["```", json.dumps(found, indent=1), "```", ""]
    return "\n".join(lines)


def _first_tokens(found: Mapping[str, Any], where: str = "") -> Iterator[list[str]]:
    """A row for each object that has times to the first token, wherever it is."""
    for name, one in found.items():
        if not isinstance(one, Mapping):
            continue
        place = ", ".join(filter(None, (where, name)))
        if (times := one.get("ttft_ms")) and times["n"]:
            yield [place, str(times["n"]), *(f"{times[each]:.1f}" for each in ("mean", "p50", "p99"))]
        else:
            yield from _first_tokens(one, place)


def _results_table(results: list[dict[str, Any]]) -> str:
    rows = [["case", "value", "floor", "of the floor", "daemon's CPU"]]
    for one in results:
        value, floor = f"{one['value']:.2f} {one['unit']}", f"{one['floor']:.2f}"
        rows.append([one["case"], value, floor, f"{one['ratio']:.0%}", f"{one['cpu_s_per_gb']:.3f} s per GB"])
    return markdown_table(rows)


if __name__ == "__main__":
    sys.exit(main())
