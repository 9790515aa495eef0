"""Part of a bench's worker: how long the host is in ``handle_preemptions``, in which vLLM waits for stores."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from kvoffd_client.vllm.connector import KvoffdConnector

TIMES_MS: list[float] = []


def timed(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def timed_method(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*arguments, **named)
        finally:
            TIMES_MS.append(1000 * (time.perf_counter() - began))

    return timed_method


KvoffdConnector.handle_preemptions = timed(KvoffdConnector.handle_preemptions)  # type: ignore[method-assign]


class FenceTimes:
    """What vLLM adds to its worker (``worker_extension_cls``)."""

    def take_fence_times(self) -> list[float]:
        taken = TIMES_MS.copy()
        TIMES_MS.clear()
        return taken
