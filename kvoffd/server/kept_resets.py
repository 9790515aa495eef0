"""What a daemon knows of resets, in a file of its directory, from one daemon to the next.

A disk or a pool that was away, or an older copy of a disk's file, does not bring back what was reset meanwhile. A
generation of a shared store that was followed is no news after a restart; of others, what pool and disks kept is void.
A namespace that an engine reset is not shared again. Without the file no reset is known, and no generation was
followed.
It is written in a thread: the directory's file system may be slow, or hang.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from math import inf
from pathlib import Path
from typing import TypeVar

import msgspec

from kvoffd.server.kept_file import KeptFile, checked
from kvoffd.system.newest import put_newest

logger = logging.getLogger(__name__)
T = TypeVar("T")

FILE = "kvoffd.resets"
MOST_BYTES = 16 << 20
AGAIN_S = 5.0
"""After which a write that failed is tried again: a file system may have been full for a moment."""
MOST_NAMES = 4096
"""Namespaces of each store, of those not shared and of resets, and disks and pools: the oldest are forgotten, but for
resets of namespaces that there are."""

Place = tuple[str, int]
"""A disk's file or a pool, by a name that it keeps wherever it lies; and its version: older copies have lower ones."""


class _Record(msgspec.Struct):
    """The file, behind its CRC-32: fingerprints in hexadecimal, under each store's URL with their generations."""

    generations: dict[str, dict[str, int]] = {}
    left: dict[str, None] = {}
    """Namespaces that an engine has reset: no shared store is asked for them."""
    resets: dict[str, int] = {}
    """By namespace, the number of its last reset."""
    places: dict[str, tuple[int, int]] = {}
    """By disk's file or pool, the number of the last reset that it has seen, and its version then."""


class KeptResets:
    """What was known, and what is known now.

    ``is_there``: whether there is a namespace; whoever resets very many makes that of no other be forgotten.
    """

    def __init__(self, file: KeptFile, record: _Record, is_there: Callable[[bytes], bool]) -> None:
        self._file = file
        self._record = record
        self._is_there = is_there
        self._differs = False
        self._again_at = inf
        self._told = False
        """Whether the log has that it cannot be written."""

    @classmethod
    def of(cls, directory: Path, is_there: Callable[[bytes], bool] = lambda fingerprint: False) -> KeptResets:
        """What an earlier daemon of this directory left, which this user alone may write."""
        file, record, damaged = KeptFile(str(directory / FILE), MOST_BYTES), _Record(), False
        try:
            record = msgspec.json.decode(file.read_checked(), type=_Record)
            for name in (
                *record.left,
                *record.resets,
                *(one for known in record.generations.values() for one in known),
            ):
                bytes.fromhex(name)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            record, damaged = _Record(), not isinstance(error, OSError)
            what = "What was known of resets, in %s, is of no use: %s. The daemon begins without it."
            logger.warning(what, file.path, error)
        kept = cls(file, record, is_there)
        kept._differs = damaged  # written anew, so that the next daemon finds nothing wrong
        return kept

    @property
    def unshared(self) -> list[bytes]:
        """Fingerprints of namespaces that engines have reset."""
        return list(map(bytes.fromhex, self._record.left))

    def generations_of(self, url: str) -> dict[bytes, int]:
        """By fingerprint, the generations that were followed."""
        return {bytes.fromhex(name): number for name, number in self._record.generations.get(url, {}).items()}

    def note(self, fingerprint: bytes, followed: Mapping[str, int] | None, places: Iterable[Place]) -> None:
        """A namespace's blocks are gone here: of generations of stores that were followed, or an engine reset it.

        ``places``: those that see it.
        """
        name = fingerprint.hex()
        self._put_reset(self._record.resets, name, self._last + 1)
        for place, version in places:
            put_newest(self._record.places, place, (self._last, version), MOST_NAMES)
        if followed is None:
            self._put_reset(self._record.left, name, None)
        else:
            self._record.left.pop(name, None)
            for url, generation in followed.items():
                put_newest(self._record.generations.setdefault(url, {}), name, generation, MOST_NAMES)
        self._write()

    def take_missed(self, place: str, version: int = 0) -> list[bytes]:
        """Fingerprints of namespaces that were reset while a disk or pool was away, which sees that now."""
        seen, since = self._record.places.get(place, (0, 0))
        if version < since:
            seen = 0
        missed = [bytes.fromhex(name) for name, number in self._record.resets.items() if number > seen]
        if missed:
            put_newest(self._record.places, place, (self._last, version), MOST_NAMES)
            self._write()
        return missed

    @property
    def _last(self) -> int:
        return max(self._record.resets.values(), default=0)

    def _put_reset(self, known: dict[str, T], name: str, value: T) -> None:
        put_newest(known, name, value, MOST_NAMES, lambda one: self._is_there(bytes.fromhex(one)))

    @property
    def is_kept(self) -> bool:
        """Whether the file has what is known, or has failed."""
        return not self._differs and not self._file.is_being_written

    def tick(self) -> None:
        """Write what is not written yet, and say so where that has failed."""
        if self._file.is_being_written:
            return
        now = time.monotonic()
        if (error := self._file.take_error()) is not None:
            if not self._told:
                why = "What is known of resets cannot be kept in %s: %s. It is tried again every %.0f s."
                logger.warning(why, self._file.path, error, AGAIN_S)
            self._told, self._again_at = True, now + AGAIN_S
        elif self._again_at == inf:
            self._told = False
        if self._differs or now >= self._again_at:
            self._differs, self._again_at = False, inf
            self._file.write_soon([checked(msgspec.json.encode(self._record))])

    def close(self) -> None:
        """Wait a moment for all of it to be written."""
        self._differs = self._differs or self._again_at < inf
        while self._file.join() and not self.is_kept:
            self.tick()
        self.tick()

    def _write(self) -> None:
        self._differs = True
        self.tick()
