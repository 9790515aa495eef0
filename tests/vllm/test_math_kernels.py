"""The choice of the CPU's math kernels before a model is built; python -m tests.tools.equal_engines shows why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvoffd_client.vllm
from kvoffd_client.vllm.math_kernels import FUNCTIONS


class Calls(TorchDispatchMode):
    """Notes each function of PyTorch's that is called: its name, and its input's device, type and size."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, str, torch.dtype, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            first = args[0]
            self.seen.add((func.overloadpacket.__name__, first.device.type, first.dtype, first.numel()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_math_kernels_are_chosen_by_the_hook(device: str) -> None:
    """vLLM calls the hook in each process before it builds a model: later, several threads may make the first call."""
    with Calls() as calls, torch.device(device):
        kvoffd_client.vllm.register()
    wanted = {(name, "cpu", dtype, 1) for name in FUNCTIONS for dtype in (torch.float32, torch.float64)}
    assert wanted <= calls.seen
