"""The page of what policies make of traces is written from any trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvoffd.cache import POLICY_NAMES
from tests.kit.made_up_loads import LOADS

from . import policies


def test_the_page_has_each_policy_and_the_error_of_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, page = tmp_path / "small.jsonl", tmp_path / "page.md"
    trace.write_text("".join(json.dumps({"hash_ids": [1, 2, 3]}) + "\n" for _ in range(4)))
    monkeypatch.setattr(policies, "BLOCKS", (2, 3))
    monkeypatch.setattr(policies, "POOLS", (20,))
    monkeypatch.setattr(policies, "PAGE", page)
    monkeypatch.setattr(policies, "MADE_REQUESTS", 400)
    monkeypatch.setattr(policies, "PARTS", (1,))
    assert policies.main([str(trace)]) == 0
    lines = page.read_text().splitlines()
    assert "| lru | 50.0 (17) | 75.0 (25) |" in lines
    assert {line.split(" | ")[0] for line in lines} >= {f"| {name}" for name in POLICY_NAMES}
    assert "| the optimum | 50.0 | 75.0 |" in lines
    assert "| small | 20 | 0.00 | 0.00 |" in lines
    assert "| a cycle of 200 documents | 50.0, 50.0 (2) |" in lines
    assert sum(line.split(" | ")[0].removeprefix("| ") in LOADS for line in lines) == len(LOADS)
