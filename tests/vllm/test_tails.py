"""Tails: prompts of models with recurrent states that end inside a block, stored and loaded to the last hash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from tests.vllm.state_harness import StateHarness
from tests.vllm.vllm_config import full_attention, make_config, recurrent_state

BLOCK, UNIT = 32, 8
"""Tokens of a block and of a hash."""
BLOCKS = 200
Make = Callable[..., StateHarness]


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Iterator[Make]:
    made: list[StateHarness] = []

    def make(seed: int = 0, blocks: int = BLOCKS, **arguments: Any) -> StateHarness:
        specs = full_attention(), recurrent_state()
        groups = [KVCacheGroupSpec([f"layer.{at}"], spec) for at, spec in enumerate(specs)]
        given = {"mamba_cache_mode": "align", "prefix_match_unit": UNIT, "max_model_len": 1024, **arguments}
        config = make_config(model, {"directory": str(tmp_path)}, **given)
        made.append(StateHarness(config, blocks, BLOCK, seed, *groups, hash_tokens=UNIT))
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
    own.manager.loads = False
    asked = prompt(1, tokens)
    of = {"first": asked, "again": asked, "longer": asked + prompt(2, 50), "other": [7, *asked[1:]]}
    for name, each in of.items():
        engine.forget()
        expected, _ = run(own, name, each)
        assert run(engine, name, each) == (expected, expected), name
        assert (expected >= (tokens - 1) // UNIT * UNIT) == (name in ("again", "longer"))


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
