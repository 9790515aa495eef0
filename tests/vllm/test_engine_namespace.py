"""The namespace on its way from the workers to the scheduler's client."""

from __future__ import annotations

from typing import Any, cast

from kvoffd_client import NamespaceSpec, SchedulerClient
from kvoffd_client.vllm.engine_namespace import PATIENCE_S, EngineNamespace, MemoryReport
from tests.kit.clock import Clock
from tests.vllm.vllm_fakes import FakeSchedulerClient

ONE = NamespaceSpec.named("one")
OTHER = NamespaceSpec.named("other")


class Harness:
    """The namespace of an engine with two workers, and the clients that it made."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.made: list[tuple[NamespaceSpec, FakeSchedulerClient]] = []
        self.namespace = EngineNamespace(2, self._connect, self.clock)

    def _connect(self, namespace: NamespaceSpec) -> SchedulerClient:
        fake: Any = FakeSchedulerClient(self.clock)
        self.made.append((namespace, fake))
        return cast(SchedulerClient, fake)

    def report(self, weights: str, **changes: Any) -> None:
        """Both workers report these weights."""
        generation = self.namespace.generation
        self.namespace.report({rank: MemoryReport(ONE, weights, generation, **changes) for rank in range(2)})


def test_a_client_is_made_once_for_each_namespace() -> None:
    harness = Harness()
    for weights in ("a", "a", "b"):
        harness.report(weights)
        assert harness.namespace.client is cast(Any, harness.made[-1][1])
        harness.namespace.leave(engine_cache_kept=False)
        harness.namespace.ask()
    (first, closed), (second, client) = harness.made
    assert first.fingerprint != second.fingerprint
    assert closed.closed
    assert not client.closed


def test_silent_workers_are_asked_again_after_a_reset() -> None:
    harness = Harness()
    namespace, clock = harness.namespace, harness.clock
    assert namespace.begin_step() == (0, None)
    namespace.report({0: MemoryReport(ONE, "weights", 0)})
    assert namespace.needs_steps
    clock.now += PATIENCE_S
    assert not namespace.needs_steps
    assert namespace.begin_step() == (None, None)
    namespace.leave(engine_cache_kept=False)
    assert namespace.begin_step() == (None, None), "nothing is computed yet"
    namespace.ask()
    assert namespace.begin_step() == (1, None)
    namespace.report({rank: MemoryReport(ONE, "weights", 1) for rank in range(2)})
    assert namespace.current is not None


def test_workers_that_do_not_fit_turn_kvoffd_off(said: list[str]) -> None:
    for other, line in (
        (MemoryReport(OTHER, "weights", 0), "disagree on name"),
        (MemoryReport(ONE, "weights", 0, machine="other"), "on several machines"),
    ):
        namespace = Harness().namespace
        namespace.report({0: MemoryReport(ONE, "weights", 0), 1: other})
        assert any(line in one for one in said), line
        assert (namespace.current, namespace.needs_steps) == (None, False)


def test_weights_that_nobody_can_read_are_shared_with_nobody(said: list[str]) -> None:
    found = []
    for _ in range(2):
        namespace = Harness().namespace
        namespace.report({0: MemoryReport(ONE, "weights", 0), 1: MemoryReport(ONE, None, 0)})
        assert namespace.current is not None
        found.append(namespace.current.fingerprint)
    assert found[0] != found[1]
    assert any("used by no other engine" in line for line in said)
