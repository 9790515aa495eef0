"""Traces: the blocks that each request asked for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvoffd_proto.zstd import MISSING, zstd_module

KEY_BYTES = 8
MOONCAKE_TOKENS = 512
"""Tokens of a block in Mooncake's traces."""
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
GZIP_MAGIC = b"\x1f\x8b"


class BadTrace(ValueError):
    """A file is not a trace. The message says where."""


class Trace(NamedTuple):
    """Requests by their keys, end to end, root first."""

    name: str
    tokens_per_block: int
    """Of most blocks, where it is not the same for all."""
    requests: list[bytes]
    block_bytes: int = 0
    """Pool bytes of a block, the mean where they differ; 0 where the trace does not say."""
    cut_off: bool = False
    """Whether the file ends in the middle."""
    others: Sequence[tuple[int, int, float]] = ()
    """Tokens, pool bytes and part of all accesses of each kind of blocks, where there are several."""
    missing: int = 0
    """Lines that the recording says it lacks."""

    @property
    def accesses(self) -> int:
        """Keys of all requests."""
        return sum(map(len, self.requests)) // KEY_BYTES


def read_trace(path: Path) -> Trace:
    """Read a trace in Mooncake's format: a line is a JSON object whose ``hash_ids`` are the blocks of a request.

    What ``kvoffd-cli record`` writes is that, with more fields, in zstd: client/TRACE.md. A file that was cut off is
    read as far as it goes.

    Source: https://github.com/kvcache-ai/Mooncake, FAST25-release. Raises BadTrace, OSError.
    """
    kinds: Counter[tuple[int, int]] = Counter()
    """Blocks by their tokens and bytes."""
    requests: list[bytes] = []
    missing: list[int] = []
    cut_off = False
    try:
        requests.extend(_requests(_lines(path), path, kinds, missing))
    except EOFError:
        cut_off = True
    tokens, _ = max(kinds, key=kinds.__getitem__, default=(MOONCAKE_TOKENS, 0))
    sized = {kind: count for kind, count in kinds.items() if kind[1]}
    every = sum(sized.values())
    block_bytes = sum(nbytes * count for (_, nbytes), count in sized.items()) // max(1, every)
    others = [(*kind, count / every) for kind, count in sorted(sized.items())] if len(sized) > 1 else []
    return Trace(path.stem.removesuffix(".jsonl"), tokens, requests, block_bytes, cut_off, others, sum(missing))


def _lines(path: Path) -> Iterator[bytes]:
    """The file's lines, decompressed. Raises BadTrace, OSError, EOFError at the end of one that was cut off."""
    with path.open("rb") as file:
        begin = file.read(len(ZSTD_MAGIC))
        if begin.startswith(GZIP_MAGIC):
            raise BadTrace(f"{path} is compressed with gzip; unpack it with gunzip.")
        packed = begin == ZSTD_MAGIC
        file.seek(0)
        if not packed:
            yield from file
            return
        if (zstd := zstd_module()) is None:
            raise BadTrace(f"{path} is compressed. {MISSING}")
        try:
            with zstd.open(file) as unpacked:
                yield from unpacked
        except zstd.ZstdError as error:
            raise BadTrace(f"{path} is damaged: {error}") from None


def _requests(
    lines: Iterator[bytes], path: Path, kinds: Counter[tuple[int, int]], missing: list[int]
) -> Iterator[bytes]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            ids = found["hash_ids"]
            kind = int(found.get("block_tokens", MOONCAKE_TOKENS)), int(found.get("block_bytes", 0))
            dropped = int(found.get("dropped", 0))
            if min(*kind, dropped) < 0:
                raise ValueError
            if dropped:
                missing.append(dropped)
            kinds[kind] += len(ids)
            yield b"".join([block.to_bytes(KEY_BYTES, "big") for block in ids])
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            raise BadTrace(
                f"{path}:{number} is not a line of Mooncake's format, a JSON object whose hash_ids are a list of whole "
                "numbers from 0 up, like all other fields."
            ) from None
