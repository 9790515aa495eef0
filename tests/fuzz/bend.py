"""Inputs bent by the bytes that a fuzzer varies: decisions, and messages with another structure than they had."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
Tree = Any
"""What msgpack decodes to without a type."""

ODD: tuple[Tree, ...] = (
    *(0, 1, 2, 3, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**53 + 1),
    *(2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31), -(2**63)),
    *(0.0, -0.5, 1e308, float("nan"), float("inf"), None, True, False),
    *("", "worker", "stats", "x" * 129, "\0", "\ud7ff", "é" * 64),
    *(b"", b"\0", b"t" * 16, b"n" * 32, b"r" * 16, b"k" * 64, b"k" * 65, b"\xff" * 4, bytes(64)),
    *([], [[]], [0] * 70, [[0, b""]] * 3, {}, {"a": 1}, {0: b""}),
)


class Choices:
    """Takes decisions from ``data`` while there is any, and from a random generator seeded by it afterwards."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._rng = random.Random(zlib.crc32(data))

    def byte(self) -> int:
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


def bend(choices: Choices, packed: bytes) -> bytes:
    """A message with one to four places of its structure changed."""
    tree = msgspec.msgpack.decode(packed)
    for _ in range(1 + choices.byte() % 4):
        tree = _bend(choices, tree)
    return msgspec.msgpack.encode(tree)


def _bend(choices: Choices, tree: Tree) -> Tree:
    if not isinstance(tree, list) or not tree or choices.byte() % 16 == 0:
        return _other(choices, tree)
    at, kind = choices.byte() % len(tree), choices.byte() % 8
    if kind == 0:
        return tree[:at] + tree[at + 1 :]
    if kind == 1:
        return tree[: at + 1] + tree[at:]
    if kind == 2:
        return tree[:at]
    return [*tree[:at], _bend(choices, tree[at]), *tree[at + 1 :]]


def _other(choices: Choices, tree: Tree) -> Tree:
    """Another value, mostly of the same kind."""
    kind = choices.byte()
    if kind % 2:
        if isinstance(tree, bool):
            return not tree
        if isinstance(tree, int):
            return max(-(2**63), min(2**64 - 1, tree + choices.of((1, -1, 2, 256, 2**31, -(2**31), 2**62))))
        if isinstance(tree, bytes | str):
            cut = choices.byte() % (len(tree) + 1)
            return choices.of((tree[:cut], tree + tree, tree + tree[:1], tree[cut:] + tree[:cut]))
    return choices.of(ODD)
