"""Draws the tables of a page of simulated fleets: ``fleet_picture.py PAGE.md FILE.png``, by a Python with matplotlib.

For each table a bar for each router and what nodes share, whose parts are the prompts' tokens by source, in percent.
"""

import re
import sys
from itertools import takewhile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

SOURCES = {"computed %": "#9a9a9a", "own pool %": "#1f77b4", "peer or store %": "#ff7f0e"}
"""Columns that are drawn, and their colours."""
COLUMNS = 2
ROW_INCHES = 0.2


def tables_of(page: str) -> dict[str, list[dict[str, str]]]:
    """Return the rows of each section's first table, if it has the columns of ``SOURCES``, by the section's title."""
    found = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        begin = text.find("|")
        lines = takewhile(lambda line: line.startswith("|"), text[begin:].splitlines()) if begin >= 0 else ()
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        if cells and set(SOURCES) <= set(cells[0]):
            found[title] = [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]
    return found


def main(page_file: str, picture: str) -> None:
    """Draw the tables of a page."""
    tables = tables_of(Path(page_file).read_text(encoding="utf-8"))
    rows = -(-len(tables) // COLUMNS)
    titles = [*tables]
    heights = [max(len(tables[title]) for title in titles[at : at + COLUMNS]) for at in range(0, len(titles), COLUMNS)]
    size = 14, rows * 0.6 + ROW_INCHES * sum(heights)
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=size, height_ratios=heights, squeeze=False)
    for axis, (title, lines) in zip(axes.flat, tables.items(), strict=False):
        begins = [0.0] * len(lines)
        for source, colour in SOURCES.items():
            widths = [float(line[source] or 0) for line in lines]
            axis.barh(range(len(lines)), widths, 0.75, begins, color=colour)
            begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
        axis.set_title(title, fontsize=9)
        axis.set_xlim(0, 100)
        axis.set_yticks(range(len(lines)), [f"{one['router']}: {one['nodes share']}" for one in lines], fontsize=7)
        axis.tick_params(axis="x", labelsize=7)
        axis.invert_yaxis()
    for axis in axes.flat[len(tables) :]:
        axis.set_axis_off()
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in SOURCES.values()]
    axes.flat[-1].legend(handles, SOURCES, fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(picture, dpi=80, bbox_inches="tight")


if __name__ == "__main__":
    main(*sys.argv[1:])
