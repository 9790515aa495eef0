"""Kinds of settings: how a value of each is read, checked and shown. ``config`` makes its fields of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from kvoffd_proto.sockets import SocketPaths
from kvoffd_proto.units import UnitError, exact_duration, exact_size, is_host, parse_duration, parse_size, quoted

MIN_DISK_BYTES = 16 * 1024**2


class DiskSize(NamedTuple):
    """A directory and the most that the daemon may take of its device."""

    directory: str
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.directory}={exact_size(self.size_bytes)}"


T = TypeVar("T")
Value: TypeAlias = int | float | str | Path | tuple[int, ...] | tuple[str, ...] | tuple[DiskSize, ...]


@dataclass(frozen=True)
class Kind:
    """How values of one kind are read and shown.

    ``parse`` takes a text or a TOML value and raises ValueError with half a sentence; ``show`` gives the text that
    ``parse`` reads back; ``metavar`` stands for the value in a help text; ``repeated`` lets a flag be given again.
    """

    metavar: str
    parse: Callable[[object], Value]
    show: Callable[[Any], str]
    repeated: bool = False


ALL_INTERFACES = "*"
"""Host of an address at which a server listens wherever it can, as ZeroMQ has it."""


class Address(NamedTuple):
    """Where a TCP server listens."""

    host: str
    port: int


def parse_address(text: str) -> Address:
    """Read ``host:port``, with brackets round an IPv6 host. Raises ValueError with half a sentence."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    usable = bool(colon and re.fullmatch("[0-9]{1,5}", port) and int(port) < 65536 and is_host(host))
    if not usable:
        raise ValueError(
            f"{quoted(text)} is not an address; write host:port, such as 127.0.0.1:9464, or nothing to switch it off"
        )
    return Address(host, int(port))


def _setting(default: T, description: str, kind: Kind) -> T:
    return field(default=default, metadata={"kind": kind, "description": description})


def size_setting(default: int, minimum: int, description: str) -> int:
    def parse(value: object) -> int:
        # parse_size refuses what is neither text nor a whole number.
        size = parse_size(value)  # type: ignore[arg-type]
        if size < minimum and size != default:
            least = f"at least {exact_size(minimum)}" + ("" if default else ", or 0,")
            raise ValueError(f"{quoted(value)} is too small; {least} is needed")
        return size

    return _setting(default, description, Kind("SIZE", parse, exact_size))


def duration_setting(default: float, minimum: float, description: str) -> float:
    def parse(value: object) -> float:
        seconds = parse_duration(value)  # type: ignore[arg-type]
        if seconds < minimum:
            raise ValueError(f"{quoted(value)} is too short; at least {exact_duration(minimum)} is needed")
        return seconds

    return _setting(default, description, Kind("DURATION", parse, exact_duration))


def number_setting(default: int, minimum: int, maximum: int, description: str) -> int:
    def parse(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,20}\s*", value):
            number = int(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            number = value
        else:
            raise ValueError(f"{quoted(value)} is not a whole number; {minimum} to {maximum} are allowed")
        if not minimum <= number <= maximum:
            raise ValueError(f"{quoted(value)} is out of range; {minimum} to {maximum} are allowed")
        return number

    return _setting(default, description, Kind("N", parse, str))


def share_setting(default: float, description: str, least: float = 0.0) -> float:
    def parse(value: object) -> float:
        try:
            share = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else -1.0
        except ValueError:
            share = -1.0
        if not least <= share <= 1.0:
            raise ValueError(
                f"{quoted(value)} is not a share; {least:g} to 1 are allowed, such as 0.015625 for one in 64"
            )
        return share

    return _setting(default, description, Kind("SHARE", parse, "{:.12g}".format))


def choice_setting(default: str, choices: tuple[str, ...], description: str) -> str:
    def parse(value: object) -> str:
        if not isinstance(value, str) or value.strip().lower() not in choices:
            raise ValueError(f"{quoted(value)} is unknown; choose {' or '.join(choices)}")
        return value.strip().lower()

    return _setting(default, description, Kind("|".join(choices), parse, str))


def ids_setting(description: str) -> tuple[int, ...]:
    def parse(value: object) -> tuple[int, ...]:
        parts = value.replace(",", " ").split() if isinstance(value, str) else value
        if not isinstance(parts, list):
            raise ValueError(f"{quoted(value)} is not a list of numeric ids; write them with commas, such as 0,1000")
        ids = []
        for part in parts:
            text = str(part) if isinstance(part, (int, str)) and not isinstance(part, bool) else ""
            if not re.fullmatch("[0-9]{1,10}", text) or int(text) >= 2**32 - 1:
                raise ValueError(
                    f"{quoted(part)} is not a numeric id; 0 to {2**32 - 2} are allowed, separated by commas"
                )
            ids.append(int(text))
        return tuple(sorted(set(ids)))

    return _setting((), description, Kind("IDS", parse, _show_list))


def _show_list(values: tuple[object, ...]) -> str:
    return ",".join(map(str, values))


def _absolute(name: str, value: object) -> Path:
    """The path that a part of a value names. Raises ValueError."""
    try:
        return Path(name).expanduser().absolute()
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{quoted(value)} cannot be used; {error}") from error


def _parse_disk(text: object) -> DiskSize:
    name, equals, size = text.strip().rpartition("=") if isinstance(text, str) else ("", "", "")
    if not equals or not name or "\0" in name:
        raise ValueError(f"{quoted(text)} is not a directory and a size; write them as in /mnt/nvme0/kvoffd=500GiB")
    path = _absolute(name, text)
    try:
        size_bytes = parse_size(size)
    except UnitError as error:
        raise ValueError(f"{quoted(text)} cannot be used; {error}") from error
    if size_bytes < MIN_DISK_BYTES:
        raise ValueError(f"{quoted(text)} is too small; at least {exact_size(MIN_DISK_BYTES)} is needed")
    return DiskSize(str(path), size_bytes)


def _parse_disks(value: object) -> tuple[DiskSize, ...]:
    parts = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise ValueError(f"{quoted(value)} is not a list of directories and sizes, such as /mnt/nvme0/kvoffd=500GiB")
    disks = tuple(map(_parse_disk, parts))
    names = [disk.directory for disk in disks]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{quoted(name)} is given twice; give each directory once")
        if "," in name:
            raise ValueError(f"{quoted(name)} has a comma in it, which is kept for lists; choose another directory")
    return disks


def disks_setting(description: str) -> tuple[DiskSize, ...]:
    return _setting((), description, Kind("DIRECTORY=SIZE", _parse_disks, _show_list, repeated=True))


def directory_setting(description: str) -> dict[str, object]:
    def parse(value: object) -> Path:
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            raise ValueError(f"{quoted(value)} is not a path; name a directory, such as /run/kvoffd")
        path = _absolute(value, value)
        if problem := SocketPaths(path).problem():
            raise ValueError(f"{quoted(value)} cannot be used; {problem[0].lower()}{problem[1:].rstrip('.')}")
        return path

    return {"kind": Kind("PATH", parse, str), "description": description}


def file_setting(description: str) -> str:
    def parse(value: object) -> str:
        if not isinstance(value, str) or "\0" in value:
            raise ValueError(f"{quoted(value)} is not a path; name a file, such as /dev/shm/kvoffd.pool, or nothing")
        if not value.strip():
            return ""
        path = _absolute(value.strip(), value)
        if not path.name or value.endswith("/"):
            raise ValueError(f"{quoted(value)} names a directory; name a file in it, such as {path}/kvoffd.pool")
        return str(path)

    return _setting("", description, Kind("PATH", parse, str))


def address_setting(default: str, description: str) -> str:
    def parse(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{quoted(value)} is not an address; write host:port, such as 127.0.0.1:9464")
        text = value.strip()
        if text:
            parse_address(text)
        return text

    return _setting(default, description, Kind("HOST:PORT", parse, str))


def urls_setting(
    check: Callable[[str], object], description: str, metavar: str = "URL", example: str = "redis://valkey.example:6379"
) -> tuple[str, ...]:
    """``check`` raises ValueError with half a sentence for what is no URL that can be used."""

    def parse(value: object) -> tuple[str, ...]:
        parts = [value] if isinstance(value, str) else value
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
            raise ValueError(f"it is not a list of {metavar}, such as {example}")
        urls = tuple(url.strip() for part in parts for url in part.split(",") if url.strip())
        for url in urls:
            check(url)
            if urls.count(url) > 1:
                raise ValueError(f"{quoted(url)} is given twice; give each URL once")
        return urls

    return _setting((), description, Kind(metavar, parse, _show_list, repeated=True))


def path_setting(description: str, example: str, metavar: str = "PATH") -> str:
    def parse(value: object) -> str:
        if not isinstance(value, str) or "\0" in value:
            raise ValueError(f"{quoted(value)} is not a {metavar.lower()}; name {example}")
        return value.strip()

    return _setting("", description, Kind(metavar, parse, str))


def did_you_mean(name: str, names: Collection[str]) -> str:
    """A question that names the nearest of ``names``; empty where none is near."""
    import difflib  # only errors need it

    close = difflib.get_close_matches(name, sorted(names), n=1)
    return f"did you mean {close[0]}?" if close else ""
