"""The pool lies on the NUMA nodes of the GPUs, each GPU's blocks on its own as long as there is room."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvoffd.pool.allocator import PoolSegment, cut_pool
from kvoffd.pool.pool import Pool
from kvoffd.system.limits import MemoryLimit
from kvoffd.system.numa import Locality, nodes_with_gpus

MIB = 1 << 20
NODES = [Locality(0, frozenset({0})), Locality(1, frozenset({1}))]
UNLIMITED = MemoryLimit(1 << 60, "a test")


def machine(sysfs: Path, gpus: Iterable[tuple[str, str]], cpus: dict[int, str], vendor: str = "0x10de") -> None:
    """``gpus``: (address, NUMA node) of each; ``cpus``: lists of CPUs by node."""
    for address, node in gpus:
        device = sysfs / "bus" / "pci" / "devices" / address
        device.mkdir(parents=True)
        for name, text in {"vendor": vendor, "class": "0x030200", "numa_node": node}.items():
            (device / name).write_text(text + "\n")
    for node_number, text in cpus.items():
        directory = sysfs / "devices" / "system" / "node" / f"node{node_number}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(text + "\n")


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


@pytest.mark.usefixtures("four_cpus")
def test_nodes_are_those_of_the_gpus(tmp_path: Path) -> None:
    machine(
        tmp_path, [("0000:3b:00.0", "2"), ("0000:4b:00.0", "2"), ("0000:9b:00.0", "0")], {0: "0-1", 1: "2", 2: "3-9"}
    )
    assert nodes_with_gpus(tmp_path) == [Locality(0, frozenset({0, 1})), Locality(2, frozenset({3}))]


@pytest.mark.usefixtures("four_cpus")
def test_a_node_without_a_cpu_for_us_is_left_out(tmp_path: Path) -> None:
    machine(tmp_path, [("0000:3b:00.0", "0"), ("0000:9b:00.0", "1")], {0: "0-3", 1: "4-7"})
    assert [node.node for node in nodes_with_gpus(tmp_path)] == [0]


@pytest.mark.parametrize(("node", "vendor"), [("-1", "0x10de"), ("0", "0x8086"), ("", "0x10de")])
def test_other_devices_and_single_nodes_name_none(tmp_path: Path, node: str, vendor: str) -> None:
    machine(tmp_path, [("0000:3b:00.0", node)], {0: "0-3"}, vendor)
    assert nodes_with_gpus(tmp_path) == []


def test_a_machine_that_says_nothing_has_none(tmp_path: Path) -> None:
    assert nodes_with_gpus(tmp_path) == []


def test_segments_cover_the_pool_in_whole_regions() -> None:
    nodes = [Locality(number, frozenset()) for number in (0, 1, 3)]
    assert cut_pool(10 * MIB + 5, MIB, nodes) == [
        PoolSegment(0, 3 * MIB, nodes[0]),
        PoolSegment(3 * MIB, 7 * MIB, nodes[1]),
        PoolSegment(7 * MIB, 10 * MIB + 5, nodes[2]),
    ]
    assert [part.end - part.begin for part in cut_pool(2 * MIB, MIB, nodes)] == [MIB, MIB]
    assert cut_pool(2 * MIB, MIB, []) == []


def test_each_segment_is_touched_by_threads_near_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    place_of: dict[int, frozenset[int]] = {}
    touched: dict[frozenset[int], list[tuple[int, int]]] = defaultdict(list)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda _, cpus: place_of.update({threading.get_ident(): frozenset(cpus)})
    )
    monkeypatch.setattr(
        "kvoffd.pool.memory._populate",
        lambda address, length: touched[place_of[threading.get_ident()]].append((address, length)),
    )
    pool = Pool(96 * MIB, region_bytes=4 * MIB, limit=UNLIMITED, nodes=NODES)
    try:
        seen: list[int] = []
        assert pool.touch(2, seen.append) == 96 * MIB
        assert seen[-1] == 96 * MIB
        for node, begin in zip(NODES, (0, 48 * MIB), strict=True):
            pieces = sorted(touched[node.cpus])
            assert pieces == [
                (pool.mapping.address + begin, 32 * MIB),
                (pool.mapping.address + begin + 32 * MIB, 16 * MIB),
            ]
    finally:
        pool.close()
