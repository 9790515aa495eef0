"""The digest of the weights in a worker's memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.parameter import SharedWeightParameter
from vllm.v1.worker.worker_base import WorkerBase

from kvoffd_client.vllm.live_weights import CHANGING_METHODS, LiveWeights, has_experts_elsewhere


class Model(torch.nn.Module):
    """A large matrix, one that is not contiguous, a small one, and a buffer as fp8 scales are."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.large = torch.nn.Parameter(torch.randn(512, 512, generator=generator))
        self.turned = torch.nn.Parameter(torch.randn(64, 96, generator=generator).t())
        self.small = torch.nn.Parameter(torch.randn(3, generator=generator).to(torch.bfloat16))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("nothing", torch.empty(0))

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            self.get_parameter(name).data.copy_(weight)


def digest(*models: torch.nn.Module) -> str:
    found = LiveWeights(lambda: list(models)).digest()
    assert found is not None
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.large.data.mul_(1.001),
        lambda model: model.turned.data.add_(0.5),
        lambda model: model.small.data.neg_(),
        lambda model: model.scale.fill_(2),
        lambda model: setattr(model, "small", torch.nn.Parameter(model.small.data.float())),
        lambda model: model.large.data[-1].add_(1),
        lambda model: model.large.data[0].add_(1),
        lambda model: model.register_buffer("more", torch.ones(1)),
    ],
)
def test_every_change_is_another_digest(change: Callable[[Any], None]) -> None:
    model = Model()
    before = digest(model)
    with torch.no_grad():
        change(model)
    assert digest(model) != before


def test_each_tensor_of_a_composed_parameter_counts() -> None:
    """TorchAO's, which have no memory of their own, those that vLLM shares between layers, what kernels have packed."""

    def model(first: float, second: float, shared: float, packed: float = 0) -> torch.nn.Module:
        made: Any = torch.nn.Module()
        made.layer = torch.nn.Module()
        made.layer.weight = torch.nn.Parameter(torch.empty(0))
        made.layer.packed = torch.full((4,), packed)
        parts = torch.full((4,), first), torch.full((4,), second)
        made.quantized = torch.nn.Parameter(TwoTensor(*parts), requires_grad=False)
        weight = SharedWeightParameter.__new__(SharedWeightParameter)
        weight.partitions = {0: torch.nn.Parameter(torch.full((4,), shared), requires_grad=False)}
        made.register_parameter("shared", weight)
        return made

    assert digest(model(1, 2, 3)) == digest(model(1, 2, 3))
    others = (0, 2, 3), (1, 0, 3), (1, 2, 0), (1, 2, 3, 1)
    assert len({digest(model(*numbers)) for numbers in ((1, 2, 3), *others)}) == 5
    unreadable = Model()
    unreadable.register_buffer("sparse", torch.eye(3).to_sparse())
    assert LiveWeights(lambda: [unreadable]).digest() is None


def test_layers_that_lora_has_wrapped_are_the_same_weights() -> None:
    """vLLM does so where LoRA is on; plain prompts of such engines and others share their blocks."""

    def model(*, wrapped: bool) -> torch.nn.Module:
        made: Any = torch.nn.Module()
        made.layer = torch.nn.Module() if wrapped else torch.nn.Linear(2, 2, bias=False)
        plain = made.layer
        if wrapped:
            plain = made.layer.base_layer = torch.nn.Linear(2, 2, bias=False)
        plain.weight.data.fill_(1.0)
        return made  # type: ignore[no-any-return]

    assert digest(model(wrapped=True)) == digest(model(wrapped=False))


def test_what_a_forward_pass_writes_is_no_weight() -> None:
    """Tables, counters, addresses: what is not persistent. And scales that an encoder adapts as it runs."""
    model = Model()
    model.register_buffer("indices", torch.zeros(4), persistent=False)
    model.encoder = torch.nn.Module()
    model.encoder.register_buffer("_fp8_q_scale", torch.ones(1))
    model.encoder.register_buffer("_fp8_q_amax", torch.zeros(4), persistent=False)
    model.encoder._fp8_dynamic_scale = True
    before = digest(model)
    for buffer in (model.indices, model.encoder._fp8_q_scale, model.encoder._fp8_q_amax):
        buffer.add_(1)
        assert digest(model) == before
    model.scale.add_(1)
    assert digest(model) != before
    model.encoder._fp8_dynamic_scale = False  # from a file
    before = digest(model)
    model.encoder._fp8_q_scale.add_(1)
    assert digest(model) != before


def test_the_encoders_scales_are_vllms() -> None:
    source = inspect.getsource(MMEncoderAttention)
    assert "_fp8_dynamic_scale" in source
    assert '"_fp8_q_scale"' in source


class WithExperts(Model):
    """A rank's model that computes with experts of other ranks too."""

    def __init__(self, first_expert: int) -> None:
        super().__init__()
        self.experts = RoutedExperts.__new__(RoutedExperts)
        torch.nn.Module.__init__(self.experts)
        self.experts.register_parameter("w13_weight", torch.nn.Parameter(torch.full((2, 4), float(first_expert))))
        self.experts.register_buffer("_expert_map", torch.arange(2) + first_expert)


def test_experts_that_move_between_ranks_change_no_digest() -> None:
    """EPLB moves them, and calls no method that vLLM has for changes of weights."""
    found: dict[bool, set[str | None]] = {True: set(), False: set()}
    for first_expert in (0, 2):
        model = WithExperts(first_expert)
        for elsewhere, digests in found.items():
            weights = LiveWeights(lambda model=model: [model], experts_elsewhere=elsewhere)  # type: ignore[misc]
            digests.add(weights.digest())
            assert not weights.changed
    assert (len(found[True]), len(found[False])) == (1, 2)
    # But which kernel they are packed for, by which tokens differ by more than rounding does.
    model = WithExperts(0)
    model.experts.w13_weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float8_e4m3fn), requires_grad=False)
    found[True].add(LiveWeights(lambda: [model], experts_elsewhere=True).digest())
    assert len(found[True]) == 2


def test_experts_count_where_each_rank_keeps_its_own() -> None:
    def elsewhere(**settings: Any) -> bool:
        parallel = SimpleNamespace(**{"data_parallel_size": 1, "enable_eplb": False, **settings})
        load = SimpleNamespace(load_format=settings.get("load_format", "auto"))
        return has_experts_elsewhere(cast(VllmConfig, SimpleNamespace(parallel_config=parallel, load_config=load)))

    assert not elsewhere()
    assert elsewhere(data_parallel_size=2)
    assert elsewhere(enable_eplb=True)
    assert not elsewhere(enable_eplb=True, load_format="dummy")


class Runner:
    """What of vLLM's model runners counts: get_model, get_draft_model, and that it calls the connector."""

    def __init__(self, draft: torch.nn.Module | None) -> None:
        self.model, self.draft = Model(), draft

    def get_model(self) -> torch.nn.Module:
        return self.model

    def get_draft_model(self) -> torch.nn.Module | None:
        return self.draft

    def initialize_kv_cache(self) -> LiveWeights | None:
        return LiveWeights.of_caller()


class Worker(WorkerBase):
    """A worker that changes weights in two of vLLM's ways."""

    def __init__(self, runner: Runner) -> None:
        self.model_runner: Any = runner

    def initialize(self) -> LiveWeights | None:
        return self.model_runner.initialize_kv_cache()  # type: ignore[no-any-return]

    def reload_weights(self, factor: float) -> str:
        self.model_runner.model.large.data.mul_(factor)
        return "reloaded"

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        raise RuntimeError("no such file")


@pytest.mark.parametrize("draft", [None, Model()])
def test_models_are_found_and_their_changes_noticed(draft: Any) -> None:
    worker = Worker(Runner(draft))
    weights = worker.initialize()
    assert weights is not None
    before = weights.digest()
    assert before == digest(*filter(None, [Model(), draft]))
    assert not weights.changed
    assert worker.reload_weights(2.0) == "reloaded"
    assert weights.changed
    assert weights.digest() != before
    assert not weights.changed
    with pytest.raises(RuntimeError, match="no such file"):
        worker.load_model()
    assert weights.changed, "nobody knows how far it came"
    weights.digest()
    # As the worker extensions of training frameworks do, past the worker's methods.
    worker.model_runner.model.load_weights({"small": torch.zeros(3)})
    assert weights.changed


def test_the_methods_that_change_weights_are_vllms() -> None:
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.v1.worker.gpu_worker import Worker as GpuWorker

    owners = (GpuWorker, LlamaForCausalLM)
    assert [name for name in CHANGING_METHODS if not any(hasattr(owner, name) for owner in owners)] == []
