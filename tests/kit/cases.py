"""Which case of a loop failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*values: object) -> Iterator[None]:
    """Name the case in whatever fails within."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"In the case {', '.join(map(repr, values))}.")
        raise
