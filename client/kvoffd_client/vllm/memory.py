"""Has vLLM allocate its KV cache in memory that can be shared with the daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvoffd_client.shared_memory import SharedMemory


class SharedKvMemory(TorchFunctionMode):
    """While active, ``torch.zeros(n, dtype=torch.int8)`` on the CPU comes from a sealed memfd.

    That is the one call with which vLLM allocates the backing of all its KV tensors (v1/worker/utils.py,
    allocate_kv_cache). Everything else passes through. Memory from a memfd is zero already.

    Attributes:
        memories: what was allocated; kept for the life of the process, since vLLM's tensors live in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memories: list[SharedMemory] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Divert that one call."""
        kwargs = kwargs or {}
        if func is torch.zeros and _is_kv_backing(args, kwargs):
            memory = SharedMemory(args[0], name="kvoffd-kv")
            self.memories.append(memory)
            return torch.frombuffer(memory.view, dtype=torch.int8)
        return func(*args, **kwargs)


def _is_kv_backing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return (
        len(args) == 1
        and isinstance(args[0], int)
        and args[0] > 0
        and kwargs.get("dtype") is torch.int8
        and (device is None or torch.device(device).type == "cpu")
    )
