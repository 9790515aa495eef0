"""Holds declarations of the CUDA driver against a real cuda.h: a C compiler judges each of them."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Prototypes = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Declarations:
    """What some of our code says of cuda.h.

    Attributes:
        types: the ctypes type of each C type that an argument is passed as, or points to.
        structs: by their C names; their fields have the names of C.
        constants: values by their C names.
        batch_forms: the forms of cuMemcpyBatchAsync, by version.
        since: names that older headers do not have yet, and since when.
    """

    prototypes: Prototypes = field(default_factory=dict)
    types: Mapping[str, type] = field(default_factory=dict)
    structs: Mapping[str, type[ctypes.Structure]] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)
    batch_forms: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    since: Mapping[str, int] = field(default_factory=dict)


def header_version(include: Path) -> int:
    """CUDA_VERSION: 1000 * major + 10 * minor."""
    found = re.search(r"#define CUDA_VERSION (\d+)", (include / "cuda.h").read_text())
    assert found is not None
    return int(found[1])


def compiler() -> str:
    """The C compiler, which kvoffd is built with."""
    found = shutil.which("gcc")
    assert found is not None, "there is no gcc to read cuda.h with"
    return found


def differences(ours: Declarations, include: Path) -> dict[str, str]:
    """What differs from `include`/cuda.h: names of ours, and what the compiler says first of each."""
    lines = ['#include "cuda.h"', '#include "cudaTypedefs.h"', "#include <stddef.h>", *_MACROS]
    for what, assertion in _assertions(ours, header_version(include)):
        lines += [f'#line 1 "ours:{what}"', assertion]
    command = [compiler(), "-x", "c", "-std=gnu11", "-fsyntax-only", "-fmax-errors=0", f"-I{include}", "-"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True)
    found: dict[str, str] = {}
    for what, sentence in re.findall(r"^ours:(.*?):1:\d+: (?:error|note): (.*)$", done.stderr, re.MULTILINE):
        found.setdefault(what, sentence)
    if done.returncode and not found:
        raise AssertionError(done.stderr)
    return found


# A symbol that cuda.h makes a macro for a newer one is expanded before it is pasted, and is_... is then another name.
_MACROS = [
    "#define IS_(name) is_##name",
    "#define IS(name) IS_(name)",
    "#define SAME __builtin_types_compatible_p",
    "#define KIND(type) __builtin_classify_type(*(type *)0)",
]
_INTEGER, _POINTER = "KIND(int)", "KIND(int *)"


def _assertions(ours: Declarations, version: int) -> Iterator[tuple[str, str]]:
    """Name and C declaration of each; one line, which compiles if ours is right."""

    def is_known(name: str) -> bool:
        return ours.since.get(name, 0) <= version

    for name, arguments in ours.prototypes.items():
        if is_known(name):
            same = f"SAME(__typeof__({name}), CUresult({', '.join(arguments)}))"
            yield name, f'enum {{ is_{name} = 1 }}; _Static_assert(IS({name}) && {same}, "other types");'
    for form, arguments in ours.batch_forms.items():
        if form <= version:
            typedef = f"PFN_cuMemcpyBatchAsync_v{form}"
            same = f"SAME({typedef}, CUresult (*)({', '.join(arguments)}))"
            yield typedef, f'_Static_assert({same}, "other types");'
    for name, kind in ours.types.items():
        is_pointer = kind in (ctypes.c_void_p, ctypes.c_char_p)
        right = f"sizeof({name}) == {ctypes.sizeof(kind)} && KIND({name}) == {_POINTER if is_pointer else _INTEGER}"
        if not is_pointer and kind is not ctypes.c_char:
            right += f" && (({name})-1 < ({name})1) == {int(kind(-1).value < 0)}"
        yield name, f'_Static_assert({right}, "other size, kind or sign");'
    for name, struct in ours.structs.items():
        if not is_known(name):
            continue
        checks = [f"sizeof({name}) == {ctypes.sizeof(struct)}"]
        for member, *_ in struct._fields_:
            ours_is = getattr(struct, member)
            checks.append(f"offsetof({name}, {member}) == {ours_is.offset}")
            checks.append(f"sizeof((({name} *)0)->{member}) == {ours_is.size}")
        yield name, f'_Static_assert({" && ".join(checks)}, "other size or offsets");'
    for name, value in ours.constants.items():
        if is_known(name):
            yield name, f'_Static_assert({name} == {value}, "another value");'
