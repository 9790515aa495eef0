"""Several tiers as one: where blocks go, where they are found, what comes with a member that is opened late."""

from __future__ import annotations

import time

import pytest

from kvoffd.cache.namespace import Namespace
from kvoffd.tiering import TieringSettings, WriteMode, manager
from kvoffd.tiers.disk.index import GroupIndex
from kvoffd_proto.messages import ABSENT, PENDING, READY
from tests.kit.held_disk import HeldDisk
from tests.kit.memory_disk import MemoryDisk
from tests.kit.slot_cache import UNIT, keys_of
from tests.kit.tiering_harness import TieringHarness, name_of


class CompositeRig(TieringHarness):
    """A rig over two disks, the first of which holds six blocks."""

    def __init__(self, other_blocks: int = 0) -> None:
        super().__init__(TieringSettings(WriteMode.ALWAYS), regions=8, tier_blocks=6)
        other = HeldDisk(MemoryDisk(), self.memory, self.clock, self.tiering, other_blocks, UNIT)
        self.tiers.attach(other.tier)
        self.members = [self.disk, other]

    def end_all(self) -> None:
        while self.members[0].jobs or self.members[1].jobs:
            for member in self.members:
                member.end_all()

    def write_all(self, space: Namespace, *numbers: int) -> None:
        self.put(space, keys_of(*numbers))
        self.tiering.tick()
        self.end_all()
        self.tiering.tick()
        self.end_all()

    def held(self) -> list[int]:
        return [len(member.blocks) for member in self.members]


@pytest.fixture
def rig() -> CompositeRig:
    return CompositeRig()


def test_it_is_full_when_all_members_are() -> None:
    rig = CompositeRig(other_blocks=10)
    space = rig.open()
    numbers = iter(range(64))
    while not all(member.tier.stats().evicted_blocks for member in rig.members):
        assert not rig.tiers.full_bytes
        rig.write_all(space, next(numbers))
    assert rig.tiers.full_bytes == 16 * UNIT


def test_every_block_is_in_one_member_and_all_are_used(rig: CompositeRig) -> None:
    space = rig.open()
    rig.write_all(space, *range(16))
    assert sum(rig.held()) == 16
    assert all(rig.held())
    assert set(rig.tiers.index(space.fingerprint, 0)) == {keys_of(number) for number in range(16)}
    assert rig.tiers.groups() == {(space.fingerprint, 0)}


def test_blocks_come_up_from_whichever_member_has_them(rig: CompositeRig) -> None:
    space = rig.open()
    rig.write_all(space, *range(8))
    rig.evict(space, keys_of(*range(8)))
    assert rig.states(space, keys_of(*range(8))) == [PENDING] * 8
    rig.tiering.pump()
    rig.end_all()
    assert rig.states(space, keys_of(*range(8))) == [READY] * 8


def test_removal_reaches_all_members(rig: CompositeRig) -> None:
    space = rig.open()
    rig.write_all(space, *range(8))
    assert rig.tiers.remove([name_of(space, keys_of(number)) for number in range(4)]) == 4
    assert rig.tiers.remove_namespace(space.fingerprint) == 4
    assert rig.held() == [0, 0]


def test_with_a_member_its_blocks_come_and_events_tell_of_it(
    rig: CompositeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "MAX_KEYS_PER_TICK", 1)
    space = rig.open()
    rig.write_all(space, *range(8))
    rig.evict(space, keys_of(*range(8)))
    coming = rig.members[1].tier
    names = [name.key for name in rig.members[1].blocks]
    rig.tiers._members.remove(coming)
    rig.tier_events.index.clear()
    rig.tiering._published.clear()
    assert rig.states(space, names[0]) == [ABSENT]
    rig.tiers.attach(coming)
    rig.tiering.directory_attached()
    for _ in range(8):
        rig.tiering.publish_some()
    assert len(rig.tier_events.index) == 8
    assert rig.states(space, names[0]) == [PENDING]


def test_of_a_member_that_hangs_nothing_is_waited_for_and_the_others_serve(rig: CompositeRig) -> None:
    space = rig.open()
    rig.write_all(space, *range(8))
    rig.evict(space, keys_of(*range(8)))
    lost = [name.key for name in rig.members[0].blocks]
    rig.tier.hangs = True
    found = {number: rig.states(space, keys_of(number)) for number in range(8)}
    assert found == {number: [ABSENT if keys_of(number) in lost else PENDING] for number in range(8)}
    assert len(rig.tiers.index(space.fingerprint, 0)) == 8


def test_a_namespace_of_a_million_blocks_is_opened_at_once(rig: CompositeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    space = rig.open()
    keys = [number.to_bytes(32) for number in range(1_000_000)]
    halves = [GroupIndex(dict.fromkeys(keys[place::2], None)) for place in range(2)]  # type: ignore[arg-type]
    for member, index in zip(rig.members, halves, strict=True):
        monkeypatch.setattr(member.tier, "index", lambda *_, index=index: index)
    began = time.thread_time()
    rig.tiering.namespace_opened(space)
    assert time.thread_time() - began < 0.1
    rig.tiering.publish_some()
    assert len(rig.tier_events.index) == manager.MAX_KEYS_PER_TICK
