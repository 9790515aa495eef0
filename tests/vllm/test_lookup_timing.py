"""Lookups that are sent early, and the rule of when an answer is awaited in vLLM's scheduler."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from vllm.v1.kv_offload.base import LookupResult, ReqContext

from kvoffd_client.vllm.connector_stats import EARLY_LOOKUPS, LOOKUP_WAITS, LOOKUP_WAITS_IN_VAIN, LOOKUPS
from kvoffd_client.vllm.lookup_allowance import UNKNOWN_RATE_S, LookupAllowance
from kvoffd_client.vllm.lookup_timing import (
    EARLY_LOOKUP_AGE_S,
    LOOKUP_WAIT_S,
    MAX_EARLY_LOOKUPS,
    WAIT_PAUSE_S,
    EarlyLookups,
    tell_of_received_requests,
)
from kvoffd_client.vllm.namespace_client import NamespaceClient
from kvoffd_client.vllm.prefill_rate import PrefillRate
from kvoffd_client.vllm.request_lookups import LookupSettings
from tests.kit.clock import Clock
from tests.kit.manager_harness import HASHES, KEYS, ManagerHarness
from tests.kit.vllm_fakes import FakeSchedulerClient


class Waiting(ManagerHarness):
    """A manager whose futures' waits are recorded; ``during`` happens while one waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def ask(self, name: str, during: Callable[[], object] = lambda: None) -> ReqContext:
        """A new request, its lookup sent."""
        context = self.request(name)
        future = self.client.asked[-1][0]

        def wait(ready: Callable[[], bool], timeout_s: float) -> bool:
            self.waits.append(timeout_s)
            during()
            return ready()

        future.waiter = wait
        return context

    def counts(self) -> dict[str, Any]:
        """What was counted since the last call."""
        return dict(self.manager.get_stats().reduce())


def test_an_answer_that_is_due_is_awaited_where_nothing_else_can_run_and_used_in_this_step() -> None:
    harness = Waiting()
    context = harness.ask("r", during=lambda: harness.client.answer(HASHES))
    harness.manager.await_answer("r", [])
    assert harness.waits == [LOOKUP_WAIT_S]
    assert harness.results(context) == [LookupResult.HIT] * 3
    counts = harness.counts()
    assert counts[LOOKUP_WAITS] == 1
    assert LOOKUP_WAITS_IN_VAIN not in counts


def test_nothing_is_awaited_while_another_request_could_run() -> None:
    harness = Waiting()
    harness.request("computed", ready=set())
    harness.ask("r")
    harness.manager.await_answer("r", ["computed"])
    harness.manager.await_answer("r", ["one that kvoffd does not know"])
    assert harness.waits == []
    assert LOOKUP_WAITS not in harness.counts()


def test_requests_that_all_wait_for_their_answers_are_no_reason_not_to_wait() -> None:
    harness = Waiting()
    harness.ask("other")
    harness.ask("r")
    harness.manager.await_answer("r", ["other"])
    assert len(harness.waits) == 1
    harness.client.answer(set(), index=0)
    harness.clock.now += WAIT_PAUSE_S
    harness.ask("next")
    harness.manager.await_answer("next", ["other"])
    assert len(harness.waits) == 1


def test_an_answer_that_is_there_needs_no_waiting() -> None:
    harness = Waiting()
    harness.ask("r")
    harness.client.answer(HASHES)
    harness.manager.await_answer("r", [])
    harness.manager.await_answer("a request of which kvoffd was not told", [])
    assert harness.waits == []


def test_after_a_wait_in_vain_none_is_made_for_a_while() -> None:
    harness = Waiting()
    context = harness.ask("r")
    harness.manager.await_answer("r", [])
    assert harness.results(context) == [LookupResult.RETRY] * 3
    assert harness.counts()[LOOKUP_WAITS_IN_VAIN] == 1
    harness.clock.now += WAIT_PAUSE_S - 0.001
    harness.ask("soon")
    harness.manager.await_answer("soon", ["r"])
    assert len(harness.waits) == 1
    harness.clock.now += 0.001
    harness.ask("later")
    harness.manager.await_answer("later", ["r", "soon"])
    assert len(harness.waits) == 2


def test_an_answer_that_is_waited_for_no_longer_keeps_nobody_waiting() -> None:
    harness = Waiting()
    late = harness.ask("late")
    harness.clock.now += UNKNOWN_RATE_S + 0.001
    assert harness.results(late) == [LookupResult.MISS] * 3
    harness.manager.await_answer("late", [])
    harness.ask("r")
    harness.manager.await_answer("r", ["late"])
    assert harness.waits == [], "the one is given up, and can run beside the other"


def test_a_request_that_was_looked_up_early_is_not_looked_up_again() -> None:
    harness = Waiting()
    harness.manager.begin_early_lookup("r", [KEYS])
    harness.client.answer(HASHES)
    assert harness.results(harness.request("r")) == [LookupResult.HIT] * 3
    assert len(harness.client.asked) == 1
    counts = harness.counts()
    assert (counts[LOOKUPS], counts[EARLY_LOOKUPS]) == (1, 1)


def test_what_is_on_its_way_is_known() -> None:
    harness = Waiting()
    harness.manager.begin_early_lookup("early", [KEYS])
    for name in ("early", "late"):
        harness.manager.on_new_request(ReqContext(name))
    assert harness.manager.is_looked_up("early")
    assert not harness.manager.is_looked_up("late")


def test_what_was_asked_early_of_weights_that_may_have_changed_is_asked_again() -> None:
    harness = Waiting()
    harness.manager.begin_early_lookup("r", [KEYS])
    lease = harness.client.answer(HASHES).lease_id
    harness.manager.namespace.leave(engine_cache_kept=False)
    harness.report("other weights")
    assert harness.results(harness.request("r")) == [LookupResult.RETRY] * 3
    assert harness.client.released == [lease]
    assert len(harness.client.asked) == 2


def test_a_reset_ends_the_leases_of_early_lookups() -> None:
    harness = Waiting()
    harness.manager.begin_early_lookup("r", [KEYS])
    lease = harness.client.answer(HASHES).lease_id
    harness.manager.reset_cache()
    assert harness.client.released == [lease]


def test_nothing_is_asked_early_where_nothing_is_loaded_or_the_namespace_is_not_known() -> None:
    harness = ManagerHarness(loads=False)
    harness.manager.begin_early_lookup("r", [KEYS])
    assert harness.client.asked == []
    other = Waiting()
    other.manager.namespace.leave(engine_cache_kept=False)
    other.manager.begin_early_lookup("r", [KEYS])
    assert other.client.asked == []


def test_early_lookups_are_bounded_and_those_of_requests_that_never_came_end() -> None:
    clock = Clock()
    client = FakeSchedulerClient(clock)
    suffix = (0).to_bytes(4, "big")
    prefill = PrefillRate({}, clock)
    named, allowance = cast(NamespaceClient, client), LookupAllowance(prefill, 0.1, clock)
    early = EarlyLookups(LookupSettings(named, {suffix: 0}, 0.1, 1.0, clock, prefill, allowance))
    for number in range(MAX_EARLY_LOOKUPS + 5):
        early.ask(str(number), [KEYS], 0)
    assert len(early) == len(client.asked) == MAX_EARLY_LOOKUPS
    lease = client.answer(HASHES, index=0).lease_id
    clock.now += EARLY_LOOKUP_AGE_S + 1
    early.ask("new", [KEYS], 0)
    assert client.released == [lease]
    assert early.take("0", 0) is None
    assert early.take("new", 0) is not None


class FakeCore:
    """As vLLM's EngineCore: prepares requests, and has a scheduler with a connector."""

    def __init__(self, connector: Any) -> None:
        self.scheduler = SimpleNamespace(get_kv_connector=lambda: connector)

    def preprocess_add_request(self, request: Any) -> tuple[str, int]:
        return f"prepared {request}", 0


def test_an_engine_tells_its_connector_or_the_children_of_a_multi_connector() -> None:
    class Core(FakeCore): ...

    told: list[str] = []
    ours = SimpleNamespace(received=told.append)
    assert tell_of_received_requests(Core, "received")
    assert tell_of_received_requests(Core, "received")
    assert Core(ours).preprocess_add_request("a") == ("prepared a", 0)
    Core(SimpleNamespace(_connectors=[SimpleNamespace(), ours])).preprocess_add_request("b")
    Core(None).preprocess_add_request("c")
    assert told == ["prepared a", "prepared b"]


def test_an_error_of_ours_costs_no_request() -> None:
    class Core(FakeCore): ...

    def fail(request: Any) -> None:
        raise RuntimeError("ours")

    assert tell_of_received_requests(Core, "received")
    assert Core(SimpleNamespace(received=fail)).preprocess_add_request("a") == ("prepared a", 0)


def test_a_vllm_that_prepares_requests_otherwise_is_left_alone() -> None:
    assert not tell_of_received_requests(SimpleNamespace, "received")
