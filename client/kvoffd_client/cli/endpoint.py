"""An OpenAI endpoint of vLLM, as ``kvoffd-cli verify`` asks it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
    """One answer. ``likeliest``: the likeliest tokens at each place. ``cached``: None if the server does not say."""

    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[dict[str, float]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached: int | None = None
    ttft_s: float = 0.0


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
                return answer.read().decode(errors="replace")
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
                if usage := chunk.get("usage"):
                    answer.prompt_tokens = usage["prompt_tokens"]
                    answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
                for choice in chunk.get("choices", ()):
                    _add_tokens(answer, choice.get("logprobs") or {})
                    if answer.tokens and not answer.ttft_s:
                        answer.ttft_s = time.monotonic() - begin
        if not answer.tokens or len(answer.likeliest) != len(answer.tokens):
            raise CliError(f"{self.url} answered without log probabilities of its tokens; is it vLLM?")
        return answer

    def _chunks(self, lines: Iterable[bytes], deadline: float) -> Iterator[dict[str, Any]]:
        for line in lines:
            if time.monotonic() > deadline:
                raise TimeoutError
            if line.strip() == b"data: [DONE]":
                return
            if line.startswith(b"data:"):
                chunk = json.loads(line[5:])
                if "error" in chunk:
                    raise CliError(f"{self.url} ended an answer with an error: {error_in(line[5:])}.")
                yield chunk
        raise CliError(
            f"{self.url} broke off an answer: the connection was closed; see whether the engine runs, and its log."
        )

    def read(self, path: str, body: bytes | None = None) -> Any:
        with self._open(path, QUICK_S, body) as answer:
            return json.loads(answer.read())

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


def _add_tokens(answer: Answer, found: Mapping[str, Any]) -> None:
    """Add the tokens of a chunk's ``logprobs``: lists of a completion, or ``content`` of a chat."""
    answer.tokens += found.get("tokens") or ()
    answer.logprobs += found.get("token_logprobs") or ()
    answer.likeliest += found.get("top_logprobs") or ()
    for one in found.get("content") or ():
        answer.tokens.append(one["token"])
        answer.logprobs.append(one["logprob"])
        answer.likeliest.append({each["token"]: each["logprob"] for each in one["top_logprobs"]})
