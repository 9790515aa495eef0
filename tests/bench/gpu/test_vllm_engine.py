"""An engine's process as the parts use it, over a made-up vLLM that answers at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.gpu.vllm_engine import Engine

MADE_UP = {
    "vllm/__init__.py": """
class SamplingParams:
    def __init__(self, **given):
        self.__dict__.update(given)
""",
    "vllm/sampling_params.py": "class RequestOutputKind:\n    DELTA = 0\n",
    "vllm/engine/__init__.py": "",
    "vllm/engine/arg_utils.py": "AsyncEngineArgs = dict\n",
    "vllm/v1/__init__.py": "",
    "vllm/v1/engine/__init__.py": "",
    "vllm/v1/engine/async_llm.py": """
import asyncio
from types import SimpleNamespace as Some

class AsyncLLM:
    @classmethod
    def from_engine_args(cls, settings):
        if settings.get("model") == "missing":
            raise ValueError("no such model")
        made = cls()
        made.seen, made.refusals = set(), 2
        return made

    async def generate(self, prompt, wanted, name):
        tokens = tuple(prompt["prompt_token_ids"])
        cached, self.seen = len(tokens) if tokens in self.seen else 0, self.seen | {tokens}
        for number in range(wanted.max_tokens):
            await asyncio.sleep(0.002)
            logprobs = None if wanted.logprobs is None else [{tokens[0]: Some(logprob=-number / 4)}]
            last = "length" if number + 1 == wanted.max_tokens else None
            sample = Some(token_ids=[tokens[0] + number], logprobs=logprobs, finish_reason=last)
            yield Some(outputs=[sample], num_cached_tokens=cached)

    async def reset_prefix_cache(self):
        self.refusals -= 1
        if self.refusals < 0:
            self.seen = set()
        return self.refusals < 0

    async def collective_rpc(self, method):
        return [[1.0, 2.0], [4.0]]
""",
}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    for name, text in MADE_UP.items():
        path = tmp_path / "made up" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path / "made up"), os.environ.get("PYTHONPATH"))))}


@pytest.fixture
def engine(tmp_path: Path, environ: dict[str, str]) -> Iterator[Engine]:
    with Engine({"model": "some"}, environ, tmp_path) as engine:
        yield engine


def test_prompts_are_asked_in_turn_and_at_a_rate(engine: Engine) -> None:
    first, second = engine.ask([(1, 50), (2, 50)], 3, logprobs=True)
    assert first.tokens == [first.tokens[0] + number for number in range(3)]
    assert (first.logprobs, first.finish, first.cached) == ([0.0, -0.25, -0.5], "length", 0)
    assert first.tokens != second.tokens
    assert first.ttft_ms > 0
    again, new = engine.ask([(1, 50), (3, 50)], 2, per_second=100.0)
    assert (again.tokens, again.cached, new.cached) == (first.tokens[:2], 50, 0)
    engine.call("reset")
    assert engine.ask([(1, 50)], 1)[0].cached == 0
    assert engine.call("fence_times") == [4.0]


def test_steps_beside_other_prompts(engine: Engine) -> None:
    seen = engine.call("beside", decoding=[(1, 20), (2, 20)], prompts=[(3, 20), (3, 20)], rest_s=0.02, seconds=5.0)
    assert all(seen["gaps_ms"][state] for state in ("alone", "during", "after"))
    assert seen["cached"] == [0, 20]


def test_what_ends_an_engine_is_said(tmp_path: Path, environ: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="ValueError: no such model"):
        Engine({"model": "missing"}, environ, tmp_path).__enter__()
    assert not list(tmp_path.glob("engine-*"))
    with Engine({}, environ, tmp_path) as engine:
        with pytest.raises(AssertionError, match="KeyError: 'unknown'"):
            engine.call("unknown")
        engine.kill()
        engine.start()
        assert engine.ask([(1, 5)], 1)[0].finish == "length"
