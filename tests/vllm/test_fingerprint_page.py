"""client/FINGERPRINT.md judges every field of vLLM's configuration."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import vllm
import vllm.config

from kvoffd_client.vllm import release_of

PAGE = Path(__file__).parents[2] / "client" / "FINGERPRINT.md"
RELEASE = ".".join(map(str, release_of(vllm.__version__) or ()))
CLASSES = {
    name: found
    for name, found in vars(vllm.config).items()
    if isinstance(found, type) and dataclasses.is_dataclass(found)
}
VERDICTS = {"in", "covered", "out"}


def judged() -> dict[str, list[tuple[str, str]]]:
    """Of each class on the page its fields, each with the only release that has it; empty for every release."""
    fields: dict[str, list[tuple[str, str]]] = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        name, *lines = section.splitlines()
        rows = [line.split(" | ") for line in lines if line.startswith("| `")]
        assert all(row[1] in VERDICTS and len(row) == 3 for row in rows), name
        fields[name] = [found for row in rows for found in re.findall(r"`(\w+)`(?: \((0\.\d+)\))?", row[0])]
    return fields


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_is_judged_once(name: str) -> None:
    named = [field for field, only in judged().get(name, []) if only in ("", RELEASE)]
    assert len(named) == len(set(named))
    fields = {field.name for field in dataclasses.fields(CLASSES[name])}
    assert fields - set(named) == set(), "judge them in client/FINGERPRINT.md"
    assert set(named) - fields == set(), "this vLLM does not have them"
