"""What a client cancels of the stores that are copied together."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffd.cache.cache import BlockCache
from kvoffd.server.jobs import JobRunner


class Stores:
    """Stores of one message, over an engine that has begun to copy them or not."""

    def __init__(self, ids: Iterable[int], *, begun: bool) -> None:
        self.ids, self.transfer = list(ids), object()
        self.client_memory: Any = SimpleNamespace(
            memory=SimpleNamespace(engine=SimpleNamespace(cancel=lambda transfer: not begun))
        )


@pytest.mark.parametrize(("begun", "cancelled", "running"), [(False, list(range(16)), []), (True, [], [3, 5])])
def test_a_fence_for_some_stores_does_not_wait_for_what_has_not_begun(
    begun: bool, cancelled: list[int], running: list[int]
) -> None:
    message, other = Stores(range(16), begun=begun), Stores([16, 17], begun=True)
    session: Any = SimpleNamespace(jobs={job_id: job for job in (message, other) for job_id in job.ids})
    cache: BlockCache = SimpleNamespace()  # type: ignore[assignment]
    runner = JobRunner(cache, clock=lambda: 0.0, deadline_s=1.0, post=lambda step: step())
    assert runner.cancel(session, [3, 5, 3, 99]) == (cancelled, running)
