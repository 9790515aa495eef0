"""How fast the engine computes prompts, learned from its scheduler's steps: what takes longer to come is computed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from statistics import median
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import OffloadKey

from kvoffd_client.vllm.connector_metadata import GROUP_ID_BYTES

if TYPE_CHECKING:
    from kvoffd_client.vllm.vllm_types import SchedulerConfig

LEAST_STEP_TOKENS = 256
"""A step of fewer tokens says nothing of prompts, unless the engine computes no more of a prompt in one."""
LEAST_REQUEST_TOKENS = 64
"""A request with fewer tokens in a step is taken for one that decodes, be it with speculative tokens."""
PROMPT_SHARE = 0.75
"""Part of a step's tokens that those of prompts must be."""
LEAST_TOKENS = 1024
"""Steps of prompts in a row are timed together until they have so many tokens."""
SAMPLES = 9
"""That are remembered: one slow step is no slow engine."""


class PrefillRate:
    """Tokens a second.

    ``tokens_per_key``: by a key's last four bytes. ``most_running``: steps that vLLM begins at most before the first of
    them ends. ``largest_chunk``: tokens of a prompt that the engine computes in a step at most.
    """

    def __init__(
        self,
        tokens_per_key: Mapping[bytes, int],
        clock: Callable[[], float],
        most_running: int = 1,
        largest_chunk: int = LEAST_STEP_TOKENS,
    ) -> None:
        self._tokens_per_key = tokens_per_key
        self._clock = clock
        self._least_step = min(LEAST_STEP_TOKENS, largest_chunk)
        self._least_request = min(LEAST_REQUEST_TOKENS, largest_chunk // 2)
        self._running: deque[tuple[float, int]] = deque(maxlen=most_running)
        """When each step began, and its tokens if it is one of prompts. One that failed never ends: it falls out."""
        self._ended = 0.0
        """When the last step ended."""
        self._tokens, self._seconds = 0, 0.0
        """Of steps of prompts in a row."""
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._is_warm = False
        """Whether an engine's first steps, in which it compiles, are over: one that loads may compute few others."""
        self.tokens_per_second = 0.0
        """0 before it is known."""

    def step_begins(self, request_tokens: Collection[int]) -> None:
        """Note that the scheduler begins a step with so many tokens of each request."""
        self._running.append((self._clock(), self._prompt_step_tokens(request_tokens)))

    def step_ended(self) -> None:
        """Note that the output of the first of the steps that run has come."""
        if not self._running:
            return
        now = self._clock()
        began, tokens = self._running.popleft()
        seconds = now - max(began, self._ended)  # the engine computed others before
        self._ended = now
        if not tokens:
            self._tokens, self._seconds = 0, 0.0
            return
        self._tokens += tokens
        self._seconds += seconds
        if self._tokens >= LEAST_TOKENS:
            self._note(self._tokens / max(self._seconds, 1e-6))
            self._tokens, self._seconds = 0, 0.0

    def _note(self, rate: float) -> None:
        if not self._is_warm:
            self._is_warm = True
            return
        self._samples.append(rate)
        self.tokens_per_second = median(self._samples)

    def seconds_for(self, keys: Iterable[OffloadKey]) -> float:
        """Time to compute the blocks of some keys, all of one request; infinite while the rate is not known."""
        if not self.tokens_per_second:
            return float("inf")
        return self.tokens_of(keys) / self.tokens_per_second

    def tokens_of(self, keys: Iterable[OffloadKey]) -> int:
        counts = Counter(key[-GROUP_ID_BYTES:] for key in keys)
        return max((count * self._tokens_per_key.get(group, 0) for group, count in counts.items()), default=0)

    def _prompt_step_tokens(self, request_tokens: Collection[int]) -> int:
        """All tokens of a step that mostly computes prompts; 0 for another."""
        tokens = sum(request_tokens)
        if tokens < self._least_step:
            return 0
        of_prompts = sum(count for count in request_tokens if count >= self._least_request)
        return tokens if of_prompts >= PROMPT_SHARE * tokens else 0


def largest_chunk_of(config: SchedulerConfig) -> int:
    """Return how many tokens of a prompt an engine computes in a step at most."""
    tokens = int(config.max_num_scheduled_tokens or config.max_num_batched_tokens)
    return min(tokens, config.long_prefill_token_threshold or tokens)
