"""The proto package is light: both ends import it, and a client in another tool may."""

from __future__ import annotations

import subprocess
import sys

MODULES = "admin codec errors events lifeline messages paths stats units"
PROGRAM = f"""
import importlib, sys
before = set(sys.modules)
for name in {MODULES.split()!r}:
    importlib.import_module("kvoffd_proto." + name)
tops = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*sorted(tops - set(sys.stdlib_module_names)))
"""


def test_the_proto_package_imports_msgspec_only() -> None:
    printed = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert set(printed.stdout.split()) <= {"kvoffd_proto", "msgspec", "typing_extensions"}, "the last is msgspec's own"
