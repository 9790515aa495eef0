"""Part of a bench's worker: how long the host is in ``handle_preemptions``, in which vLLM waits for stores."""

from __future__ import annotations

import time
from typing import Any

from kvoffd_client.vllm.connector import KvoffdConnector

TIMES_MS: list[float] = []
handle_preemptions = KvoffdConnector.handle_preemptions


def timed(connector: KvoffdConnector, *arguments: Any, **named: Any) -> None:
    began = time.perf_counter()
    try:
        handle_preemptions(connector, *arguments, **named)
    finally:
        TIMES_MS.append(1000 * (time.perf_counter() - began))


KvoffdConnector.handle_preemptions = timed  # type: ignore[method-assign]


class FenceTimes:
    """What vLLM adds to its worker (``worker_extension_cls``)."""

    def take_fence_times(self) -> list[float]:
        taken = TIMES_MS.copy()
        TIMES_MS.clear()
        return taken
