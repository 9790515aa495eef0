"""Traces: the blocks that each request asked for."""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, cast

from msgspec import DecodeError, Meta, Struct
from msgspec.json import Decoder

KEY_BYTES = 8
MOONCAKE_TOKENS = 512
"""Tokens of a block in Mooncake's traces."""
POWERS = [1 << bits for bits in range(4, 13)]
"""Other tokens of a block that lengths of requests may tell of."""
MOST_LINE_BYTES = 64 << 20
"""Of a request of three million blocks: no memory is taken for a file that has no lines, or unpacks to none."""
MOST_ACCESSES = 1 << 26
"""Requests and their blocks, together: a replay takes about 190 bytes for each, and a small file may unpack to any
number."""
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
GZIP_MAGIC = b"\x1f\x8b"


class BadTrace(ValueError):
    """A file is not a trace. The message says where."""


class _Line(Struct):
    """What is read of a line."""

    hash_ids: list[int]
    input_length: Any = None
    block_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    block_bytes: Annotated[int, Meta(ge=0, lt=1 << 53)] = 0
    dropped: Annotated[int, Meta(ge=0)] = 0
    timestamp: Any = None


_DECODER = Decoder(_Line)


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
    seconds: Sequence[float] = ()
    """When each request came, never earlier than the one before it; empty where a line does not say."""

    @property
    def accesses(self) -> int:
        """Keys of all requests."""
        return sum(map(len, self.requests)) // KEY_BYTES


def read_trace(path: Path) -> Trace:
    """Read a trace in Mooncake's format: a line is a JSON object whose ``hash_ids`` are the blocks of a request.

    ``kvoffd-cli trace record`` writes that, with more fields, compressed by gzip: client/README.md. Where no line says
    how many tokens a block has, and the lengths of requests fit a power of two and not 512, it is that. A file that was
    cut off is read as far as it goes.

    Source: https://github.com/kvcache-ai/Mooncake, FAST25-release. Raises BadTrace, OSError.
    """
    kinds: Counter[tuple[int, int]] = Counter()
    """Blocks by their tokens and bytes, where a line says them."""
    requests: list[bytes] = []
    seconds: list[float] = []
    missing = accesses = 0
    least, most = 1, 1 << 31
    """Tokens that a block may have, by the lengths of all requests: the last block of one need not be full."""
    least_whole, most_whole = 1, 1 << 31
    """The same where a request has whole blocks alone, and a rest that is in none."""
    cut_off = False
    try:
        for line in _read(_lines(path), path):
            count, length = len(line.hash_ids), line.input_length
            if (accesses := accesses + 1 + count) > MOST_ACCESSES:
                why = f"has more than {MOST_ACCESSES:,} requests and blocks of requests, together"
                raise BadTrace(f"{path} {why}, which are too many to replay; give a part of its lines.")
            missing += line.dropped
            if line.block_tokens is not None or line.block_bytes:
                tokens = MOONCAKE_TOKENS if line.block_tokens is None else line.block_tokens
                kinds[tokens, line.block_bytes] += count
            if count > 1 and type(length) is int:
                least, most = max(least, -(-length // count)), min(most, (length - 1) // (count - 1))
                least_whole, most_whole = max(least_whole, length // (count + 1) + 1), min(most_whole, length // count)
            if isinstance(line.timestamp, (int, float)):
                seconds.append(max(line.timestamp / 1000, *seconds[-1:]) if seconds else line.timestamp / 1000)
            requests.append(b"".join([block.to_bytes(KEY_BYTES, "big") for block in line.hash_ids]))
    except EOFError:
        cut_off = True
    usual = (MOONCAKE_TOKENS, *POWERS)
    fitting = [tokens for tokens in usual if least <= tokens <= most]
    fitting += [tokens for tokens in usual if least_whole <= tokens <= most_whole]
    tokens, _ = max(kinds, key=kinds.__getitem__, default=((fitting or [MOONCAKE_TOKENS])[0], 0))
    sized = {kind: count for kind, count in kinds.items() if kind[1]}
    every = sum(sized.values())
    block_bytes = sum(nbytes * count for (_, nbytes), count in sized.items()) // max(1, every)
    others = [(*kind, count / every) for kind, count in sorted(sized.items())] if len(sized) > 1 else []
    timed = seconds if len(seconds) == len(requests) else []
    return Trace(path.stem.removesuffix(".jsonl"), tokens, requests, block_bytes, cut_off, others, missing, timed)


def _lines(path: Path) -> Iterator[bytes]:
    """The file's lines, decompressed. Raises BadTrace, OSError, EOFError at the end of one that was cut off."""
    with path.open("rb") as file:
        begin = file.peek(len(ZSTD_MAGIC))  # a pipe cannot be read again
        if begin.startswith(ZSTD_MAGIC):
            raise BadTrace(f"{path} is compressed with zstd; unpack it with `zstd -d`.")
        if not begin.startswith(GZIP_MAGIC):
            yield from _split(file, path)
            return
        try:
            with gzip.open(file) as unpacked:
                yield from _split(cast(BinaryIO, unpacked), path)
        except (zlib.error, gzip.BadGzipFile) as error:
            raise BadTrace(f"{path} is damaged: {error}.") from None


def _split(file: BinaryIO, path: Path) -> Iterator[bytes]:
    for line in iter(partial(file.readline, MOST_LINE_BYTES), b""):
        if len(line) == MOST_LINE_BYTES:
            raise BadTrace(f"{path} is no trace: it has a line of more than {MOST_LINE_BYTES >> 20} MiB.")
        yield line


def _read(lines: Iterator[bytes], path: Path) -> Iterator[_Line]:
    """What the lines have. Raises BadTrace, EOFError where the last one is not whole."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = _DECODER.decode(line)
            if found.hash_ids and not 0 <= min(found.hash_ids) <= max(found.hash_ids) < 1 << 8 * KEY_BYTES:
                raise ValueError
        except (DecodeError, ValueError, RecursionError):
            if number > 1 and not line.endswith(b"\n"):
                raise EOFError from None
            raise BadTrace(
                f"{path}:{number} is not a line of Mooncake's format, a JSON object whose hash_ids are a list of whole "
                "numbers from 0 up, like all other fields."
            ) from None
        yield found
