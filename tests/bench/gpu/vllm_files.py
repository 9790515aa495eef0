"""vLLM for a machine with a GPU and without internet: fetched and packed here, unpacked there.

``fetch`` makes .gpu/vllm: vLLM's wheel for CUDA, less what serving a text model on the meant GPUs does not open, and
what it needs (vllm_needs.toml). It has two archives in pieces, which may come to the machine one by one:
``vllm.tar.xz``, which is always needed, and ``beside.tar``, wheels of which only those are unpacked that the machine
lacks. Downloads, and what was packed, are kept in .gpu-cache. Imports the standard library only.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from tests.bench.gpu import fatbin, wheels

ROOT = Path(__file__).parents[3]
FILES = ROOT / ".gpu" / "vllm"
CACHE = ROOT / ".gpu-cache"
NEEDS = Path(__file__).with_name("vllm_needs.toml")
MANIFEST = "pieces.json"
PIECE_BYTES = 50 << 20
HOPPER = 90
COMPRESSION = {"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 64 << 20}
"""Kernels that are alike lie far apart."""
ALWAYS, BESIDE = "vllm.tar.xz", "beside.tar"
SITE, PEGAFLOW = "site", "pegaflow"
"""Directories of packages. PegaFlow's is on Python's path only where it runs: it registers itself with every vLLM."""
PEGAFLOW_VARIABLE = "GPU_BENCH_PEGAFLOW"
"""Names PegaFlow's directory to the bench."""

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


def needs() -> dict[str, Any]:
    import tomllib  # Python 3.10 has none, and must come as far as an error that says so

    return tomllib.loads(NEEDS.read_text())


# --- where there is internet ------------------------------------------------------------------------


def fetch(kvoffd: Path, python: str, architectures: Collection[int] = (HOPPER,), files: Path = FILES) -> None:
    """Fill ``files`` for a Python of this version (``3.12``) and GPUs of these architectures. Minutes, and 0.6 GB.

    ``kvoffd``: its wheel, for its name in the list of packages, by which vLLM finds the connector.
    """
    wanted, downloads = needs(), CACHE / f"wheels-{python}"
    vllm, packed, beside, pegaflow = (
        _downloaded(each, downloads, python)
        for each in ([f"vllm=={wanted['vllm']}"], wanted["packed"], wanted["beside"], [wanted["pegaflow"]])
    )
    known = [python, sorted(architectures), wanted, LEFT_OUT, NOT_FOR_HOPPER, LIBRARIES, REPLACED, COMPRESSION]
    key = hashlib.sha256(repr(known).encode() + Path(fatbin.__file__).read_bytes()).hexdigest()[:16]
    kept = CACHE / f"{key}-{ALWAYS}"
    if not kept.exists():
        with TemporaryDirectory(dir=CACHE) as scratch:
            fill([*vllm, *packed], Path(scratch) / SITE, architectures)
            made = kept.with_suffix(".new")
            with lzma.open(made, "wb", filters=[COMPRESSION]) as file:
                write_tar(file, Path(scratch))
            made.rename(kept)
    with TemporaryDirectory(dir=CACHE) as scratch, io.BytesIO() as file:
        for wheel in beside:
            shutil.copy(wheel, scratch)
        write_tar(file, Path(scratch))
        archives = {ALWAYS: kept.read_bytes(), BESIDE: file.getvalue()}
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    for wheel in (kvoffd, *pegaflow):
        shutil.copy(wheel, files)
    write_pieces(files, python, archives)
    capabilities = ", ".join(f"{one / 10:g}" for one in sorted(architectures))
    sizes = " and ".join(f"{len(data) / 2**20:.0f} MiB ({name})" for name, data in archives.items())
    print(f"{files} has {sizes}, for Python {python} and GPUs of compute capability {capabilities}.")


def _downloaded(wanted: Iterable[str], to: Path, python: str) -> list[Path]:
    _, missing = wheels.find(wanted, to)
    if missing:
        to.mkdir(parents=True, exist_ok=True)
        wheels.download(missing, to, python, needs=False)
    found, missing = wheels.find(wanted, to)
    if missing:
        sys.exit(f"The package index gave no wheel of {', '.join(missing)}.")
    return found


def fill(given: Iterable[Path], site: Path, architectures: Collection[int]) -> None:
    """Make the directory of packages out of wheels."""
    left_out = (*LEFT_OUT, *(NOT_FOR_HOPPER if set(architectures) == {HOPPER} else ()))
    for wheel in given:
        wheels.unpack(wheel, site, left_out)
    for name, text in REPLACED.items():
        if not (site / name).exists():
            sys.exit(f"This vLLM has no {name}: see REPLACED in {__file__}.")
        (site / name).write_text(text)
    for path in filter(Path.exists, (site / name for name in LIBRARIES)):
        # Most kernels of experts are compiled for newer GPUs alone, and their PTX is large.
        path.write_bytes(fatbin.slim(path.read_bytes(), architectures, keep_ptx="_moe_" not in path.name))


def write_tar(to: IO[bytes], root: Path) -> None:
    """Write the files below ``root``: the same bytes for the same files."""
    with tarfile.open(fileobj=to, mode="w|") as tar:
        for path in sorted(path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
            info = tar.gettarinfo(path, str(path.relative_to(root)))
            info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
            with path.open("rb") as file:
                tar.addfile(info, file)


def write_pieces(files: Path, python: str, archives: Mapping[str, bytes], piece_bytes: int = PIECE_BYTES) -> None:
    described = {}
    for name, data in archives.items():
        for number, start in enumerate(range(0, len(data), piece_bytes)):
            (files / f"{name}.{number:02}").write_bytes(data[start : start + piece_bytes])
        described[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (files / MANIFEST).write_text(json.dumps({"python": python, "archives": described}, indent=1) + "\n")


# --- on the machine ---------------------------------------------------------------------------------


class Lacking(Exception):
    """What is missing or does not fit; the sentence says what to do."""


def install(files: Path, sites: Path) -> Path:
    """Unpack what is needed into a directory below ``sites``, unless it is there; return that.

    Raises Lacking.
    """
    manifest = json.loads((files / MANIFEST).read_text())
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if manifest["python"] != here:
        raise Lacking(f"{files} is for Python {manifest['python']}, and this is {here}: give PYTHON=/path/to/one.")
    wanted = needs()
    if (torch := _installed("torch")) is None or _numbers(torch) < _numbers(wanted["least_torch"]):
        found = "none" if torch is None else torch
        raise Lacking(f"vLLM needs torch {wanted['least_torch']} for CUDA or newer; this Python has {found}.")
    lacking = [one for one in wanted["beside"] if _installed(one.partition("==")[0]) is None]
    pegaflow, _ = wheels.find([wanted["pegaflow"]], files)
    key = hashlib.sha256(repr([manifest, lacking, pegaflow]).encode()).hexdigest()[:16]
    place = sites / f"vllm-{key}"
    if place.exists():
        return place
    # Both before anything is unpacked: what is missing shall be known soon.
    always = _joined(files, ALWAYS, manifest["archives"][ALWAYS])
    more = _joined(files, BESIDE, manifest["archives"][BESIDE], of=lacking) if lacking else b""
    for old in sites.glob("vllm-*"):
        shutil.rmtree(old)
    new = sites / "vllm-new"
    _extract(lzma.decompress(always), new)
    if lacking:
        _extract(more, new / "wheels")
        found, _ = wheels.find(lacking, new / "wheels")
        for wheel in found:
            wheels.unpack(wheel, new / SITE)
    for wheel in pegaflow:
        wheels.unpack(wheel, new / PEGAFLOW)
    # Each process of an engine would compile it by itself.
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-j0", str(new)], stdout=subprocess.DEVNULL)
    return new.rename(place)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def _joined(files: Path, name: str, described: Mapping[str, Any], of: Sequence[str] = ()) -> bytes:
    data = b"".join(path.read_bytes() for path in sorted(files.glob(f"{name}.*")))
    if len(data) < described["bytes"]:
        what = f", of which this machine lacks {', '.join(of)}" if of else ""
        here = f"{len(data) >> 20} of {described['bytes'] >> 20} MiB"
        raise Lacking(f"{files} has {here} of {name}{what}: bring its other pieces too.")
    if hashlib.sha256(data).hexdigest() != described["sha256"]:
        raise Lacking(f"The pieces of {name} in {files} do not belong together: bring all of one `make gpu-files`.")
    return data


def _extract(data: bytes, to: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extraction_filter = getattr(tarfile, "tar_filter", None)  # an argument since Python 3.11.4
        tar.extractall(to)
