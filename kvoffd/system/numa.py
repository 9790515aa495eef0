"""NUMA nodes and CPUs near the GPUs, from sysfs. Asks no GPU driver."""

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
    """A NUMA node and its CPUs: where a PCI device or a part of the pool lies."""

    node: int | None
    """Number of the NUMA node; None where the machine has only one or does not say."""
    cpus: frozenset[int]
    """CPUs near it; empty where the machine does not say."""


NOWHERE = Locality(None, frozenset())
"""The locality of a device of which sysfs says nothing."""


def locality_of(pci_bus_id: str, sysfs: Path = SYSFS) -> Locality:
    """The locality of a PCI device (``0000:3b:00.0``, any case, with a domain of four or eight digits)."""
    domain, _, rest = pci_bus_id.lower().partition(":")
    # The driver may print eight digits of the domain where sysfs has four.
    device = sysfs / "bus" / "pci" / "devices" / f"{domain[-4:]}:{rest}"
    node = text_of(device / "numa_node")
    return Locality(int(node) if node.isdecimal() else None, parse_cpu_list(text_of(device / "local_cpulist")))


def nodes_with_gpus(sysfs: Path = SYSFS) -> list[Locality]:
    """The nodes of NVIDIA GPUs, ascending, with those of their CPUs that this process may use; others are left out.

    Empty on a machine without a GPU, or with a single node, or where sysfs does not say where the GPUs sit.
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
    """The CPUs that this process may use; all of the machine where a seccomp filter lets nobody ask."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except OSError:
        return frozenset(range(os.cpu_count() or 1))


def parse_cpu_list(text: str) -> frozenset[int]:
    """The CPUs of a list such as ``0-3,8,10-11``; an empty set for any other text."""
    cpus: set[int] = set()
    try:
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return frozenset()
    return frozenset(cpus)


def run_near(locality: Locality) -> None:
    """Keeps the calling thread on those of the locality's CPUs that it may use; does nothing where there is none."""
    wanted = locality.cpus & usable_cpus()
    if not wanted:
        return
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as error:  # a container's policy: copies are slower at worst
        _log.debug("The thread stays where it is: %s.", error)
