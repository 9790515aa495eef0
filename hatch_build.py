"""Compiles the daemon's loops in C when kvoffd is built or installed; hatch calls it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = ["kvoffd/cache/key_states.c", "kvoffd/transfer/host_copy.c"]
LIBRARY = "kvoffd/libkvoffd.so"
FLAGS = ["-O3", "-std=gnu11", "-Wall", "-Wextra", "-Wno-psabi", "-fPIC", "-shared"]


class CompiledLoops(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library into the tree and into the wheel, which is then one for this platform.

    Where there is no compiler kvoffd is installed without it: the connector in an engine's image needs none, and a
    daemon says at its start what is missing.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        (root / LIBRARY).unlink(missing_ok=True)  # a new file, since a daemon may be running on the one that was there
        named = [os.environ["CC"]] if "CC" in os.environ else ["cc", "gcc", "clang"]
        compiler = next((words for words in map(shlex.split, named) if words and shutil.which(words[0])), None)
        if compiler is None:
            print(f"None of {named} is installed: kvoffd is built without what its daemon needs.", file=sys.stderr)
            return
        sources = [str(root / source) for source in SOURCES]
        subprocess.run([*compiler, *FLAGS, "-o", str(root / LIBRARY), *sources], check=True)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append(LIBRARY)
