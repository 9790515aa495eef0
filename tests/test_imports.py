"""Who imports whom: packages import downwards only, type-only imports included, and the door suite no inner module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
    "observe": "",
    "system": "errors",
    "pool": "system errors",
    "cache": "pool system errors",
    "simulate": "cache pool errors",
    "tiers": "pool system errors",
    "tiering": "cache tiers pool system errors",
    "config": "tiering tiers cache errors",
    "memory_estimate": "config tiers cache pool system errors",
    "transfer": "pool system errors",
    "server": "tiering tiers cache transfer pool system observe config memory_estimate errors",
    "cli": "server simulate cache observe config memory_estimate errors",
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


def modules(name: str) -> Iterator[tuple[str, Path]]:
    """The modules of a top-level package: dotted name and file."""
    for path in sorted(TREES[name].rglob("*.py")):
        parts = path.relative_to(TREES[name]).with_suffix("").parts
        yield ".".join([name, *(part for part in parts if part != "__init__")]), path


def imported(name: str, under: str = "") -> dict[str, set[str]]:
    """What each module of a package imports; only modules whose name begins with ``under``."""
    return {
        module: set(imports_of(path.read_text(), module, path.name == "__init__.py"))
        for module, path in modules(name)
        if module.startswith(under)
    }


def _room(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


def test_rooms_are_listed_from_the_lowest_up() -> None:
    names = list(PACKAGES)
    for name, allowed in PACKAGES.items():
        assert all(names.index(other) < names.index(name) for other in allowed.split()), name
    there = {path.stem for path in (ROOT / "kvoffd").glob("*.py")} | {
        path.parent.name for path in (ROOT / "kvoffd").glob("*/__init__.py")
    }
    assert there - {"__init__"} == set(names)


def test_rooms_import_only_what_they_may() -> None:
    """And so in no circle, since each package may only import from those above it in the list."""
    for module, names in imported("kvoffd").items():
        own, others = _room(module), {_room(name) for name in names if name.startswith("kvoffd.")}
        if own:
            assert others & set(PACKAGES) - {own} <= set(PACKAGES[own].split()), module


@pytest.mark.parametrize("name", list(TREES))
def test_the_daemon_and_the_client_share_only_the_wire(name: str) -> None:
    for module, names in imported(name).items():
        others = {other.partition(".")[0] for other in names} & set(TREES) - {name}
        assert others <= DISTRIBUTION[name], module


@pytest.mark.parametrize(
    ("name", "under", "never"),
    [
        ("kvoffd_proto", "", {"numpy", "torch", "vllm", "zmq"}),  # both ends import it, and other tools may
        ("kvoffd", "", {"torch", "vllm"}),
        ("kvoffd", "kvoffd.cache", {"asyncio", "socket", "threading", "torch", "vllm", "zmq"}),
    ],
)
def test_what_a_room_never_imports(name: str, under: str, never: set[str]) -> None:
    for module, names in imported(name, under).items():
        assert not {other.partition(".")[0] for other in names} & never, module


def test_only_the_connector_imports_vllm() -> None:
    for module, names in imported("kvoffd_client").items():
        if not module.startswith("kvoffd_client.vllm"):
            assert "vllm" not in {other.partition(".")[0] for other in names}, module


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
