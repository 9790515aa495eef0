"""Traces: the blocks that each request looked up."""

from __future__ import annotations

import gzip
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, cast

import numpy as np
from msgspec import UNSET, DecodeError, Meta, Struct, UnsetType, ValidationError, field
from msgspec.json import Decoder

from kvoffd_proto.messages import MAX_PRIORITY, MAX_TTL_S, HintAction

KEY_BYTES = 8
MOONCAKE_TOKENS = 512
"""Tokens of a block in Mooncake's traces."""
POWERS = [1 << bits for bits in range(4, 13)]
"""Other common tokens per block, which the lengths of requests may indicate."""
MAX_LINE_BYTES = 64 << 20
"""Longest line, for a request of three million blocks: bounds the memory for files without lines, packed or not."""
MAX_VALUE_BYTES = 256 << 20
"""Longest value that is not in one line."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_KEY = (1 << 8 * KEY_BYTES) - 1
"""The largest key; negative numbers of blocks are taken as those of two's complement."""
OWN_KEY = 1 << 63
"""First of the keys that are given to blocks of sessions with numbers of their own."""
MAX_TOKENS = (1 << 31) - 1
"""The most tokens of a block."""
MAX_TIME = 1 << 63
"""The latest ``timestamp`` or ``t``, and as a negative number the earliest."""
MAX_REQUESTS_AND_BLOCKS = 1 << 26
"""Limit of requests and their blocks together: a replay takes about 190 bytes for each, and a small file may unpack to
any number."""
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
GZIP_MAGIC = b"\x1f\x8b"


class BadTrace(ValueError):
    """A file is not a trace. The message says where."""


class _Line(Struct):
    """A request, or a session of several, which kv-cache-tester and AIPerf write."""

    hash_ids: list[int] | UnsetType | None = UNSET
    requests: list[_Line] | UnsetType = UNSET
    """Requests of a session, or of an agent in it."""
    input_length: Any = None
    session_input_length: Any = field(default=None, name="in")
    """``input_length`` of a session's request."""
    block_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | list[Any] | None = None
    """Tokens of a block; in kvcache-simulator's format those of each block, which are not used."""
    block_size: Any = None
    """Tokens of a block of a session, or of a request in kvcache-simulator's format."""
    hash_id_scope: Any = "local"
    """``global`` if equal numbers in several sessions mean the same block."""
    block_bytes: Annotated[int, Meta(ge=0, lt=1 << 53)] = 0
    dropped: Annotated[int, Meta(ge=0)] = 0
    timestamp: Any = None
    t: Any = None
    """Seconds since the session began."""
    session_id: Any = None
    """Session of a request that has a line of its own, as AIPerf writes it."""
    hint: HintAction | None = None
    """The line is a hint about its blocks, not a request."""
    priority: Annotated[int, Meta(ge=0, le=MAX_PRIORITY)] = 0
    ttl_s: Annotated[float, Meta(ge=0, le=MAX_TTL_S)] = 0.0

    @property
    def is_session(self) -> bool:
        return self.requests is not UNSET

    def flat(self) -> Iterator[_Line]:
        """Yield the request, or those of a session and its agents."""
        if self.requests is UNSET:
            yield self
        else:
            for one in self.requests:
                yield from one.flat()

    @property
    def tokens_per_block(self) -> int | None:
        """Tokens of a request's block; None if it does not give them."""
        if isinstance(self.block_tokens, int):
            return self.block_tokens
        return self.valid_block_size

    @property
    def valid_block_size(self) -> int | None:
        return self.block_size if type(self.block_size) is int and 0 < self.block_size <= MAX_TOKENS else None

    def seconds(self, *, in_session: bool) -> float | None:
        """Return the time of a request or a hint; None if it has none."""
        if in_session and type(self.t) in (int, float):
            return float(self.t)
        return self.timestamp / 1000 if type(self.timestamp) in (int, float) else None


_DECODER = Decoder(_Line | list[_Line])


class TracedHint(NamedTuple):
    before: int
    """Number of the request that follows it."""
    seconds: float
    action: HintAction
    keys: bytes
    priority: int = 0
    ttl_s: float = 0.0


class RequestTrace(NamedTuple):
    """Requests by their concatenated keys, root first."""

    name: str
    tokens_per_block: int
    """Tokens of most blocks, if they differ."""
    requests: list[bytes]
    block_bytes: int = 0
    """Pool bytes of a block, the mean if they differ; 0 if the trace does not give them."""
    cut_off: bool = False
    """Whether the file ends in the middle."""
    others: Sequence[tuple[int, int, float]] = ()
    """Tokens, pool bytes and part of all accesses of each kind of blocks, if there are several."""
    missing: int = 0
    """Number of lines that the recording reports as lost."""
    seconds: Sequence[float] = ()
    """Times of the requests, never decreasing; empty if a line has none."""
    hints: Sequence[TracedHint] = ()
    """Hints in their order."""
    skipped: int = 0
    """Number of objects without ``hash_ids``, as of requests that were aborted, or of a summary."""
    sessions: Sequence[int] = ()
    """Number of each request's session, by first appearance; empty if a request has none."""

    @property
    def accesses(self) -> int:
        """Number of the requests' keys, repeated ones included."""
        return sum(map(len, self.requests)) // KEY_BYTES

    @property
    def distinct(self) -> int:
        """Number of different keys."""
        return len(np.unique(np.frombuffer(b"".join(self.requests), np.uint64)))


class _Lengths:
    """Ranges of the tokens that a block may have, by the lengths of all requests. Each request narrows them.

    Tools differ in what they do with tokens that fill no block.
    """

    def __init__(self) -> None:
        self._padded = range(1, MAX_TOKENS + 1)
        """If they are in a last block: count = ceil(length / tokens)."""
        self._whole = self._padded
        """If they are in no block: count = floor(length / tokens)."""

    def add(self, count: int, length: int) -> None:
        """Narrow the ranges by a request of ``length`` tokens in ``count`` blocks, at least two."""
        padded, whole = self._padded, self._whole
        self._padded = range(max(padded.start, -(-length // count)), min(padded.stop, (length - 1) // (count - 1) + 1))
        self._whole = range(max(whole.start, length // (count + 1) + 1), min(whole.stop, length // count + 1))

    @property
    def block_tokens(self) -> int:
        """The usual number that fits; ``MOONCAKE_TOKENS`` if none does."""
        usual = (MOONCAKE_TOKENS, *POWERS)
        fitting = [tokens for allowed in (self._padded, self._whole) for tokens in usual if tokens in allowed]
        return fitting[0] if fitting else MOONCAKE_TOKENS


class _TraceParts:
    """A trace as far as it was read. ``path``: for errors, and the trace's name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._requests: list[bytes] = []
        self._seconds: list[float] = []
        """Times of the requests that have one."""
        self._sessions: list[int] = []
        """Numbers of the sessions of requests that have one."""
        self._session_numbers: dict[object, int] = {}
        self._begin_together = False
        """Whether times are those since the beginning of a session."""
        self._hints: list[TracedHint] = []
        self._kinds: Counter[tuple[int, int]] = Counter()
        """Number of blocks by their tokens and bytes, 0 for unknown, as far as lines give them."""
        self._lengths = _Lengths()
        self._missing = self._skipped = self._requests_and_blocks = self._own_keys = 0

    def add(self, line: _Line) -> None:
        """Add a request, a hint, or the requests of a session. Raises BadTrace if the trace gets too large."""
        self._missing += line.dropped
        is_session = line.is_session
        if line.hash_ids is UNSET and not is_session:
            self._skipped += 1
            return
        self._begin_together |= is_session
        session: object = object() if is_session else line.session_id
        own: dict[int, int] = {}
        """Key by number, if the session's numbers mean other blocks than those of others."""
        for one in line.flat():
            ids = one.hash_ids or []
            self._requests_and_blocks += 1 + len(ids)
            if self._requests_and_blocks > MAX_REQUESTS_AND_BLOCKS:
                why = f"has more than {MAX_REQUESTS_AND_BLOCKS:,} requests and blocks of requests, together"
                raise BadTrace(f"{self._path} {why}, which are too many to replay; give a part of its lines.")
            if is_session and line.hash_id_scope == "local":
                ids = [own.setdefault(block, OWN_KEY + self._own_keys + len(own)) for block in ids]
            self._add_sizes(line, one, len(ids))
            keys = b"".join([(block & MAX_KEY).to_bytes(KEY_BYTES, "big") for block in ids])
            at = one.seconds(in_session=is_session)
            if line.hint is not None:
                if at is None:  # it comes with the request before it
                    at = self._seconds[-1] if self._seconds else 0.0
                self._hints.append(TracedHint(len(self._requests), at, line.hint, keys, line.priority, line.ttl_s))
                continue
            if at is not None:
                self._seconds.append(at)
            if isinstance(session, str | int) or is_session:
                self._sessions.append(self._session_numbers.setdefault(session, len(self._session_numbers)))
            self._requests.append(keys)
        self._own_keys += len(own)

    def _add_sizes(self, line: _Line, one: _Line, blocks: int) -> None:
        """Count the blocks of a request or hint, ``one``, by their sizes. ``line`` is the same, or its session."""
        if not blocks:
            return
        if line.is_session and line.block_size is not None:
            self._kinds[line.block_size, 0] += blocks
        elif (tokens := one.tokens_per_block) is not None or one.block_bytes:
            self._kinds[MOONCAKE_TOKENS if tokens is None else tokens, one.block_bytes] += blocks
        length = one.session_input_length if line.is_session else one.input_length
        if blocks > 1 and type(length) is int:
            self._lengths.add(blocks, length)

    def trace(self, *, cut_off: bool) -> RequestTrace:
        """Return the trace. Raises BadTrace if no object is a request."""
        requests, seconds, sessions, hints = self._requests, self._seconds, self._sessions, self._hints
        if self._skipped and not requests and not self._hints:
            raise BadTrace(f"{self._path} is not a trace: none of its objects has hash_ids, or a list of requests.")
        if len(seconds) < len(requests):
            seconds = []
        if len(sessions) < len(requests):
            sessions = []
        if self._begin_together and seconds:  # the sessions, one after the other in the file, ran at the same time
            by_time = sorted((at, number) for number, at in enumerate(seconds))
            # A hint comes before the first request that is later, or as late and behind the hint in the file.
            hints = [one._replace(before=bisect_left(by_time, (one.seconds, one.before))) for one in hints]
            hints.sort(key=lambda one: (one.before, one.seconds))
            requests, seconds = [requests[number] for _, number in by_time], [at for at, _ in by_time]
            sessions = [sessions[number] for _, number in by_time] if sessions else []
        seconds = [*accumulate(seconds, max)]
        by_tokens: Counter[int] = Counter()
        for (tokens, _), count in self._kinds.items():
            by_tokens[tokens] += count
        sized = {kind: count for kind, count in self._kinds.items() if kind[1]}
        blocks = sum(sized.values())
        return RequestTrace(
            self._path.stem.removesuffix(".jsonl"),
            max(by_tokens, key=by_tokens.__getitem__, default=self._lengths.block_tokens),
            requests,
            block_bytes=sum(nbytes * count for (_, nbytes), count in sized.items()) // max(1, blocks),
            cut_off=cut_off,
            others=[(*kind, count / blocks) for kind, count in sorted(sized.items())] if len(sized) > 1 else [],
            missing=self._missing,
            seconds=seconds,
            hints=hints,
            skipped=self._skipped,
            sessions=sessions,
        )


def read_trace(path: Path) -> RequestTrace:
    """Read a trace of requests or sessions: one JSON object a line, or a list of them, or one session.

    A request is an object whose ``hash_ids`` are its blocks, as in Mooncake's format. ``kvoffd-cli trace record``
    writes that, with more fields, compressed by gzip: client/README.md. kvcache-simulator's has a ``block_size``. A
    session has a list of ``requests``, as those of kv-cache-tester and AIPerf; all sessions begin together. If no line
    gives the tokens of a block, they are 512, or another power of two if only that fits the requests' lengths. A file
    that was cut off is read up to there.

    Sources: https://github.com/kvcache-ai/Mooncake, FAST25-release; https://github.com/callanjfox/kv-cache-tester,
    docs/trace_replay_tester.md; kvcache-simulator 0.1.3 in PyPI, README. Raises BadTrace, OSError.
    """
    parts = _TraceParts(path)
    try:
        for line in _decoded(_lines(path), path):
            parts.add(line)
    except EOFError:
        return parts.trace(cut_off=True)
    return parts.trace(cut_off=False)


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the file's lines, decompressed. Raises BadTrace, OSError, and EOFError at the end of a truncated file."""
    with path.open("rb") as file:
        begin = file.peek(len(ZSTD_MAGIC))  # a pipe cannot be read again
        if begin.startswith(ZSTD_MAGIC):
            raise BadTrace(f"{path} is compressed with zstd; unpack it with `zstd -d`.")
        if not begin.startswith(GZIP_MAGIC):
            yield from _bounded_lines(file, path)
            return
        try:
            with gzip.open(file) as unpacked:
                yield from _bounded_lines(cast(BinaryIO, unpacked), path)
        except (zlib.error, gzip.BadGzipFile) as error:
            raise BadTrace(f"{path} is damaged: {error}.") from None


def _bounded_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield the lines of a file. Raises BadTrace for one that is too long."""
    for line in iter(partial(file.readline, MAX_LINE_BYTES), b""):
        if len(line) == MAX_LINE_BYTES:
            raise BadTrace(f"{path} is not a trace: it has a line of more than {MAX_LINE_BYTES >> 20} MiB.")
        yield line


def _decoded(lines: Iterator[bytes], path: Path) -> Iterator[_Line]:
    """Decode the lines. Raises BadTrace, and EOFError if the last one is incomplete."""
    begun = False
    """Whether a line was a value, so that the others are too."""
    for number, line in enumerate(lines, 1):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if not line.strip():
            continue
        try:
            found = _DECODER.decode(line) if begun else _first_value(line, lines, path)
            begun = True
            every = found if isinstance(found, list) else [found]
            for one in every:
                _check(one, f"{path}:{number}")
        except BadTrace:
            raise
        except (DecodeError, ValueError, RecursionError) as error:
            is_malformed = isinstance(error, DecodeError) and not isinstance(error, ValidationError)
            if begun and is_malformed and not line.endswith(b"\n"):
                raise EOFError from None
            raise BadTrace(
                f"{path}:{number} is neither a request (a JSON object whose hash_ids are whole 64-bit numbers) nor a "
                "session (one with a list of requests)."
            ) from None
        yield from every


def _first_value(line: bytes, lines: Iterator[bytes], path: Path) -> _Line | list[_Line]:
    """Decode the first value of a file, which is the only one if it goes over several lines."""
    try:
        return _DECODER.decode(line)
    except DecodeError as error:
        if "truncated" not in str(error):  # as msgspec says of an unfinished value
            raise
    parts, nbytes = [line], len(line)
    for following in lines:
        parts.append(following)
        if (nbytes := nbytes + len(following)) > MAX_VALUE_BYTES:
            raise BadTrace(
                f"{path} is one JSON value of more than {MAX_VALUE_BYTES >> 20} MiB; give one object per line."
            )
    return _DECODER.decode(b"".join(parts))


def _check(line: _Line, where: str) -> None:
    """Check the values of a request or a session that their types leave open. Blocks and times may be missing.

    Raises BadTrace for a time, which has a sentence of its own, and ValueError without one for the others.
    """
    if line.is_session and line.hash_id_scope not in ("local", "global"):
        raise ValueError
    if line.is_session and line.block_size is not None and line.valid_block_size is None:
        raise ValueError
    for one in line.flat():
        if one.hash_ids and not -(1 << 63) <= min(one.hash_ids) <= max(one.hash_ids) <= MAX_KEY:
            raise ValueError
        for time in (one.t, one.timestamp):
            if type(time) in (int, float) and not -MAX_TIME <= time <= MAX_TIME:
                raise BadTrace(f"{where} has a time beyond 2^63; a timestamp is in milliseconds, and t in seconds.")
