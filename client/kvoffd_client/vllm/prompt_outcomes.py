"""Reports the outcome of each prompt: decided in the step that schedules it, sent then or when its load ends."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from kvoffd_client.vllm.connector_metadata import ChunkGroups
from kvoffd_client.vllm.engine_namespace import EngineNamespace
from kvoffd_client.vllm.keyed_lookup import KeyedLookup
from kvoffd_client.vllm.prompt_report import failed
from kvoffd_client.vllm.request_state import RequestState


class PromptOutcomes:
    """The reports of an engine's prompts.

    Args:
        loading: by request, the lookup under whose lease it is being loaded.
    """

    def __init__(self, namespace: EngineNamespace, groups: ChunkGroups, loading: Mapping[str, KeyedLookup]) -> None:
        self._namespace, self._groups, self._loading = namespace, groups, loading
        self._scheduled: list[tuple[RequestState, int]] = []
        """Requests that this step schedules, with the tokens that they load."""

    def scheduled(self, state: RequestState, loaded_tokens: int) -> None:
        """Record that a request is about to be scheduled with ``loaded_tokens``."""
        self._scheduled.append((state, loaded_tokens))

    def decide(self) -> None:
        """Decide the outcomes of the requests that this step schedules, now that vLLM knows what they compute."""
        scheduled, self._scheduled = self._scheduled, []
        for state, loaded_tokens in scheduled:
            record = state.record
            self._send(state)  # of a load before a reset, whose end vLLM does not report
            if not record.is_decided or record.counted is not None:
                load = self._loading.get(state.request.request_id)
                record.of_load = record.decide(
                    state.request,
                    self._groups,
                    state.last,
                    state.adapter.content,
                    state.tiers,
                    loaded_tokens=loaded_tokens,
                    load_lease_id=load.future.lease_id if load is not None else 0,
                )
                if load is None:
                    self._send(state)
            # After a preemption it is looked up again, and all this is decided again.
            record.is_late = record.skipped = record.refused = False

    def load_failed(self, state: RequestState) -> None:
        """Record that a request's load failed, so that it is recomputed."""
        if state.record.of_load is not None:
            state.record.of_load = failed(state.record.of_load)

    def load_ended(self, state: RequestState) -> None:
        """Send the report of a request whose load has ended."""
        self._send(state)

    def request_ended(self, state: RequestState) -> None:
        """Send the report of a request that has ended, if it still waits for it; dropped if it was not scheduled, or
        is being loaded."""
        record = state.record
        if state.request is None:  # vLLM never announced it
            return
        if not (is_loading := state.request.request_id in self._loading):
            self._send(state)
        if record.counted is not None or is_loading:
            lease_id = record.of_load.lease_id if record.of_load is not None else 0
            report = record.decide(
                state.request, self._groups, state.last, state.adapter.content, state.tiers, dropped=True
            )
            record.of_load = structs.replace(report, lease_id=report.lease_id or lease_id)
        self._send(state)

    def _send(self, state: RequestState) -> None:
        if state.record.of_load is not None:
            self._namespace.client.report_prompt(state.record.of_load)
            state.record.of_load = None
