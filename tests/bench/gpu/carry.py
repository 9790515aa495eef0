"""Takes ``make gpu`` to a machine without internet: what it needs is fetched and built here, and unpacked there.

``fetch [--python 3.12]`` puts wheels into .gpu: kvoffd's own, which has its library compiled, and those of its
dependencies and pytest; and into .gpu/vllm what the parts of vLLM need (vllm_files.py). ``run ARGUMENT...`` starts
``tests.bench.gpu`` by this Python with them, or by .venv's where none of them is for this Python. Imports the standard
library only.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.bench.gpu import vllm_files, wheels

ROOT = Path(__file__).parents[3]
CARRIED = ROOT / ".gpu"
SITES = ROOT / ".gpu-site"
PACKAGES = (ROOT, ROOT / "client", ROOT / "proto")
VENV_PYTHON = ROOT / ".venv" / "bin" / "python"
LIBRARY = Path("kvoffd") / "libkvoffd.so"
MOST_BYTES = 64 << 20
TESTS_NEED = ("pytest", "pytest-timeout")


def fetch(python: str, architectures: list[int]) -> None:
    """Fill .gpu for a Python of this version (``3.12``) on x86-64. Needs the package index, and gcc."""
    import tomllib  # Python 3.10 has none, and must come as far as run

    shutil.rmtree(CARRIED, ignore_errors=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    subprocess.run([*wheels.PIP, "wheel", "--no-deps", "--wheel-dir", str(CARRIED), str(ROOT)], check=True)
    (kvoffd,) = CARRIED.glob("*.whl")
    wheels.download([*project["dependencies"], *TESTS_NEED], CARRIED, python)
    nbytes = sum(path.stat().st_size for path in CARRIED.iterdir())
    print(f"{CARRIED} has {nbytes / 2**20:.0f} MiB, for Python {python} on x86-64.", flush=True)
    if nbytes > MOST_BYTES:
        sys.exit(f"That is more than {MOST_BYTES >> 20} MiB.")
    vllm_files.fetch(kvoffd, python, architectures)


def run(arguments: list[str]) -> None:
    """Become ``python -m tests.bench.gpu`` with these arguments."""
    python, environ = sys.executable, dict(os.environ)
    carried = sorted(CARRIED.glob("*.whl"))
    tags = {
        tag for *_, tag, abi, _ in (wheel.stem.split("-") for wheel in carried) if abi == tag
    }  # for one Python alone
    of_vllm = any(one.removeprefix("--part=").startswith("vllm") for one in arguments)
    if of_vllm and "--double" not in arguments and (vllm_files.FILES / vllm_files.MANIFEST).exists():
        try:
            place = vllm_files.install(vllm_files.FILES, SITES)
        except vllm_files.Lacking as problem:
            sys.exit(str(problem))
        environ["PYTHONPATH"] = os.pathsep.join(
            map(str, (*PACKAGES, _unpacked(sorted(vllm_files.FILES.glob("kvoffd-*.whl"))), place / vllm_files.SITE))
        )
        environ[vllm_files.PEGAFLOW_VARIABLE] = str(place / vllm_files.PEGAFLOW)
    elif carried and tags <= {f"cp{sys.version_info.major}{sys.version_info.minor}"}:
        environ["PYTHONPATH"] = os.pathsep.join(map(str, (*PACKAGES, _unpacked(carried))))
    elif VENV_PYTHON.exists():
        python = str(VENV_PYTHON)
    elif carried:
        versions = " and ".join(f"{tag[2]}.{tag[3:]}" for tag in sorted(tags))
        sys.exit(
            f"{CARRIED} is for Python {versions}, and this is {sys.version.split()[0]}: run `make gpu "
            'PYTHON=/path/to/one`, or where there is internet `make gpu-files ARGS="--python VERSION"`.'
        )
    else:
        sys.exit("Neither .venv nor .gpu is here: run `make venv`, or `make gpu-files` where there is internet.")
    _renew_library()
    os.chdir(ROOT)
    os.execve(python, [python, "-m", "tests.bench.gpu", *arguments], environ)


def _unpacked(given: list[Path]) -> Path:
    """Unpack the wheels, once for these, and not in .gpu, which is to stay as small as it was fetched."""
    known = repr([(wheel.name, wheel.stat().st_size, wheel.stat().st_mtime_ns) for wheel in given])
    site = SITES / f"wheels-{hashlib.sha256(known.encode()).hexdigest()[:16]}"
    if not site.exists():
        for old in SITES.glob("wheels-*"):  # those of other wheels, and what was not finished
            shutil.rmtree(old)
        for wheel in given:
            wheels.unpack(wheel, SITES / "wheels-new")
        (SITES / "wheels-new").rename(site)
    return site


def _renew_library() -> None:
    """Compile the library where C in the tree is newer; without a compiler take what was carried."""
    library, compiler = ROOT / LIBRARY, shutil.which("cc")
    newest = max(path.stat().st_mtime for pattern in ("*.c", "*.h") for path in (ROOT / "kvoffd").rglob(pattern))
    if library.exists() and library.stat().st_mtime >= newest:
        return
    if compiler is not None:
        names: dict[str, Any] = {}
        for node in ast.parse((ROOT / "hatch_build.py").read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id] = ast.literal_eval(node.value)
        made = library.with_suffix(".new")  # a new file: the old one may be mapped
        subprocess.run([compiler, *names["FLAGS"], "-o", str(made), *names["SOURCES"]], cwd=ROOT, check=True)
        made.replace(library)
    elif carried := list(SITES.glob(f"*/{LIBRARY}")):
        shutil.copy(carried[0], library)
    else:
        sys.exit(f"C in {ROOT} is newer than {LIBRARY}, and there is no compiler (cc): install gcc.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch", help="fill .gpu")
    fetching.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    capability = "compute capability of the GPUs for vLLM, times ten; may be given again [90]"
    fetching.add_argument("--gpu", type=int, action="append", help=capability)
    commands.add_parser("run", help="run tests.bench.gpu", add_help=False)
    options, arguments = parser.parse_known_args()
    if options.command == "run":
        run(arguments)
    else:
        fetch(options.python, options.gpu or [vllm_files.HOPPER])


if __name__ == "__main__":
    main()
