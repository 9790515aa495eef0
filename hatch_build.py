"""Compiles the daemon's loops in C when kvoffd is built or installed; makes its long description. hatch calls it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

SOURCES = [
    "kvoffd/cache/curve.c",
    "kvoffd/cache/blocks.c",
    "kvoffd/cache/lru.c",
    "kvoffd/cache/askers.c",
    "kvoffd/cache/computing.c",
    "kvoffd/cache/arc.c",
    "kvoffd/cache/recover.c",
    "kvoffd/cache/learned.c",
    "kvoffd/pool/slots.c",
    "kvoffd/system/version.c",
    "kvoffd/tiers/answers.c",
    "kvoffd/tiers/disk_index.c",
    "kvoffd/tiers/disk_reads.c",
    "kvoffd/tiers/receive.c",
    "kvoffd/transfer/host_copy.c",
    "kvoffd/transfer/plan.c",
    "kvoffd/transfer/cuda/gpu_copy.c",
]
LIBRARY = "kvoffd/libkvoffd.so"
COMMIT_FILE = {"wheel": "kvoffd_proto/commit.txt", "sdist": "proto/kvoffd_proto/commit.txt"}
"""Where a build that is no release has its commit. A wheel built from a sdist has the sdist's."""
FLAGS = ["-O3", "-std=gnu11", "-Wall", "-Wextra", "-Wno-psabi", "-fPIC", "-shared"]


class CompiledLoops(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library into the wheel, which is then one for this platform and every Python; editable, into the tree.

    Nothing in the tree is touched before the compiler has succeeded, and nothing at all for a wheel: the tree may be
    another's, mounted into a container, and a daemon may be running on the library that lies there.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        self._made = tempfile.TemporaryDirectory(prefix="kvoffd-build-")  # goes with this object if all fails
        if version != "editable" and (commit := _commit(root, self.metadata.version)):
            written = Path(self._made.name, "commit.txt")
            written.write_text(f"{commit}\n")
            build_data["force_include"][str(written)] = COMMIT_FILE[self.target_name]
        if self.target_name != "wheel":
            return
        compiler = _compiler()
        made = Path(self._made.name, "libkvoffd.so")
        sources = [str(root / source) for source in SOURCES]
        if subprocess.run([*compiler, *FLAGS, "-o", str(made), *sources], check=False).returncode:
            sys.exit("kvoffd's C does not compile; the compiler said why.")
        if version == "editable":
            beside = root / f"{LIBRARY}.new"
            shutil.copy(made, beside)
            beside.replace(root / LIBRARY)  # a new file: the old one may be mapped
        else:
            build_data["force_include"][str(made)] = LIBRARY
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._made.cleanup()


class LongDescription(MetadataHookInterface):
    """README.md for package indexes, where links to other files of the repository lead nowhere: their text remains."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = re.sub(r"\[([^\]]+)\]\((?!https?://|#)[^)]+\)", r"\1", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def _commit(root: Path, release: str) -> str:
    """Return the tree's commit as ``g0123456789ab``, with ``.dirty`` if files were changed; empty for a release, and if
    unknown.

    KVOFFD_COMMIT names it where git does not know, as in an image: a commit or what ``git describe --dirty`` says.
    """
    said = os.environ.get("KVOFFD_COMMIT", "")
    if not said and (root / ".git").exists():
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
        with suppress(OSError):
            said = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.strip()
    found = re.search(r"([0-9a-f]{12})[0-9a-f]{28}(-dirty)?$", said)
    if found is None:
        return "dirty" if said == f"v{release}-dirty" else ""
    return f"g{found[1]}{'.dirty' if found[2] else ''}"


def _compiler() -> list[str]:
    """Its command line. A wheel without the library would look whole and hold a daemon that cannot start."""
    named = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    for words in map(shlex.split, named):
        if shutil.which(words[0]):
            return words
    sys.exit(
        f"kvoffd is built from C, and no compiler was found ({', '.join(named)}): install gcc, name one in CC, or "
        "install a wheel, which needs none."
    )
