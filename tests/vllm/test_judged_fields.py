"""judged_fields.txt judges every field of vLLM's configuration, and its environment variables."""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase

import vllm
import vllm.config
from vllm import envs

from kvoffd_client.vllm.compat import release_of
from kvoffd_client.vllm.fingerprint import JUDGED_FIELDS, judged_fields

RELEASE = ".".join(map(str, release_of(vllm.__version__) or ()))


def test_fingerprint_judges_every_field() -> None:
    for name, found in vars(vllm.config).items():
        if isinstance(found, type) and dataclasses.is_dataclass(found):
            judged = {field for field, only in judged_fields().get(name, {}).items() if only in ("", RELEASE)}
            fields = {field.name for field in dataclasses.fields(found)}
            assert fields <= judged, f"judge {fields - judged} of {name} in {JUDGED_FIELDS.name}"


def test_fingerprint_judges_every_variable() -> None:
    names = judged_fields()["environment"]
    missing = [each for each in envs.environment_variables if not any(fnmatchcase(each, name) for name in names)]
    assert not missing, f"judge them in {JUDGED_FIELDS.name}"
