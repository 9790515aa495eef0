"""How long new prompts wait for a daemon that hangs: vLLM's own scheduler, a real daemon, no model."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from kvoffd_client import AdminClient, NamespaceSpec
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.vllm.vllm_config import make_config, make_scheduler

DEADLINE_S = 15.0
"""What the scheduler must not wait for: many times the 20 ms of a short prompt while the rate is not known."""


def test_new_prompts_do_not_wait_out_the_deadline(model: Path) -> None:
    """Each of four prompts would wait for 15 s. The daemon learns that their lookups were late."""
    with DaemonProcess() as daemon, AdminClient(daemon.directory) as admin:
        options = {"directory": str(daemon.directory), "lookup_deadline_ms": 1000 * DEADLINE_S}
        scheduler, hasher = make_scheduler(make_config(model, options, max_model_len=1024), 30)
        manager = scheduler.connector._manager
        manager.namespace.join(NamespaceSpec.named("waits"))  # there are no workers to report it
        wait_until(lambda: manager.namespace.client.ready)
        serial = itertools.count(3)

        def prompt_s() -> float:
            """Seconds from a new prompt's arrival until it is computed."""
            number = next(serial)
            request = Request(f"r{number}", [number] * 64, SamplingParams(max_tokens=1), None, block_hasher=hasher)
            began = time.perf_counter()
            scheduler.add_request(request)
            while request.request_id not in scheduler.schedule().num_scheduled_tokens:
                time.sleep(0.001)  # as vLLM's engine after a step in which no model ran
            took = time.perf_counter() - began
            scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
            return took

        os.kill(daemon.pid, signal.SIGSTOP)
        seconds = [prompt_s() for _ in range(4)]
        os.kill(daemon.pid, signal.SIGCONT)
        assert max(seconds) < DEADLINE_S / 5

        def reported_late() -> int:
            manager._report_at = 0.0
            prompt_s()
            (found,) = admin.stats().namespaces
            return found.late_lookups

        wait_until(lambda: reported_late() >= 4)
        scheduler.shutdown()
