"""Small pieces of text and tables that several pages share."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import ConsoleOptions
from rich.table import Table
from rich.text import Text

SHORT_FINGERPRINT = 8
"""Hex digits shown of a fingerprint: enough to tell namespaces apart, and ``clear --namespace`` takes them."""
MIN_NUMBER_CELLS = 7
"""Number columns do not get narrower, so that a page that is drawn again and again stays calm."""
GAP = (0, 2, 0, 0)


def printable(text: str) -> str:
    """Replace what could move the cursor or change colours: names come from clients."""
    return "".join(character if character.isprintable() else "?" for character in text)


def fitting(text: str, style: str = "") -> Text:
    """Text that gives way when the line is full: cut with an ellipsis, never wrapped."""
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def short_fingerprint(fingerprint: bytes) -> str:
    """The first digits of a fingerprint."""
    return fingerprint.hex()[:SHORT_FINGERPRINT]


def percent(part: float, whole: float, none: str = "-") -> str:
    """``part`` of ``whole`` as a percentage that is 0 or 100 only when it is exactly that; ``none`` of nothing."""
    if whole <= 0:
        return none
    share = 100 * part / whole
    if share <= 0:
        return "0 %"
    if share < 0.1:
        return "<0.1 %"
    if part < whole:
        share = min(share, 99.9)
    return "100 %" if share == 100 else f"{share:.1f} %"


def bar_characters(options: ConsoleOptions) -> tuple[str, str, str]:
    """Characters for full, half-full and empty parts of a bar that the terminal can show."""
    return ("#", "+", ".") if options.ascii_only else ("█", "▒", "░")


def section(title: str, min_cells: int = 0) -> Table:
    """A table without lines. Its first column gives way when the line is full; fill it with ``fitting``."""
    table = Table(box=None, padding=GAP, pad_edge=False, header_style="bold")
    table.add_column(title, min_width=min_cells)
    return table


def add_numbers(table: Table, titles: Sequence[str]) -> None:
    """Add right-aligned columns that keep their width."""
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True, min_width=MIN_NUMBER_CELLS, header_style="not bold dim")
