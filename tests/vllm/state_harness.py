"""vLLM's own scheduler of a model with attention and recurrent states, over memory that knows what is in it.

Each block holds what a model would have written: of attention, for each position the prefix that ends there; of states,
the prefix that they are of. Whatever a step reads is compared with what its request needs.
"""

from __future__ import annotations

from random import Random
from typing import Any

from kvoffd_proto.messages import READY
from tests.vllm.scheduler_harness import SchedulerHarness
from tests.vllm.vllm_fakes import KEY_BYTES, split


class WrongContent(AssertionError):
    """A request would have read what is not its own."""


class StateHarness(SchedulerHarness):
    """The harness with block contents, and a daemon that keeps what is stored.

    Attributes:
        kept: contents of the daemon's blocks, by group and block hash.
        loads: number of tokens of each load.
        cached: tokens that a request had when it first computed.
    """

    def __init__(self, config: Any, blocks: int, block_tokens: int, seed: int, *groups: Any, hash_tokens: int) -> None:
        super().__init__(config, blocks, *groups, hash_tokens=hash_tokens)
        self.kept: dict[tuple[int, bytes], dict[int, int]] = {}
        self.loads: list[int] = []
        self.cached: dict[str, int] = {}
        self._block_tokens = block_tokens
        self._random = Random(seed)
        self._memory: dict[int, dict[int, int]] = {}
        """What is in each block of the engine: prefixes by position."""
        self._due: dict[int, Any] = {}
        """Stores that have not read their blocks."""

    def answer(self) -> None:
        for future, groups in self.client.asked[self._answered :]:
            if not future.done:
                for group in groups:
                    keys = split(group.keys)
                    future.states.append(bytes(READY * ((group.group, key) in self.kept) for key in keys))
                self.client.end(future)
        self._answered = len(self.client.asked)

    def work(self, output: Any, meta: Any) -> set[int]:
        ended = {job for job in self._due if job in meta.jobs_to_flush or self._random.random() < 0.5}
        for job_id in ended:
            self._store(self._due.pop(job_id))
        for copy in output.kv_cache_block_copies or ():
            self._memory[copy.dst_block_id] = dict(self._memory.get(copy.src_block_id, {}))
        for job in meta.load_jobs.values():
            self._load(job)
        for name, count in output.num_scheduled_tokens.items():
            self._compute(self.scheduler.requests[name], count)
        self._due |= meta.store_jobs
        return ended

    def forget(self) -> None:
        """Empty the engine's own cache."""
        assert self.scheduler.reset_prefix_cache()

    def _transfers(self, blocks: Any, spec: Any) -> Any:
        """Pairs of a block and a key of the daemon."""
        ids = iter(map(int, blocks.block_ids))
        for group, size in enumerate(blocks.group_sizes):
            keys = spec.groups[group]
            assert size * KEY_BYTES == len(keys)
            yield from ((next(ids), (group, keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])) for at in range(size))

    def _store(self, job: Any) -> None:
        for block, key in self._transfers(job.src_spec, job.dst_spec):
            self.kept[key] = dict(self._memory[block])

    def _load(self, job: Any) -> None:
        self.loads.append(job.src_spec.load_tokens)
        fails = job.req_id in self.failing
        for block, key in self._transfers(job.dst_spec, job.src_spec):
            self._memory[block] = {} if fails else dict(self.kept[key])

    def _compute(self, request: Any, count: int) -> None:
        end, size = request.num_computed_tokens, self._block_tokens
        begin, prefixes = end - count, [hash(tuple(request.all_token_ids[:at])) for at in range(end + 1)]
        self.cached.setdefault(request.request_id, begin)
        attention, states = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for at in range(begin):
            if (found := self._memory.get(attention[at // size], {}).get(at)) != prefixes[at + 1]:
                raise WrongContent(f"{request.request_id}: position {at} of {begin} has {found}.")
        if begin:
            block = states[(begin - 1) // size]
            if self._memory.get(block) != {begin: prefixes[begin]}:
                raise WrongContent(f"{request.request_id}: the state at {begin} is {self._memory.get(block)}.")
        for at in range(begin, end):
            content = self._memory.setdefault(attention[at // size], {})
            if at % size == 0:
                content.clear()
            for later in [one for one in content if one >= at]:
                del content[later]
            content[at] = prefixes[at + 1]
        self._memory[states[(end - 1) // size]] = {end: prefixes[end]}
