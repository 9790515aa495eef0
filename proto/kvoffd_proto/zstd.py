"""The module that compresses with zstd: the standard one of Python 3.14, before that its backport."""

from __future__ import annotations

import sys
from types import ModuleType

MISSING = f"This Python has no zstd; install it with: {sys.executable} -m pip install backports.zstd."


def zstd_module() -> ModuleType | None:
    """``compression.zstd``, or what has the same functions; None where it is not installed."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        return None
    found: ModuleType = zstd
    return found
