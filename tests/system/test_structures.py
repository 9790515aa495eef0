"""A structure that our C and our Python share is laid out alike in both; a mistake in it is seen."""

from __future__ import annotations

import ctypes
import importlib
import pkgutil
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import kvoffd
from kvoffd.cache import block_table, states
from kvoffd.cache.askers import _Askers
from kvoffd.cache.block_table import BlockTable
from kvoffd.cache.computing import _Fields
from kvoffd.cache.learned import BINS, CLASSES, Counts, Known
from kvoffd.cache.namespace import MissReason
from kvoffd.cache.recovery import _Recovery
from kvoffd.pool.allocator import PAGE_BYTES
from kvoffd.pool.slot_table import MAX_KEY_BYTES, RECORD_BYTES
from kvoffd.system import native as native_module
from kvoffd.system import structures as system_structures
from kvoffd.system.native import Native, NotCompiled, declared
from kvoffd.system.structures import VERSION
from kvoffd.tiers.disk_map import _Index
from kvoffd.transfer.cuda.engine import _GpuCopying
from kvoffd_proto.messages import MAX_WORLD_SIZE
from tests.kit.cuda_abi import compiler
from tests.tools import structures

ROOT = Path(kvoffd.__file__).parent
CONSTANTS = {
    "cache/blocks.c": {
        "RECORD": RECORD_BYTES,
        "MISSES": block_table.KNOWN_MISSES,
        "PARTIAL": MissReason.PARTIAL,
        "MAX_RANKS": MAX_WORLD_SIZE,
        "PAGE": PAGE_BYTES,
        "offsetof(struct block_group, rank)": 32,
        "sizeof(struct block_group)": 32 + 12 * MAX_WORLD_SIZE,
        **{name: getattr(states, name) for name in ("FREE", "WRITING", "READY", "DROPPED", "NOT_FIRST")},
        **{name: getattr(states, name) for name in ("WRITTEN", "SHARD_STATE", "UNVERIFIED", "CORRUPT")},
    },
    "cache/learned.c": {"BINS": BINS, "CLASSES": len(CLASSES)},
    "tiers/disk_index.c": {"ROW": MAX_KEY_BYTES},
}


def refusals(shared: structures.Shared) -> str:
    """What the compiler says of a source and of its structure beside Python's."""
    path, name, _ = shared
    made: Any = type(name, (ctypes.Structure,), {"_fields_": getattr(system_structures, name.upper())})
    asserted = [f"sizeof(struct {name}) == {ctypes.sizeof(made)}"]
    for field, *_ in made._fields_:
        offset, size, own = getattr(made, field).offset, getattr(made, field).size, field.removeprefix("at_")
        same = f"offsetof(struct {name}, {own}) == {offset} && sizeof(((struct {name} *)0)->{own}) == {size}"
        asserted.append(same)
    return compiled(path, (ROOT / path).read_text(), asserted)


def compiled(path: str, text: str, asserted: list[str]) -> str:
    """What the compiler says of a source in a file's folder, in which all that is asserted must hold."""
    lines = ["#include <stddef.h>", text, *(f'_Static_assert({one}, "");' for one in asserted)]
    command = [compiler(), "-x", "c", "-std=gnu11", "-Wno-psabi", "-fsyntax-only", f"-I{(ROOT / path).parent}", "-"]
    return subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=False).stderr


def test_what_is_made_of_the_c_files_is_current() -> None:
    """Else a library that was made of them is refused."""
    for path, text in structures.files().items():
        assert path.read_text() == text, "run: python -m tests.tools.structures, and build the library again"


@pytest.mark.parametrize("shared", list(structures.shared()), ids=lambda shared: shared.name)
def test_a_structure_is_the_same_in_c_and_in_python(shared: structures.Shared) -> None:
    assert refusals(shared) == ""


def test_comments_and_white_space_make_no_other_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structures, "ROOT", tmp_path)
    found = []
    for text in ("int a;", "/* Of\n * two lines. */\nint  a;", "int b;"):
        (tmp_path / "one.c").write_text(text)
        found.append(structures.version())
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("field", ["some_t a;", "uint64_t a[UNKNOWN];", "union { int a; } b;"])
def test_a_field_that_is_not_understood_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setattr(structures, "ROOT", tmp_path)
    monkeypatch.setattr(structures, "SHARED", {"one.c": ["known"]})
    (tmp_path / "one.c").write_text(f"struct known {{ uint64_t first; {field} }};")
    with pytest.raises((ValueError, KeyError)):
        list(structures.shared())


@pytest.mark.parametrize("structure", [_Recovery, Known, Counts, _Askers, _Fields, _Index, _GpuCopying])
def test_a_field_that_c_does_not_have_cannot_be_set(structure: type[ctypes.Structure]) -> None:
    """ctypes would set an attribute that C never sees."""
    with pytest.raises(AttributeError):
        structure().sizes = 1


def test_the_block_table_has_the_fields_of_c() -> None:
    assert BlockTable._fields_ == system_structures.BLOCKS


@pytest.mark.parametrize("path", CONSTANTS)
def test_a_constant_is_the_same_in_c_and_in_python(path: str) -> None:
    same = [f"{name} == {int(value)}" for name, value in CONSTANTS[path].items()]
    text = (ROOT / path).read_text()
    assert compiled(path, text, same) == ""
    assert compiled(path, text, [f"!({one})" for one in same]).count("static assertion failed") == len(same)


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_module, "VERSION", VERSION + 1)
    with pytest.raises(NotCompiled, match=r"has version [0-9a-f]{8} instead of [0-9a-f]{8}.*make venv"):
        Native()


def test_functions_have_as_many_arguments_in_c_as_in_python() -> None:
    for module in pkgutil.walk_packages(kvoffd.__path__, "kvoffd."):
        if module.name not in ("kvoffd.__main__", "kvoffd.libkvoffd"):
            importlib.import_module(module.name)
    text = "".join(path.read_text() for path in ROOT.rglob("*.c"))
    found = {name: given.count(",") + 1 for name, given in re.findall(r"^\w.*?\bkvoffd_(\w+)\(([^)]*)\)\n", text, re.M)}
    known = {name: len(getattr(Native(), name).argtypes) for name in declared}
    assert known
    assert {name: found[name] for name in known} == known
