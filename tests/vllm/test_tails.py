"""Tails: prompts of models with recurrent states that end inside a block, stored and loaded to the last hash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from kvoffd_proto.messages import READY
from tests.vllm.scheduler_harness import SchedulerHarness
from tests.vllm.vllm_config import full_attention, make_config, recurrent_state
from tests.vllm.vllm_fakes import KEY_BYTES, split

BLOCK, UNIT = 32, 8
"""Tokens of a block and of a hash."""
BLOCKS = 200


class WrongContent(AssertionError):
    """A request would have read what is not its own."""


class StateHarness(SchedulerHarness):
    """The harness with memory that knows what is in it, and a daemon that keeps what is stored.

    Each block holds what a model would have written: of attention, for each position the prefix that ends there; of
    states, the prefix that they are of. Whatever a step reads is compared with what its request needs.

    Attributes:
        kept: contents of the daemon's blocks, by group and block hash.
        loads: number of tokens of each load.
        read: keys that were loaded.
        cached: tokens that a request had when it first computed.
    """

    def __init__(self, config: Any, blocks: int, seed: int, *groups: Any) -> None:
        super().__init__(config, blocks, *groups, hash_tokens=UNIT)
        self.kept: dict[tuple[int, bytes], dict[int, int]] = {}
        self.loads: list[int] = []
        self.read: set[tuple[int, bytes]] = set()
        self.cached: dict[str, int] = {}
        self._random = Random(seed)
        self._memory: dict[int, dict[int, int]] = {}
        """What is in each block of the engine: prefixes by position."""
        self._due: dict[int, Any] = {}
        """Stores that have not read their blocks."""

    def answer(self) -> None:
        for index in self.unanswered:
            future, groups = self.client.asked[index]
            for group in groups:
                keys = split(group.keys)
                future.states.append(bytes(READY * ((group.group, key) in self.kept) for key in keys))
            self.client.end(future)

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
            self.read.add(key)

    def _compute(self, request: Any, count: int) -> None:
        end, size = request.num_computed_tokens, BLOCK
        begin, tokens = end - count, request.all_token_ids[:end]
        prefixes = [*accumulate(tokens, lambda before, token: hash((before, token)), initial=0)]
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


Make = Callable[..., StateHarness]


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Iterator[Make]:
    made: list[StateHarness] = []

    def make(seed: int = 0, blocks: int = BLOCKS, **arguments: Any) -> StateHarness:
        specs = full_attention(), recurrent_state()
        groups = [KVCacheGroupSpec([f"layer.{at}"], spec) for at, spec in enumerate(specs)]
        given = {"mamba_cache_mode": "align", "prefix_match_unit": UNIT, "max_model_len": 1024, **arguments}
        config = make_config(model, {"directory": str(tmp_path)}, **given)
        made.append(StateHarness(config, blocks, seed, *groups))
        return made[-1]

    yield make
    for one in made:
        one.close()


def prompt(seed: float, tokens: int) -> list[int]:
    return Random(seed).choices(range(1000), k=tokens)


def run(engine: StateHarness, name: str, tokens: list[int], **arguments: Any) -> tuple[int, int]:
    """Run a prompt; returns how many of its tokens were cached, and how many of them were loaded."""
    before = sum(engine.loads)
    request = engine.add(name, tokens, 4, **arguments)
    engine.end([request], 30)
    return engine.cached[name], sum(engine.loads) - before


@pytest.mark.parametrize("tokens", [UNIT + 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + UNIT, 3 * BLOCK + 2 * UNIT + 3])
def test_a_prompt_comes_back_to_the_last_token_that_vllm_s_own_cache_gives(make: Make, tokens: int) -> None:
    own, engine = make(), make()
    own.manager.lookups.enabled = False
    asked = prompt(1, tokens)
    of = {"first": asked, "again": asked, "longer": asked + prompt(2, 50), "other": [7, *asked[1:]]}
    for name, each in of.items():
        engine.forget()
        expected, _ = run(own, name, each)
        assert run(engine, name, each) == (expected, expected), name
        assert (expected >= (tokens - 1) // UNIT * UNIT) == (name in ("again", "longer"))


def test_a_prompt_whose_tail_vllm_s_own_cache_has_is_looked_up_once(make: Make) -> None:
    engine, asked = make(), prompt(1, 3 * BLOCK + 2 * UNIT + 3)
    run(engine, "first", asked)
    before = len(engine.client.asked)
    assert run(engine, "again", asked) == (3 * BLOCK + 2 * UNIT, 0)
    assert len(engine.client.asked) - before == 1


def test_a_preempted_prompt_with_a_tail_is_counted_again(make: Make) -> None:
    """The daemon counts no lookups of tails."""
    engine, asked = make(), prompt(1, 3 * BLOCK + 2 * UNIT + 3)
    run(engine, "first", asked)
    engine.forget()
    request = engine.add("again", asked, 200)
    for _ in range(4):
        engine.step()
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)
    engine.forget()
    before = len(engine.client.asked)
    for _ in range(6):
        engine.step()
    assert request.num_computed_tokens > len(asked)
    assert engine.client.again[before:] == [False, True, False], "chunks, then the tails too, then the one it loads"
    assert engine.loads == [3 * BLOCK + 2 * UNIT] * 2
    assert [one.again for one in engine.client.reported if one.request == "again"] == [False, True]


RETAIN = {"action_id": "1", "action_type": "kv.retain", "action_version": "1.0", "payload": {"ttl_s": 60}}


@pytest.mark.parametrize("tokens", [UNIT + 1, 2 * BLOCK + UNIT, 2 * BLOCK + UNIT + 1, 2 * BLOCK])
def test_a_hint_to_retain_names_the_tails_that_were_stored_and_loaded(make: Make, tokens: int) -> None:
    engine, asked = make(), prompt(1, tokens)
    hints = {"protocol_version": "0.1", "message_id": "1", "actions": [RETAIN]}
    for each in (asked, asked + prompt(2, 2 * UNIT)):
        before = {*engine.kept}
        engine.client.hints.clear()
        engine.read.clear()
        engine.forget()
        run(engine, f"{len(engine.loads)} {len(each)}", each, parameters={"kv_hints": hints})
        hinted = {
            (one.group, key) for _, groups, *_ in engine.client.hints for one in groups for key in split(one.keys)
        }
        assert {*engine.kept} - before | engine.read <= hinted
    assert engine.read


def test_a_prompt_that_waits_for_the_answer_about_its_tail_is_looked_at_when_it_comes(make: Make) -> None:
    engine, asked = make(), prompt(1, 3 * BLOCK + 2 * UNIT + 3)
    run(engine, "first", asked)
    engine.forget()
    engine.add("running", prompt(5, 20), 400)
    for _ in range(3):
        engine.step()
    engine.answers = False
    engine.add("again", asked, 4)
    engine.answer()
    engine.step()
    assert not engine.loads
    engine.answer()
    engine.step()
    assert engine.loads == [3 * BLOCK + 2 * UNIT]


@pytest.mark.parametrize("seed", range(3))
def test_random_prompts_that_share_prefixes_read_what_is_their_own(make: Make, seed: int) -> None:
    play(make(seed, 40), seed)


def play(engine: StateHarness, seed: int, rounds: int = 40) -> None:
    """Prompts that begin as earlier ones do, several at once in a small cache, with failed loads and lost blocks."""
    random, prompts, preempted = Random(seed), [prompt(0, 300)], False
    for number in range(rounds):
        if random.random() < 0.7:
            engine.forget()
        if random.random() < 0.2:
            for key in random.sample(sorted(engine.kept), len(engine.kept) // 10):
                del engine.kept[key]
        asked = []
        for part in range(random.randint(1, 4)):
            begin = random.choice(prompts)
            cut = random.choice([len(begin), random.randrange(len(begin)), random.randrange(len(begin))])
            prompts.append(begin[:cut] + prompt(random.random(), random.randint(1, 200)))
            name, tokens = f"{number}.{part}", random.choice(prompts[-8:])[:600]
            asked.append(engine.add(name, tokens, random.randint(1, 40)))
            if random.random() < 0.1:
                engine.failing.add(name)
        engine.end(asked, 1000)
        engine.failing.clear()
        preempted |= any(request.num_preemptions for request in asked)
    assert preempted
    assert sum(tokens % BLOCK > 0 for tokens in engine.loads) > 5
