"""Where pages go: a terminal in colour, or a pipe in plain text."""

from __future__ import annotations

import sys

from rich.console import Console, RenderableType

PIPE_CELLS = 120
"""Width of a page that nobody looks at yet."""
PIPE_LIST_CELLS = 1000
"""A list that goes into a pipe is as wide as it needs to be: who filters it wants whole names."""


def make_console(*, pipe_cells: int = PIPE_CELLS) -> Console:
    """A console on stdout. Colours obey NO_COLOR; a pipe gets no control codes at all, whatever FORCE_COLOR says."""
    if sys.stdout.isatty():
        return Console(highlight=False, markup=False, emoji=False)
    return Console(
        width=pipe_cells, color_system=None, force_terminal=False, highlight=False, markup=False, emoji=False
    )


def show(console: Console, page: RenderableType) -> None:
    """Print ``page``; in a pipe without the spaces that pad its lines."""
    if console.is_terminal:
        console.print(page)
        return
    with console.capture() as captured:
        console.print(page)
    lines = (line.rstrip() for line in captured.get().splitlines())
    emit("\n".join(lines))


def emit(text: str) -> None:
    """Print ``text`` at once: who reads a pipe waits for it."""
    print(text, flush=True)
