"""NUMA nodes: which of them GPUs sit on, and which part of the pool lies on which."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvoffd.system.numa import SYSFS, parse_cpu_list

_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"


class Node(NamedTuple):
    """A NUMA node, and those of its CPUs that this process may run on."""

    number: int
    cpus: frozenset[int]


class Segment(NamedTuple):
    """Bytes [begin, end) of the pool, touched by CPUs of one node."""

    begin: int
    end: int
    node: Node


def nodes_with_gpus(sysfs: Path = SYSFS) -> list[Node]:
    """The nodes of NVIDIA's GPUs, ascending, without those that this process may not run on. Asks no driver.

    Empty on a machine that has no GPU, or that does not say where they sit, as one with a single node.
    """
    numbers = {
        int(node)
        for device in (sysfs / "bus" / "pci" / "devices").glob("*")
        if _read(device / "vendor") == _NVIDIA
        and _read(device / "class").startswith(_DISPLAY_CLASS)
        and (node := _read(device / "numa_node")).isdecimal()
    }
    usable = os.sched_getaffinity(0)
    nodes = [
        Node(
            number, parse_cpu_list(_read(sysfs / "devices" / "system" / "node" / f"node{number}" / "cpulist")) & usable
        )
        for number in sorted(numbers)
    ]
    return [node for node in nodes if node.cpus]


def cut_pool(pool_bytes: int, region_bytes: int, nodes: Sequence[Node]) -> list[Segment]:
    """One segment per node, of whole regions and about equal size; fewer where there are fewer regions than nodes."""
    if not nodes:
        return []
    regions = -(-pool_bytes // region_bytes)
    bounds = [number * regions // len(nodes) * region_bytes for number in range(len(nodes))] + [pool_bytes]
    return [
        Segment(begin, end, node) for node, begin, end in zip(nodes, bounds, bounds[1:], strict=False) if begin < end
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
