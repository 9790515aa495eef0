"""Build the environments of others' routers: ``python -m tests.routers.build_routers DIRECTORY``, from the Makefile.

Each has one of its own, for their requirements are not ours. Imports the standard library only.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.tools.build_venv import Builder, BuildFailed

ROUTERS = {"dynamo": "ai-dynamo-runtime==1.6.1", "vllm-router": "vllm-router==0.1.17"}


class RouterBuilder(Builder):
    """Adds one package from PyPI."""

    def install(self, package: str) -> None:
        self._pip(f"installing {package}", [package], "There are wheels for x86_64 and aarch64 with glibc.")


def main() -> int:
    """Build in the directory named; 0 when all steps succeeded."""
    for name, package in ROUTERS.items():
        builder = RouterBuilder(Path(sys.argv[1]).absolute() / name, Path(__file__).resolve().parents[2])
        try:
            builder.create()
            builder.install(package)
        except BuildFailed as failure:
            print(failure, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
