"""RELIABILITY.md is true: each promise has two tests, each wait the length it says, and its files are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffd.config import SETTINGS, Config, ServerLimits
from kvoffd_client import ClientOptions
from kvoffd_client.vllm.config import ConnectorOptions
from kvoffd_proto.units import parse_duration
from tests.sim.planted import PLANTED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "RELIABILITY.md").read_text()
UNIT = (ROOT / "deploy" / "systemd" / "kvoffd.service").read_text()
DOOR = ("daemon", "cli", "faults", "chaos", "vllm")
OPTIONS = {"ClientOptions": ClientOptions(), "ConnectorOptions": ConnectorOptions(), "ServerLimits": ServerLimits()}


def constants() -> Iterator[tuple[tuple[str, str], float]]:
    """Every number of every module, read and not imported: vLLM and a GPU's driver may be missing."""
    for top in ("kvoffd", "client/kvoffd_client", "proto/kvoffd_proto"):
        for path in (ROOT / top).rglob("*.py"):
            module = ".".join(path.relative_to((ROOT / top).parent).with_suffix("").parts)
            for node in ast.parse(path.read_text()).body:
                if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
                    continue
                for target in node.targets:
                    if isinstance(target, ast.Name) and isinstance(node.value.value, int | float):
                        yield (module, target.id), node.value.value


CONSTANTS = dict(constants())


def rows() -> dict[str, str]:
    """Of the table of waits: where each is set, and how long it is."""
    _, _, section = PAGE.partition("## How long anybody waits")
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


def promises() -> dict[str, tuple[str, str]]:
    """Of the table of promises: the test at the door and the one in the simulator, by number."""
    _, _, section = PAGE.partition("## Promises")
    found: dict[str, tuple[str, str]] = {}
    for line in section.partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].isdecimal():
            found[cells[0]] = cells[2].strip("`"), cells[3].strip("`")
    return found


def is_there(test: str) -> bool:
    """Whether a test of this id is defined; what is in brackets behind its name is the name of a planted fault."""
    file, _, name = test.partition("::")
    function, _, fault = name.partition("[")
    path = ROOT / file
    if not path.exists() or not re.search(rf"^def {function}\(", path.read_text(), re.MULTILINE):
        return False
    return not fault or any(planted.name == fault.rstrip("]") for planted in PLANTED)


def test_waits_are_as_long_as_the_table_says() -> None:
    shown = {name: parse_duration(wait.replace(" ", "")) for name, wait in rows().items()}
    assert shown == pytest.approx({name: value_s(name) for name in shown})


def test_each_promise_has_a_test_at_the_door_and_one_in_the_simulator() -> None:
    assert len(promises()) == 12
    for number, (door, simulator) in promises().items():
        assert is_there(door), f"promise {number}: there is no {door}"
        assert door.split("/")[1] in DOOR
        assert is_there(simulator), f"promise {number}: there is no {simulator}"
        assert simulator.startswith("tests/sim/")


def test_files_that_the_page_names_are_there() -> None:
    named = set(re.findall(r"`((?:tests|kvoffd|client|deploy)/[\w/.*-]+)`", PAGE))
    assert len(named) > 10
    assert [name for name in sorted(named) if not list(ROOT.glob(name))] == []


def test_each_symptom_has_a_test_that_is_there() -> None:
    _, _, section = PAGE.partition("## Symptoms that others report")
    lines = section.partition("\n## ")[0].splitlines()
    for line in lines[lines.index("|---|---|---|") + 1 :]:
        tests = re.findall(r"`(tests/\S+::\w+)`", line)
        assert tests or not line, line
        assert all(map(is_there, tests)), line
