"""A client of vLLM's OpenAI server that streams: when each token came, and which."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from tests.bench.contest.engine import Engine

SILENCE_S = 120.0
"""A request ends as failed when nothing came for this long."""


@dataclass
class Traffic:
    """What a client saw of its requests.

    Attributes:
        ttft_s: seconds from each request's sending to its first token.
        gaps_s: seconds between tokens, of all requests.
        seconds: from the first sending to the last answer's end.
        answers: each request's answer, in the order of the prompts: token ids, or the text where the client has no ids.
        failed: causes of requests that failed.
        verdict: what a program of others concluded.
    """

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    answers: list[Any] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    verdict: str = ""


@dataclass
class _Answer:
    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    failed: str = ""


def send(
    engine: Engine, prompts: Sequence[list[int]], *, max_tokens: int, at_once: int, deadline_s: float, **more: Any
) -> Traffic:
    """Send prompts of token ids, at most ``at_once`` at a time in their order, greedy unless ``more`` differs.

    Raises AssertionError when they are not all answered within ``deadline_s``; what still runs ends with the engine.
    """
    body = {
        "model": str(engine.model),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **more,
    }
    pool = ThreadPoolExecutor(at_once)
    began = time.perf_counter()
    futures = [pool.submit(_complete, engine.port, {**body, "prompt": prompt}) for prompt in prompts]
    _, late = wait(futures, deadline_s)
    seconds = time.perf_counter() - began
    pool.shutdown(wait=False, cancel_futures=True)
    assert not late, f"{len(late)} of {len(futures)} requests were not answered within {deadline_s:g} s"
    answers = [future.result() for future in futures]
    return Traffic(
        ttft_s=[one.ttft_s for one in answers if one.ttft_s is not None],
        gaps_s=[gap for one in answers for gap in one.gaps_s],
        seconds=seconds,
        answers=[sorted(one.tokens.items()) for one in answers],
        failed=[one.failed for one in answers if one.failed],
    )


def _complete(port: int, body: dict[str, Any]) -> _Answer:
    answer, last = _Answer(), dict[int, float]()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SILENCE_S)
    began = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"status {response.status}: {response.read()[:300]!r}")
        for line in response:
            data = line.removeprefix(b"data: ").strip()
            if not data or data == b"[DONE]":
                continue
            found = json.loads(data)
            if "error" in found:
                raise OSError(str(found["error"])[:300])
            for choice in found["choices"]:
                now, number, tokens = time.perf_counter(), choice["index"], choice.get("token_ids") or []
                if not tokens:
                    continue
                if answer.ttft_s is None:
                    answer.ttft_s = now - began
                if number in last:
                    answer.gaps_s.append(now - last[number])
                last[number] = now
                answer.tokens.setdefault(number, []).extend(tokens)
    except (OSError, http.client.HTTPException) as error:
        answer.failed = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return answer
