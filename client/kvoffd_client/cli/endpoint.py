"""An OpenAI endpoint of vLLM, as ``kvoffd-cli verify`` asks it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite, isnan, nan
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvoffd_client.admin_client import base_url, error_in, open_url
from kvoffd_client.cli.target import CliError
from kvoffd_client.errors import HttpError

if TYPE_CHECKING:
    from http.client import HTTPResponse

Body = Mapping[str, Any]
"""A request with ``prompt`` or ``messages``."""

ANSWER_S = 300.0
"""Longest time for one answer, its prefill included."""
QUICK_S = 10.0
RESET_S = 60.0
MAX_BYTES = 16 << 20
"""Most bytes of a page, or of a line of an answer."""
OF_PROMPTS = (
    "model", "prompt", "messages", "tools", "tool_choice", "documents", "chat_template", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "add_special_tokens", "reasoning_effort", "mm_processor_kwargs",
    "cache_salt",
)  # fmt: skip
"""Fields of a request that decide its prompt and its keys. All others are replaced."""
GREEDY = {
    "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0,
    "frequency_penalty": 0, "n": 1, "ignore_eos": True, "max_tokens": 32, "stream": True,
    "stream_options": {"include_usage": True}, "return_tokens_as_token_ids": True,
}  # fmt: skip
"""No sampling, whatever the model's generation_config says, and no early end."""
LIKELIEST = 5
"""Tokens at each place of an answer whose log probabilities are asked for."""


@dataclass
class Answer:
    """One answer. Its lists are of one length.

    ``logprobs``: NaN where the server gives no number. ``likeliest``: the likeliest tokens at each place. ``cached``:
    None if the server does not say.
    """

    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[dict[str, float]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached: int | None = None
    ttft_s: float = 0.0

    @property
    def has_numbers(self) -> bool:
        """Whether its log probabilities can be compared: a model whose output is NaN has none."""
        others = (value for place in self.likeliest for value in place.values())
        return all(map(isfinite, self.logprobs)) and not any(map(isnan, others))


Tokens = Annotated[int, Meta(ge=0)]
LogProb = float | None
"""JSON has no NaN: vLLM writes null."""


class LikelyToken(Struct):
    token: str
    logprob: LogProb


class ChatToken(Struct):
    token: str
    logprob: LogProb
    top_logprobs: list[LikelyToken]


class LogProbs(Struct):
    """Lists of a completion, or ``content`` of a chat."""

    tokens: list[str] | None = None
    token_logprobs: list[LogProb] | None = None
    top_logprobs: list[dict[str, LogProb]] | None = None
    content: list[ChatToken] | None = None


class Choice(Struct):
    logprobs: LogProbs | None = None


class UsageDetails(Struct):
    cached_tokens: Tokens | None = None


class Usage(Struct):
    prompt_tokens: Tokens
    prompt_tokens_details: UsageDetails | None = None


class Chunk(Struct):
    """A part of an answer: the fields that are read."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: object = None


class Endpoint:
    """A server. All calls raise CliError or HttpError, with a whole sentence, and end by themselves."""

    def __init__(self, url: str) -> None:
        self.url = base_url(url).removesuffix("/v1")

    def model(self) -> tuple[str, str]:
        """Return the first model's name and what it was loaded from."""
        found = self.read("/v1/models")
        try:
            return str(found["data"][0]["id"]), str(found["data"][0].get("root") or "")
        except (TypeError, KeyError, IndexError):
            raise CliError(f"{self.url}/v1/models lists no model; is it an OpenAI endpoint?") from None

    def metrics(self) -> str:
        """Return /metrics; empty if there are none."""
        try:
            with self._open("/metrics", QUICK_S) as answer:
                return answer.read(MAX_BYTES).decode(errors="replace")
        except HttpError:
            return ""

    def can_reset(self) -> bool:
        """Return whether vLLM's own prefix cache can be reset, as in its development mode."""
        try:
            with self._open("/reset_prefix_cache", QUICK_S):
                return False
        except HttpError as error:
            return error.status == 405  # it wants POST

    def reset(self) -> None:
        """Reset vLLM's own prefix cache, once no request uses it."""
        deadline = time.monotonic() + RESET_S
        while not self.read("/reset_prefix_cache", b"").get("success"):
            if time.monotonic() > deadline:
                raise CliError(
                    f"vLLM's prefix cache cannot be reset while {self.url} runs other requests, as it did for "
                    f"{RESET_S:.0f} s; keep them away, or give --cold or --push-out."
                )
            time.sleep(0.1)

    def ask(self, body: Body, request: str, **fields: object) -> Answer:
        """Return the greedy answer to a prompt. ``request`` becomes part of the engine's id of it."""
        chat = "messages" in body
        asked = {name: body[name] for name in OF_PROMPTS if name in body} | GREEDY | fields
        asked |= {"logprobs": True, "top_logprobs": LIKELIEST} if chat else {"logprobs": LIKELIEST}
        answer, begin = Answer(), time.monotonic()
        path = "/v1/chat/completions" if chat else "/v1/completions"
        with self._open(path, ANSWER_S, json.dumps(asked).encode(), {"X-Request-Id": request}) as response:
            for chunk in self._chunks(response, begin + ANSWER_S):
                if (usage := chunk.usage) is not None:
                    answer.prompt_tokens = usage.prompt_tokens
                    details = usage.prompt_tokens_details
                    answer.cached = None if details is None else details.cached_tokens
                for choice in chunk.choices or ():
                    if choice.logprobs is not None:
                        _add_tokens(answer, choice.logprobs)
                    if answer.tokens and not answer.ttft_s:
                        answer.ttft_s = time.monotonic() - begin
        if not answer.tokens:
            raise CliError(f"{self.url} answered without log probabilities of its tokens; is it vLLM?")
        return answer

    def _chunks(self, response: HTTPResponse, deadline: float) -> Iterator[Chunk]:
        """Yield the parts of a streamed answer. Raises errors that ``open_url`` turns into HttpError."""
        streams = False
        while line := response.readline(MAX_BYTES + 1):
            if time.monotonic() > deadline:
                raise TimeoutError
            if len(line) > MAX_BYTES:
                raise ValueError(f"a line has more than {MAX_BYTES} bytes")
            if line.strip() == b"data: [DONE]":
                return
            if line.startswith(b"data:"):
                chunk, streams = msgspec.convert(json.loads(line[5:]), Chunk), True
                if chunk.error is not None:
                    raise CliError(f"{self.url} ended an answer with an error: {error_in(line[5:])}.")
                yield chunk
        if not streams:
            raise CliError(f"{self.url} did not stream an answer; is it vLLM?")
        raise CliError(
            f"{self.url} broke off an answer: the connection was closed; see whether the engine runs, and its log."
        )

    def read(self, path: str, body: bytes | None = None) -> dict[str, Any]:
        """Return the object that a path answers with. A ``body``, even an empty one, is sent by POST."""
        with self._open(path, QUICK_S, body) as answer:
            found = json.loads(answer.read(MAX_BYTES))
            if not isinstance(found, dict):
                raise ValueError("it is no JSON object")
            return found

    @contextmanager
    def _open(
        self, path: str, timeout_s: float, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[HTTPResponse]:
        key = os.environ.get("OPENAI_API_KEY")
        sent = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        try:
            with open_url(self.url + path, timeout_s, body, sent | dict(headers or {})) as answer:
                yield answer
        except HttpError as error:
            hint = "; give the server's key in OPENAI_API_KEY" if error.status == 401 else ""
            raise HttpError(f"{self.url}{path} {error}{hint}.", error.status) from None


def _add_tokens(answer: Answer, found: LogProbs) -> None:
    """Add the tokens of a chunk. Raises ValueError if its lists do not fit."""
    tokens, logprobs, likeliest = found.tokens or [], found.token_logprobs or [], found.top_logprobs or []
    for one in found.content or ():
        tokens.append(one.token)
        logprobs.append(one.logprob)
        likeliest.append({each.token: each.logprob for each in one.top_logprobs})
    if not len(tokens) == len(logprobs) == len(likeliest):
        raise ValueError(
            f"it has {len(tokens)} tokens with {len(logprobs)} log probabilities and {len(likeliest)} lists of others"
        )
    answer.tokens += tokens
    answer.logprobs += map(_number, logprobs)
    answer.likeliest += [{token: _number(logprob) for token, logprob in place.items()} for place in likeliest]


def _number(logprob: LogProb) -> float:
    return nan if logprob is None else logprob
