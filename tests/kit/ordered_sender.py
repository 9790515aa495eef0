"""Waiting for jobs to leave an OrderedSender."""

from __future__ import annotations

import time
from collections.abc import Iterable

from kvoffd_client.ordered_sender import OrderedSender


def wait_sent(sender: OrderedSender, job_ids: Iterable[int], timeout_s: float) -> bool:
    """Wait until none of the jobs is left unsent; False when one is after ``timeout_s`` seconds."""
    wanted, deadline = set(job_ids), time.monotonic() + timeout_s
    while not wanted.isdisjoint(sender.waiting):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.001)
    return True
