"""What vllm_changes finds between two made-up releases; nothing is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.vllm_changes import Tree, Uses, changes

CONNECTOR = """
from vllm.base import Manager
from vllm.calls import build, old_name

class OurManager(Manager):
    def __init__(self):
        self._window = 1
    def lookup(self, key):
        return self.jobs._jobs[key].is_store
"""
BASE = """
from abc import ABC, abstractmethod
from vllm.jobs import Jobs

class Root(ABC):
    def from_root(self): ...

class Manager(Root):
    @abstractmethod
    def lookup(self, key: bytes): ...
    def touch(self, keys): ...
    def _unused(self): ...
"""
JOBS = """
class Job:
    is_store: bool

class Jobs:
    def __init__(self):
        self._jobs: dict[int, Job] = {}
"""
CALLS = """
from vllm.elsewhere import build

def old_name(): ...
"""
ELSEWHERE = """
def build(config: int) -> int:
    return config
"""
FILES = {"base.py": BASE, "jobs.py": JOBS, "calls.py": CALLS, "elsewhere.py": ELSEWHERE}


def report(tmp_path: Path, **changed: tuple[str, str]) -> list[str]:
    """Compare FILES with a release in which, by file, one text was replaced by another."""
    trees = []
    for release, files in (("old", {}), ("new", changed)):
        root = tmp_path / release / "vllm"
        root.mkdir(parents=True)
        for name, text in FILES.items():
            before, after = files.get(name.removesuffix(".py"), ("", ""))
            assert before in text
            (root / name).write_text(text.replace(before, after, 1) if before else text)
        trees.append(Tree(root))
    source = tmp_path / "connector.py"
    source.write_text(CONNECTOR)
    return [line.strip() for line in changes(*trees, Uses.of([source]))]


def test_equal_releases_differ_in_nothing_and_private_attributes_are_listed(tmp_path: Path) -> None:
    assert report(tmp_path) == ["Private attributes that are used", "Jobs._jobs is as it was"]


@pytest.mark.parametrize(
    ("file", "before", "after", "line"),
    [
        (
            "base",
            "key: bytes",
            "key, again=False",
            "~ lookup(self, key) [abstractmethod] is now lookup(self, key, again=False)",
        ),
        (
            "base",
            "    def _unused",
            "    @abstractmethod\n    def _unused",
            "! _unused(self) [abstractmethod] is abstract now",
        ),
        ("base", "    def touch(self, keys): ...\n", "", "- touch(self, keys)"),
        (
            "base",
            "    def from_root(self)",
            "    def from_root(self, step)",
            "~ from_root(self) is now from_root(self, step)",
        ),
        ("base", "    def _unused", "    def reset(self): ...\n    def _unused", "+ reset(self)"),
        (
            "base",
            "    def _unused",
            "    _window: int = 0\n    def _unused",
            "! _window is an attribute of vLLM's own now (OurManager has it)",
        ),
        ("jobs", "_jobs:", "_table:", "! Jobs._jobs is gone"),
        ("jobs", "dict[int, Job]", "list[Job]", "~ Jobs._jobs: dict[int, Job] is now Jobs._jobs: list[Job]"),
        ("calls", "def old_name", "def new_name", "! it is gone, or was moved"),
        ("elsewhere", "config: int)", "config, groups)", "~ (config) is now (config, groups)"),
        ("elsewhere", "return config", "return config + 1", "~ does something else, or does it otherwise: it"),
    ],
)
def test_what_changed_is_said(tmp_path: Path, file: str, before: str, after: str, line: str) -> None:
    found = report(tmp_path, **{file: (before, after)})
    assert any(line in said for said in found), found


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("elsewhere", "config: int", "config: str"),
        ("elsewhere", "    return", '    """Build it."""\n    return'),
        ("base", "def _unused(self)", "def _unused(self, more)"),
    ],
)
def test_annotations_docstrings_and_private_methods_that_are_not_used_are_no_change(
    tmp_path: Path, file: str, before: str, after: str
) -> None:
    assert report(tmp_path, **{file: (before, after)}) == report(tmp_path / "equal")


def test_a_field_that_is_used_and_gone_is_said(tmp_path: Path) -> None:
    # Job is reached through an object that vLLM hands over, and its module is imported by one that we import from.
    assert "- Job.is_store" in report(tmp_path, jobs=("is_store", "stores"))
