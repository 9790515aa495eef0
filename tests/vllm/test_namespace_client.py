"""The namespace on its way from the workers to the scheduler's client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from kvoffd_client import NamespaceSpec, SchedulerClient
from kvoffd_client.vllm.connector_metadata import MemoryReport, NamespacesDiffer, common_namespace
from kvoffd_client.vllm.namespace_client import PATIENCE_S, EngineNamespace, NamespaceClient
from tests.kit.clock import Clock
from tests.kit.vllm_fakes import FakeSchedulerClient

ONE = NamespaceSpec.named("one")
OTHER = NamespaceSpec.named("other")


class Harness:
    """A namespace client and the fakes it made."""

    def __init__(self) -> None:
        self.made: list[tuple[NamespaceSpec, FakeSchedulerClient]] = []
        self.client = NamespaceClient(self._make)

    def _make(self, namespace: NamespaceSpec) -> SchedulerClient:
        fake: Any = FakeSchedulerClient(Clock())
        self.made.append((namespace, fake))
        return cast(SchedulerClient, fake)


def test_workers_that_agree_have_one_namespace() -> None:
    assert common_namespace([ONE, replace(ONE)]) is ONE


def test_workers_that_disagree_are_told_apart_by_their_factors() -> None:
    with pytest.raises(NamespacesDiffer, match="name"):
        common_namespace([ONE, OTHER])


def test_before_the_namespace_is_known_nothing_is_there_and_nothing_fails() -> None:
    client = Harness().client
    assert not client.ready
    assert client.credit_bytes == 0
    assert client.take_events() == []
    client.release(1)
    client.invalidate([])
    client.close()


def test_joining_makes_the_client_once_for_each_namespace() -> None:
    harness = Harness()
    harness.client.join(ONE)
    harness.client.join(replace(ONE))
    assert harness.client.ready
    assert [namespace for namespace, _ in harness.made] == [ONE]
    harness.client.join(OTHER)
    (_, first), (namespace, second) = harness.made
    assert namespace is OTHER
    assert first.closed
    assert not second.closed


def test_a_closed_client_joins_nothing() -> None:
    harness = Harness()
    harness.client.join(ONE)
    harness.client.close()
    assert harness.made[0][1].closed
    harness.client.join(OTHER)
    assert len(harness.made) == 1


def engine_namespace() -> tuple[EngineNamespace, Clock]:
    """The namespace of an engine with two workers."""
    clock = Clock()
    return EngineNamespace(2, Harness().client, clock), clock


def test_workers_that_do_not_report_are_waited_for_for_a_while_and_asked_again_after_a_reset() -> None:
    namespace, clock = engine_namespace()
    assert namespace.news() == (0, None)
    namespace.report({0: MemoryReport(ONE, "weights", 0)})
    assert namespace.needs_steps
    clock.now += PATIENCE_S
    assert not namespace.needs_steps
    assert namespace.news() == (None, None)
    namespace.leave(engine_cache_kept=False)
    assert namespace.news() == (None, None), "nothing is computed yet"
    namespace.ask()
    assert namespace.news() == (1, None)
    namespace.report({rank: MemoryReport(ONE, "weights", 1) for rank in range(2)})
    assert namespace.current is not None


@pytest.mark.parametrize(("after", "kept", "may_store"), [("a", True, True), ("b", False, True), ("b", True, False)])
def test_blocks_of_other_weights_in_vllms_own_cache_are_not_stored(after: str, kept: bool, may_store: bool) -> None:
    namespace, _ = engine_namespace()
    for generation, weights in enumerate(("a", after)):
        if generation:
            namespace.leave(engine_cache_kept=kept)
        namespace.ask()
        namespace.report({rank: MemoryReport(ONE, weights, generation) for rank in range(2)})
    assert namespace.may_store is may_store
    namespace.leave(engine_cache_kept=False)
    namespace.report({rank: MemoryReport(ONE, weights, 2) for rank in range(2)})
    assert namespace.may_store
