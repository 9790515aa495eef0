"""NUMA nodes and CPUs near the GPUs, read from sysfs instead of a GPU driver."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NamedTuple

from kvoffd.system.files import text_of

_log = logging.getLogger(__name__)

SYSFS = Path("/sys")
_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"


class Locality(NamedTuple):
    """NUMA node and CPUs of a PCI device or a part of the pool."""

    node: int | None
    """Number of the NUMA node; None if the machine has only one, or if it is unknown."""
    cpus: frozenset[int]
    """CPUs near it; empty if unknown."""


NOWHERE = Locality(None, frozenset())
"""Locality of a device that is unknown to sysfs, and of memory for which any node will do."""


def locality_of(pci_bus_id: str, sysfs: Path = SYSFS) -> Locality:
    """Return the locality of a PCI device (``0000:3b:00.0``, any case, with a domain of four or eight digits)."""
    domain, _, rest = pci_bus_id.lower().partition(":")
    # The driver may print eight digits of the domain, sysfs four.
    device = sysfs / "bus" / "pci" / "devices" / f"{domain[-4:]}:{rest}"
    node = text_of(device / "numa_node")
    return Locality(int(node) if node.isdecimal() else None, parse_cpu_list(text_of(device / "local_cpulist")))


def nodes_with_gpus(sysfs: Path = SYSFS) -> list[Locality]:
    """Return the nodes of NVIDIA GPUs, ascending, with the CPUs that this process may use; nodes without any are left
    out. Empty on a machine without a GPU, with a single node, or if sysfs does not know the GPUs' nodes.
    """
    numbers = {
        int(node)
        for device in (sysfs / "bus" / "pci" / "devices").glob("*")
        if text_of(device / "vendor") == _NVIDIA
        and text_of(device / "class").startswith(_DISPLAY_CLASS)
        and (node := text_of(device / "numa_node")).isdecimal()
    }
    usable = usable_cpus()
    directory = sysfs / "devices" / "system" / "node"
    nodes = [
        Locality(number, parse_cpu_list(text_of(directory / f"node{number}" / "cpulist")) & usable)
        for number in sorted(numbers)
    ]
    return [node for node in nodes if node.cpus]


def usable_cpus() -> frozenset[int]:
    """Return the CPUs that this process may use; all of the machine if a seccomp filter forbids the call."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except OSError:
        return frozenset(range(os.cpu_count() or 1))


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the CPUs of a list such as ``0-3,8,10-11``; an empty set for any other text."""
    cpus: set[int] = set()
    try:
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return frozenset()
    return frozenset(cpus)


def run_near(locality: Locality) -> None:
    """Pin the calling thread to those of the locality's CPUs that it may use, if there are any."""
    wanted = locality.cpus & usable_cpus()
    if not wanted:
        return
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as error:  # a container's policy; copies are slower at worst
        _log.debug("The thread is not pinned to CPUs: %s.", error)
