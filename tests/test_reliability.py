"""RELIABILITY.md says what is: its table of waits has every wait and its default. Files are there."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffd.config import SETTINGS, Config
from kvoffd_client import ClientOptions
from kvoffd_client.vllm.connector_options import ConnectorOptions
from kvoffd_proto.units import parse_duration

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "RELIABILITY.md").read_text()
BUGS = (ROOT / "tests" / "BUGS_FOUND.md").read_text()
UNIT = (ROOT / "deploy" / "systemd" / "kvoffd.service").read_text()
OPTIONS = {"ClientOptions": ClientOptions(), "ConnectorOptions": ConnectorOptions()}
WAIT_WORDS = "TIMEOUT|DEADLINE|CLOSE|AFTER|GRACE|HANGING|HANDSHAKE|ABANDON|LINGER|WAIT"
WAIT_NAME = re.compile(rf"_?([A-Z_]+_)?({WAIT_WORDS})_(S|MS)")
"""Constants of these names are waits. Pauses, intervals and bounds of sizes have others."""
NO_WAITS = {
    "ConnectorOptions.lookup_refresh_ms": "how old an answer may be",
    "shared_ask_deadline": "0 unless it is set: that of the kind of store, which the table has",
    "heartbeat_interval": "how often, not how long",
    "event_heartbeat": "how often, not how long",
}


def constants() -> Iterator[tuple[tuple[str, str], float]]:
    """Every number of every module, read and not imported: vLLM and a GPU's driver may be missing."""
    for top in ("kvoffd", "client/kvoffd_client", "proto/kvoffd_proto"):
        for path in (ROOT / top).rglob("*.py"):
            module = ".".join(path.relative_to((ROOT / top).parent).with_suffix("").parts)
            for node in ast.parse(path.read_text()).body:
                if (
                    "bench" in path.parts
                    or not isinstance(node, ast.Assign)
                    or not isinstance(node.value, ast.Constant)
                ):
                    continue
                for target in node.targets:
                    if isinstance(target, ast.Name) and isinstance(node.value.value, int | float):
                        yield (module, target.id), node.value.value


CONSTANTS = dict(constants())


def rows() -> dict[str, str]:
    """Of the table of waits: where each is set, and how long it is."""
    _, _, section = PAGE.partition("## Every wait has a deadline")
    found: dict[str, str] = {}
    for line in section.partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and (name := re.fullmatch("`(.+)`", cells[2])):
            assert name[1] not in found, f"{name[1]} is in the table twice"
            found[name[1]] = cells[1]
    return found


def value_s(name: str) -> float:
    """What the code says, in seconds."""
    settings = {setting.name: setting.field_name for setting in SETTINGS}
    owner, _, last = name.rpartition(".")
    value: float
    if name in settings:
        value = getattr(Config(), settings[name])
    elif owner in OPTIONS:
        value = getattr(OPTIONS[owner], last)
    elif not owner:
        found = re.search(rf"^{name}=(.+)$", UNIT, re.MULTILINE)
        assert found, f"{name} is neither a setting nor in the systemd unit"
        value = parse_duration(found[1])
    else:
        value = CONSTANTS[owner, last]
    return value / 1000 if last.lower().endswith("_ms") else value


def waits_in_code() -> Iterator[str]:
    for setting in SETTINGS:
        if setting.kind.metavar == "DURATION":
            yield setting.name
    for owner, options in OPTIONS.items():
        for field in dataclasses.fields(options):
            if field.name.endswith(("_s", "_ms")):
                yield f"{owner}.{field.name}"
    for module, name in CONSTANTS:
        if WAIT_NAME.fullmatch(name):
            yield f"{module}.{name}"


@pytest.mark.parametrize(("name", "shown"), rows().items())
def test_a_wait_is_as_long_as_the_table_says(name: str, shown: str) -> None:
    assert parse_duration(shown.replace(" ", "")) == pytest.approx(value_s(name))


def test_every_wait_is_in_the_table() -> None:
    missing = set(waits_in_code()) - set(rows()) - set(NO_WAITS)
    assert not missing, f"enter {sorted(missing)} into the table of waits in RELIABILITY.md"


def test_files_that_the_pages_name_are_there() -> None:
    named = set(re.findall(r"`((?:tests|kvoffd|client|deploy)/[\w/.*-]+)`", PAGE + BUGS))
    assert len(named) > 20
    assert [name for name in sorted(named) if not list(ROOT.glob(name))] == []
