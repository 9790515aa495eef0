"""Writes what Python must know of our C: ``python -m tests.tools.structures``, after each change of a C file.

The C files describe the structures that C and Python share. From them this makes ``kvoffd/system/structures.py``, with
their fields for ctypes, and ``kvoffd/system/version.c``. Both have the version, a hash of all C files without comments:
a library that was made of other files is refused, since it could read wrong memory.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2] / "kvoffd"
FIELDS, VERSION = ROOT / "system/structures.py", ROOT / "system/version.c"
SHARED = {
    "system/slot_index.h": ["slot_index"],
    "pool/slots.h": ["slots"],
    "cache/blocks.h": ["state_counts", "group_blocks", "blocks"],
    "cache/recover.c": ["recovery"],
    "cache/learned.c": ["known", "counts"],
    "cache/askers.c": ["askers"],
    "cache/computing.c": ["computing"],
    "tiers/disk_index.c": ["disk_region", "disk_index"],
    "transfer/cuda/gpu_copy.c": ["gpu_copying"],
}
"""Structures that Python has too, by file. One that others contain comes before them."""
TYPES = {
    "uint64_t": "ctypes.c_uint64",
    "uint32_t": "ctypes.c_uint32",
    "double": "ctypes.c_double",
    "CUstream": "ctypes.c_void_p",
}
HEAD = '''"""Fields of the structures that C and Python share. Made by ``python -m tests.tools.structures``.

They are made from the C files, which say what they mean. That of a pointer is an address, and begins with ``at_``.
"""

from __future__ import annotations

import ctypes

VERSION = {version}
"""A library of another version is refused: it is made of other C files."""
'''
LIBRARY = """/* Made from all C files: python -m tests.tools.structures. system/structures.py has the same version. */
#include <stdint.h>

const uint32_t kvoffd_version = {version};
"""


class Shared(NamedTuple):
    """A structure: its file, its name in C, and the fields for ctypes with their types."""

    path: str
    name: str
    fields: list[tuple[str, str]]


def source(path: Path) -> str:
    """Return the text of a C file without comments, and with one space for any white space."""
    text = re.sub(r"/\*.*?\*/", " ", path.read_text(), flags=re.DOTALL)
    return re.sub(r"\s+", " ", text).strip()


def version() -> int:
    found = hashlib.sha256()
    for path in sorted([*ROOT.rglob("*.c"), *ROOT.rglob("*.h")]):
        if path != VERSION:
            found.update(f"{path.relative_to(ROOT)} {source(path)}\n".encode())
    return int.from_bytes(found.digest()[:4], "big")


def shared() -> Iterator[Shared]:
    for path, names in SHARED.items():
        text = source(ROOT / path)
        for name in names:
            found = re.search(rf"\bstruct {name} {{ ([^{{}}]*?) }};", text)
            if found is None:
                raise ValueError(f"{path} has no struct {name}, or one with a structure in it.")
            yield Shared(path, name, list(_fields(found[1], _constants(text))))


def _constants(text: str) -> dict[str, int]:
    """Return the numbers that a file's enums name."""
    found: dict[str, int] = {}
    for body in re.findall(r"\benum {([^}]*)}", text):
        number = -1
        for item in body.split(","):
            name, _, given = map(str.strip, item.partition("="))
            try:
                number = _number(given, found) if given else number + 1
            except (KeyError, SyntaxError, ValueError):
                break  # of other constants than these
            found[name] = number
    return found


def _number(expression: str, known: dict[str, int]) -> int:
    """Return the value of a number, a constant, or a product of these."""
    value = 1
    for factor in expression.split("*"):
        word = factor.strip()
        value *= known[word] if word.isidentifier() else ast.literal_eval(word)
    return value


def _fields(body: str, constants: dict[str, int]) -> Iterator[tuple[str, str]]:
    for declaration in body.replace("const ", "").rstrip("; ").split(";"):
        found = re.fullmatch(r" ?(struct )?(\w+) (.+)", declaration)
        if found is None:
            raise ValueError(f"This line is not understood: {declaration}")
        kind = _class(found[2]) if found[1] else TYPES.get(found[2], "")
        for declarator in found[3].split(","):
            field = re.fullmatch(r" ?(\*[* ]*)?(\w+)((?:\[\w+\])*)", declarator)
            if field is None or not (kind or field[1]):
                raise ValueError(f"The field {declarator} of this line is not understood: {declaration}")
            sizes = [str(_number(size, constants)) for size in re.findall(r"\[(\w+)\]", field[3])]
            own = "ctypes.c_void_p" if field[1] else kind
            yield f"{'at_' if field[1] else ''}{field[2]}", " * ".join([own, *reversed(sizes)])


def _class(name: str) -> str:
    return name.title().replace("_", "")


def files() -> dict[Path, str]:
    """Return the files that are made, with their text."""
    structures = list(shared())
    parts = [HEAD.format(version=f"0x{version():08X}")]
    used = {kind for one in structures for _, kind in one.fields}
    for path, name, fields in structures:
        lines = "".join(f'    ("{field}", {kind}),\n' for field, kind in fields)
        parts.append(f'\n{name.upper()} = (\n{lines})\n"""``struct {name}`` of {path}."""\n')
        if _class(name) in used:
            parts.append(f"\n\nclass {_class(name)}(ctypes.Structure):\n    _fields_ = {name.upper()}\n\n")
    return {FIELDS: "".join(parts), VERSION: LIBRARY.format(version=f"0x{version():08X}")}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
