"""The page of a GPU's results: one Markdown section a part."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.bench.report_file import markdown_table

DOUBLE = (
    "**Not a GPU.** This is the tests' double of the CUDA driver, over host memory: it shows that the programs run, "
    "and none of its figures means anything."
)


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
