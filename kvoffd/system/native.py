"""The C part of kvoffd: one library, which ``hatch_build.py`` compiles when kvoffd is installed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from kvoffd.errors import KvoffdError
from kvoffd.system.structures import VERSION

LIBRARY = Path(__file__).parents[1] / "libkvoffd.so"
if TYPE_CHECKING:  # of a ctypes.Structure mypy would accept any attribute: typeshed gives it __getattr__
    Structure = object
else:
    Structure = ctypes.Structure


class NotCompiled(KvoffdError):
    """The library is missing or cannot be loaded. The message says what to do."""


VOID_P, CHAR_P, INT, UINT32, DOUBLE = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_double
COUNT = ctypes.c_uint64
"""An unsigned result of 64 bits."""
NUMBER = VOID_P
"""An unsigned argument of 64 bits: ctypes takes twice as long to pass a c_uint64."""
KEYS = NUMBER, CHAR_P, NUMBER, NUMBER
"""Arguments: number of a group, keys end to end, number of keys, bytes of each."""
ITEMS = VOID_P, NUMBER
"""Arguments: address of the items, number of items."""

Signature: TypeAlias = tuple[type | None, ...]
"""Types of a function's result and of its arguments."""
declared: dict[str, tuple[bool, Signature]] = {}


def declare(*, keep_gil: bool = True, **functions: Signature) -> None:
    """Declare functions of the library, which the C files describe, by their names without ``kvoffd_``.

    ``keep_gil``: they take microseconds, less than getting the GIL back from another thread.
    """
    declared.update((name, (keep_gil, signature)) for name, signature in functions.items())


class Native:
    """The library with the functions that the packages declare. Raises NotCompiled if ``path`` is unusable."""

    def __init__(self, path: Path = LIBRARY) -> None:
        try:
            self._without_gil, self._with_gil = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
            found = ctypes.c_uint32.in_dll(self._with_gil, "kvoffd_version").value
            if found != VERSION:
                raise OSError(f"it has version {found:08x} instead of {VERSION:08x}")
        except (OSError, ValueError) as error:
            raise NotCompiled(
                f"The daemon's compiled part cannot be loaded ({error}); install kvoffd again on a machine with a C "
                "compiler (in its source tree: run make venv)."
            ) from error

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in declared:
            raise AttributeError(f"no package declares {name}")
        keep_gil, (result, *arguments) = declared[name]
        function = getattr(self._with_gil if keep_gil else self._without_gil, f"kvoffd_{name}")
        function.argtypes, function.restype = arguments, result
        setattr(self, name, function)
        return cast("Callable[..., Any]", function)


native = cache(Native)
