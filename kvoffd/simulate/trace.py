"""Traces: the blocks that each request asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

KEY_BYTES = 8
MOONCAKE_TOKENS = 512
"""Tokens of a block in Mooncake's traces."""


class BadTrace(ValueError):
    """A file is not a trace. The message says where."""


class Trace(NamedTuple):
    """Requests by their keys, end to end, root first."""

    name: str
    tokens_per_block: int
    requests: list[bytes]

    @property
    def accesses(self) -> int:
        """Keys of all requests."""
        return sum(map(len, self.requests)) // KEY_BYTES


def read_trace(path: Path) -> Trace:
    """Read a trace in Mooncake's format: a line is a JSON object whose ``hash_ids`` are the blocks of a request.

    Source: https://github.com/kvcache-ai/Mooncake, FAST25-release. Raises BadTrace, OSError.
    """
    with path.open("rb") as file:
        return Trace(path.stem, MOONCAKE_TOKENS, list(_requests(file, path)))


def _requests(lines: Iterator[bytes], path: Path) -> Iterator[bytes]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            ids = json.loads(line)["hash_ids"]
            yield b"".join([block.to_bytes(KEY_BYTES, "big") for block in ids])
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise BadTrace(
                f"{path}:{number} is not a line of Mooncake's format, a JSON object with the list hash_ids ({error!r})."
            ) from None
