"""What a daemon knows of shared stores, in a file of its directory, from one daemon to the next.

A generation that it has followed is no news after a restart; of others, what pool and disks kept is void. A namespace
that an engine reset is not shared again. Without the file no generation was followed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from kvoffd.server.kept_file import KeptFile

logger = logging.getLogger(__name__)
T = TypeVar("T")

FILE = "kvoffd.shared"
MOST_BYTES = 16 << 20
MOST_NAMESPACES = 4096
"""Of each store, and of those that are left: the oldest are forgotten."""


class _Record(msgspec.Struct):
    """The file: fingerprints in hexadecimal, under each store's URL with their generations."""

    generations: dict[str, dict[str, int]] = {}
    left: dict[str, None] = {}


class KeptShared:
    """What was known, and what is known now."""

    def __init__(self, file: KeptFile, record: _Record) -> None:
        self._file = file
        self._record = record

    @classmethod
    def of(cls, directory: Path) -> KeptShared:
        """What an earlier daemon of this directory left, which this user alone may write."""
        file, record = KeptFile(str(directory / FILE), MOST_BYTES), _Record()
        try:
            record = msgspec.json.decode(file.read(), type=_Record)
            for name in (*record.left, *(one for known in record.generations.values() for one in known)):
                bytes.fromhex(name)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            record = _Record()
            logger.warning("What was known of shared stores, in %s, is of no use: %s.", file.path, error)
        return cls(file, record)

    @property
    def left(self) -> list[bytes]:
        """Fingerprints of namespaces that engines have reset."""
        return list(map(bytes.fromhex, self._record.left))

    def generations_of(self, url: str) -> dict[bytes, int]:
        """By fingerprint, the generations that were followed."""
        return {bytes.fromhex(name): number for name, number in self._record.generations.get(url, {}).items()}

    def note(self, fingerprint: bytes, followed: Mapping[str, int] | None) -> None:
        """A namespace's blocks are gone here: of generations of stores that were followed, or an engine reset it."""
        name, before = fingerprint.hex(), msgspec.json.encode(self._record)
        if followed is None:
            _put(self._record.left, name, None)
        else:
            self._record.left.pop(name, None)
            for url, generation in followed.items():
                _put(self._record.generations.setdefault(url, {}), name, generation)
        if (data := msgspec.json.encode(self._record)) != before:
            self._file.write([data])
            if (error := self._file.error) is not None:
                logger.warning("What is known of shared stores cannot be kept in %s: %s.", self._file.path, error)


def _put(known: dict[str, T], name: str, value: T) -> None:
    known[name] = value
    if len(known) > MOST_NAMESPACES:
        del known[next(iter(known))]
