"""A structure that our C and our Python share is laid out alike in both; a mistake in it is seen."""

from __future__ import annotations

import ctypes
import importlib
import pkgutil
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvoffd
from kvoffd.cache import block_table
from kvoffd.cache.block_table import BlockTable
from kvoffd.cache.learned import Counts, Known
from kvoffd.cache.namespace import MissReason
from kvoffd.cache.recovery import _Recovery
from kvoffd.pool.allocator import PAGE_BYTES, SlotAllocator
from kvoffd.pool.slot_table import MAX_KEY_BYTES, RECORD_BYTES
from kvoffd.system import native as native_module
from kvoffd.system.native import Native, NotCompiled, declared
from kvoffd.tiers.disk_map import _Index, _RegionAddresses
from kvoffd.transfer.cuda.engine import _GpuCopying
from kvoffd_proto.messages import MAX_WORLD_SIZE
from tests.kit.cuda_abi import compiler

ROOT = Path(kvoffd.__file__).parent
STRUCTURES = {
    "blocks": ("cache/blocks.h", BlockTable),
    "recovery": ("cache/recover.c", _Recovery),
    "known": ("cache/learned.c", Known),
    "counts": ("cache/learned.c", Counts),
    "gpu_copying": ("transfer/cuda/gpu_copy.c", _GpuCopying),
    "slots": ("pool/slots.h", SlotAllocator),
    "disk_region": ("tiers/disk_index.c", _RegionAddresses),
    "disk_index": ("tiers/disk_index.c", _Index),
}

CONSTANTS = {
    "cache/blocks.c": {
        "RECORD": RECORD_BYTES,
        "MISSES": block_table.KNOWN_MISSES,
        "PARTIAL": MissReason.PARTIAL,
        "MAX_RANKS": MAX_WORLD_SIZE,
        "PAGE": PAGE_BYTES,
        "offsetof(struct block_group, rank)": 32,
        "sizeof(struct block_group)": 32 + 12 * MAX_WORLD_SIZE,
        **{name: getattr(block_table, name) for name in ("FREE", "WRITING", "READY", "DROPPED", "NOT_FIRST")},
        **{name: getattr(block_table, name) for name in ("WRITTEN", "SHARD_STATE", "UNVERIFIED", "CORRUPT")},
    },
    "tiers/disk_index.c": {"ROW": MAX_KEY_BYTES},
}


def fields(structure: type[ctypes.Structure], begin: int = 0, prefix: str = "") -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each field, those of a structure in it among them."""
    for name, kind, *_ in structure._fields_:
        field = getattr(structure, name)
        if isinstance(kind, type) and issubclass(kind, ctypes.Structure):
            yield from fields(kind, begin + field.offset, f"{prefix}{name}.")
        else:
            yield prefix + name.removeprefix("at_"), begin + field.offset, field.size


def refusals(name: str, text: str) -> str:
    """What the compiler says of a source and of its structure beside Python's."""
    path, structure = STRUCTURES[name]
    asserted = [f"sizeof(struct {name}) == {ctypes.sizeof(structure)}"]
    for field, offset, size in fields(structure):
        same = f"offsetof(struct {name}, {field}) == {offset} && sizeof(((struct {name} *)0)->{field}) == {size}"
        asserted.append(same)
    return compiled(path, text, asserted)


def compiled(path: str, text: str, asserted: list[str]) -> str:
    """What the compiler says of a source in a file's folder, in which all that is asserted must hold."""
    lines = ["#include <stddef.h>", text, *(f'_Static_assert({one}, "");' for one in asserted)]
    command = [compiler(), "-x", "c", "-std=gnu11", "-Wno-psabi", "-fsyntax-only", f"-I{(ROOT / path).parent}", "-"]
    return subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_is_the_same_in_c_and_in_python(name: str) -> None:
    assert refusals(name, (ROOT / STRUCTURES[name][0]).read_text()) == ""


@pytest.mark.parametrize("path", CONSTANTS)
def test_a_constant_is_the_same_in_c_and_in_python(path: str) -> None:
    same = [f"{name} == {int(value)}" for name, value in CONSTANTS[path].items()]
    text = (ROOT / path).read_text()
    assert compiled(path, text, same) == ""
    assert compiled(path, text, [f"!({one})" for one in same]).count("static assertion failed") == len(same)


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_module, "VERSION", native_module.VERSION + 1)
    with pytest.raises(NotCompiled, match=r"has version \d+ instead of \d+.*make venv"):
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
