"""KV cache events as lines, for ``kvoffd-cli events``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from kvoffd_client.cli.json_output import Plain
from kvoffd_client.cli.text import printable, short_fingerprint
from kvoffd_proto.events import (
    KV_TOPIC_PREFIX,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
)

HASH_DIGITS = 12


def fingerprint_of(topic: bytes) -> bytes:
    """The fingerprint in a KV topic; empty where it is none."""
    try:
        return bytes.fromhex(topic.removeprefix(KV_TOPIC_PREFIX).decode("ascii"))
    except ValueError:
        return b""


def gap_before(sequence: int, last: int | None) -> str:
    """A sentence when messages between ``last`` and ``sequence`` did not come, else nothing."""
    if last is None or sequence == last + 1:
        return ""
    if sequence <= last:
        return "The daemon was restarted: its pool is empty and its events count from the start again."
    missing = sequence - last - 1
    return f"{missing} event message{'s' if missing > 1 else ''} before number {sequence} did not arrive here."


def lines_of(topic: bytes, sequence: int, batch: EventBatch, labels: Mapping[bytes, str]) -> Iterator[str]:
    """One line per event: time, sequence number, namespace, what happened."""
    fingerprint = fingerprint_of(topic)
    name = f"{short_fingerprint(fingerprint)} {printable(labels.get(fingerprint, ''))}".strip()
    clock = time.strftime("%H:%M:%S", time.localtime(batch.ts))
    milliseconds = int(batch.ts % 1 * 1000)
    for event in batch.events:
        yield f"{clock}.{milliseconds:03}  {sequence:>8}  {name}  {_happened(event)}"


def _happened(event: KvEvent) -> str:
    if isinstance(event, AllBlocksCleared):
        return "cleared  all blocks"
    word = "stored " if isinstance(event, BlockStored) else "removed"
    hashes = event.block_hashes
    group = "" if event.group_idx is None else f"group {event.group_idx}  "
    first, last = (block_hash.hex()[:HASH_DIGITS] for block_hash in (hashes[0], hashes[-1])) if hashes else ("", "")
    span = first if first == last else f"{first} to {last}"
    return f"{word}  {group}{len(hashes):>6} block{' ' if len(hashes) == 1 else 's'}  {span}".rstrip()


def event_object(topic: bytes, sequence: int, batch: EventBatch, labels: Mapping[bytes, str]) -> dict[str, Plain]:
    """The message as ``--json`` prints it. Hashes are hex."""
    fingerprint = fingerprint_of(topic)
    return {
        "sequence": sequence,
        "time": batch.ts,
        "namespace": fingerprint.hex(),
        "label": labels.get(fingerprint),
        "events": [_event(event) for event in batch.events],
    }


def _event(event: KvEvent) -> Plain:
    if isinstance(event, BlockStored):
        hashes: list[Plain] = [block_hash.hex() for block_hash in event.block_hashes]
        return {
            "type": "stored",
            "group": event.group_idx,
            "medium": event.medium,
            "tokens_per_block": event.block_size,
            "block_hashes": hashes,
        }
    if isinstance(event, BlockRemoved):
        hashes = [block_hash.hex() for block_hash in event.block_hashes]
        return {"type": "removed", "group": event.group_idx, "medium": event.medium, "block_hashes": hashes}
    return {"type": "cleared"}
