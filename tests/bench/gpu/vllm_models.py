"""Models with random weights for a GPU, written on the spot: ``python -m tests.bench.gpu.vllm_models 3b DIRECTORY``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

from tests.kit.models import Shape, llama_config, llama_parameters


class Size(NamedTuple):
    """A Llama's shape, and its number of tokens. They need not be those of a tokenizer."""

    shape: Shape
    vocabulary: int


SIZES = {
    "3b": Size(Shape(hidden=3072, intermediate=8192, layers=28, heads=24, kv_heads=8, head_dim=128), 32_000),
    # Llama 3.1's.
    "8b": Size(Shape(hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, head_dim=128), 128_256),
}


def write_llama(size: Size, path: Path) -> None:
    """Write the model in bfloat16, drawn on the GPU, into the directory ``path``; the configuration last."""
    import torch
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator("cuda").manual_seed(7)
    weights = {}
    for name, sizes, deviation in llama_parameters(size.shape, size.vocabulary):
        drawn = torch.ones(sizes, dtype=torch.bfloat16, device="cuda")
        if deviation:
            drawn.normal_(0, deviation, generator=generator)
        weights[name] = drawn.cpu()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    changes = {"vocab_size": size.vocabulary, "max_position_embeddings": 131_072, "torch_dtype": "bfloat16"}
    config = {**llama_config(size.shape), "rope_theta": 500_000.0, **changes}
    (path / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    write_llama(SIZES[sys.argv[1]], Path(sys.argv[2]))
