"""The logic of the parts with a real vLLM, without one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.bench.gpu.setup import Setup
from tests.bench.gpu.vllm_engine import Answer, gaps_by_state
from tests.bench.gpu.vllm_parts import Bench, difference, is_unequal, is_wrong


def answer(tokens: list[int], logprobs: list[float], cached: int = 32, finish: str = "length") -> Answer:
    return Answer(12.5, cached, tokens, logprobs, finish)


def test_answers_are_compared_to_the_last_bit() -> None:
    own = [answer([1, 2], [-0.5, -1.0]), answer([3, 4], [-0.5, -1.5])]
    same = difference(own, own)
    assert (same["same_tokens"], same["same_logprobs"], same["farthest_logprob"]) == (2, 2, 0.0)
    assert not is_unequal({"a step": same})
    close = difference(own, [own[0], answer([3, 4], [-0.5, -1.25])])
    assert (close["same_tokens"], close["same_logprobs"], close["farthest_logprob"]) == (2, 1, 0.25)
    assert not is_unequal({"a step": close}), "kernels may compute in another order"


@pytest.mark.parametrize(
    "other",
    [
        answer([3, 5], [-0.5, -1.5]),
        answer([3, 4], [-0.5, -1.5], finish="error"),
        answer([3, 4], [-0.5, -1.5], cached=0),
    ],
    ids=["other-token", "failed", "computed"],
)
def test_what_must_not_be_is_wrong(other: Answer) -> None:
    own = [answer([3, 4], [-0.5, -1.5])]
    assert is_unequal({"first": difference(own, own), "second": {"inner": difference(own, [other])}})


def test_a_step_that_failed_is_wrong_unless_it_is_another_connectors() -> None:
    assert is_wrong({"kvoffd": {"failed": "AssertionError"}})
    assert not is_wrong({"kvoffd": {"failed_requests": 0}, "PegaFlow": {"failed": "AssertionError"}})
    assert is_wrong({"kvoffd": {"new": {"failed_requests": 1}}})


def test_gaps_between_tokens_belong_to_what_was_there() -> None:
    arrivals = [0.0, 1.0, 2.0, 3.5, 4.0, 5.0, 7.0]
    gaps = gaps_by_state(arrivals, events=[(1.5, 3.0)], rest_s=1.2)
    assert gaps == {"alone": [1000.0, 2000.0], "during": [1000.0, 1500.0], "after": [500.0, 1000.0]}


def test_a_step_that_fails_loses_nothing() -> None:
    kept: list[Mapping[str, Any]] = []
    bench = Bench(Setup("", True, keep=lambda found: kept.append(json.loads(json.dumps(found)))))
    with bench.step("good") as found:
        found["figure"] = 1
    with bench.step("bad") as found:
        found["before"] = 2
        raise AssertionError("the engine ended")
    with bench.step("after"):
        pass
    assert [list(one) for one in kept] == [["good"], ["good", "bad"], ["good", "bad", "after"]]
    assert kept[-1]["good"]["figure"] == 1
    assert (kept[-1]["bad"]["before"], kept[-1]["bad"]["failed"]) == (2, "AssertionError: the engine ended")
