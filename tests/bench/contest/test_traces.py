"""Slices of traces: whole conversations, lengths that fit, and recordings of ``kvoffd-cli trace record``."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.contest.traces import slice_of


def published(count: int, turns: int, tokens: int) -> list[dict[str, Any]]:
    """Return conversations that share a system prompt's key and grow by a key a turn, interleaved."""
    return [
        {
            "timestamp": 1000 * (turn * count + chat),
            "input_length": tokens * (turn + 2),
            "output_length": 64,
            "hash_ids": [0, *(1000 * (chat + 1) + at for at in range(turn + 1))],
        }
        for turn in range(turns)
        for chat in range(count)
    ]


def write(file: Path, lines: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(one) + "\n" for one in lines)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


def test_whole_conversations_are_drawn_and_lengths_divided(tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.jsonl", published(count=100, turns=3, tokens=512))
    made = slice_of(trace, tmp_path / "slice.jsonl", most=30, max_tokens=600, seconds=60.0)
    lines = [json.loads(line) for line in made.file.read_text().splitlines()]
    assert (made.requests, made.divisor, made.block_tokens) == (30, 4, 128)
    chats = [one["hash_ids"][1] for one in lines]
    assert sorted(map(chats.count, set(chats))) == [3] * 10
    assert (lines[0]["timestamp"], lines[-1]["timestamp"] * made.seconds_per_unit) == (0, pytest.approx(60.0))
    # Each turn repeats the system prompt and what came before, but for the first request of all.
    assert made.repeated == 128 * (9 + 10 * 2 + 10 * 3)
    assert made.tokens == 128 * 10 * (2 + 3 + 4)


def test_a_recording_is_a_trace(tmp_path: Path) -> None:
    recorded = [
        {
            "timestamp": 100 * at,
            "input_length": 64,
            "hash_ids": [1, at],
            "namespace": 0,
            "group": 0,
            "block_tokens": 32,
            "block_bytes": 1,
        }
        for at in range(4)
    ]
    hint = {**recorded[0], "hint": "retain", "priority": 1, "ttl_s": 5}
    trace = write(tmp_path / "trace.jsonl.gz", [hint, *recorded])
    made = slice_of(trace, tmp_path / "slice.jsonl", most=100, max_tokens=3_000, seconds=10.0)
    assert (made.requests, made.tokens, made.block_tokens, made.divisor) == (4, 256, 32, 1)
    assert {json.loads(line)["output_length"] for line in made.file.read_text().splitlines()} == {8}


def test_other_files_are_refused(tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", [{"a": 1}])
    with pytest.raises(ValueError, match="is not a trace"):
        slice_of(other, tmp_path / "slice.jsonl", most=1, max_tokens=1, seconds=1.0)
