"""Draws the page's picture: ``picture.py ROWS.jsonl FILE.png``, run by a Python with matplotlib.

For each workload, each side's seconds, median time to the first token and CPU seconds, as parts of those of vLLM's own
cache.
"""

import json
import sys
from collections import defaultdict

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = {"none": "#9a9a9a", "kvoffd": "#1f77b4", "lmcache": "#ff7f0e"}
NONE = "none"


def main(rows_file: str, picture: str) -> None:
    found: dict[str, dict[str, list[dict[str, object]]]] = defaultdict(lambda: defaultdict(list))
    with open(rows_file) as lines:
        for row in map(json.loads, lines):
            if not row["lost"]:
                found[row["workload"]][row["side"]].append(row)
    figures = {
        "seconds": lambda row: row["seconds"],
        "first token, p50": lambda row: (row["ttft_ms"] or [0.0])[0],
        "CPU seconds, of engine and cache": lambda row: row["engine_cpu_s"] + row["cache_cpu_s"],
    }
    workloads = [name for name, sides in found.items() if NONE in sides and len(sides) > 1]
    figure, axes = pyplot.subplots(1, len(figures), figsize=(15, 1 + 0.42 * len(workloads)), sharey=True)
    for axis, (title, value) in zip(axes, figures.items(), strict=True):
        for number, (side, colour) in enumerate(COLOURS.items()):
            for at, workload in enumerate(workloads):
                base = mean(map(value, found[workload][NONE]))
                measured = [value(row) for row in found[workload].get(side, ())]
                if base and measured:
                    part = mean(measured) / base
                    axis.barh(at + 0.26 * (number - 1), min(part, 2.0), 0.24, color=colour)
                    if part > 2.0:
                        axis.text(2.0, at + 0.26 * (number - 1), f" {part:.1f}", va="center", fontsize=7)
        axis.axvline(1.0, color="#9a9a9a", linewidth=0.8)
        axis.set_title(title, fontsize=10)
        axis.set_yticks(range(len(workloads)), workloads, fontsize=8)
    axes[0].invert_yaxis()
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    axes[-1].legend(handles, COLOURS, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle("as parts of vLLM's own cache alone; less is better", fontsize=10)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def mean(values: object) -> float:
    numbers = [float(value) for value in values]  # type: ignore[attr-defined]
    return sum(numbers) / len(numbers)


if __name__ == "__main__":
    main(*sys.argv[1:])
