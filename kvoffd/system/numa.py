"""Which CPUs are near a GPU, from sysfs."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NamedTuple

_log = logging.getLogger(__name__)

SYSFS = Path("/sys")


class Locality(NamedTuple):
    """Where a PCI device sits."""

    node: int | None
    """NUMA node; None where the machine has but one or does not say."""
    cpus: frozenset[int]
    """CPUs near it; empty where the machine does not say."""


NOWHERE = Locality(None, frozenset())
"""Of a device that the machine says nothing about."""


def locality_of(pci_bus_id: str, sysfs: Path = SYSFS) -> Locality:
    """Looks a PCI device (``0000:3b:00.0``, any case, domain of four or eight digits) up."""
    domain, _, rest = pci_bus_id.lower().partition(":")
    # The driver may print eight digits of the domain where sysfs has four.
    device = sysfs / "bus" / "pci" / "devices" / f"{domain[-4:]}:{rest}"
    node = _text(device / "numa_node")
    cpus = parse_cpu_list(_text(device / "local_cpulist"))
    return Locality(int(node) if node.isdecimal() else None, cpus)


def parse_cpu_list(text: str) -> frozenset[int]:
    """``0-3,8,10-11`` as a set; what is no such list is an empty one."""
    cpus: set[int] = set()
    try:
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return frozenset()
    return frozenset(cpus)


def run_near(locality: Locality) -> None:
    """Keeps the calling thread on those of the CPUs it may use at all; does nothing where there is none."""
    wanted = locality.cpus & os.sched_getaffinity(0)
    if not wanted:
        return
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as error:  # a container's policy: slower copies at worst
        _log.debug("The thread stays where it is: %s.", error)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
