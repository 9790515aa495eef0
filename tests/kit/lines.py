"""Counts the lines of Python that a call executes: how much work it does, however busy the machine is."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_of(call: Callable[[], Any]) -> int:
    """Return how many lines the call executes in this thread, each as often as it is. C is not counted, and nothing
    that the garbage collector calls: it comes when it likes, and hypothesis, for one, has a callback in it."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count
