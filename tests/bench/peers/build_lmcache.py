"""Build LMCache's own environment: ``python -m tests.bench.peers.build_lmcache DIRECTORY``, started by the Makefile.

LMCache's wheel asks for CUDA libraries of some gigabytes, which its multiprocess server does not import on a machine
without a GPU. So it is installed without its requirements, and those that it does import are installed by name.
Imports the standard library only.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.tools.build_venv import NOT_CPU, TORCH, Builder, BuildFailed, cpu_index

LMCACHE = "lmcache==0.5.6"
# The bounds are those of LMCache's own metadata. Left out: awscrt, cuda-python, cufile-python, cupy, google-*, redis
# and grpcio-observability, for storage and devices that are not compared, and pytest and setuptools_scm.
REQUIREMENTS = (
    "aiofile",
    "aiofiles",
    "aiohttp",
    "blake3",
    "cachetools",
    "cryptography",
    "fastapi",
    "grpcio>=1.78.0",
    "httptools",
    "httpx",
    "huggingface_hub>=1.5.0",
    "msgspec",
    "numba",
    "numpy<=2.2.6",
    "nvtx",
    "opentelemetry-api>=1.20.0,<=1.40.0",
    "opentelemetry-exporter-otlp>=1.20.0",
    "opentelemetry-exporter-prometheus>=0.50b0,<=0.61b0",
    "opentelemetry-sdk>=1.20.0",
    "prometheus_client>=0.18.0,<=0.24.1",
    "protobuf>=6.31.1,<7",
    "psutil",
    "py-cpuinfo",
    "pyyaml",
    "pyzmq>=25.0.0",
    "safetensors",
    "setuptools>=77.0.3,<81.0.0",
    "sortedcontainers",
    "transformers>=5.4",
    "uvicorn",
)
STARTS = "import lmcache.integration.vllm.vllm_multi_process_adapter, lmcache.v1.multiprocess.http_server"


class LMCacheBuilder(Builder):
    """Adds LMCache's steps."""

    def install_lmcache(self) -> None:
        """torch, CPU build, then LMCache, then what it imports."""
        hint = "Set PIP_TORCH_ARGS to where a CPU build of torch is; see tests/tools/build_venv.py."
        self._pip(f"installing {TORCH}", [TORCH, *cpu_index()], hint)
        self._pip(f"installing {LMCACHE}", ["--no-deps", LMCACHE])
        self._pip("installing what it imports", REQUIREMENTS)
        self._run("checking that torch is a CPU build still", [str(self._python), "-c", NOT_CPU], hint)
        self._run("starting LMCache's Python package", [str(self._python), "-c", STARTS])


def main() -> int:
    """Build in the directory named; 0 when all steps succeeded."""
    builder = LMCacheBuilder(Path(sys.argv[1]).absolute(), Path(__file__).resolve().parents[3])
    try:
        builder.create()
        builder.install_lmcache()
    except BuildFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
