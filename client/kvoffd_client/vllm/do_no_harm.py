"""Measures where kvoffd would do harm: loads that take longer than computing, and stores that vLLM waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from statistics import median

from kvoffd_client.vllm.log import logger
from kvoffd_client.vllm.prefill_rate import PrefillRate

LOAD_SAMPLES = 9
"""Loads remembered for each length."""
MIN_LOAD_SAMPLES = 5
MIN_SLOW_LOADS, SLOW_LOADS_S = 2, 10.0
"""This many loads suffice if together they took this long: MIN_LOAD_SAMPLES loads of half a minute each, one after the
other, take longer than SAMPLE_AGE_S, so that the first is forgotten before the last one ends."""
SAMPLE_AGE_S = 120.0
"""Age after which measurements are ignored, and skipped loads are tried again."""
MARGIN, MIN_LOSS_S = 2.0, 0.02
"""Loads are skipped if they take more than MARGIN times as long as computing, and more than MIN_LOSS_S longer."""
WINDOW_S = 30.0
"""Time over which the waits of vLLM for stores are summed up."""
MIN_WAITS = 5
MIN_WAITED_S = 0.05
"""Shortest wait of vLLM for a store that counts."""
WAITED_SHARE = 0.2
"""Stores pause if vLLM waited for them for this share of the window, in MIN_WAITS waits."""
STORE_PAUSE_S = 60.0


class DoNoHarm:
    """Decides which loads and stores cost more than they save. If it is not ``active`` it only measures.

    The duration of a load's copy on the slowest rank, as measured by the daemon, is compared with computing the same
    number of tokens. Time in queues does not count: earlier prompts would have to be computed first, too. Loads are
    grouped by length, a power of two of tokens. Loads of unknown duration, or not clearly slower, are made.

    Stores pause for a while if vLLM waits for them for too much of its time before it reuses their blocks. That is the
    measurable harm of stores: the engine's speed itself depends more on its batches.

    Attributes:
        loads_paused_until: time until which loads are skipped, by bit_length() of their tokens.
        stores_paused_until: time until which stores are skipped.
    """

    def __init__(self, clock: Callable[[], float], prefill: PrefillRate, *, active: bool) -> None:
        self._clock, self._prefill, self._active = clock, prefill, active
        self._load_samples: dict[int, deque[tuple[float, float]]] = {}
        """End and seconds per token of loads, by length."""
        self._store_waits: deque[tuple[float, float]] = deque(maxlen=1000)
        """Time and duration of vLLM's waits for stores."""
        self.loads_paused_until: dict[int, float] = {}
        self.stores_paused_until = -inf

    @property
    def rates(self) -> tuple[float, float]:
        """Rates of prefill and of recent loads in tokens per second; 0 if unknown."""
        recent = self._recent()
        return self._prefill.tokens_per_second, 1 / max(median(recent), 1e-9) if recent else 0.0

    def skips_load(self, tokens: int) -> bool:
        """Return whether a load of these tokens is to be computed instead, because such loads take longer."""
        paused_until = self.loads_paused_until.get(tokens.bit_length())
        return paused_until is not None and self._clock() < paused_until

    def may_skip(self, fewest: int, most: int) -> bool:
        """Return whether a load of a number of tokens within these bounds may be skipped."""
        now, lengths = self._clock(), range(fewest.bit_length(), most.bit_length() + 1)
        return any(length in lengths and now < until for length, until in self.loads_paused_until.items())

    def load_s(self, tokens: int) -> float:
        """Return how many seconds a load of these tokens takes; 0 if unknown.

        By recent loads from about half as long: shorter ones say little about it.
        """
        return self._median_s(tokens, self._recent(tokens.bit_length() - 1))

    def _recent(self, shortest: int = 0, longest: float = inf) -> list[float]:
        """Return the seconds per token of recent loads of these lengths."""
        oldest = self._clock() - SAMPLE_AGE_S
        of_lengths = (samples for length, samples in self._load_samples.items() if shortest <= length <= longest)
        return [per_token for samples in of_lengths for at, per_token in samples if at >= oldest]

    @staticmethod
    def _median_s(tokens: int, per_token: Sequence[float]) -> float:
        """Return the seconds for these tokens by the median of loads, 0 if they are too few."""
        together_s = sum(tokens * one_s for one_s in per_token)  # had each of those loads this many tokens
        least = MIN_SLOW_LOADS if together_s >= SLOW_LOADS_S else MIN_LOAD_SAMPLES
        return tokens * median(per_token) if len(per_token) >= least else 0.0

    def record_load(self, tokens: int, seconds: float) -> None:
        """Record the duration of a load. If loads of its length take too long, pause them and log that."""
        if tokens <= 0:
            return
        now, rate, length = self._clock(), self._prefill.tokens_per_second, tokens.bit_length()
        self._load_samples.setdefault(length, deque(maxlen=LOAD_SAMPLES)).append((now, seconds / tokens))
        loaded_s = self._median_s(tokens, self._recent(length, length))
        paused_until = self.loads_paused_until.pop(length, -inf)
        if not self._active or not rate:
            return
        computed_s = tokens / rate
        if loaded_s > MARGIN * computed_s and loaded_s - computed_s > MIN_LOSS_S:
            self.loads_paused_until[length] = now + SAMPLE_AGE_S
            if now >= paused_until:  # else it was logged, and this load had begun before
                logger.warning(
                    "kvoffd: loads of about %d tokens take %.2f s, computing them %.2f s: such prompts "
                    "compute; a load is tried again %.0f s after the last one.",
                    *(tokens, loaded_s, computed_s, SAMPLE_AGE_S),
                )

    def record_store_wait(self, seconds: float) -> None:
        """Record a wait of vLLM for stores, in the slowest worker."""
        now = self._clock()
        if not self._active or seconds < MIN_WAITED_S or now < self.stores_paused_until:
            return
        self._store_waits.append((now, seconds))
        while self._store_waits[0][0] < now - WINDOW_S:
            self._store_waits.popleft()
        waited_s = sum(wait_s for _, wait_s in self._store_waits)
        if len(self._store_waits) >= MIN_WAITS and waited_s > WAITED_SHARE * WINDOW_S:
            self.stores_paused_until = now + STORE_PAUSE_S
            self._store_waits.clear()
            logger.warning(
                "kvoffd: vLLM waited %.1f s of the last %.0f s for stores before it could reuse their blocks; stores "
                "pause for %.0f s. More KV cache memory in the engine, or a faster daemon, would help.",
                *(waited_s, WINDOW_S, STORE_PAUSE_S),
            )
