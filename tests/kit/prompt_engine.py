"""An engine without a model that serves prompts one after the other, as vLLM's connector does."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from kvoffd_client import GroupKeys, GroupTransfer, KeyState
from kvoffd_client.testing import FakeEngine

from .wire import prompt_of

TIMEOUT_S = 30.0
PAUSE_S = 0.002
"""Pause between two lookups of blocks that are on their way from a tier."""
STEP_BLOCKS = 16
"""Blocks that it computes in a step, after which it stores them: 8,192 tokens in blocks of 512."""


class PromptEngine(FakeEngine):
    """It has one rank and one group, and no cache of its own. Blocks of prompts lie in its blocks from 0 on."""

    _own_jobs = itertools.count(1 << 32)  # those of FakeEngine count from 1

    def serve(self, name: str, keys: Sequence[bytes]) -> int:
        """Serve a prompt of these blocks: wait for all that comes, load it, store the others, and report the prompt.

        Returns how many leading blocks were loaded. Raises AssertionError if the daemon is away, or too late.
        """
        wanted, until = [GroupKeys(0, b"".join(keys))], time.monotonic() + TIMEOUT_S
        counted = last = self.scheduler.lookup(wanted, reported=True)
        while True:
            assert last.wait(TIMEOUT_S), "no answer to a lookup"
            assert not last.failed
            if not last.pending:
                break
            assert time.monotonic() < until, "blocks of a tier neither came nor failed"
            time.sleep(PAUSE_S)
            if last is not counted:
                self.scheduler.release(last.lease_id)
            last = self.scheduler.lookup(wanted, again=True, reported=True)
        found = last.leading_ready()
        if found:
            self._load(last.lease_id, keys[:found])
        self._store(keys, [at for at, state in enumerate(last.states[0]) if state != KeyState.READY])
        tokens = self.namespace.groups[0].tokens_per_block
        report = prompt_of(
            tokens * len(keys),
            loaded=tokens * found,
            request=name,
            keys=len(keys),
            lease_id=counted.lease_id,
            load_lease_id=last.lease_id if found else 0,
            own_keys=[0],
            covered_keys=[found],
        )
        self.scheduler.report_prompt(report)
        for lease_id in {counted.lease_id, last.lease_id}:
            self.scheduler.release(lease_id)
        return found

    def _load(self, lease_id: int, keys: Sequence[bytes]) -> None:
        job_id = next(self._own_jobs)
        self.workers[0].load(job_id, lease_id, [GroupTransfer.of(keys, range(len(keys)))])
        self._wait_for(job_id)

    def _store(self, keys: Sequence[bytes], missing: Sequence[int]) -> None:
        """Store the blocks at these places of a prompt, each step after the one before it."""
        for begin in range(0, len(missing), STEP_BLOCKS):
            step = missing[begin : begin + STEP_BLOCKS]
            before = keys[step[0] - 1] if step[0] else b""
            part = GroupTransfer.of([keys[at] for at in step], step)._replace(before=before)
            job_id = next(self._own_jobs)
            self.workers[0].store(job_id, [part])
            self._wait_for(job_id)

    def _wait_for(self, job_id: int) -> None:
        until = time.monotonic() + TIMEOUT_S
        while (left := until - time.monotonic()) > 0:
            for result in self.workers[0].wait_results(left):
                if result.job_id == job_id:
                    return
        raise AssertionError("a job has no result")
