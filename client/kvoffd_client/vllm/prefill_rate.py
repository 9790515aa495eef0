"""Measures how fast an engine computes prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from statistics import median

MIN_STEP_TOKENS = 256
"""Steps with fewer tokens are not measured, unless the engine's prompt chunks are smaller."""
MIN_REQUEST_TOKENS = 64
"""A request with fewer tokens in a step is considered to decode, perhaps with speculative tokens."""
PROMPT_SHARE = 0.75
"""Least share of prompt tokens in a measured step."""
MIN_TOKENS = 512
"""Consecutive steps of prompts are measured together until they have this many tokens."""
SAMPLES = 9
"""Measurements of which the median is taken, so that single slow steps do not matter."""


class PrefillRate:
    """Measures an engine's prefill rate.

    Args:
        most_running: most steps that vLLM begins before the first of them ends.
        prompt_step_tokens: most tokens of a prompt that the engine computes in a step.

    Attributes:
        tokens_per_second: the rate; 0 while unknown.
    """

    def __init__(self, clock: Callable[[], float], most_running: int, prompt_step_tokens: int) -> None:
        self._clock = clock
        self._least_step = min(MIN_STEP_TOKENS, prompt_step_tokens)
        self._least_request = min(MIN_REQUEST_TOKENS, prompt_step_tokens // 2)
        self._running: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=most_running)
        """Start of each step, and the tokens of its requests. A failed step never ends and is dropped."""
        self._ended = 0.0
        """Time of the last step's end."""
        self._tokens, self._seconds = 0, 0.0
        """Tokens and duration of consecutive steps of prompts."""
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._is_warm = False
        """Whether the engine's first measurement, during which it compiles, is over."""
        self.tokens_per_second = 0.0

    def begin_step(self, request_tokens: Collection[int]) -> None:
        """Record the start of a step with these numbers of tokens per request."""
        self._running.append((self._clock(), tuple(request_tokens)))

    def step_ended(self) -> None:
        """Record the output of the first running step."""
        if not self._running:
            return
        now, (began, request_tokens) = self._clock(), self._running.popleft()
        seconds, self._ended = now - max(began, self._ended), now  # previous steps may have run until then
        tokens = sum(request_tokens)
        of_prompts = sum(count for count in request_tokens if count >= self._least_request)
        if tokens < self._least_step or of_prompts < PROMPT_SHARE * tokens:
            self._tokens, self._seconds = 0, 0.0
            return
        self._tokens += tokens
        self._seconds += seconds
        if self._tokens < MIN_TOKENS:
            return
        if self._is_warm:
            self._samples.append(self._tokens / max(self._seconds, 1e-6))
            self.tokens_per_second = median(self._samples)
        self._is_warm, self._tokens, self._seconds = True, 0, 0.0
