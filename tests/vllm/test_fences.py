"""For which stores a step waits: for those whose blocks it writes, and for no others. Over vLLM's own scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, SlidingWindowSpec

from kvoffd_client.vllm.compat import HAS_DEFECTS_OF_0_32
from tests.vllm.scheduler_harness import SchedulerHarness
from tests.vllm.vllm_config import HEADS, full_attention, make_config, recurrent_state
from tests.vllm.vllm_fakes import split

BLOCK_TOKENS, HASH_TOKENS = 32, 16
STEPS = 1500
REQUESTS = 4
LONGEST = 600
"""Tokens with which a conversation ends."""
BLOCKS = {"full": 38, "window": 38, "state": 40}
SHARE_THAT_ENDS = 0.05
"""Of the running stores, in a step: most still run when their blocks are wanted."""
SHARE_OF_LOADS_THAT_ENDS = 0.5
COPIES = ["copies"] if HAS_DEFECTS_OF_0_32 else []
"""0.33 keeps no state inside a block of such prompts, so that none is copied."""


class Engine(SchedulerHarness):
    """Conversations whose parts follow each other at once, in a cache that is too small, and slow stores."""

    def __init__(self, model: Path, directory: Path, kind: str) -> None:
        specs = {
            "full": full_attention(),
            "window": SlidingWindowSpec(block_size=BLOCK_TOKENS, sliding_window=100, **HEADS),
            "state": recurrent_state(),
        }
        self.kinds = ["full"] if kind == "full" else ["full", kind]
        groups = [KVCacheGroupSpec([f"layer.{at}"], specs[one]) for at, one in enumerate(self.kinds)]
        options: dict[str, Any] = {"max_model_len": 1024, "max_num_batched_tokens": 256, "max_num_seqs": REQUESTS}
        if kind == "state":
            options["mamba_cache_mode"] = "align"
        config = make_config(model, {"directory": str(directory), "offload_prompt_only": False}, **options)
        hash_tokens = HASH_TOKENS if kind == "state" else BLOCK_TOKENS
        super().__init__(config, BLOCKS[kind] * len(groups), *groups, hash_tokens=hash_tokens)
        self.manager.stores.credit_bytes = 1 << 40
        self._random = Random(kind)
        self._stores: dict[int, set[int]] = {}
        """The blocks of those that have not ended."""
        self._jobs: dict[int, Any] = {}
        self._requests = 0
        self.seen = Counter[str]()

    def run(self) -> None:
        """Make steps. Raises AssertionError where one waits for a store in vain, or writes what one has to read."""
        for _ in range(STEPS):
            while len(self.scheduler.requests) < REQUESTS:
                tokens = self._random.choices(range(1000), k=self._random.randrange(20, 250))
                for _ in range(self._random.randrange(1, 3)):
                    self._begin([*tokens, *self._random.choices(range(1000), k=self._random.randrange(1, 100))])
            requests = [*self.scheduler.requests.values()]
            output = self.step()
            self.seen["preempted"] += len(output.preempted_req_ids or ())
            for one in requests:
                if one.is_finished() and one.num_tokens < LONGEST:
                    more = self._random.choices(range(1000), k=self._random.randrange(1, 100))
                    self._begin([*one.all_token_ids, *more])

    def work(self, output: SchedulerOutput, meta: Any) -> set[int]:
        random, written, preempted = self._random, self._written(output), output.preempted_req_ids or ()
        stores = {job_id: {int(each) for each in job.src_spec.block_ids} for job_id, job in meta.store_jobs.items()}
        self._jobs |= meta.store_jobs
        self.seen["loads"] += len(meta.load_jobs)
        self.held = {each for each in sorted(self.loading) if random.random() > SHARE_OF_LOADS_THAT_ENDS}
        for job_id, blocks in (self._stores | stores).items():
            request_id = self._jobs[job_id].req_id
            wanted = blocks & written
            if job_id in stores and request_id in output.num_scheduled_tokens:
                wanted -= self._blocks_of(request_id)  # it reads what this step computes, and after it
            if job_id in meta.jobs_to_flush:
                self.seen["waits"] += 1
                assert wanted or request_id in preempted, "the step waits for a store in vain"
            else:
                assert not wanted, "the step writes blocks that a store has still to read"
        self._stores |= stores
        ended = {
            each for each in sorted(self._stores) if each in meta.jobs_to_flush or random.random() < SHARE_THAT_ENDS
        }
        for job_id in ended:
            del self._stores[job_id]
            self.there.update(key for keys in self._jobs[job_id].dst_spec.groups for key in split(keys))
        return ended

    def _begin(self, tokens: list[int]) -> None:
        self._requests += 1
        self.add(str(self._requests), tokens, self._random.randrange(1, 60))

    def _written(self, output: SchedulerOutput) -> set[int]:
        """The blocks that a step may write: not the hits of requests that begin, but of layers with states."""
        written = {copy.dst_block_id for copy in output.kv_cache_block_copies or ()}
        self.seen["copies"] += len(written)
        for load in output.kv_connector_metadata.load_jobs.values():
            written.update(int(each) for each in load.dst_spec.block_ids)
        cached = output.scheduled_cached_reqs
        begun = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        for request_id, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                begun[request_id] = computed
            else:
                written.update(*(blocks or ()))
        for request_id, computed in begun.items():
            for kind, table in zip(self.kinds, self.scheduler.kv_cache_manager.get_block_ids(request_id), strict=True):
                hits = 0 if kind == "state" else computed // BLOCK_TOKENS
                written.update(table[hits:])
                read = {*table[:hits]}
                self.seen["hits"] += sum(not read.isdisjoint(blocks) for blocks in self._stores.values())
                self.seen["states"] += kind == "state" and computed > 0
        for request_id, tokens in output.num_scheduled_tokens.items():
            end = self.scheduler.requests[request_id].num_computed_tokens
            for table in self.scheduler.kv_cache_manager.get_block_ids(request_id):
                written.update(table[(end - tokens) // BLOCK_TOKENS : -(-end // BLOCK_TOKENS)])
        return written - {0}

    def _blocks_of(self, request_id: str) -> set[int]:
        return set().union(*self.scheduler.kv_cache_manager.get_block_ids(request_id))


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Iterator[Callable[[str], Engine]]:
    made: list[Engine] = []

    def build(kind: str) -> Engine:
        made.append(Engine(model, tmp_path, kind))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


@pytest.mark.parametrize(("kind", "seen"), [("full", ["preempted"]), ("window", []), ("state", ["states", *COPIES])])
def test_a_step_waits_for_stores_of_what_it_writes_and_for_no_others(
    make: Callable[[str], Engine], kind: str, seen: list[str]
) -> None:
    engine = make(kind)
    engine.run()
    assert all(engine.seen[each] > 2 for each in ("hits", "loads", "waits", *seen)), engine.seen


IN_VAIN, TO_READ = "waits for a store in vain", "writes blocks that a store has still to read"


def hits_are_fenced(engine: Engine) -> None:
    """As vLLM does."""
    engine.connector._shape.attention_ids.clear()


def new_blocks_are_not_fenced(engine: Engine) -> None:
    engine.connector._new_blocks = set()  # of which the pool knows nothing


def states_are_not_fenced(engine: Engine) -> None:
    engine.connector._shape.attention_ids.append(1)


def copies_are_not_fenced(engine: Engine) -> None:
    half = engine.connector.connector_scheduler
    update = half._update_req_states

    def update_req_states(output: SchedulerOutput) -> None:
        update(output)
        copies = output.kv_cache_block_copies or ()
        half._current_batch_allocated_block_ids.difference_update([copy.dst_block_id for copy in copies])

    half._update_req_states = update_req_states


@pytest.mark.parametrize(
    ("kind", "plant", "found"),
    [
        ("full", hits_are_fenced, IN_VAIN),
        ("window", hits_are_fenced, IN_VAIN),
        ("full", new_blocks_are_not_fenced, TO_READ),
        ("window", new_blocks_are_not_fenced, TO_READ),
        ("state", states_are_not_fenced, TO_READ),
        pytest.param("state", copies_are_not_fenced, TO_READ, marks=pytest.mark.skipif(not COPIES, reason="no copies")),
    ],
)
def test_a_planted_fault_is_found(
    make: Callable[[str], Engine], kind: str, plant: Callable[[Engine], None], found: str
) -> None:
    engine = make(kind)
    plant(engine)
    with pytest.raises(AssertionError, match=found):
        engine.run()
