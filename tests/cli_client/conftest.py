"""What tests of pages share."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console, RenderableType


@pytest.fixture
def render() -> Callable[..., str]:
    """Text of a renderable on a screen of ``width`` columns, without colours."""

    def text_of(page: RenderableType, width: int = 80) -> str:
        stream = StringIO()
        Console(file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False).print(page)
        return stream.getvalue()

    return text_of
