"""Reports the outcome of each prompt: decided in the step that schedules it, sent then or when its load ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import structs

from kvoffd_client.vllm.chunk_groups import ChunkGroups
from kvoffd_client.vllm.engine_namespace import EngineNamespace
from kvoffd_client.vllm.keyed_lookup import KeyedLookup
from kvoffd_client.vllm.log import logger
from kvoffd_client.vllm.prompt_report import report_of, report_of_failed
from kvoffd_client.vllm.request_state import PromptWait, RequestState, Scheduling
from kvoffd_proto.messages import PromptReport


class Undecided(NamedTuple):
    """A request that a step schedules, its wait that has ended, and its scheduling before this one."""

    state: RequestState
    wait: PromptWait
    earlier: Scheduling


class PromptOutcomes:
    """The reports of an engine's prompts.

    Args:
        loading: by request, the lookup under whose lease it is being loaded.
    """

    def __init__(self, namespace: EngineNamespace, groups: ChunkGroups, loading: Mapping[str, KeyedLookup]) -> None:
        self._namespace, self._groups, self._loading = namespace, groups, loading
        self._undecided: list[Undecided] = []
        """Requests that this step schedules."""

    def scheduled(self, state: RequestState, wait: PromptWait, earlier: Scheduling) -> None:
        """Record that a request is about to be scheduled: its ``wait`` ends, and so does its ``earlier`` scheduling."""
        self._undecided.append(Undecided(state, wait, earlier))

    def decide(self) -> None:
        """Decide the outcomes of the requests that this step schedules, now that vLLM knows what they compute."""
        undecided, self._undecided = self._undecided, []
        for state, wait, earlier in undecided:
            self._send(earlier)  # of a load before a reset, whose end vLLM does not report
            if state.was_reported and wait.counted is None:
                continue  # it computes after its load, or was not looked up again: nothing of it is to be counted
            load = self._loading.get(state.request.request_id)
            state.scheduling.unsent_report = report_of(
                state,
                wait,
                wait.promoted,
                self._groups,
                loaded_tokens=state.scheduling.loaded_tokens,
                load_lease_id=load.future.lease_id if load is not None else 0,
            )
            state.was_reported = True
            if load is None:
                self._send(state.scheduling)

    def load_failed(self, state: RequestState) -> None:
        """Record that a request's load failed, so that it is recomputed."""
        if (report := state.scheduling.unsent_report) is not None:
            state.scheduling.unsent_report = report_of_failed(report)

    def load_ended(self, state: RequestState) -> None:
        """Send the report of a request whose load has ended."""
        self._send(state.scheduling)

    def request_ended(self, state: RequestState) -> None:
        """Send what is left of an ended request's reports. One that ended while it waited is reported as dropped if the
        daemon must count its lookup; others that never ran have no report."""
        if state.request is None:  # vLLM never announced it
            return
        if state.request.request_id in self._loading:
            self._send_dropped_load(state)
            return
        self._send(state.scheduling)
        if state.wait.counted is not None:
            self._report(report_of(state, state.wait, state.wait.promoted, self._groups, dropped=True))

    def _send_dropped_load(self, state: RequestState) -> None:
        """Report a request that ended while it loaded as dropped, instead of its report as loaded."""
        # Its blocks came up, and its lookup was counted, in the wait before the load.
        loaded, state.scheduling.unsent_report = state.scheduling.unsent_report, None
        report = report_of(state, state.wait, state.scheduling.promoted, self._groups, dropped=True)
        if loaded is not None and not report.lease_id:
            report = structs.replace(report, lease_id=loaded.lease_id)
        self._report(report)

    def _send(self, scheduling: Scheduling) -> None:
        """Send a scheduling's report, unless that was done."""
        report, scheduling.unsent_report = scheduling.unsent_report, None
        if report is not None:
            self._report(report)

    def _report(self, report: PromptReport) -> None:
        try:
            self._namespace.client.report_prompt(report)
        except ValueError as error:  # a number that cannot be: its report is lost, the engine's step is not
            logger.warning_once("kvoffd: a prompt's report could not be sent: %s", error)  # type: ignore[attr-defined]
