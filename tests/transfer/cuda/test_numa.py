"""Threads run near their GPU where the machine says which CPUs that are."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from kvoffd.system.numa import NOWHERE, Locality, locality_of, parse_cpu_list, run_near


def device(sysfs: Path, node: str, cpus: str) -> None:
    directory = sysfs / "bus" / "pci" / "devices" / "0000:3b:00.0"
    directory.mkdir(parents=True)
    (directory / "numa_node").write_text(node + "\n")
    (directory / "local_cpulist").write_text(cpus + "\n")


def test_a_gpu_is_found_however_the_driver_writes_its_address(tmp_path: Path) -> None:
    device(tmp_path, "1", "2-4,8")
    for bus_id in ("0000:3B:00.0", "00000000:3B:00.0", "0000:3b:00.0"):
        assert locality_of(bus_id, tmp_path) == Locality(1, frozenset({2, 3, 4, 8})), bus_id


def test_a_machine_that_tells_no_node_is_no_error(tmp_path: Path) -> None:
    assert locality_of("0000:3B:00.0", tmp_path) == NOWHERE
    device(tmp_path, "-1", "")
    assert locality_of("0000:3B:00.0", tmp_path) == NOWHERE


def test_lists_of_cpus() -> None:
    for text, cpus in (("", set()), ("7", {7}), ("0-1,3", {0, 1, 3}), ("0-x", set())):
        assert parse_cpu_list(text) == cpus, text


def test_only_the_calling_thread_moves_to_cpus_it_may_use() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    seen: list[set[int]] = []

    def thread() -> None:
        run_near(Locality(0, frozenset({one, 100000})))
        seen.append(os.sched_getaffinity(0))
        run_near(Locality(0, frozenset({100000})))
        seen.append(os.sched_getaffinity(0))

    runner = threading.Thread(target=thread)
    runner.start()
    runner.join()
    assert seen == [{one}, {one}]
    assert os.sched_getaffinity(0) == before
