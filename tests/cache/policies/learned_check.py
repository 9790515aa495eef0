"""Holds the books of the policy ``learned``, which are in C, against themselves."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import numpy as np

import kvoffd
from kvoffd.cache.learned import Learned
from kvoffd_proto.messages import READY
from tests.kit.cuda_abi import compiler
from tests.kit.slot_cache import CacheRig

SOURCE = Path(__file__).with_suffix(".c")


@functools.cache
def _checker() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory, "check.so")
        headers = Path(kvoffd.__file__).parent / "cache"
        flags = ["-std=gnu11", "-O1", "-fPIC", "-shared", f"-I{headers}"]
        subprocess.run([compiler(), *flags, "-o", made, SOURCE], check=True)
        return ctypes.CDLL(str(made))


def policy_of(rig: CacheRig) -> Learned:
    assert isinstance(rig.policy, Learned)
    return rig.policy


def check_learned(rig: CacheRig) -> None:
    """Every known key has one place, every block is at the place of its key, and what is counted is so."""
    policy = policy_of(rig)
    line = _checker().check_learned(ctypes.c_void_p(policy._at))
    assert not line, f"{SOURCE}:{line}: {SOURCE.read_text().splitlines()[line - 1].strip()}"
    ready = np.flatnonzero(rig.cache.blocks.state == READY).tolist()
    assert sorted(int(block) for some in policy.candidates() for block in some) == ready
