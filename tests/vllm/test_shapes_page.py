"""client/SHAPES.md and client/COMPARISON.md name tests and lines that are there; each test of an engine has a row."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import TransferResult

from tests.gpu.test_engines import SHAPES

# Collecting imports vLLM and torch.
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "client" / "SHAPES.md"
COMPARISON = ROOT / "client" / "COMPARISON.md"
RESULTS = ("works", "refused", "not run")
NAME = re.compile(r"`(tests/[\w/]+\.py(?:::[^`]+)?)`")
VLLM = Path(vllm.__file__).parent
# Where the folders of vLLM lie that the comparison abbreviates.
FOLDERS = {"kv_offload": VLLM / "v1", "offloading": VLLM / "distributed" / "kv_transfer" / "kv_connector" / "v1"}


class Collected:
    """Plugin of pytest: the marks of every test, by its name for pytest."""

    def __init__(self) -> None:
        self.marks: dict[str, set[str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.marks = {item.nodeid: {mark.name for mark in item.iter_markers()} for item in items}


def rows() -> list[list[str]]:
    """The cells of every row of the page's tables: shape, result, tests."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def named(*pages: Path) -> set[str]:
    return {name for page in pages for name in NAME.findall(page.read_text())}


@pytest.fixture(scope="module")
def tests() -> dict[str, set[str]]:
    """Every test of the connector, of GPUs and of other files that are named."""
    elsewhere = {name.partition("::")[0] for name in named(COMPARISON)}
    elsewhere = {name for name in elsewhere if not name.startswith(("tests/vllm/", "tests/gpu/"))}
    found = Collected()
    files = [str(ROOT / name) for name in ("tests/vllm", "tests/gpu", *sorted(elsewhere))]
    # Here rather than in a process of its own, which would import vLLM and torch once more.
    with contextlib.redirect_stdout(io.StringIO()) as said:
        pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *files], plugins=[found])
    assert found.marks, said.getvalue()[-2000:]
    return found.marks


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


def test_the_tests_that_rows_name_are_there(tests: dict[str, set[str]]) -> None:
    missing = [name for name in sorted(named(PAGE, COMPARISON)) if not any(covers(name, test) for test in tests)]
    assert not missing


def test_every_test_of_an_engine_is_named(tests: dict[str, set[str]]) -> None:
    engines = {test for test, marks in tests.items() if {"engine", "shapes"} & marks}
    assert engines
    missing = sorted(test for test in engines if not any(covers(name, test) for name in named(PAGE)))
    assert not missing, "name them in client/SHAPES.md"


@pytest.mark.skipif(not vllm.__version__.startswith("0.32."), reason="the first of two lines is one of 0.32")
def test_what_the_comparison_says_of_vllm_has_a_line_there() -> None:
    lines = re.findall(r"`(?:([\w/]+\.py))?:([\d,-]+)(?:/[\d,-]+)?`", COMPARISON.read_text())
    assert len(lines) >= 20
    source: list[str] = []
    for file, numbers in lines:
        if file:
            source = (FOLDERS.get(file.partition("/")[0], VLLM) / file).read_text().splitlines()
        assert all(source[int(number) - 1].strip() for number in re.findall(r"\d+", numbers)), (file, numbers)


def test_flashinfer_takes_the_heads_of_its_shapes_model(tmp_path: Path) -> None:
    """Which no machine without a GPU runs. vLLM's list is read: flashinfer is not beside a vLLM for CPU."""
    source = (VLLM / "v1" / "attention" / "backends" / "flashinfer.py").read_text()
    sizes = re.findall(r"def get_supported_head_sizes.*?return \[(.*?)\]", source, re.DOTALL)
    config = json.loads((SHAPES["flashinfer"].make(tmp_path / "model") / "config.json").read_text())
    assert str(config["hidden_size"] // config["num_attention_heads"]) in sizes[0].split(", ")


def test_vllms_own_worker_asserts_on_a_failed_load() -> None:
    """When this fails, vLLM has learned it: correct client/COMPARISON.md."""
    worker = OffloadingConnectorWorker.__new__(OffloadingConnectorWorker)
    worker.worker = SimpleNamespace(get_finished=lambda: [TransferResult(job_id=1, success=False)])
    worker._load_jobs = {1: "request"}
    with pytest.raises(AssertionError):
        worker.get_finished(set())
