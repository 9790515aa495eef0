"""The identity of a model's files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvoffd_client.vllm.fingerprint import weights_identity


def write_model(path: Path, seed: int = 0, layers: int = 200) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    save_file(
        {f"layer.{index}": random.standard_normal((16, 16), np.float32) for index in range(layers)},
        path / "model.safetensors",
    )
    (path / "config.json").write_text("{}")
    return path


def test_a_copy_is_the_same_model_whatever_its_path_and_times(tmp_path: Path) -> None:
    original = write_model(tmp_path / "a")
    shutil.copytree(original, tmp_path / "b", copy_function=shutil.copyfile)
    os.utime(tmp_path / "b" / "model.safetensors", (1, 1))
    assert weights_identity(str(original)) == weights_identity(str(tmp_path / "b"))


def test_another_checkpoint_of_the_same_shape_at_the_same_path_is_another_model(tmp_path: Path) -> None:
    first = weights_identity(str(write_model(tmp_path / "a", seed=0)))
    assert weights_identity(str(write_model(tmp_path / "a", seed=1))) != first


def test_another_file_beside_the_weights_makes_another_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "a")
    first = weights_identity(str(model))
    (model / "modeling.py").write_text("scale = 2")
    assert weights_identity(str(model)) != first


@pytest.mark.parametrize("name", ["model.bin", "model.gguf", "model.safetensors"])
def test_files_of_other_formats_are_told_apart_by_content(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\1" * 100_000)
    first = weights_identity(str(tmp_path))
    (tmp_path / name).write_bytes(b"\2" * 100_000)
    assert weights_identity(str(tmp_path)) != first


def test_where_no_weights_are_found_the_path_tells_models_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert weights_identity(str(tmp_path / "a")) != weights_identity(str(tmp_path / "b"))
