"""``kvoffd-cli record``: what engines ask for, anonymised, in a file that ``simulate`` replays.

The daemon opens no file: this process fetches what was asked for, and writes it with its own user's rights.
"""

from __future__ import annotations

import json as json_text
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from kvoffd_client.admin_client import AdminClient
from kvoffd_client.cli.console import count_blocks, print_line
from kvoffd_client.cli.json_objects import RecordDone
from kvoffd_client.cli.json_output import print_json
from kvoffd_client.cli.target import OPERATOR_WAIT_S, CliError, Directory, Json, local_directory
from kvoffd_client.errors import KvoffdClientError
from kvoffd_proto.admin import RecordedChain
from kvoffd_proto.units import format_count, format_duration, format_size, parse_duration, parse_size, plural
from kvoffd_proto.zstd import MISSING, zstd_module

FETCH_S = 0.5
"""Between two questions for what was asked for."""
ID_BITS = 53
"""Of a key's number: JSON's numbers are exact so far in every language."""
END_BYTES = 64
"""More than the end of the compressed stream takes."""
LEAST_BYTES = 4096


def record(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write, such as asked.jsonl.zst.")],
    duration: Annotated[
        str, typer.Option("--duration", metavar="TIME", help="End after so long, as in 90s or 2h. [default: at Ctrl-C]")
    ] = "",
    max_size: Annotated[str, typer.Option("--max-size", metavar="SIZE", help="End before FILE is larger.")] = "1GiB",
    directory: Directory = None,
    json: Json = False,
) -> int:
    """Record what engines ask for, in a file that simulate replays.

    Until Ctrl-C, or as long as --duration says. The file has one JSON object a line, compressed with zstd: a
    request's keys of one KV cache group, as numbers by which nobody can find out what was asked, since they are
    hashes with a salt that is kept nowhere. No text, no token and no name is in it. Engines are not slowed. The
    exit status is 1 where the daemon went away meanwhile; what was recorded until then is in the file.
    """
    option = "--duration"
    try:
        seconds = parse_duration(duration) if duration else float("inf")
        option = "--max-size"
        most_bytes = parse_size(max_size)
    except ValueError as error:
        raise CliError(f"{option}: {error}.") from None
    if not seconds:
        raise CliError(f"--duration {duration} records nothing; give a longer one, or none and end with Ctrl-C.")
    if most_bytes < LEAST_BYTES:
        raise CliError(f"--max-size {max_size} is too little; give {format_size(LEAST_BYTES)} or more.")
    if (zstd := zstd_module()) is None:
        raise CliError(MISSING)
    with AdminClient(local_directory(context, directory), OPERATOR_WAIT_S) as admin:
        number = admin.record().recording
        try:
            opened = file.open("xb")
        except FileExistsError:
            raise CliError(f"{file} exists already; name another file, or remove it.") from None
        except OSError as error:
            raise CliError(f"{file} cannot be written: {error.strerror}.") from None
        if sys.stderr.isatty():
            print("Recording; Ctrl-C ends it.", file=sys.stderr)
        try:
            with opened:
                done = _write(admin, number, file, TraceWriter(opened, zstd, most_bytes), seconds)
        except OSError as error:
            holds = file.exists() and file.stat().st_size > 0
            left = "What is in it can be replayed." if holds else "It is empty."
            raise CliError(f"{file} cannot be written to its end: {error.strerror}. {left}") from error
    if json:
        print_json(done)
    else:
        lost = f" {format_count(done.dropped)} more came too fast and are missing." if done.dropped else ""
        full = f" It ended since {file} may not be larger (--max-size)." if done.ended == "size" else ""
        print_line(
            f"{format_count(done.chains)} request{plural(done.chains)} for {count_blocks(done.keys)} in "
            f"{format_duration(done.seconds)}, in {format_size(done.bytes)} of {file}.{lost}{full}"
        )
    return int(done.ended == "daemon")


@dataclass
class TraceWriter:
    """Writes lines to a file that grows to ``most_bytes`` at most."""

    file: BinaryIO
    zstd: Any
    most_bytes: int
    chains: int = 0
    keys: int = 0
    dropped: int = 0
    _salt: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    def __post_init__(self) -> None:
        self._compressor = self.zstd.ZstdCompressor(
            options={
                self.zstd.CompressionParameter.enable_long_distance_matching: 1,
                self.zstd.CompressionParameter.checksum_flag: 1,
            }
        )
        self._unflushed = 0

    def write(self, chain: RecordedChain, dropped: int) -> bool:
        """Add a line; False where the file has no room for it. ``dropped``: chains that are missing behind it."""
        line = self._line(chain, dropped)
        if self.file.tell() + self._unflushed + len(line) + END_BYTES > self.most_bytes:
            self.flush()
            if self.file.tell() + len(line) + END_BYTES > self.most_bytes:
                return False
        self._unflushed += len(line)
        self.file.write(self._compressor.compress(line))
        self.chains += 1
        self.keys += len(chain.keys) // chain.key_bytes
        self.dropped += dropped
        return True

    def flush(self) -> None:
        """Have all lines in the file, so that who ends this process loses nothing."""
        if self._unflushed:
            self.file.write(self._compressor.flush(self.zstd.ZstdCompressor.FLUSH_BLOCK))
            self.file.flush()
            self._unflushed = 0

    def close(self) -> None:
        """Write the end of the stream."""
        self.file.write(self._compressor.flush())
        self.file.flush()
        os.fsync(self.file.fileno())

    def _line(self, chain: RecordedChain, dropped: int) -> bytes:
        """A request in Mooncake's format, with what that does not have."""
        # Equal keys of two groups or namespaces are different blocks.
        whose = chain.namespace.to_bytes(8, "big") + chain.group.to_bytes(8, "big")
        salted = blake2b(key=self._salt, person=whose, digest_size=8)
        ids = []
        for at in range(0, len(chain.keys), chain.key_bytes):
            one = salted.copy()
            one.update(chain.keys[at : at + chain.key_bytes])
            ids.append(int.from_bytes(one.digest(), "big") >> (64 - ID_BITS))
        fields = {
            "timestamp": chain.milliseconds,
            "input_length": len(ids) * chain.tokens_per_block,
            "hash_ids": ids,
            "namespace": chain.namespace,
            "group": chain.group,
            "block_tokens": chain.tokens_per_block,
            "block_bytes": chain.block_bytes,
        }
        if dropped:
            fields["dropped"] = dropped
        return json_text.dumps(fields, separators=(",", ":")).encode() + b"\n"


@contextmanager
def _ended_by_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set: the file gets its end."""
    end = threading.Event()
    before = {number: signal.signal(number, lambda *_: end.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield end
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write(admin: AdminClient, number: int, file: Path, writer: TraceWriter, seconds: float) -> RecordDone:
    began = time.monotonic()
    until, ended = began + seconds, ""
    with _ended_by_signal() as told:
        while not ended:
            if told.is_set():
                ended = "interrupt"
            elif time.monotonic() >= until:
                ended = "duration"
            try:
                fetched = admin.record(number, end=bool(ended))
            except KvoffdClientError as error:
                ended = "daemon"
                print(f"kvoffd-cli: {error}", file=sys.stderr)
                break
            for at, chain in enumerate(fetched.chains, 1):
                if not writer.write(chain, fetched.dropped if at == len(fetched.chains) else 0):
                    ended = "size"
                    break
            writer.flush()
            if not fetched.chains:
                writer.dropped += fetched.dropped
                told.wait(max(0.0, min(FETCH_S, until - time.monotonic())))
        took = time.monotonic() - began
        writer.close()
    return RecordDone(str(file), took, writer.chains, writer.keys, writer.dropped, writer.file.tell(), ended)
