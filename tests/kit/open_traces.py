"""Open traces of requests, which are no part of kvoffd: those of Mooncake's FAST'25 release."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = os.environ.get("TESTS_TRACES", "")
"""Folder that has them; empty if it was not named."""


def open_trace(name: str) -> Path:
    """The file of a trace, such as ``conversation``; it may not exist."""
    return Path(FOLDER, f"{name}_trace.jsonl")
