"""The program that measures lookups while blocks come up works: all of each prompt does, from a store and a disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.coming_up import PAUSES_S, measure, page

BLOCKS, BLOCK_BYTES = 8, 1 << 18


@pytest.mark.parametrize("kind", ["redis", "disk"])
def test_a_prompt_comes_up_however_often_it_is_asked_for(kind: str, tmp_path: Path) -> None:
    found = measure(kind, 1, BLOCKS, BLOCK_BYTES, str(tmp_path))
    assert {name: len(rounds) for name, rounds in found.items()} == dict.fromkeys(PAUSES_S, 1)
    assert "every 3 ms" in page({kind: found}, BLOCKS * BLOCK_BYTES)
