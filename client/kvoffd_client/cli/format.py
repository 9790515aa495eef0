"""Prints pages, to a terminal in colour or to a pipe as plain text, and formats text that pages share."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from textwrap import wrap

from msgspec import Struct
from rich.console import Console, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from kvoffd_proto.namespace_differences import fields_of_description
from kvoffd_proto.stats import DaemonStats
from kvoffd_proto.units import printable

WIDE_CELLS = 120
"""Columns of a terminal that is wide enough for labels next to ids."""
PIPE_CELLS = 1000
"""Width of output to a pipe, so that filters see whole names."""

NO_NAMESPACE = "There is no namespace; an engine opens its own when it connects."
Line = str | tuple[str, str]
"""Text, or text with a style."""


def make_console() -> Console:
    """Return a console on stdout. Colours obey NO_COLOR; a pipe never gets control codes, even with FORCE_COLOR."""
    plain = partial(Console, highlight=False, markup=False, emoji=False)
    return plain() if sys.stdout.isatty() else plain(width=PIPE_CELLS, color_system=None, force_terminal=False)


def print_page(page: RenderableType, console: Console | None = None) -> None:
    """Print ``page``; to a pipe without trailing spaces."""
    console = console or make_console()
    if console.is_terminal:
        console.print(page)
        return
    with console.capture() as captured:
        console.print(page)
    print_line("\n".join(line.rstrip() for line in captured.get().splitlines()))


def say(*lines: Line) -> None:
    """Print lines; on a terminal wrapped to its width."""
    console = make_console()
    for line, style in wrapped(lines, console.width):
        print_page(Text(line, style=style), console)


def wrapped(lines: Iterable[Line], width: int) -> Iterator[tuple[str, str]]:
    """Yield lines with their styles. Long ones continue on the next line, indented."""
    for line in lines:
        text, style = (line, "") if isinstance(line, str) else line
        indent = " " * (2 + len(text) - len(text.lstrip()))
        for part in wrap(printable(text), max(8, width), subsequent_indent=indent, break_on_hyphens=False) or [""]:
            yield part, style


def print_line(text: str) -> None:
    """Print ``text`` and flush, for the reader of a pipe."""
    print(text, flush=True)


def table_of(titles: Sequence[str], rows: Iterable[Sequence[str]], gap: int = 2) -> Table:
    """Return a table. Columns whose title begins with ``>`` are numbers, aligned right, with ``<`` short words.

    Nothing is cut: on a narrow screen the text of other columns wraps. ``gap``: cells between columns.
    """
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    for title in titles:
        justify: JustifyMethod = "right" if title.startswith(">") else "left"
        table.add_column(title.lstrip("<>"), justify=justify, no_wrap=title[:1] in ("<", ">"), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print_page(table_of(titles, rows))


def print_status(text: str = "") -> None:
    """Show progress on stderr if it is a terminal, replacing the previous status."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def print_json(value: object) -> None:
    """Print ``value`` as one line of JSON and flush."""
    encoding = sys.stdout.encoding or "utf-8"
    print_line(json.dumps(to_plain(value), ensure_ascii=encoding.lower() != "utf-8"))


def to_plain(value: object) -> object:
    """Turn structs into objects by field name, bytes into hex. Raises TypeError for others."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Struct):
        fields = {name: to_plain(getattr(value, name)) for name in value.__struct_fields__ if name != "request_id"}
        described = fields_of_description(text) if isinstance(text := fields.get("description"), str) else None
        return fields if described is None else fields | {"description": described}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no JSON form.")


def engine_lines(now: DaemonStats) -> Iterator[str]:
    """Yield for each namespace which engines have it open."""
    for one in now.namespaces:
        if one.engines:
            yield f"{one.id} is open in {'; '.join(map(printable, one.engines))}"
