"""Takes ``make gpu`` to a machine without internet: what it needs is fetched and built here, and unpacked there.

``fetch [--python 3.12]`` puts wheels into .gpu: kvoffd's own, which has its library compiled, and those of its
dependencies and pytest. Into .gpu/vllm it puts what the parts of vLLM need (vllm_needs.toml): an archive of vLLM for
CUDA, less what serving a text model on the meant GPUs does not open, with packages that few machines have; and wheels,
of which only those are unpacked that the machine lacks. ``run ARGUMENT...`` starts ``tests.bench.gpu`` by this Python
with them, or by .venv's where they are for another Python. Imports the standard library only.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

from tests.bench.gpu import fatbin

ROOT = Path(__file__).parents[3]
CARRIED = ROOT / ".gpu"
VLLM = CARRIED / "vllm"
NEEDS = tomllib.loads(Path(__file__).with_name("vllm_needs.toml").read_text())
SITES = ROOT / ".gpu-site"
PACKAGES = (ROOT, ROOT / "client", ROOT / "proto")
VENV_PYTHON = ROOT / ".venv" / "bin" / "python"
LIBRARY = Path("kvoffd") / "libkvoffd.so"
TESTS_NEED = ("pytest", "pytest-timeout")
PEGAFLOW_VARIABLE = "GPU_BENCH_PEGAFLOW"
"""Names PegaFlow's directory to the bench. It is on Python's path only where PegaFlow runs, which registers itself with
every vLLM.
"""
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
HOPPER = 90
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
# pip takes only the very platforms that it is given.
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)), "manylinux2014_x86_64", "manylinux1_x86_64")
COMPRESSION = {"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 64 << 20}
"""Kernels that are alike lie far apart."""

LEFT_OUT = (
    "vllm/vllm-rs",  # the front end in Rust
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/third_party/tml_fa4/*",
    "vllm/_flashmla*.so",
    "vllm/_flashkda*.so",
    "vllm/_deepselect*.so",
    "vllm/_qutlass*.so",  # has symbols that torch 2.11 lacks; vLLM runs without it
    "vllm/entrypoints/serve/instrumentator/static/*",
    "vllm/benchmarks/*",
    "vllm/model_executor/layers/fused_moe/configs/*",
    "vllm/model_executor/layers/quantization/utils/configs/*",
    "*.jpg",
    "*.png",
)
NOT_FOR_HOPPER = ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",)
"""It has FlashAttention 3."""
LIBRARIES = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
)
REPLACED = {
    # Imported for every model, and imports kernels of MiniMax M3 whose packages (cutlass, quack) are large.
    "vllm/model_executor/warmup/minimax_m3_msa_warmup.py": "def minimax_m3_msa_warmup(worker):\n    pass\n",
}


# --- where there is internet ------------------------------------------------------------------------


def fetch(python: str, architectures: Collection[int]) -> None:
    """Fill .gpu for a Python of this version (``3.12``) on x86-64, and GPUs of these architectures.

    Needs the package index, and gcc. Takes minutes, and 0.6 GB.
    """
    shutil.rmtree(CARRIED, ignore_errors=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    subprocess.run([*PIP, "wheel", "--no-deps", "--wheel-dir", str(CARRIED), str(ROOT)], check=True)
    (kvoffd,) = CARRIED.glob("*.whl")
    download([*project["dependencies"], *TESTS_NEED], CARRIED, python)
    download(NEEDS["beside"], VLLM / "beside", python, "--no-deps")
    download([NEEDS["pegaflow"]], VLLM, python, "--no-deps")
    shutil.copy(kvoffd, VLLM)  # for its name in the list of packages, by which vLLM finds the connector
    archive = VLLM / f"vllm-{python}.tar.xz"
    with TemporaryDirectory(dir=CARRIED) as scratch:
        wheels, site = Path(scratch) / "wheels", Path(scratch) / "site"
        download([f"vllm=={NEEDS['vllm']}", *NEEDS["packed"]], wheels, python, "--no-deps")
        fill(wheels.iterdir(), site, architectures)
        with lzma.open(archive, "wb", filters=[COMPRESSION]) as file, tarfile.open(fileobj=file, mode="w|") as tar:
            tar.add(site, "")
    for name, files in (
        ("wheels", CARRIED.glob("*.whl")),
        (archive.name, [archive]),
        ("wheels for vLLM", VLLM.rglob("*.whl")),
    ):
        print(f"{CARRIED} has {sum(file.stat().st_size for file in files) / 2**20:.0f} MiB of {name}.")


def download(wanted: Iterable[str], to: Path, python: str, *options: str) -> None:
    """Fetch wheels for a Python of this version on x86-64."""
    platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    command = [*PIP, "download", "--only-binary=:all:", "--python-version", python, *platforms, "--dest", str(to)]
    subprocess.run([*command, *options, *wanted], check=True)


def fill(wheels: Iterable[Path], site: Path, architectures: Collection[int]) -> None:
    """Make the directory of packages out of wheels."""
    left_out = (*LEFT_OUT, *(NOT_FOR_HOPPER if set(architectures) == {HOPPER} else ()))
    for wheel in wheels:
        unpack(wheel, site, left_out)
    for name, text in REPLACED.items():
        if not (site / name).exists():
            sys.exit(f"This vLLM has no {name}: see REPLACED in {__file__}.")
        (site / name).write_text(text)
    for path in filter(Path.exists, (site / name for name in LIBRARIES)):
        # Most kernels of experts are compiled for newer GPUs alone, and their PTX is large.
        path.write_bytes(fatbin.slim(path.read_bytes(), architectures, keep_ptx="_moe_" not in path.name))


# --- on the machine ---------------------------------------------------------------------------------


def run(arguments: Sequence[str]) -> None:
    """Become ``python -m tests.bench.gpu`` with these arguments."""
    python, environ, carried = sys.executable, dict(os.environ), sorted(CARRIED.glob("*.whl"))
    of_vllm = any(one.removeprefix("--part=").startswith("vllm") for one in arguments)
    if of_vllm and "--double" not in arguments and VLLM.exists():
        environ["PYTHONPATH"] = path_with(unpacked("vllm", files_of_vllm()))
        if pegaflow := sorted(VLLM.rglob("pegaflow*.whl")):
            environ[PEGAFLOW_VARIABLE] = str(unpacked("pegaflow", pegaflow))
    elif carried and pythons(carried) <= {HERE}:
        environ["PYTHONPATH"] = path_with(unpacked("wheels", carried))
    elif VENV_PYTHON.exists():
        python = str(VENV_PYTHON)
    elif carried:
        sys.exit(
            f"{CARRIED} is for Python {' and '.join(pythons(carried))}, and this is {HERE}: run `make gpu "
            'PYTHON=/path/to/one`, or where there is internet `make gpu-files ARGS="--python VERSION"`.'
        )
    else:
        sys.exit("Neither .venv nor .gpu is here: run `make venv`, or `make gpu-files` where there is internet.")
    renew_library()
    os.chdir(ROOT)
    os.execve(python, [python, "-m", "tests.bench.gpu", *arguments], environ)


def path_with(site: Path) -> str:
    return os.pathsep.join(map(str, (*PACKAGES, site)))


def pythons(wheels: Iterable[Path]) -> set[str]:
    """The versions of Python that these wheels are for, as far as they are for one alone."""
    tags = (wheel.stem.split("-")[-3:-1] for wheel in wheels)
    return {f"{tag[2]}.{tag[3:]}" for tag, abi in tags if tag == abi}


def files_of_vllm() -> list[Path]:
    """What is to be unpacked for vLLM here. Exits with a sentence if something is missing, or does not fit."""
    archive, wheels = VLLM / f"vllm-{HERE}.tar.xz", {normal(path.name): path for path in VLLM.rglob("*.whl")}
    if not archive.exists() and (others := sorted(path.name for path in VLLM.glob("vllm-*.tar.xz"))):
        sys.exit(f"{VLLM} has {', '.join(others)}, and this is Python {HERE}: give PYTHON=/path/to/one.")
    if (torch := installed("torch")) is None or numbers(torch) < numbers(NEEDS["least_torch"]):
        sys.exit(f"vLLM needs torch {NEEDS['least_torch']} for CUDA or newer; this Python has {torch or 'none'}.")
    lacking = [normal(one) for one in NEEDS["beside"] if installed(one.partition("==")[0]) is None]
    kvoffd = [path for name, path in wheels.items() if name.startswith("kvoffd==")]
    missing = [*([] if archive.exists() else [archive.name]), *([] if kvoffd else ["kvoffd's wheel"])]
    missing += [one for one in lacking if one not in wheels]
    if missing:
        sys.exit(f"This machine lacks {', '.join(missing)}: bring them into {VLLM} too.")
    return [archive, *kvoffd, *(wheels[one] for one in lacking)]


def normal(requirement: str) -> str:
    """``Py_YAML==6.0`` or ``Py_YAML-6.0-...`` as ``py-yaml==6.0``."""
    name, version = requirement.split("==") if "==" in requirement else requirement.split("-")[:2]
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}"


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def unpacked(name: str, files: Sequence[Path]) -> Path:
    """A directory with what is in these files, made once; not in .gpu, which is to stay as small as it was fetched."""
    known = repr([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files])
    site = SITES / f"{name}-{hashlib.sha256(known.encode()).hexdigest()[:16]}"
    if not site.exists():
        for old in SITES.glob(f"{name}-*"):  # those of other files, and what was not finished
            shutil.rmtree(old)
        new = SITES / f"{name}-new"
        new.mkdir(parents=True)
        for file in files:
            unpack(file, new)
        # Each process of an engine would compile it by itself.
        subprocess.run([sys.executable, "-m", "compileall", "-q", "-j0", str(new)], stdout=subprocess.DEVNULL)
        new.rename(site)
    return site


def unpack(file: Path, site: Path, left_out: Sequence[str] = ()) -> None:
    """Put what is in an archive or a wheel into ``site``: of a wheel all whose name matches none of ``left_out``."""
    if file.suffix != ".whl":
        with tarfile.open(file) as tar:
            tar.extraction_filter = getattr(tarfile, "tar_filter", None)  # an argument since Python 3.11.4
            tar.extractall(site)
        return
    with ZipFile(file) as packed:
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


def renew_library() -> None:
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
    fetching.add_argument("--python", default=HERE)
    capability = "compute capability of the GPUs for vLLM, times ten; may be given again [90]"
    fetching.add_argument("--gpu", type=int, action="append", help=capability)
    commands.add_parser("run", help="run tests.bench.gpu", add_help=False)
    options, arguments = parser.parse_known_args()
    if options.command == "run":
        run(arguments)
    else:
        fetch(options.python, options.gpu or [HOPPER])


if __name__ == "__main__":
    main()
