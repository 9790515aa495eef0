"""What a test needs of the machine. It is skipped where that is missing, and fails where it was asked for.

``TESTS_REQUIRE=redis,s3,vllm`` names what must be there: in CI nothing may be skipped in silence. It is no
``KVOFFD_...``: these are settings of the daemon, which refuses those that it does not know.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import NoReturn

import pytest

NEEDS = (
    "chromium",
    "cuda-headers",
    "helm",
    "history",
    "nixl",
    "prometheus",
    "redis",
    "rclone",
    "root",
    "s3",
    "shm",
    "systemd",
    "tmux",
    "vllm",
)
"""Everything that a test may ask for."""
VARIABLE = "TESTS_REQUIRE"


def required() -> frozenset[str]:
    """Return what the environment says must be there. Raises UsageError for a name that no test asks for."""
    names = frozenset(filter(None, os.environ.get(VARIABLE, "").split(",")))
    if unknown := sorted(names - set(NEEDS)):
        raise pytest.UsageError(f"{VARIABLE} names {', '.join(unknown)}; it may name {', '.join(NEEDS)}.")
    return names


def missing(need: str, reason: str) -> NoReturn:
    """End the test that cannot run: skip it, or fail it where ``need`` is required."""
    assert need in NEEDS, f"{need!r} is not in tests.kit.require.NEEDS"
    if need in required():
        pytest.fail(f"{VARIABLE} requires {need}, which is missing: {reason}", pytrace=False)
    pytest.skip(reason)


def require(need: str, there: object, reason: str) -> None:
    """Go on only where ``there`` is true, such as ``require("redis", shutil.which("redis-server"), "...")``."""
    if not there:
        missing(need, reason)


def require_nixl() -> None:
    """Go on only where the library of peers is."""
    require("nixl", find_spec("nixl_cu12"), "NIXL is not installed")
