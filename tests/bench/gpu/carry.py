"""Takes ``make gpu`` to a machine without internet: what it needs is fetched and built here, and unpacked there.

``carry.py fetch [--python 3.12]`` puts wheels into .gpu: kvoffd's own, which has its library compiled, and those of its
dependencies and pytest. ``carry.py run ARGUMENT...`` starts ``tests.bench.gpu`` with them, or with .venv where that is
there: by the first Python of the machine that has torch for CUDA. Imports the standard library only.
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
from zipfile import ZipFile

ROOT = Path(__file__).parents[3]
CARRIED = ROOT / ".gpu"
SITES = ROOT / ".gpu-site"
VENV_PYTHON = ROOT / ".venv" / "bin" / "python"
LIBRARY = Path("kvoffd") / "libkvoffd.so"
MOST_BYTES = 64 << 20
ABOUT = (
    "import importlib.util as u, sys; v = sys.version_info; assert (3, 11) <= v; "
    "print(f'cp{v[0]}{v[1]}', bool(u.find_spec('torch') and __import__('torch').version.cuda))"
)
ABOUT_S = 60.0
"""The first import of torch on a machine reads some GB."""
TESTS_NEED = ("pytest", "pytest-timeout")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def fetch(python: str) -> None:
    """Fill .gpu for a Python of this version (``3.12``) on x86-64. Needs the package index, and gcc."""
    import tomllib  # Python 3.10 has none, and must come as far as run

    shutil.rmtree(CARRIED, ignore_errors=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(CARRIED), str(ROOT)], check=True)
    platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    wanted = [*project["dependencies"], *TESTS_NEED]
    download = [*pip, "download", "--only-binary=:all:", "--python-version", python, *platforms]
    subprocess.run([*download, "--dest", str(CARRIED), *wanted], check=True)
    nbytes = sum(path.stat().st_size for path in CARRIED.iterdir())
    print(f"{CARRIED} has {nbytes / 2**20:.0f} MiB, for Python {python} on x86-64.")
    if nbytes > MOST_BYTES:
        sys.exit(f"That is more than {MOST_BYTES >> 20} MiB.")


def run(arguments: list[str]) -> None:
    """Become ``python -m tests.bench.gpu`` with these arguments, by the first Python that fits and has torch.

    Where none has torch for CUDA, torch's tests are skipped. The double needs none.
    """
    wheels = sorted(CARRIED.glob("*.whl"))
    if not VENV_PYTHON.exists() and not wheels:
        sys.exit("Neither .venv nor .gpu is here: run `make venv`, or `make gpu-files` where there is internet.")
    fitting = [VENV_PYTHON] if VENV_PYTHON.exists() else []
    others = [Path(sys.executable), *_other_pythons()] if wheels and not (fitting and "--double" in arguments) else []
    tags, about = _tags(wheels), {python: _about(python) for python in (*fitting, *others)}
    fitting += [python for python in others if (tag := about[python][0]) and (not tags or tag in tags)]
    if not fitting:
        ours = f"{sys.version_info.major}.{sys.version_info.minor}"
        theirs = ", ".join(f"{tag[2]}.{tag[3:]}" for tag in sorted(tags))
        sys.exit(
            f"{CARRIED} is for Python {theirs}, which is not here; this is {ours}. Run `make gpu PYTHON=/path/to/one`, "
            f'or where there is internet `make gpu-files ARGS="--python {ours}"`.'
        )
    python = next((one for one in fitting if about[one][1]), fitting[0])
    print(f"{python}, {'with' if about[python][1] else 'without'} torch for CUDA", flush=True)
    environ = dict(os.environ)
    if python != VENV_PYTHON:
        environ["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "client", ROOT / "proto", _unpacked(wheels))))
    _renew_library()
    os.chdir(ROOT)
    os.execve(python, [str(python), "-m", "tests.bench.gpu", *arguments], environ)


def _tags(wheels: list[Path]) -> set[str]:
    """The Pythons (``cp312``) that wheels are for which are for one alone."""
    parts = [wheel.stem.split("-") for wheel in wheels]
    return {python for *_, python, abi, _ in parts if abi == python and python.startswith("cp")}


def _other_pythons() -> list[Path]:
    """All of this machine's, as a vLLM may have been installed for any of them."""
    path = os.environ.get("PATH", "").split(os.pathsep)
    places = dict.fromkeys([*map(Path, path), *Path("/opt").glob("*/bin"), *Path("/usr/local").glob("*/bin")])
    names = [
        place / f"python3{minor}" for place in places for minor in ("", *(f".{number}" for number in range(11, 15)))
    ]
    return [name for name in names if os.access(name, os.X_OK)]


def _about(python: Path) -> tuple[str, bool]:
    """A Python's tag, and whether it has torch for CUDA; no tag for one that does not run or is too old."""
    command = [str(python), "-c", ABOUT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ABOUT_S, check=True)
        tag, has_torch = done.stdout.split()[-2:]
    except (OSError, ValueError, subprocess.SubprocessError):
        return "", False
    return tag, has_torch == "True"


def _unpacked(wheels: list[Path]) -> Path:
    """Unpack the wheels, once for these, and not in .gpu, which is to stay as small as it was fetched."""
    known = repr([(wheel.name, wheel.stat().st_size, wheel.stat().st_mtime_ns) for wheel in wheels])
    site = SITES / hashlib.sha256(known.encode()).hexdigest()[:16]
    if not site.exists():
        shutil.rmtree(SITES, ignore_errors=True)  # those of other wheels, and what was not finished
        for wheel in wheels:
            with ZipFile(wheel) as packed:
                packed.extractall(SITES / "new")
        (SITES / "new").rename(site)
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
    commands.add_parser("run", help="run tests.bench.gpu", add_help=False)
    options, arguments = parser.parse_known_args()
    if options.command == "run":
        run(arguments)
    else:
        fetch(options.python)


if __name__ == "__main__":
    main()
