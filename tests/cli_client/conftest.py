"""Commands run in this process here, so what is logged must not go where another test's handlers sent it."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def no_handlers_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that a test before this one imported may have one for a stderr that is closed by now."""
    open_ones = [one for one in logging.root.handlers if not getattr(getattr(one, "stream", None), "closed", False)]
    monkeypatch.setattr(logging.root, "handlers", open_ones)
