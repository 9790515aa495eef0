"""client/FINGERPRINT.md judges every field of vLLM's configuration, and its environment variables.

``python -m tests.vllm.test_fingerprint_page`` writes the list of these fields that the connector has.
"""

from __future__ import annotations

import dataclasses
import re
from fnmatch import fnmatchcase
from pathlib import Path

import vllm
import vllm.config
from vllm import envs

from kvoffd_client.vllm.compat import release_of
from kvoffd_client.vllm.fingerprint import JUDGED_FIELDS

PAGE = Path(__file__).parents[2] / "client" / "FINGERPRINT.md"
VARIABLES = "environment variables"
RELEASE = ".".join(map(str, release_of(vllm.__version__) or ()))


def judged() -> dict[str, list[tuple[str, str]]]:
    """Of each class on the page its fields, each with the only release that has it; empty for every release."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, fields in re.findall(
        r"^\| (?:(\w+) \| )?(`.*?) \| (?:in|covered|out) \|", PAGE.read_text(), re.MULTILINE
    ):
        found.setdefault(name or VARIABLES, []).extend(re.findall(r"`(\w+\*?)`(?: \((0\.\d+)\))?", fields))
    return found


def judged_fields() -> str:
    """All fields, of whichever release, as the connector's list has them."""
    return "".join(
        " ".join([name, *sorted(field for field, _ in fields)]) + "\n"
        for name, fields in judged().items()
        if name != VARIABLES
    )


def test_fingerprint_judges_every_field() -> None:
    assert JUDGED_FIELDS.read_text() == judged_fields(), "python -m tests.vllm.test_fingerprint_page"
    for name, found in vars(vllm.config).items():
        if isinstance(found, type) and dataclasses.is_dataclass(found):
            named = {field for field, only in judged().get(name, []) if only in ("", RELEASE)}
            fields = {field.name for field in dataclasses.fields(found)}
            assert fields <= named, f"judge {fields - named} of {name} in client/FINGERPRINT.md"


def test_fingerprint_judges_every_variable() -> None:
    names = [name for name, _ in judged()[VARIABLES]]
    missing = [each for each in envs.environment_variables if not any(fnmatchcase(each, name) for name in names)]
    assert not missing, "judge them in client/FINGERPRINT.md"


if __name__ == "__main__":
    JUDGED_FIELDS.write_text(judged_fields())
