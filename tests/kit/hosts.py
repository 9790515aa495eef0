"""Names that only some processes know, and whose addresses change: as a cluster's DNS has them. For root."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from .require import require


class Hosts:
    """A file for daemons in place of ``/etc/hosts``: ``hosts`` of ``DaemonProcess``."""

    def __init__(self, path: Path) -> None:
        require("root", _can_mount(), "a mount namespace needs root and the command unshare")
        self.path = path
        self.set("unused.test", [])

    def set(self, name: str, addresses: Iterable[str]) -> None:
        """Have a name, and no other one, lead to these addresses. The file stays, as processes have mounted it."""
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address in addresses)]
        self.path.write_text("\n".join(lines) + "\n")


@functools.cache
def _can_mount() -> bool:
    if os.geteuid() or not shutil.which("unshare"):
        return False
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "--bind", "/etc/hosts", "/etc/hosts"], capture_output=True, check=False
    )
    return tried.returncode == 0
