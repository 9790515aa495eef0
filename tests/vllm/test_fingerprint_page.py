"""client/FINGERPRINT.md judges every field of vLLM's configuration, and its environment variables.

``python -m tests.vllm.test_fingerprint_page`` writes the list of these fields that the connector has.
"""

from __future__ import annotations

import dataclasses
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import vllm
import vllm.config
from vllm import envs

from kvoffd_client.vllm.compat import release_of
from kvoffd_client.vllm.fingerprint import ENVIRONMENT, JUDGED_FIELDS

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


def judged_fields() -> str:
    """All of them, of whichever release, as the connector's list has them."""
    return "".join(
        " ".join([name, *sorted(field for field, _ in fields)]) + "\n" for name, fields in judged().items() if fields
    )


def test_the_connectors_list_of_judged_fields_is_the_pages() -> None:
    assert JUDGED_FIELDS.read_text() == judged_fields(), "python -m tests.vllm.test_fingerprint_page"


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_is_judged_once(name: str) -> None:
    named = [field for field, only in judged().get(name, []) if only in ("", RELEASE)]
    assert len(named) == len(set(named))
    fields = {field.name for field in dataclasses.fields(CLASSES[name])}
    assert fields - set(named) == set(), "judge them in client/FINGERPRINT.md"
    assert set(named) - fields == set(), "this vLLM does not have them"


def variables() -> list[tuple[str, str, str]]:
    """Each name or pattern of the page's last table, with the only release that has it, and the verdict."""
    rows = [line.split(" | ") for line in PAGE.read_text().split("\n## Environment variables")[1].splitlines()]
    return [
        (name, only, row[1])
        for row in rows
        if len(row) == 3
        for name, only in re.findall(r"`([A-Z0-9_]+\*?)`(?: \((0\.\d+)\))?", row[0])
    ]


def test_every_environment_variable_is_judged_once() -> None:
    names = [name for name, only, _ in variables() if RELEASE.startswith(only)]
    assert len(names) == len(set(names))
    known = set(envs.environment_variables)
    missing = sorted(each for each in known if not any(fnmatchcase(each, name) for name in names))
    assert not missing, "judge them in client/FINGERPRINT.md"
    assert not {name for name in names if "*" not in name} - known, "this vLLM does not have them"


def test_the_variables_that_are_in_are_those_that_are_read() -> None:
    assert sorted(name for name, _, verdict in variables() if verdict == "in") == sorted(ENVIRONMENT)


if __name__ == "__main__":
    JUDGED_FIELDS.write_text(judged_fields())
