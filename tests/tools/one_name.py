"""Finds classes with the name of another one of the same program: ``python -m tests.tools.one_name``, in ``make lint``.

A reader of one of them would take it for the other. The daemon and the client library are programs of their own; both
have what is on the wire.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
WIRE = "proto/kvoffd_proto"
PROGRAMS = {"the daemon": ("kvoffd", WIRE), "the client": ("client/kvoffd_client", WIRE)}


def classes_of(files: Iterable[Path]) -> Mapping[str, Sequence[str]]:
    """Return the places of all classes at the top of modules, by name, without those that begin with ``_``."""
    found = defaultdict[str, list[str]](list)
    for path in sorted(files):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(f"{path}:{node.lineno}")
    return found


def twins(program: str, folders: Sequence[Path]) -> list[str]:
    """Return a line for each name that several classes have."""
    classes = classes_of(path for folder in folders for path in folder.rglob("*.py"))
    return [
        f"{places[0]}: {program} has several classes {name}: also {', '.join(places[1:])}. Name each by what it is."
        for name, places in classes.items()
        if len(places) > 1
    ]


def main() -> int:
    found = [line for name, folders in PROGRAMS.items() for line in twins(name, [ROOT / one for one in folders])]
    print(*found, sep="\n", end="\n" * bool(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
