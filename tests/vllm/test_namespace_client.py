"""The namespace on its way from the workers to the scheduler's client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from support.vllm_fakes import Clock, FakeSchedulerClient

from kvoffd_client import NamespaceSpec, SchedulerClient
from kvoffd_client.vllm.connector_metadata import NamespacesDiffer, common_namespace
from kvoffd_client.vllm.namespace_client import NamespaceClient

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
