"""How fast the engine computes prompts, learned from its scheduler's steps: what takes longer to come is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from vllm.v1.kv_offload.base import OffloadKey

from kvoffd_client.vllm.connector_metadata import GROUP_ID_BYTES

LEAST_STEP_TOKENS = 256
"""A step of fewer tokens is taken for decoding, whose rate says nothing of prompts."""
STEPS = 5
"""Steps in a row that are timed together: vLLM begins one or two before those before them have ended."""
OLD_WEIGHT = 0.7
"""Weight of what was measured before."""


class PrefillRate:
    """Tokens a second. ``tokens_per_key``: by a key's last four bytes."""

    def __init__(self, tokens_per_key: Mapping[bytes, int], clock: Callable[[], float]) -> None:
        self._tokens_per_key = tokens_per_key
        self._clock = clock
        self._began = 0.0
        self._tokens: list[int] = []
        """Of the steps since then."""
        self._is_warm = False
        """Whether more was measured than an engine's first steps, in which it compiles: these count until then."""
        self.tokens_per_second = 0.0
        """0 before it is known."""

    def step(self, tokens: int) -> None:
        """Note that the scheduler begins a step with so many tokens."""
        if len(self._tokens) == STEPS:
            seconds, before = self._clock() - self._began, self.tokens_per_second
            rate = sum(self._tokens) / max(seconds, 1e-6)
            self.tokens_per_second = OLD_WEIGHT * before + (1 - OLD_WEIGHT) * rate if self._is_warm else rate
            self._is_warm = before > 0
            self._tokens.clear()
        if tokens < LEAST_STEP_TOKENS:
            self._tokens.clear()
            return
        if not self._tokens:
            self._began = self._clock()
        self._tokens.append(tokens)

    def seconds_for(self, keys: Iterable[OffloadKey]) -> float:
        """Time to compute the blocks of some keys, all of one request; infinite while the rate is not known."""
        if not self.tokens_per_second:
            return float("inf")
        return self.tokens_of(keys) / self.tokens_per_second

    def tokens_of(self, keys: Iterable[OffloadKey]) -> int:
        """Tokens of the blocks of some keys, all of one request."""
        counts = Counter(key[-GROUP_ID_BYTES:] for key in keys)
        return max((count * self._tokens_per_key.get(group, 0) for group, count in counts.items()), default=0)
