"""How pages are printed, to a terminal in colour or into a pipe as plain text, and the pieces of text they share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from kvoffd_proto.units import format_count, plural, printable

TEXT_CELLS = 80
"""Width of what need not be wider."""
PIPE_CELLS = 120
PIPE_LIST_CELLS = 1000
"""A list in a pipe is as wide as it needs to be: who filters it wants whole names."""
SHORT_FINGERPRINT_DIGITS = 12
"""Hex digits shown of a fingerprint, here, in logs and in metrics; ``clear --namespace`` takes them."""
MIN_NUMBER_CELLS = 7
"""Number columns do not get narrower, so that columns stay where they are when a page is drawn again."""
GAP = (0, 2, 0, 0)


def make_console(*, pipe_cells: int = PIPE_CELLS) -> Console:
    """Make a console on stdout. Colours obey NO_COLOR; a pipe gets no control codes, whatever FORCE_COLOR says."""
    if sys.stdout.isatty():
        return Console(highlight=False, markup=False, emoji=False)
    return Console(
        width=pipe_cells, color_system=None, force_terminal=False, highlight=False, markup=False, emoji=False
    )


def print_page(page: RenderableType, console: Console | None = None) -> None:
    """Print ``page``; in a pipe without the spaces that pad its lines."""
    console = console or make_console()
    if console.is_terminal:
        console.print(page)
        return
    with console.capture() as captured:
        console.print(page)
    print_line("\n".join(line.rstrip() for line in captured.get().splitlines()))


def print_list(page: RenderableType) -> None:
    """Print ``page``; in a pipe its lines are as long as their longest names need."""
    print_page(page, make_console(pipe_cells=PIPE_LIST_CELLS))


def print_line(text: str) -> None:
    """Print ``text`` and flush: the reader of a pipe waits for it."""
    print(text, flush=True)


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows; a title that begins with ``>`` is one of numbers, aligned right, with ``<`` one of short words.

    Nothing is left out: on a narrow screen other texts go on in a second line.
    """
    table = plain_table()
    for title in titles:
        justify: JustifyMethod = "right" if title.startswith(">") else "left"
        table.add_column(title.lstrip("<>"), justify=justify, no_wrap=title[:1] in ("<", ">"), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    print_list(table)


def fitting(text: str, style: str = "") -> Text:
    """Text that is cut with an ellipsis where the line is full, and never wrapped."""
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def short_fingerprint(fingerprint: bytes) -> str:
    return fingerprint.hex()[:SHORT_FINGERPRINT_DIGITS]


def namespace_name(label: str, fingerprint: bytes) -> str:
    return f"{printable(label)} ({short_fingerprint(fingerprint)})"


def count_blocks(count: int) -> str:
    """``count`` with the noun, such as ``1 block`` or ``1,234 blocks``."""
    return f"{format_count(count)} block{plural(count)}"


def were(count: int) -> str:
    return "was" if count == 1 else "were"


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


def plain_table() -> Table:
    return Table(box=None, padding=GAP, pad_edge=False, header_style="bold")


def section(title: str, numbers: Sequence[str] = (), min_cells: int = 0) -> Table:
    """A table without lines whose first column is narrowed when the line is full; fill that one with ``fitting``."""
    table = plain_table()
    table.add_column(title, min_width=min_cells)
    add_numbers(table, numbers)
    return table


def add_numbers(table: Table, titles: Sequence[str]) -> None:
    """Add right-aligned columns that keep their width."""
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True, min_width=MIN_NUMBER_CELLS, header_style="not bold dim")


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr where that is a terminal; yield what takes (bytes done, bytes of all)."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
