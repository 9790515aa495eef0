"""Which directories hold blocks, and how much of each: ``DIRECTORY=SIZE``, as people write it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kvoffd_proto.units import UnitError, exact_size, parse_size, quoted

MIN_DISK_BYTES = 16 * 1024**2


class DiskSize(NamedTuple):
    """A directory and the most that the daemon may take of its device."""

    directory: str
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.directory}={exact_size(self.size_bytes)}"


def parse_disk(text: object) -> DiskSize:
    """Read ``DIRECTORY=SIZE``. Raises ValueError with half a sentence."""
    name, equals, size = text.strip().rpartition("=") if isinstance(text, str) else ("", "", "")
    if not equals or not name or "\0" in name:
        raise ValueError(f"{quoted(text)} is not a directory and a size; write them as in /mnt/nvme0/kvoffd=500GiB")
    try:
        size_bytes = parse_size(size)
        path = Path(name).expanduser().absolute()
    except (UnitError, RuntimeError, OSError) as error:
        raise ValueError(f"{quoted(text)} cannot be used; {error}") from error
    if size_bytes < MIN_DISK_BYTES:
        raise ValueError(f"{quoted(text)} is too small; at least {exact_size(MIN_DISK_BYTES)} is needed")
    return DiskSize(str(path), size_bytes)


def parse_disks(value: object) -> tuple[DiskSize, ...]:
    """Read a list of them, or a text of them with commas between. Raises ValueError with half a sentence."""
    parts = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise ValueError(f"{quoted(value)} is not a list of directories and sizes, such as /mnt/nvme0/kvoffd=500GiB")
    disks = tuple(map(parse_disk, parts))
    names = [disk.directory for disk in disks]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{quoted(name)} is there twice; give each directory once")
        if "," in name:
            raise ValueError(f"{quoted(name)} has a comma in it, which is kept for lists; choose another directory")
    return disks


def show_disks(value: object) -> str:
    """The text that ``parse_disks`` reads back."""
    assert isinstance(value, tuple)
    return ",".join(map(str, value))
