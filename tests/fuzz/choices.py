"""Decisions made from the bytes that a fuzzer varies."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Takes decisions from ``data`` while there is any, and from a random generator seeded by it afterwards."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._rng = random.Random(zlib.crc32(data))

    def byte(self) -> int:
        """A number from 0 to 255."""
        if self._at == len(self._data):
            return self._rng.randrange(256)
        self._at += 1
        return self._data[self._at - 1]

    def of(self, options: Sequence[T]) -> T:
        """One of ``options``, of which there are at most 256."""
        return options[self.byte() % len(options)]

    def number(self, most: int) -> int:
        taken = 0
        for _ in range((most.bit_length() + 7) // 8):
            taken = taken << 8 | self.byte()
        return taken % (most + 1)

    def bytes(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        return bytes(self.byte() for _ in range(count))
