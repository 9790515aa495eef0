"""A cheap identity of a model's weights.

A model from a hub is its name, its revision and the commit its configuration came from. A local directory is
identified by content, not by path or time, so that a copy, or another mount point in another container, shares
blocks, and two checkpoints that follow each other at one path do not: names, sizes and safetensors headers of all
weight files, and a few hundred bytes from the middle of up to 64 tensors of each file. Training moves practically
all of them; whoever edits single numbers of a checkpoint in place should change the ``salt``.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py")
SAMPLES_PER_FILE = 64
SAMPLE_BYTES = 256
MAX_HEADER_BYTES = 100 << 20


def weights_identity(model: str) -> str | None:
    """Return a digest of a local model's files, None when ``model`` is no local path."""
    path = Path(model)
    if path.is_file():
        return _digest_of([path])
    if not path.is_dir():
        return None
    files = sorted(item for item in path.iterdir() if item.suffix in WEIGHT_SUFFIXES and item.is_file())
    if not any(item.suffix != ".py" for item in files):
        # Weights in a form not known here: the path is all there is to tell them apart.
        return hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    return _digest_of(files)


def _digest_of(files: list[Path]) -> str:
    total = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        total.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            header = _safetensors_header(file.read(8), size) if path.suffix == ".safetensors" else 0
            if header:
                content = file.read(header)
                total.update(content)
                offsets = _tensor_offsets(content, 8 + header, size)
            else:
                step = max(SAMPLE_BYTES, size // SAMPLES_PER_FILE)
                offsets = list(range(0, size, step))
            for offset in offsets:
                file.seek(offset)
                total.update(file.read(SAMPLE_BYTES))
    return total.hexdigest()


def _safetensors_header(prefix: bytes, size: int) -> int:
    """Length of the JSON header, 0 when the file is not what its name says."""
    length = int.from_bytes(prefix, "little") if len(prefix) == 8 else 0
    return length if 0 < length <= min(MAX_HEADER_BYTES, size - 8) else 0


def _tensor_offsets(header: bytes, base: int, size: int) -> list[int]:
    """Where to sample: the middles of up to SAMPLES_PER_FILE tensors, spread over the file."""
    try:
        entries = json.loads(header)
        spans = sorted(tuple(entry["data_offsets"]) for name, entry in entries.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError):
        spans = []
    if not spans:
        return list(range(base, size, max(SAMPLE_BYTES, (size - base) // SAMPLES_PER_FILE)))
    step = max(1, -(-len(spans) // SAMPLES_PER_FILE))
    return [base + (int(begin) + int(end)) // 2 for begin, end in spans[::step]]
