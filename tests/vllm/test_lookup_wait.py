"""How long new prompts wait for a daemon that hangs: vLLM's own scheduler, a real daemon, no model."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvoffd_client import AdminClient, NamespaceSpec
from kvoffd_client.vllm.manager import KvoffdManager
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.vllm.scheduler_harness import BLOCK_TOKENS, SchedulerHarness

DEADLINE_S = 15.0
"""What the scheduler must not wait for: many times the 20 ms of a short prompt while the rate is not known."""
PROMPT_TOKENS = 64


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with DaemonProcess() as daemon:
        one = Engine(daemon, model)
        yield one
        one.admin.close()
        one.harness.close()


class Engine:
    """A scheduler that is connected to a daemon."""

    def __init__(self, daemon: DaemonProcess, model: Path) -> None:
        self.daemon = daemon
        settings = {"directory": str(daemon.directory), "lookup_deadline_ms": 1000 * DEADLINE_S}
        self.harness = SchedulerHarness(model, 64, settings)
        self.manager: KvoffdManager = self.harness.connector.connector_scheduler.manager
        namespace = NamespaceSpec.named("waits")
        self.manager.namespace.join(namespace)  # there are no workers to report it
        wait_until(lambda: self.manager.namespace.client.ready)
        self._serial = itertools.count()
        self.admin = AdminClient(daemon.directory)

    def prompt_s(self, tokens: int = PROMPT_TOKENS) -> float:
        """Seconds from a new prompt's arrival to its end; nothing computes it."""
        serial = next(self._serial)
        request = self.harness.request(f"r{serial}", [serial + 3] * tokens)
        began = time.perf_counter()
        self.harness.run(request)
        return time.perf_counter() - began

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The daemon hangs."""
        os.kill(self.daemon.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.daemon.pid, signal.SIGCONT)

    def reported_late(self) -> int:
        """Late lookups of which the daemon knows, once the engine has sent its report."""
        self.manager._report_at = 0.0
        self.prompt_s()
        (found,) = self.admin.stats().namespaces
        return found.late_lookups


def test_new_prompts_do_not_wait_out_the_deadline(engine: Engine) -> None:
    """Each of four prompts would wait for 15 s."""
    with engine.stopped():
        seconds = [engine.prompt_s() for _ in range(4)]
    assert max(seconds) < DEADLINE_S / 5
    wait_until(lambda: engine.reported_late() >= 4)


def test_after_late_answers_the_waiting_recovers(engine: Engine) -> None:
    manager = engine.manager
    with engine.stopped():
        for _ in range(4):
            engine.prompt_s()
    assert manager._allowed_s(PROMPT_TOKENS) == 0.0
    wait_until(lambda: bool(engine.prompt_s()) and manager._allowed_s(PROMPT_TOKENS) > 0.0)


def test_an_engine_that_has_all_of_a_prompt_waits_for_nobody(engine: Engine) -> None:
    """Of a prompt that vLLM has whole, it computes the last block, and the others count as what it has."""
    tokens = 32 * BLOCK_TOKENS
    engine.harness.run(engine.harness.request("new", [999] * tokens))
    wait_until(lambda: engine.manager.namespace.client.ready)
    engine.manager._no_wait_before = float("-inf")
    with engine.stopped():
        engine.harness.run(engine.harness.request("again", [999] * tokens))
    assert engine.manager._no_wait_before == float("-inf"), "a wait would have been in vain"
