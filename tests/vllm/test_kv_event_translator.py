"""The daemon's events in vLLM's words."""

from __future__ import annotations

import pytest
from vllm.v1.kv_offload.base import Medium, OffloadKey

from kvoffd_client.vllm import kv_event_translator
from kvoffd_client.vllm.kv_event_translator import KvEventTranslator
from kvoffd_proto.events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.kit.vllm_fakes import block_hash, key


def stored(*numbers: int, group: int = 0, medium: str = "CPU") -> BlockStored:
    return BlockStored([block_hash(number) for number in numbers], None, [], 32, None, medium, None, group)


def removed(*numbers: int, group: int = 0, medium: str = "CPU") -> BlockRemoved:
    return BlockRemoved([block_hash(number) for number in numbers], medium, group)


def test_groups_get_vllms_ids_back() -> None:
    translator = KvEventTranslator((0, 3))
    [event] = translator.translate([stored(1, 2, group=1)])
    assert event.keys == [key(1, 3), key(2, 3)]
    assert event.medium is Medium.CPU
    assert not event.removed


def test_what_somebody_had_under_the_same_name_with_more_groups_is_passed_over() -> None:
    translator = KvEventTranslator((0,))
    events = [stored(1, group=1), removed(1, group=63), stored(2, group=-1), AllBlocksCleared(), stored(3)]
    assert [event.keys for event in translator.translate(events)] == [[key(3)]]


def test_when_all_is_cleared_each_announced_block_is_removed_by_name() -> None:
    translator = KvEventTranslator((0,))
    translator.translate([stored(1, 2), removed(1)])
    [event] = translator.translate([AllBlocksCleared()])
    assert (event.keys, event.removed) == ([key(2)], True)
    assert translator.translate([AllBlocksCleared()]) == []


def test_what_is_known_already_is_not_said_again() -> None:
    translator = KvEventTranslator((0,))
    events = translator.translate([stored(1), stored(1, 2, 2), removed(9), removed(1, 1)])
    assert [(event.keys, event.removed) for event in events] == [
        ([key(1)], False),
        ([key(2)], False),
        ([key(1)], True),
    ]


def test_the_pool_and_the_disks_are_told_apart() -> None:
    translator = KvEventTranslator((0,))
    events = translator.translate([stored(1), stored(1, medium="STORAGE"), removed(1), stored(2), AllBlocksCleared()])
    assert [(event.keys, event.medium, event.removed) for event in events] == [
        ([key(1)], Medium.CPU, False),
        ([key(1)], Medium.STORAGE, False),
        ([key(1)], Medium.CPU, True),
        ([key(2)], Medium.CPU, False),
        ([key(2)], Medium.CPU, True),
        ([key(1)], Medium.STORAGE, True),
    ]


def test_what_is_described_and_never_announced_is_forgotten_but_for_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_translator, "MAX_UNTOLD", 10)
    translator = KvEventTranslator((0,))
    translator.translate([stored(*range(0, 1000, 100)), stored(1, medium="STORAGE")])
    described: dict[OffloadKey, object] = {}
    most = 0
    for number in range(1000):
        described[key(number)] = None
        translator.forget_untold(described)
        most = max(most, len(described))
    assert most < 50
    assert set(map(key, [1, *range(0, 1000, 100), *range(990, 1000)])) <= described.keys()
