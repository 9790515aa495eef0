"""A digest of the models in a worker's memory, and whether they may have changed since.

A configuration only names a checkpoint. Training updates weights in place, and a sleeping engine may wake up with other
weights, so only the tensors themselves identify what KV blocks were computed with.
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
"""Samples from each tensor. Training changes all numbers of a tensor; change the ``salt`` if you edit single ones in
place."""

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
"""Methods of vLLM's workers, model runners and models (0.32, 0.33) that may change the weights."""

CHECKPOINT_FORMATS = frozenset(
    {"auto", "fastsafetensors", "hf", "instanttensor", "mistral", "npcache", "pt", "safetensors"}
)
"""Load formats that read the files named by the configuration (vLLM's DefaultModelLoader)."""


def has_experts_elsewhere(vllm_config: VllmConfig) -> bool:
    """Return whether a worker has only some of the model's experts, and the fingerprint's files identify all of them.

    With data parallelism each rank has other experts, or other parts of them. EPLB moves experts between running ranks.
    """
    parallel = vllm_config.parallel_config
    spread = parallel.data_parallel_size > 1 or parallel.enable_eplb
    return spread and str(vllm_config.load_config.load_format) in CHECKPOINT_FORMATS


class LiveWeights:
    """The models of one worker. ``models`` returns those in memory: the model, and a draft model if any.

    With ``experts_elsewhere`` all ranks compute with experts of other ranks, so the local experts do not identify an
    engine and are not part of the digest.

    Attributes:
        changed: whether the weights may have changed since the last digest.
        runner: vLLM's model runner, if found.
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
        """Return the weights of the calling worker; without a model if no caller is a model runner.

        vLLM passes no model to connectors. But it registers the KV caches from its model runner, in a method of its
        worker, so both are in the call stack, perhaps with other connectors in between.
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
        """Wrap the methods that change weights, to notice every call."""
        for name in CHANGING_METHODS:
            if callable(method := getattr(owner, name, None)):
                setattr(owner, name, self._noticing(method))

    def digest(self) -> str | None:
        """Return the digest, in hex, of all parameters and buffers: names, types, shapes and samples of their bytes.

        Equal weights on equally many workers have equal digests in every process. None if the model is not found or
        cannot be read, which must cost an engine its shared blocks, not its start.
        """
        try:
            self.changed = False  # first: a change while the tensors are read counts
            began = time.monotonic()
            total, samples = hashlib.sha256(), list[torch.Tensor]()
            if not (models := self._models()):
                return None
            for number, model in enumerate(models):
                modules = model.named_modules() if self._experts_elsewhere else ()
                experts = tuple(f"{name}." for name, module in modules if isinstance(module, RoutedExperts))
                for name, tensor in (*_tensors(model), *_packed_columns(model)):
                    if name.startswith(experts):
                        # Their number differs between ranks. Type and shape depend on the quantization.
                        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape[1:])}\n".encode())
                        continue
                    # With LoRA vLLM wraps each layer, which does not change plain prompts.
                    plain = name.replace(".base_layer.", ".")
                    total.update(f"{number} {plain} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                    pieces = sample(tensor)
                    samples += pieces
                    if logger.isEnabledFor(logging.DEBUG):  # to compare two engines' weights
                        digest = hashlib.sha256(b"".join(joined(pieces))).hexdigest()[:16]
                        logger.debug("kvoffd: weights %d %s: %s", number, plain, digest)
            for piece in joined(samples):
                total.update(piece)
            seconds = time.monotonic() - began
            logger.info(
                "kvoffd: took a digest of the weights, samples of %d tensors, in %.3f s.", len(samples), seconds
            )
            return total.hexdigest()
        except Exception:
            logger.exception("kvoffd: the weights in memory could not be read.")
            return None

    def mark_changed(self) -> None:
        """Record that the weights, or those of an adapter, may have changed."""
        self.changed = True

    def _noticing(self, method: Callable[..., Any]) -> Any:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.changed = True  # and again below: a digest that is taken while it runs may be of old and new weights
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
    """Yield the parameters, and the buffers that are part of the weights.

    Other buffers follow from the configuration or the parameters, are written by forward passes, or hold addresses:
    non-persistent ones, and scales that vLLM's encoders adapt (mm_encoder_attention.py).
    """
    for name, parameter in model.named_parameters():
        yield from _byte_tensors(name, parameter)
    for prefix, module in model.named_modules():
        if not getattr(module, "_fp8_dynamic_scale", False):
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if name.removeprefix(f"{prefix}.") not in module._non_persistent_buffers_set:
                    yield from _byte_tensors(name, buffer)


def _packed_columns(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield columns of the matrices that vLLM packs for its CPU kernels, which leaves their parameters empty.

    Only the layer's ``cpu_linear`` can read them (vllm/model_executor/layers/utils.py, dispatch_cpu_unquantized_gemm).
    For a unit vector it returns exactly a column, without rounding by any kernel, at the cost of reading the matrix.
    Other kernels keep packed matrices in attributes.
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


def _byte_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors with the bytes: some parameters of vLLM and TorchAO consist of several."""
    if isinstance(tensor, SharedWeightParameter):
        for index, partition in tensor.partitions.items():
            yield from _byte_tensors(f"{name}.{index}", partition)
    elif is_traceable_wrapper_subclass(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from _byte_tensors(f"{name}.{attribute}", getattr(tensor, attribute))
    else:
        yield name, tensor


def sample(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return evenly spaced samples of a tensor's memory, on its device."""
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
    """Yield the bytes of the pieces of each device, with one copy, hence one wait, per device."""
    for device in dict.fromkeys(piece.device for piece in pieces):
        yield torch.cat([piece for piece in pieces if piece.device == device]).cpu().numpy().tobytes()
