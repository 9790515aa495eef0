"""How fast the engine computes prompts, learned from its scheduler's steps: what takes longer to come is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from vllm.v1.kv_offload.base import OffloadKey

from kvoffd_client.vllm.connector_metadata import GROUP_ID_BYTES

LEAST_STEP_TOKENS = 256
"""A step of fewer tokens is taken for decoding, whose rate says nothing of prompts."""
STEPS = 5
"""Steps in a row that are timed together, whatever follows."""
AHEAD = 2
"""Steps that vLLM begins at most before the ones before them have ended."""
LEAST_TOKENS = 1024
"""Of fewer steps, which are timed where they are between steps of decoding, and"""
LONGER = 8
"""so many times as long as one of these."""
OLD_WEIGHT = 0.7
"""Weight of what was measured before."""


class PrefillRate:
    """Tokens a second. ``tokens_per_key``: by a key's last four bytes."""

    def __init__(self, tokens_per_key: Mapping[bytes, int], clock: Callable[[], float]) -> None:
        self._tokens_per_key = tokens_per_key
        self._clock = clock
        self._began: list[float] = []
        """When steps of prompts in a row began, and those of decoding that followed."""
        self._tokens: list[int] = []
        """Of the steps of prompts in a row."""
        self._computes_prompts = self._followed_prompts = False
        """Whether the last step was one of prompts, and the one before those in a row."""
        self._is_warm = False
        """Whether more was measured than an engine's first steps, in which it compiles: these count until then."""
        self.tokens_per_second = 0.0
        """0 before it is known."""

    def step(self, tokens: int) -> None:
        """Note that the scheduler begins a step with so many tokens; 0 where there is nothing to compute."""
        now, began = self._clock(), self._began
        if len(self._tokens) == STEPS:
            self._note(now - began[0])
        if tokens >= LEAST_STEP_TOKENS:
            if len(began) > len(self._tokens):
                self._forget()
            if not began:
                self._followed_prompts = self._computes_prompts
            began.append(now)
            self._tokens.append(tokens)
        elif not tokens or not began:
            self._forget()
        else:
            began.append(now)
            if len(began) == len(self._tokens) + AHEAD + 2:
                decoded_s = now - began[-2]
                # Until the last but one began, the prompts were computed, and one step of decoding, give or take one.
                seconds = began[-2] - began[0] - decoded_s
                if sum(self._tokens) >= LEAST_TOKENS and seconds > LONGER * decoded_s and not self._followed_prompts:
                    self._note(seconds)
                self._forget()
        self._computes_prompts = tokens >= LEAST_STEP_TOKENS

    def _note(self, seconds: float) -> None:
        """Steps of prompts in a row took so long."""
        before, rate = self.tokens_per_second, sum(self._tokens) / max(seconds, 1e-6)
        self.tokens_per_second = OLD_WEIGHT * before + (1 - OLD_WEIGHT) * rate if self._is_warm else rate
        self._is_warm = before > 0
        self._forget()

    def _forget(self) -> None:
        self._began.clear()
        self._tokens.clear()

    def seconds_for(self, keys: Iterable[OffloadKey]) -> float:
        """Time to compute the blocks of some keys, all of one request; infinite while the rate is not known."""
        if not self.tokens_per_second:
            return float("inf")
        return self.tokens_of(keys) / self.tokens_per_second

    def tokens_of(self, keys: Iterable[OffloadKey]) -> int:
        """Tokens of the blocks of some keys, all of one request."""
        counts = Counter(key[-GROUP_ID_BYTES:] for key in keys)
        return max((count * self._tokens_per_key.get(group, 0) for group, count in counts.items()), default=0)
