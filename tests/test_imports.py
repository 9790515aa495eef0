"""Who imports whom: packages import downwards only, type-only imports included, and the door suite no inner module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import kvoffd_client

ROOT = Path(__file__).parents[1]
TREES = {
    "kvoffd": ROOT / "kvoffd",
    "kvoffd_client": ROOT / "client/kvoffd_client",
    "kvoffd_proto": ROOT / "proto/kvoffd_proto",
}

DISTRIBUTION = {
    "kvoffd_proto": set[str](),
    "kvoffd_client": {"kvoffd_proto"},
    "kvoffd": {"kvoffd_proto"},
}
"""What each top-level package may import of the others."""

PACKAGES = {
    "errors": "",
    "system": "errors",
    "observe": "system errors",
    "pool": "system errors",
    "cache": "pool system errors",
    "tiers": "pool system errors",
    "tiering": "cache tiers pool system errors",
    "simulate": "tiering tiers cache pool system errors",
    "config": "tiering tiers cache errors",
    "memory_estimate": "config tiering tiers cache pool system errors",
    "transfer": "pool system errors",
    "server": "tiering tiers cache transfer pool system observe config memory_estimate errors",
    "cli": "server simulate cache observe config memory_estimate pool system errors",
    "__main__": "cli",
}
"""The packages and single modules of ``kvoffd``, from the lowest up, and what each of them may import."""

DOOR = ("daemon", "cli", "faults", "chaos")
"""Folders of tests at the border. They outlive what is behind it."""


def imports_of(source: str, module: str, is_package: bool) -> Iterator[str]:
    """The absolute names of all modules that a module's source imports, wherever in it the imports are."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".") + ["__init__"] * is_package
            parents = parts[: len(parts) - node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def imported() -> dict[str, set[str]]:
    """By module of the product, the absolute names of what it imports."""
    found = {}
    for name, root in TREES.items():
        for path in root.rglob("*.py"):
            parts = [part for part in path.relative_to(root).with_suffix("").parts if part != "__init__"]
            module = ".".join([name, *parts])
            found[module] = set(imports_of(path.read_text(), module, path.name == "__init__.py"))
    return found


def tops(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def package_of(module: str) -> str:
    """In ``kvoffd``."""
    return module.partition(".")[2].partition(".")[0]


PARTS = {"kvoffd.cache.awaited_keys"}
"""Files that are parts of the only one that imports them, and know it."""


@pytest.mark.parametrize("package", ["server", "cache", "transfer", "pool", "system", "observe"])
def test_files_of_a_package_import_each_other_in_no_circle(package: str) -> None:
    """Else none of a circle's files can be read before the others."""
    inner = {one for one in imported() if one.startswith(f"kvoffd.{package}.")} - PARTS
    left = {one: imported()[one] & inner - {one} for one in inner}
    while free := [one for one, names in left.items() if not names]:
        left = {one: names - {*free} for one, names in left.items() if names}
    assert not left


def test_packages_are_listed_from_the_lowest_up() -> None:
    names = list(PACKAGES)
    for name, allowed in PACKAGES.items():
        assert all(names.index(other) < names.index(name) for other in allowed.split()), name
    assert {package_of(module) for module in imported() if module.startswith("kvoffd.")} == set(names)


def test_packages_import_only_what_they_may() -> None:
    """And so in no circle, since each package may only import from those above it in the list."""
    for module, names in imported().items():
        if module.startswith("kvoffd."):
            own, others = package_of(module), {package_of(name) for name in names if name.startswith("kvoffd.")}
            assert others & set(PACKAGES) - {own} <= set(PACKAGES[own].split()), module


def test_the_daemon_and_the_client_share_only_the_wire() -> None:
    for module, names in imported().items():
        own = module.partition(".")[0]
        assert tops(names) & set(TREES) - {own} <= DISTRIBUTION[own], module


def test_what_is_never_imported() -> None:
    for module, names in imported().items():
        never = set() if module.startswith("kvoffd_client.vllm") else {"vllm"}
        if not module.startswith("kvoffd_client"):
            never |= {"torch"}
        if module.startswith("kvoffd_proto"):  # both ends import it, and other tools may
            never |= {"numpy", "zmq"}
        if module.startswith("kvoffd.cache"):
            never |= {"asyncio", "socket", "threading", "zmq"}
        assert not tops(names) & never, module


def test_nothing_imports_what_is_for_tests() -> None:
    for module, names in imported().items():
        assert "kvoffd_client.testing" not in names, module


def test_the_door_suite_knows_the_border_only() -> None:
    public = {"kvoffd_client", "kvoffd_client.cli", "kvoffd_client.cli.main", "kvoffd_client.testing"}
    public |= {f"kvoffd_client.{name}" for name in kvoffd_client.__all__}
    files = [path for folder in DOOR for path in (ROOT / "tests" / folder).rglob("*.py")]
    files += [path for path in (ROOT / "tests/vllm").glob("test_*.py") if "pytest.mark.engine" in path.read_text()]
    inner: dict[str, set[str]] = {}
    for path in files:
        names = set(imports_of(path.read_text(), "tests.any.file", is_package=False))
        of_product = {name for name in names if name.partition(".")[0] in TREES}
        if wrong := {name for name in of_product - public if not name.startswith("kvoffd_client.testing.")}:
            inner[str(path.relative_to(ROOT))] = wrong
    assert not inner, "use public names of kvoffd_client, or tests/kit: tests/kit/wire.py alone knows the wire"
