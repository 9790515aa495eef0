"""The page of what a GPU told: one Markdown section a part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.bench.report_file import markdown_table

DOUBLE = (
    "**Not a GPU.** This is the tests' double of the CUDA driver, over host memory: it shows that the programs run, "
    "and none of its figures means anything."
)


def write_page(report: Mapping[str, Any]) -> str:
    """Return the page of a report."""
    lines = [f"# {report['card']}, {report['date']}", ""]
    if report["double"]:
        lines += [DOUBLE, ""]
    lines += [f"Commit {report['commit']}. `make gpu`; the figures are in the JSON file beside this page.", ""]
    for name, part in report["parts"].items():
        lines += [f"## {name}: {part['outcome']}, {part['seconds']:.0f} s", ""]
        found = dict(part["found"]) if isinstance(part["found"], dict) else part["found"]
        if isinstance(found, dict) and "results" in found:
            lines += [_results_table(found.pop("results")), ""]
        if isinstance(found, dict):
            lines += [*_items(found), ""]
        else:
            lines += ["```", str(found), "```", ""]
    return "\n".join(lines)


def _results_table(results: list[dict[str, Any]]) -> str:
    rows = [["case", "value", "floor", "of the floor", "daemon's CPU"]]
    for one in results:
        cpu = f"{one['cpu_s_per_gb']:.3f} s per GB" if "cpu_s_per_gb" in one else ""
        value, floor = f"{one['value']:.2f} {one['unit']}", f"{one['floor']:.2f}"
        rows.append([one["case"], value, floor, f"{one['ratio']:.0%}", cpu])
    return markdown_table(rows)


def _items(found: Mapping[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in found.items():
        if isinstance(value, dict):
            lines += [f"{indent}* {name}", *_items(value, indent + "  ")]
        elif isinstance(value, list) and value:
            lines += [f"{indent}* {name}", *(f"{indent}  * {_text(one)}" for one in value)]
        else:
            lines.append(f"{indent}* {name}: {_text(value)}")
    return lines


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    return f"{value:.3f}" if isinstance(value, float) else str(value)
