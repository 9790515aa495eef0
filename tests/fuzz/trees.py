"""Messages bent in their structure: a field left out, doubled, or of another kind or size, and the rest as it was."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.fuzz.choices import Choices

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
