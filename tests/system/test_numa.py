"""Which NUMA nodes and CPUs are near a GPU, as the machine tells; and threads that run there."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvoffd.system.numa import NOWHERE, Locality, locality_of, nodes_with_gpus, parse_cpu_list, run_near


def machine(
    sysfs: Path, gpus: Iterable[tuple[str, str]], cpus: dict[int, str] | None = None, vendor: str = "0x10de"
) -> None:
    """``gpus``: (address, NUMA node) of each; ``cpus``: lists of CPUs by node."""
    for address, node in gpus:
        device = sysfs / "bus" / "pci" / "devices" / address
        device.mkdir(parents=True)
        near = (cpus or {}).get(int(node or -1), "")
        for name, text in {"vendor": vendor, "class": "0x030200", "numa_node": node, "local_cpulist": near}.items():
            (device / name).write_text(text + "\n")
    for number, text in (cpus or {}).items():
        directory = sysfs / "devices" / "system" / "node" / f"node{number}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(text + "\n")


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


@pytest.mark.usefixtures("four_cpus")
def test_nodes_are_those_of_the_gpus(tmp_path: Path) -> None:
    gpus = [("0000:3b:00.0", "2"), ("0000:4b:00.0", "2"), ("0000:9b:00.0", "0")]
    machine(tmp_path, gpus, {0: "0-1", 1: "2", 2: "3-9"})
    assert nodes_with_gpus(tmp_path) == [Locality(0, frozenset({0, 1})), Locality(2, frozenset({3}))]


@pytest.mark.usefixtures("four_cpus")
def test_a_node_without_a_cpu_for_us_is_left_out(tmp_path: Path) -> None:
    machine(tmp_path, [("0000:3b:00.0", "0"), ("0000:9b:00.0", "1")], {0: "0-3", 1: "4-7"})
    assert [node.node for node in nodes_with_gpus(tmp_path)] == [0]


def test_other_devices_and_single_nodes_name_none(tmp_path: Path) -> None:
    for at, (node, vendor) in enumerate((("-1", "0x10de"), ("0", "0x8086"), ("", "0x10de"))):
        machine(tmp_path / str(at), [("0000:3b:00.0", node)], vendor=vendor)
        assert nodes_with_gpus(tmp_path / str(at)) == []
    assert nodes_with_gpus(tmp_path / "a machine that says nothing") == []


def test_a_gpu_is_found_however_the_driver_writes_its_address(tmp_path: Path) -> None:
    machine(tmp_path, [("0000:3b:00.0", "1"), ("0000:4b:00.0", "-1")], {1: "2-4,8"})
    for bus_id in ("0000:3B:00.0", "00000000:3B:00.0", "0000:3b:00.0"):
        assert locality_of(bus_id, tmp_path) == Locality(1, frozenset({2, 3, 4, 8})), bus_id
    for bus_id in ("0000:4B:00.0", "0000:5B:00.0"):  # which tells no node; which is not there
        assert locality_of(bus_id, tmp_path) == NOWHERE, bus_id


def test_lists_of_cpus() -> None:
    for text, cpus in (("", set()), ("7", {7}), ("0-1,3", {0, 1, 3}), ("0-x", set())):
        assert parse_cpu_list(text) == cpus, text


def test_only_the_calling_thread_moves_to_cpus_it_may_use() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    seen: list[set[int]] = []

    def thread() -> None:
        for cpus in ({one, 100000}, {100000}):
            run_near(Locality(0, frozenset(cpus)))
            seen.append(os.sched_getaffinity(0))

    runner = threading.Thread(target=thread)
    runner.start()
    runner.join()
    assert seen == [{one}, {one}]
    assert os.sched_getaffinity(0) == before
