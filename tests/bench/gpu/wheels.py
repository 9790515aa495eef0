"""Wheels: fetched from the package index for another machine's Python, and unpacked there without pip.

Imports the standard library only.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from zipfile import ZipFile

# pip takes only the very platforms that it is given.
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)), "manylinux2014_x86_64", "manylinux1_x86_64")
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


def download(wanted: Iterable[str], to: Path, python: str, *, needs: bool = True) -> None:
    """Fetch wheels for a Python of this version (``3.12``) on x86-64; without ``needs`` nothing that they depend on."""
    platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    command = [*PIP, "download", "--only-binary=:all:", "--python-version", python, *platforms, "--dest", str(to)]
    subprocess.run([*command, *([] if needs else ["--no-deps"]), *wanted], check=True)


def normal(requirement: str) -> str:
    """``Py_YAML==6.0`` or ``Py_YAML-6.0-...`` as ``py-yaml==6.0``."""
    name, version = requirement.split("==") if "==" in requirement else requirement.split("-")[:2]
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}"


def find(wanted: Iterable[str], directory: Path) -> tuple[list[Path], list[str]]:
    """The wheels in ``directory`` of these requirements, each ``name==version``, and the requirements without one."""
    there = {normal(path.name): path for path in sorted(directory.glob("*.whl"))}
    names = [normal(one) for one in wanted]
    return [there[name] for name in names if name in there], [name for name in names if name not in there]


def unpack(wheel: Path, site: Path, left_out: Sequence[str] = ()) -> None:
    """Put what is in a wheel into ``site``, but for files whose name matches one of ``left_out``."""
    with ZipFile(wheel) as packed:
        for item in packed.infolist():
            if any(fnmatch(item.filename, pattern) for pattern in left_out):
                continue
            path = Path(packed.extract(item, site))
            if item.external_attr >> 16 & 0o111 and path.is_file():  # a program
                path.chmod(0o755)
    for data in site.glob("*.data"):
        for kind in ("purelib", "platlib"):
            if (data / kind).exists():
                shutil.copytree(data / kind, site, dirs_exist_ok=True)
        shutil.rmtree(data)
