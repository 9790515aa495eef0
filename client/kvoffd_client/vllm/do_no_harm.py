"""Where kvoffd would do harm, as measured: loads that take longer than computing, stores that vLLM waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from statistics import median
from typing import TYPE_CHECKING

from kvoffd_client.vllm.log import logger

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig

LEAST_STEP_TOKENS = 256
"""A step of fewer tokens says nothing of prompts, unless the engine computes no more of a prompt in one."""
LEAST_REQUEST_TOKENS = 64
"""A request with fewer tokens in a step is taken for one that decodes, be it with speculative tokens."""
PROMPT_SHARE = 0.75
"""Part of a step's tokens that those of prompts must be."""
LEAST_TOKENS = 512
"""Steps of prompts in a row are timed together until they have so many tokens."""
SAMPLES = 9
"""That are remembered: one slow step is no slow engine."""

LOAD_SAMPLES = 9
"""Loads of about one length that are remembered."""
LEAST_LOAD_SAMPLES = 5
LEAST_DEAR, DEAR_S = 2, 10.0
"""So few are enough where they took so long together: of loads of half a minute there are never five in a while."""
SAMPLE_AGE_S = 120.0
"""What was measured longer ago says nothing: where loads were skipped for it, they are tried again."""
MARGIN = 2.0
"""A load is skipped where it takes so many times as long as computing, and"""
LEAST_LOSS_S = 0.02
"""so much longer."""
WINDOW_S = 30.0
LEAST_WAITS = 5
LEAST_WAITED_S = 0.05
"""A shorter wait of vLLM's for a store is none."""
WAITED_SHARE = 0.2
"""Stores pause where vLLM waited for them for this part of the window, in that many waits."""
STORE_PAUSE_S = 60.0


class PrefillRate:
    """Tokens a second that an engine computes of prompts.

    Args:
        most_running: how many steps vLLM begins at most before the first of them ends.
        largest_chunk: how many tokens of a prompt the engine computes in a step at most.

    Attributes:
        tokens_per_second: 0 before it is known.
    """

    def __init__(self, clock: Callable[[], float], most_running: int, largest_chunk: int) -> None:
        self._clock = clock
        self._least_step = min(LEAST_STEP_TOKENS, largest_chunk)
        self._least_request = min(LEAST_REQUEST_TOKENS, largest_chunk // 2)
        self._running: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=most_running)
        """When each step began, and the tokens of its requests. One that failed never ends: it falls out."""
        self._ended = 0.0
        """When the last step ended."""
        self._tokens, self._seconds = 0, 0.0
        """Of steps of prompts in a row."""
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._is_warm = False
        """Whether an engine's first steps, in which it compiles, are over: one that loads may compute few others."""
        self.tokens_per_second = 0.0

    def step_begins(self, request_tokens: Collection[int]) -> None:
        """Note that the scheduler begins a step with so many tokens of each request."""
        self._running.append((self._clock(), tuple(request_tokens)))

    def step_ended(self) -> None:
        """Note that the output of the first of the steps that run has come."""
        if not self._running:
            return
        now, (began, request_tokens) = self._clock(), self._running.popleft()
        seconds, self._ended = now - max(began, self._ended), now  # the engine computed others before
        tokens = sum(request_tokens)
        of_prompts = sum(count for count in request_tokens if count >= self._least_request)
        if tokens < self._least_step or of_prompts < PROMPT_SHARE * tokens:
            self._tokens, self._seconds = 0, 0.0
            return
        self._tokens += tokens
        self._seconds += seconds
        if self._tokens < LEAST_TOKENS:
            return
        if self._is_warm:
            self._samples.append(self._tokens / max(self._seconds, 1e-6))
            self.tokens_per_second = median(self._samples)
        self._is_warm, self._tokens, self._seconds = True, 0, 0.0


def largest_chunk_of(config: SchedulerConfig) -> int:
    """Return how many tokens of a prompt an engine computes in a step at most."""
    tokens = int(config.max_num_scheduled_tokens or config.max_num_batched_tokens)
    return min(tokens, config.long_prefill_token_threshold or tokens)


class DoNoHarm:
    """Says where loads and stores cost more than they bring. Where it is not ``active`` it measures only.

    A load's time is compared with computing as many tokens, at its end. The daemon measures it, from the beginning of
    its copy to its end: neither steps of other requests nor the loads before it count, which would have to be computed
    before it too. The slowest rank counts. Loads of about one length,
    a power of two of tokens, are compared with each other. What is not known, or not clearly slower, is loaded.

    Stores pause for a while where vLLM waits for them too often, before it reuses blocks that are being stored. That is
    the harm of stores that can be measured: an engine's speed with and without stores depends on its
    batches far more.

    Attributes:
        loads_paused_until: by the bits of a number of tokens; no load of so many until that time.
        stores_paused_until: no store before that time.
    """

    def __init__(self, clock: Callable[[], float], prefill: PrefillRate, *, active: bool) -> None:
        self.prefill = prefill
        self._clock = clock
        self.active = active
        self._loads: dict[int, deque[tuple[float, float]]] = {}
        """By length, when loads ended and their seconds per token."""
        self._waits: deque[tuple[float, float]] = deque(maxlen=1000)
        """When vLLM waited for stores, and how long."""
        self.loads_paused_until: dict[int, float] = {}
        self.stores_paused_until = float("-inf")

    @property
    def rates(self) -> tuple[float, float]:
        """Tokens a second that are computed, and that loads brought lately; 0 for what is not known."""
        oldest = self._clock() - SAMPLE_AGE_S
        lately = [one for samples in self._loads.values() for at, one in samples if at >= oldest]
        return self.prefill.tokens_per_second, 1 / max(median(lately), 1e-9) if lately else 0.0

    def note_load(self, tokens: int, seconds: float) -> None:
        """Note how long a load took. Where loads of its length take too long they pause, and the log says so."""
        now, rate, length = self._clock(), self.prefill.tokens_per_second, tokens.bit_length()
        if tokens <= 0:
            return
        samples = self._loads.setdefault(length, deque(maxlen=LOAD_SAMPLES))
        samples.append((now, seconds / tokens))
        lately = [per_token for at, per_token in samples if at >= now - SAMPLE_AGE_S]
        enough = LEAST_DEAR if tokens * sum(lately) >= DEAR_S else LEAST_LOAD_SAMPLES
        paused_until = self.loads_paused_until.pop(length, float("-inf"))
        if not self.active or not rate or len(lately) < enough:
            return
        loaded_s, computed_s = tokens * median(lately), tokens / rate
        if loaded_s > MARGIN * computed_s and loaded_s - computed_s > LEAST_LOSS_S:
            self.loads_paused_until[length] = now + SAMPLE_AGE_S
            if now >= paused_until:
                logger.warning(
                    "kvoffd: loads of about %d tokens take %.2f s here, and computing them %.2f s: they are computed "
                    "until loads are tried again %.0f s after the last one.",
                    *(tokens, loaded_s, computed_s, SAMPLE_AGE_S),
                )

    def note_wait(self, seconds: float) -> None:
        """Note that vLLM waited so long for stores, in all workers at once."""
        now = self._clock()
        if not self.active or seconds < LEAST_WAITED_S or now < self.stores_paused_until:
            return
        self._waits.append((now, seconds))
        while self._waits[0][0] < now - WINDOW_S:
            self._waits.popleft()
        waited_s = sum(wait_s for _, wait_s in self._waits)
        if len(self._waits) >= LEAST_WAITS and waited_s > WAITED_SHARE * WINDOW_S:
            self.stores_paused_until = now + STORE_PAUSE_S
            self._waits.clear()
            logger.warning(
                "kvoffd: vLLM waited %.1f s of the last %.0f for stores before it could reuse their blocks; nothing is "
                "stored for %.0f s. More KV cache memory in the engine, or a faster daemon, would help.",
                *(waited_s, WINDOW_S, STORE_PAUSE_S),
            )
