"""client/SHAPES.md is true to the tests: those that its rows name are there, and each test of an engine is in a row."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Collecting imports vLLM and torch.
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "client" / "SHAPES.md"
RESULTS = ("works", "refused", "not run")
NAME = re.compile(r"`(tests/[\w/]+\.py(?:::[^`]+)?)`")

COLLECT = """
import json, sys
import pytest
class Collected:
    def pytest_collection_modifyitems(self, items):
        marks = {item.nodeid: sorted({mark.name for mark in item.iter_markers()}) for item in items}
        print("collected", json.dumps(marks))
sys.exit(pytest.main(["--collect-only", "-qq", *sys.argv[1:]], plugins=[Collected()]))
"""


def rows() -> list[list[str]]:
    """The cells of every row of the page's tables: shape, result, tests."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@pytest.fixture(scope="module")
def tests() -> dict[str, list[str]]:
    """The marks of every test of the connector, of engines elsewhere and of GPUs, by its name for pytest."""
    command = [sys.executable, "-c", COLLECT, "tests/vllm", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("collected ")] or [""]
    assert line, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(line.partition(" ")[2])
    return found


def covers(name: str, test: str) -> bool:
    """A row may name a file, a test with all its parameters, or one of them."""
    return test == name or test.startswith((f"{name}::", f"{name}["))


def test_a_row_says_what_becomes_of_its_shape() -> None:
    header, *shapes = [row for row in rows() if not row[0].startswith("--")]
    assert header == ["shape", "vLLM 0.32", "tests"]
    assert len(shapes) >= 10
    for row in shapes:
        if row == header:
            continue
        assert len(row) == 3, row
        assert row[1].startswith(RESULTS), row
        assert NAME.search(row[2]) or row[1].startswith("not run"), f"no test is named for {row[0]!r}"
        assert row[1] not in ("refused", "not run"), f"the row of {row[0]!r} does not say with what sentence, or why"


def test_the_tests_that_rows_name_are_there(tests: dict[str, list[str]]) -> None:
    named = set(NAME.findall(PAGE.read_text()))
    missing = [name for name in sorted(named) if not any(covers(name, test) for test in tests)]
    assert not missing


def test_every_test_of_an_engine_is_named(tests: dict[str, list[str]]) -> None:
    named = set(NAME.findall(PAGE.read_text()))
    engines = {test for test, marks in tests.items() if {"engine", "shapes"} & set(marks)}
    assert engines
    missing = sorted(test for test in engines if not any(covers(name, test) for name in named))
    assert not missing, "name them in client/SHAPES.md"
