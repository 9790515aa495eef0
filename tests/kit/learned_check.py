"""Holds the books of the policy ``learned``, which are in C, against themselves."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import kvoffd
from kvoffd.cache.policies.learned import Policy
from tests.kit.cache_harness import CacheHarness
from tests.kit.cuda_abi import compiler

SOURCE = Path(__file__).with_suffix(".c")


@functools.cache
def _checker() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory, "check.so")
        headers = Path(kvoffd.__file__).parent / "cache" / "learned"
        flags = ["-std=gnu11", "-O1", "-fPIC", "-shared", f"-I{headers}", "-Wl,--unresolved-symbols=ignore-all"]
        subprocess.run([compiler(), *flags, "-o", made, SOURCE], check=True)
        return ctypes.CDLL(str(made))


def policy_of(rig: CacheHarness) -> Policy:
    policy = rig.cache.policy
    assert isinstance(policy, Policy)
    return policy


def check_learned(policy: Policy) -> None:
    """Every known key has one place, every block is at the place of its key, and what is counted is so."""
    line = _checker().check_learned(ctypes.c_void_p(policy._at))
    assert not line, f"{SOURCE}:{line}: {SOURCE.read_text().splitlines()[line - 1].strip()}"
    blocks = [block for block in policy._blocks._by_number if block is not None]
    assert len(blocks) == len(policy) == len(list(policy.candidates()))
    assert set(policy.candidates()) == set(blocks)
    assert len(policy._blocks._unused) + len(blocks) + 1 == len(policy._blocks._by_number)
