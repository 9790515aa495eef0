"""A worker's LoRA adapters: vLLM's own reading of files, behind a manager that is a double."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.config import LoRAConfig
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from kvoffd_client.vllm.adapters import LiveAdapters


def lora_request(path: Path | str, number: int = 1, *, in_place: bool = False) -> Any:
    return LoRARequest("name", number, str(path), load_inplace=in_place)


class AdapterManager:
    """What of vLLM's manager of adapters counts: it reads files, and holds `capacity` of what it has read."""

    def __init__(self, capacity: int = 1) -> None:
        self.capacity, self.reads = capacity, 0
        self.held: dict[int, LoRAModel] = {}

    def list_adapters(self) -> set[int]:
        return set(self.held)

    def add_adapter(self, request: LoRARequest) -> None:
        number = request.lora_int_id
        if number not in self.held or request.load_inplace:
            adapter = self._load_adapter(request)
            self.held.pop(number, None)
            while len(self.held) >= self.capacity:
                del self.held[next(iter(self.held))]
            self.held[number] = adapter

    def _load_adapter(self, request: LoRARequest) -> LoRAModel:
        self.reads += 1
        path = request.lora_path
        return LoRAModel.from_local_checkpoint(
            path,
            {"q_proj", "v_proj"},
            PEFTHelper.from_local_dir(path, None),
            lora_model_id=request.lora_int_id,
            device="cpu",
            dtype=torch.float32,
        )


class AdapterWorker:
    """A worker's adapters, and how often one of them has changed."""

    def __init__(self, capacity: int = 1, changed: Callable[[], None] = lambda: None, **settings: Any) -> None:
        self._changed = changed
        self.manager, self.changes = AdapterManager(capacity), 0
        self.adapters = LiveAdapters(self.manager, LoRAConfig(**settings), self.change)

    def change(self) -> None:
        self.changes += 1
        self._changed()

    def loaded(self, path: Path, number: int = 1, *, in_place: bool = False) -> bytes:
        """The digest of an adapter that vLLM wants now."""
        self.manager.add_adapter(lora_request(path, number, in_place=in_place))
        return self.contents[number]

    @property
    def contents(self) -> dict[int, bytes]:
        contents = self.adapters.contents()
        assert contents is not None
        return {number: content for number, (_, content) in contents.items()}
