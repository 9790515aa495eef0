"""Hints in kv_transfer_params: followed where they are understood, counted where not, never an error."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from vllm.v1.kv_offload.base import ReqContext

from kvoffd_client.vllm import connector_stats as stats
from kvoffd_client.vllm.hints import DEFAULT_RETAIN_S, LOGGED_EVERY_S, Hint, Hints
from tests.kit.clock import Clock
from tests.kit.manager_harness import KEYS, ManagerHarness


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"priority": 3}, Hint(3, DEFAULT_RETAIN_S)),
        ({"priority": 3, "retain_s": 60}, Hint(3, 60.0)),
        ({"retain_s": 0.5}, Hint(1, 0.5)),
        ({"retain_s": 0}, Hint(0)),
        ({"priority": -2}, Hint(-2)),
        ({"priority": -2, "retain_s": 60}, Hint(-2)),
        ({"conversation_over": True, "priority": 10}, Hint(-10)),
        ({"conversation_over": False}, Hint(0)),
        ({}, Hint(0)),
    ],
)
def test_what_is_understood(given: dict[str, Any], hint: Hint) -> None:
    bad: list[None] = []
    assert Hints(Clock(), lambda: bad.append(None)).of({"kvoffd": given, "do_remote_prefill": True}) == hint
    assert not bad


@pytest.mark.parametrize("params", [None, {}, {"max_load_tokens": 5}, {"kvoffd": None}, [], "kvoffd"])
def test_where_there_is_none_nothing_is_counted(params: object) -> None:
    assert Hints(Clock(), pytest.fail).of(params) is None  # type: ignore[arg-type]


BAD: list[object] = [
    1,
    "over",
    [],
    True,
    {"priority": "high"},
    {"priority": 11},
    {"priority": 1.5},
    {"priority": True},
    {"priority": None},
    {"priority": 10**400},
    {"retain_s": float("nan")},
    {"retain_s": float("inf")},
    {"retain_s": -1},
    {"retain_s": 10**400},
    {"retain_s": "1h"},
    {"conversation_over": 1},
    {"conversation_over": "yes"},
    {"\x1b[2J\n": 1},
    {1: 2},
    {"prioritiy": 3},
]


def test_what_is_not_is_counted_and_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock, bad = Clock(), list[int]()
    hints = Hints(clock, lambda: bad.append(1))
    with caplog.at_level(logging.WARNING):
        for count, given in enumerate(BAD, 1):
            assert hints.of({"kvoffd": given}) is None
            assert len(bad) == count
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) <= 1
        clock.now += LOGGED_EVERY_S
        hints.of({"kvoffd": {"\x1b[2J\n": 1}})
        assert all(record.getMessage().isprintable() for record in caplog.records)


def test_the_daemon_is_told_when_the_request_has_ended() -> None:
    rig = ManagerHarness()
    manager, client = rig.manager, rig.client
    client.max_keys = 1000

    def run(name: str, params: dict[str, Any] | None) -> None:
        context = ReqContext(name, kv_transfer_params=params)
        manager.on_new_request(context)
        manager.begin_lookup(name, [KEYS])
        manager.on_request_finished(context)

    run("a", {"kvoffd": {"conversation_over": True}})
    ((groups, priority, retain_s),) = client.hints
    assert (len(groups), len(groups[0].keys) // 3) == (1, len(KEYS[0]) - 4)
    assert (priority, retain_s) == (-10, 0.0)
    run("b", None)
    run("c", {"kvoffd": {"priority": "high"}})
    assert len(client.hints) == 1
    told = manager.get_stats()
    assert told is not None
    assert told.reduce()[stats.BAD_HINTS] == 1
    manager.namespace.leave(engine_cache_kept=False)
    run("d", {"kvoffd": {"priority": 1}})
    assert len(client.hints) == 1, "which weights made these blocks is not known"
