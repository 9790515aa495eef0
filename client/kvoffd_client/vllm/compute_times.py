"""Estimates when an engine would have computed a prompt, after the earlier ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from kvoffd_client.vllm.engine_facts import EngineFacts
from kvoffd_client.vllm.engine_namespace import EngineNamespace
from kvoffd_client.vllm.prefill_rate import PrefillRate
from kvoffd_client.vllm.request_state import RequestState
from kvoffd_client.vllm.waits import MIN_COMPUTED_S


class ComputeTimes:
    """Times in which prompts would be computed, at the expected rate.

    Tokens of earlier requests are summed up once in a step, and only as far as a request asks for.

    Args:
        requests: unfinished requests by id, in the order of their arrival.
        loading: ids of requests that are being loaded, which compute nothing.
    """

    def __init__(
        self,
        engine: EngineFacts,
        prefill: PrefillRate,
        namespace: EngineNamespace,
        requests: Mapping[str, RequestState],
        loading: Collection[str],
    ) -> None:
        self._engine, self._prefill, self._namespace = engine, prefill, namespace
        self._requests, self._loading = requests, loading
        self._tokens_before: dict[str, int] = {}
        """Tokens that the requests before each compute, of the requests that were summed up in this step."""
        self._sum = 0
        """The same for the next one."""
        self._rest: Iterator[RequestState] | None = None
        """Requests that were not summed up yet, in vLLM's order; None before the first question of a step."""

    def begin_step(self) -> None:
        """Forget the sums of the last step."""
        self._tokens_before, self._sum, self._rest = {}, 0, None

    @property
    def rate(self) -> float:
        """Expected prefill rate in tokens per second: measured, else last reported by an engine of this namespace, else
        assumed."""
        reported = self._namespace.client.reported_prefill_rate
        return self._prefill.tokens_per_second or reported or self._engine.assumed_rate

    def seconds(self, request_id: str, tokens: int) -> float:
        """Return the seconds until ``tokens`` of a request would be computed, after those of earlier requests."""
        return max(MIN_COMPUTED_S, (self._before(request_id) + tokens) / self.rate)

    def _before(self, request_id: str) -> int:
        """Return the tokens that earlier requests compute before this one."""
        if self._rest is None:
            self._rest = self._in_order()
        while request_id not in self._tokens_before:
            if (state := next(self._rest, None)) is None:
                return 0  # it came after the step's first question: not in vLLM, which adds requests between steps
            request = state.request
            self._tokens_before[request.request_id] = self._sum
            if request.request_id not in self._loading:
                self._sum += max(0, request.num_prompt_tokens - request.num_computed_tokens)
        return self._tokens_before[request_id]

    def _in_order(self) -> Iterator[RequestState]:
        """Return the requests in the order in which vLLM schedules them."""
        if not self._engine.by_priority:
            return iter([*self._requests.values()])
        return iter(sorted(self._requests.values(), key=lambda state: (state.request.priority, state.number)))
