"""What a worker has in its memory: a digest of the live models, and whether they may have changed since it was taken.

A configuration names a checkpoint. Training updates weights in place, and an engine that sleeps may wake up with
others, so only the tensors themselves tell what KV blocks were computed with.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.parameter import SharedWeightParameter
from vllm.v1.worker.worker_base import WorkerBase

from kvoffd_client.vllm.log import logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PIECE_BYTES = 64
PIECES = 16
"""Taken of each tensor, spread over it. Training moves all of a tensor's numbers; change the ``salt`` where you
edit single ones in place."""

CHANGING_METHODS = (
    "apply_model",
    "checkpoint_restore",
    "finish_weight_update",
    "load_model",
    "load_weights",
    "reload_weights",
    "reset_weights",
    "start_draft_weight_update",
    "start_weight_update",
    "update_weights",
    "wake_up",
)
"""Methods of vLLM's workers, model runners and models (0.32, 0.33) after which the weights may be others."""

CHECKPOINT_FORMATS = frozenset(
    {"auto", "fastsafetensors", "hf", "instanttensor", "mistral", "npcache", "pt", "safetensors"}
)
"""Load formats that fill a model from the files that its configuration names (vLLM's DefaultModelLoader)."""


def has_experts_elsewhere(vllm_config: VllmConfig) -> bool:
    """Return whether a worker's experts may be any of the model's, and the fingerprint's files tell which those are.

    Under data parallelism vLLM gives each rank other experts, or other parts of all of them. EPLB moves them between
    ranks while they run.
    """
    parallel = vllm_config.parallel_config
    spread = parallel.data_parallel_size > 1 or parallel.enable_eplb
    return spread and str(vllm_config.load_config.load_format) in CHECKPOINT_FORMATS


class LiveWeights:
    """The models of one worker. ``models`` returns those that are in memory: the model, and a draft model if any.

    Where ``experts_elsewhere`` is true other ranks compute with the experts that are here, and this one with theirs:
    the experts here tell no engine from another, and count for nothing.

    Attributes:
        changed: the weights may be others than those of the last digest.
        runner: vLLM's model runner, where it was found.
    """

    def __init__(
        self, models: Callable[[], list[torch.nn.Module]], runner: object = None, *, experts_elsewhere: bool = False
    ) -> None:
        self._models = models
        self.runner = runner
        self.changed = False
        self._experts_elsewhere = experts_elsewhere

    @classmethod
    def of_caller(cls, *, experts_elsewhere: bool = False) -> LiveWeights:
        """Return the weights of the worker that is calling; without a model where no caller is a model runner.

        vLLM hands connectors no model. It registers the KV caches from inside its model runner, in a method of its
        worker, with other connectors in between perhaps, so both are among the callers.
        """
        runner = worker = None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, WorkerBase):
                worker = worker or caller
            elif callable(getattr(caller, "get_model", None)):
                runner = runner or caller
            frame = frame.f_back
        weights = cls(lambda: _models_of(runner), runner, experts_elsewhere=experts_elsewhere)
        for owner in (worker, runner, *_models_of(runner)):
            weights.watch(owner)
        return weights

    def watch(self, owner: Any) -> None:
        """Have every call of a method that changes weights noticed. The methods do what they did."""
        for name in CHANGING_METHODS:
            if callable(method := getattr(owner, name, None)):
                setattr(owner, name, self._noticing(method))

    def digest(self) -> str | None:
        """Return the digest, in hex, of all parameters and buffers: names, types, shapes and samples of their bytes.

        The same weights give the same digest in every process that splits them over as many workers. None where they
        are not found or cannot be read: that must cost an engine its shared blocks, not its start.
        """
        try:
            self.changed = False
            began = time.monotonic()
            total, samples = hashlib.sha256(), list[torch.Tensor]()
            if not (models := self._models()):
                return None
            for number, model in enumerate(models):
                modules = model.named_modules() if self._experts_elsewhere else ()
                experts = tuple(f"{name}." for name, module in modules if isinstance(module, RoutedExperts))
                for name, tensor in (*_tensors(model), *_packed_columns(model)):
                    if name.startswith(experts):
                        # How many there are differs from rank to rank. Their form tells how they are quantized.
                        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape[1:])}\n".encode())
                        continue
                    # Where LoRA is on, vLLM puts each layer into another one, and plain prompts get what they got.
                    plain = name.replace(".base_layer.", ".")
                    total.update(f"{number} {plain} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                    pieces = sample(tensor)
                    samples += pieces
                    if logger.isEnabledFor(logging.DEBUG):  # by it two engines' weights are compared
                        digest = hashlib.sha256(b"".join(joined(pieces))).hexdigest()[:16]
                        logger.debug("kvoffd: weights %d %s: %s", number, plain, digest)
            for piece in joined(samples):
                total.update(piece)
            seconds = time.monotonic() - began
            logger.info("kvoffd: named the weights by samples of %d tensors in %.3f s.", len(samples), seconds)
            return total.hexdigest()
        except Exception:
            logger.exception("kvoffd: the weights in memory could not be read.")
            return None

    def note_change(self) -> None:
        """The weights, or those of an adapter, may be others from now on."""
        self.changed = True

    def _noticing(self, method: Callable[..., Any]) -> Any:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.changed = True
            try:
                return method(*args, **kwargs)
            finally:
                self.changed = True

        return call


def _models_of(runner: Any) -> list[torch.nn.Module]:
    getters = (getattr(runner, name, None) for name in ("get_model", "get_draft_model"))
    models = [getter() for getter in getters if callable(getter)]
    return [model for model in models if isinstance(model, torch.nn.Module)]


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the parameters, and the buffers that are part of the weights.

    Others follow from the configuration or the parameters, or are written by each forward pass, or hold addresses:
    those that are not persistent, and scales that vLLM's encoders adapt as they run (mm_encoder_attention.py).
    """
    for name, parameter in model.named_parameters():
        yield from _plain(name, parameter)
    for prefix, module in model.named_modules():
        if not getattr(module, "_fp8_dynamic_scale", False):
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if name.removeprefix(f"{prefix}.") not in module._non_persistent_buffers_set:
                    yield from _plain(name, buffer)


def _packed_columns(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return columns of the matrices that vLLM packs for its CPU kernels, which leaves their parameters empty.

    Only the layer's own product reads them (vllm/model_executor/layers/utils.py, dispatch_cpu_unquantized_gemm). With a
    vector of zeros and a one it is a column, exactly: nothing is rounded, whatever the kernel and its threads. It
    costs a read of the matrix. Other kernels keep what they packed in attributes.
    """
    for name, module in model.named_modules():
        weight, product = getattr(module, "weight", None), getattr(module, "cpu_linear", None)
        if not isinstance(weight, torch.Tensor) or weight.numel() > 0 or hasattr(module, "base_layer"):
            continue
        if product is None:
            yield from ((f"{name}.{key}", kept) for key, kept in vars(module).items() if isinstance(kept, torch.Tensor))
            continue
        inputs = getattr(module, "input_size_per_partition", None) or module.input_size
        columns = sorted({0, inputs // 2, inputs - 1})
        vectors = torch.zeros(len(columns), inputs, dtype=weight.dtype)
        vectors[range(len(columns)), columns] = 1
        with torch.inference_mode():
            yield f"{name}.columns", product(vectors, weight, None)


def _plain(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors that hold the bytes: some of vLLM's and TorchAO's parameters are made of several."""
    if isinstance(tensor, SharedWeightParameter):
        for index, partition in tensor.partitions.items():
            yield from _plain(f"{name}.{index}", partition)
    elif is_traceable_wrapper_subclass(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{attribute}", getattr(tensor, attribute))
    else:
        yield name, tensor


def sample(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return pieces of a tensor's memory, from its first byte to its last, on its device."""
    if tensor.is_meta or tensor.numel() == 0:
        return []
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    length = (last + 1) * tensor.element_size()
    begin = tensor.storage_offset() * tensor.element_size()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    memory.set_(tensor.untyped_storage(), begin, (length,), (1,))
    if length <= PIECES * PIECE_BYTES:
        return [memory]
    step = (length - PIECE_BYTES) // (PIECES - 1)
    return [memory.as_strided((PIECES, PIECE_BYTES), (step, 1)).reshape(-1)]


def joined(pieces: list[torch.Tensor]) -> Iterator[bytes]:
    """Return the bytes of the pieces of each device. One copy per device: each would wait for the device anew."""
    for device in dict.fromkeys(piece.device for piece in pieces):
        yield torch.cat([piece for piece in pieces if piece.device == device]).cpu().numpy().tobytes()
