"""A daemon is killed, or loses power, at any call while blocks are cleared: none of them is there for the next one."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from kvoffd.server.persistence import State, StateFile
from kvoffd.tiers.header import make_block_group
from tests.kit.cases import case
from tests.kit.memory_disk import Killed, MemoryDisk, names_of, no_fault
from tests.tiers.disk_rig import ONE, OTHER, DiskRig, block_of

BLOCKS, CLEARS = 12, 5
"""Blocks of each of two namespaces; both together are more than the disk holds."""
NOW = 1_700_000_000.0


class Device(MemoryDisk):
    """The disk and ``kvoffd.state``: both outlive daemons, and one of their calls is the last."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[bytes] = []
        self.calls = 0

    def copy(self) -> Device:
        twin = Device()
        twin.files, twin.kept = super().copy().files, self.kept[:]
        return twin

    def die_at(self, last: int, random: Random) -> None:
        def fault(name: str, number: int) -> None:
            self.calls += 1
            if self.calls == last:
                raise Killed(random.choice((0, 8, 4096, 20_000)))

        self.fault = fault


class FileOfDevice(StateFile):
    outlives_reboot = True

    def __init__(self, device: Device) -> None:
        self.path, self._device = "kvoffd.state", device
        self.requested = self.tried = self.written = 0

    def read(self) -> bytes:
        if not self._device.kept:
            raise FileNotFoundError
        return self._device.kept[0]

    def save(self, content: bytes) -> None:
        self.requested += 1
        self._device._ask("state")
        self._device.kept[:] = [content]
        self.tried = self.written = self.requested


class Generations(dict[bytes, int]):
    def __init__(self, state: State) -> None:
        self.get = lambda fingerprint, _: state.generations.of(fingerprint)  # type: ignore[method-assign,assignment]


class ClearedRig(DiskRig):
    """``answered``: the generations of namespaces that a client was told of."""

    files: Device

    def open(self) -> None:
        self.state = State(FileOfDevice(self.files), lambda: NOW)
        self.state.restore()
        self.generations = Generations(self.state)
        super().open()
        for fingerprint, generation in self.tier.found_generations.items():
            if not self.state.generations.accept(fingerprint, generation):
                self.tier.remove_all(fingerprint)
        self.work()

    def live(self, answered: dict[bytes, int], versions: dict[tuple[bytes, int], int]) -> None:
        """Store, invalidate and clear, until that ends or the daemon does."""
        for version in range(CLEARS):
            groups = [make_block_group(name, self.state.generations.of(name), 0, (12_000,)) for name in (ONE, OTHER)]
            for group in groups:
                versions[group.fingerprint, group.generation] = version
                self.write(*(block_of(number, group, version=version) for number in range(BLOCKS)), version=version)
            self.remove(1, 2, group=groups[0])
            writing = block_of(1, groups[0], version=version)
            self.begin_write(writing, version)
            if version % 2:
                self.state.generations.void_here(None)
                self.tier.remove_all(None)
            else:
                self.state.generations.void_here(ONE)
                self.tier.remove_all(ONE)
            answered.update({name: self.state.generations.of(name) for name in (ONE, OTHER)})
            self.listener.blocks = {(group.tag, key) for group, key in names_of(self.tier)}
            self.work()


def deaths() -> Iterator[tuple[int, Device, dict[bytes, int], dict[tuple[bytes, int], int]]]:
    """What daemons leave that were killed at one call after another."""
    last = 0
    while True:
        last += 1 + last // 24
        device, answered, versions = Device(), dict[bytes, int](), dict[tuple[bytes, int], int]()
        rig = ClearedRig(device)
        device.die_at(last, Random(last))
        try:
            rig.live(answered, versions)
        except Killed:
            device.fault = no_fault
            yield last, device, answered, versions
        else:
            return


def test_nothing_that_was_cleared_is_there_for_the_next_daemon() -> None:
    count = came_back = 0
    for last, device, answered, versions in deaths():
        for seed in range(3):
            with case((last, seed)):
                files = device.copy()
                if seed:
                    files.lose_power(Random(seed))
                rig = ClearedRig(files)
                there = list(names_of(rig.tier))
                came_back += len(there)
                for group in {group for group, _ in there}:
                    assert group.generation == rig.state.generations.of(group.fingerprint)
                    assert group.generation >= answered.get(group.fingerprint, 0), "it was cleared"
                    version = versions[group.fingerprint, group.generation]
                    for number in range(BLOCKS):
                        rig.read(block_of(number, group, version=version), version)  # which compares what it finds
        count += 1
    assert count > 60
    assert came_back > 10 * count, "or it proves nothing"
