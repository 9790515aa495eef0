"""vLLM's scheduler, which takes a prompt's priority from its ``kv_transfer_params``: the tests' engines pass those."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from vllm.v1.request import Request


class PriorityScheduler(Scheduler):
    """The scheduler of ``batch.py`` for prompts with priorities."""

    def add_request(self, request: Request) -> None:
        request.priority = request.kv_transfer_params["priority"] if request.kv_transfer_params else 0
        super().add_request(request)
