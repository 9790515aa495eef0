"""The namespace on its way from the workers to the scheduler's client."""

from __future__ import annotations

from typing import cast

from kvoffd_client import NamespaceSpec, SchedulerClient
from kvoffd_client.vllm.engine_namespace import APART_S, PATIENCE_S, EngineNamespace, MemoryState, Unconnected
from tests.kit.clock import Clock
from tests.vllm.vllm_fakes import FakeSchedulerClient

ONE = NamespaceSpec.named("one")
OTHER = NamespaceSpec.named("other")


def made(clock: Clock) -> EngineNamespace:
    """The namespace of an engine with two workers, over a fake client."""
    return EngineNamespace(2, lambda _: cast(SchedulerClient, FakeSchedulerClient(clock)), clock)


def test_a_client_is_made_once_for_each_namespace() -> None:
    clients: list[FakeSchedulerClient] = []

    def connect(_: NamespaceSpec) -> SchedulerClient:
        clients.append(FakeSchedulerClient(Clock()))
        return cast(SchedulerClient, clients[-1])

    namespace = EngineNamespace(1, connect, Clock())
    for weights in ("a", "a", "b"):
        namespace.update({0: MemoryState(ONE, weights, namespace.generation)})
        namespace.leave(engine_cache_kept=False)
        namespace.want_digests()
    assert [client.closed for client in clients] == [True, False]


def test_where_no_client_could_be_made_it_is_tried_after_the_next_reset() -> None:
    client = cast(SchedulerClient, FakeSchedulerClient(Clock()))
    made = [cast(SchedulerClient, Unconnected()), client]
    namespace = EngineNamespace(1, lambda _: made.pop(0), Clock())
    for _ in range(3):
        namespace.update({0: MemoryState(ONE, "a", namespace.generation)})
        assert not made or not namespace.serves
        assert not namespace.engine_cache_has_other_weights, "the weights are the same"
        namespace.leave(engine_cache_kept=True)
        namespace.want_digests()
    assert (made, namespace.client) == ([], client)


def test_silent_workers_are_asked_again_after_a_reset() -> None:
    clock = Clock()
    namespace = made(clock)
    assert namespace.take_message() == (0, None)
    namespace.update({0: MemoryState(ONE, "weights", 0)})
    assert namespace.needs_steps
    clock.now += PATIENCE_S
    assert not namespace.needs_steps
    assert namespace.take_message() == (None, None)
    namespace.update({1: MemoryState(ONE, "weights", 0)})
    assert namespace.current is not None, "the last one was late"
    namespace.leave(engine_cache_kept=False)
    assert namespace.take_message() == (None, None), "nothing is computed yet"
    namespace.want_digests()
    assert namespace.take_message() == (1, None)
    namespace.update({rank: MemoryState(ONE, "weights", 1) for rank in range(2)})
    assert namespace.current is not None


def test_workers_that_do_not_fit_turn_kvoffd_off(said: list[str]) -> None:
    for other, line in (
        (MemoryState(OTHER, "weights", 0), "disagree on name"),
        (MemoryState(ONE, "weights", 0, machine="other"), "on several machines"),
    ):
        namespace = made(Clock())
        said.clear()
        for adapters in (None, {1: ("path", b"digest")}):  # one of them reads a LoRA adapter
            namespace.update({0: MemoryState(ONE, "weights", 0, adapters=adapters), 1: other})
        assert sum(line in one for one in said) == 1, line
        assert (namespace.current, namespace.needs_steps) == (None, False)


def test_weights_that_nobody_can_read_are_shared_with_nobody(said: list[str]) -> None:
    found = []
    for _ in range(2):
        namespace = made(Clock())
        namespace.update({0: MemoryState(ONE, "weights", 0), 1: MemoryState(ONE, None, 0)})
        assert namespace.current is not None
        found.append(namespace.current.fingerprint)
    assert found[0] != found[1]
    assert any("cannot be used by other engines" in line for line in said)


DAEMON = FakeSchedulerClient.epoch


def test_workers_that_do_not_meet_the_scheduler_are_said_once(said: list[str]) -> None:
    """They run where the scheduler's directory is not, or is another daemon's."""
    clock = Clock()
    namespace = made(clock)

    def report(*registered_with: int | None) -> None:
        own = namespace.current.fingerprint if namespace.current else None
        memory = [MemoryState(ONE, "a", 0, registered=own if one else None, daemon=one) for one in registered_with]
        namespace.update(dict(enumerate(memory)))

    def after(seconds: float) -> tuple[str, int | None, int]:
        clock.now += seconds
        namespace.step_ended()
        return namespace.problem, namespace.take_daemon(), len([line for line in said if "stores and loads" in line])

    report(None, None)
    for others in ((DAEMON, None), (DAEMON, DAEMON + 1)):
        said.clear()
        report(DAEMON, DAEMON)
        assert after(0.0) == ("", None, 0)
        report(*others)
        assert after(APART_S) == ("", None, 0), "the engine was idle"
        problem, daemon, lines = after(APART_S)
        assert problem.startswith("The scheduler is connected to the daemon in /run/kvoffd, but these workers have not")
        assert " for 60 s: 1. " in problem
        assert (daemon, lines, namespace.serves) == (DAEMON, 1, False)
        assert after(APART_S) == (problem, None, 1)
        report(DAEMON, DAEMON)
        assert namespace.serves, "before the next step"
        assert after(0.0) == ("", None, 1)
    said.clear()
    report(None, DAEMON)
    for ready in (True, False, True):
        cast(FakeSchedulerClient, namespace.client).ready = ready
        assert after(APART_S / 2) == ("", None, 0), "without a daemon all wait for one"
    report(None, DAEMON)
    namespace.leave(engine_cache_kept=False)
    assert after(APART_S) == ("", None, 0)


def test_a_worker_that_cannot_share_its_memory_says_why_itself(said: list[str]) -> None:
    clock = Clock()
    namespace = made(clock)
    namespace.update({rank: MemoryState(ONE, "a", 0, problem="No CUDA here." * rank) for rank in range(2)})
    own = namespace.current.fingerprint if namespace.current else None
    namespace.update({0: MemoryState(ONE, "a", 0, registered=own, daemon=DAEMON)})
    for _ in range(3):
        namespace.step_ended()
        clock.now += APART_S
    assert (namespace.problem, namespace.take_daemon()) == ("worker 1: No CUDA here.", None)
    assert not any("stores and loads" in line for line in said)
