"""The identity of LoRA adapters."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest

from kvoffd_client.vllm.fingerprint import LoraAdapters
from tests.kit.models import write_lora_adapter


def request(path: Path | str, int_id: int = 1, *, in_place: bool = False) -> Any:
    return LoRARequest("name", int_id, str(path), load_inplace=in_place)


def test_equal_adapters_are_one_wherever_they_are_and_others_are_not(tmp_path: Path) -> None:
    one, other = write_lora_adapter(tmp_path / "one", seed=1), write_lora_adapter(tmp_path / "other", seed=2)
    copied = tmp_path / "copied"
    shutil.copytree(one, copied)
    adapters = LoraAdapters()
    first, second, third = (
        adapters.content_of(request(path, number)) for number, path in enumerate((one, copied, other), 1)
    )
    assert first == second != third
    assert third is not None
    (one / "adapter_config.json").write_text("{}")
    assert LoraAdapters().content_of(request(one)) != adapters.content_of(request(copied))


def test_an_adapter_that_an_engine_applies_in_part_is_another_one(tmp_path: Path) -> None:
    path = write_lora_adapter(tmp_path / "one", seed=1)

    def content(**settings: Any) -> bytes | None:
        return LoraAdapters(LoRAConfig(**settings)).content_of(request(path))

    whole = content()
    assert whole == content(max_loras=4, max_lora_rank=32, fully_sharded_loras=True), "where and how fast"
    parts = [content(target_modules=["q_proj"]), content(target_modules=["q_proj", "v_proj"])]
    assert parts[1] == content(target_modules=["v_proj", "q_proj"])
    assert len({whole, *parts, content(lora_dtype="bfloat16"), content(enable_tower_connector_lora=True)}) == 5


def test_an_adapter_with_new_content_is_unknown_until_a_reset(tmp_path: Path, said: list[str]) -> None:
    path = write_lora_adapter(tmp_path / "one", seed=1)
    adapters = LoraAdapters()
    first = adapters.content_of(request(path))
    assert first is not None
    write_lora_adapter(path, seed=2)
    assert adapters.content_of(request(path)) == first, "that is in memory"
    assert adapters.content_of(request(path, int_id=2)) is None, "vLLM's own cache has blocks of the first"
    assert adapters.content_of(request(path, int_id=2)) is None
    assert sum("loaded anew with another content" in line for line in said) == 1
    adapters.engine_cache_reset()
    second = adapters.content_of(request(path, int_id=2))
    assert second not in (None, first)
    assert adapters.content_of(request(path, int_id=3)) == second, "the same once more"
    adapters.engine_cache_reset()
    write_lora_adapter(path, seed=1)
    assert adapters.content_of(request(path, int_id=4)) == first, "of which no cache has another's blocks"


def test_an_adapter_loaded_in_place_is_read_again(tmp_path: Path) -> None:
    path = write_lora_adapter(tmp_path / "one", seed=1)
    adapters = LoraAdapters()
    first = adapters.content_of(request(path))
    write_lora_adapter(path, seed=2)
    assert adapters.content_of(request(path, in_place=True)) is None, "vLLM's own cache has blocks of the first"
    adapters.engine_cache_reset()
    second = adapters.content_of(request(path, in_place=True))
    assert second not in (None, first)
    moved = write_lora_adapter(tmp_path / "two", seed=1)
    assert adapters.content_of(request(moved, in_place=True)) == first
    assert adapters.content_of(request(path)) is None, "vLLM computes it with the one that has its id now"


def test_an_adapter_without_files_or_with_another_ones_id_is_unknown(tmp_path: Path) -> None:
    adapters = LoraAdapters()
    (tmp_path / "empty").mkdir()
    for without_files in (tmp_path / "nothing", "not-there/at-all", tmp_path / "empty"):
        assert adapters.content_of(request(without_files)) is None
    one, other = write_lora_adapter(tmp_path / "one", seed=1), write_lora_adapter(tmp_path / "other", seed=2)
    adapters = LoraAdapters()
    first = adapters.content_of(request(one))
    assert adapters.content_of(request(other)) is None
    assert adapters.content_of(request(one)) == first
    assert adapters.content_of(request(other, 2)) is None, "vLLM's own cache has blocks of the first under its name"
