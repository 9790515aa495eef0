"""Memory for copies."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def random_bytes(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def address_of(buffer: Bytes) -> int:
    return int(buffer.ctypes.data)
