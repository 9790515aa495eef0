"""Engines that kvoffd cannot serve, and options that are none, are refused at the start."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import AuxOutputConfig, HiSparseConfig, PoolerConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.pooling_params import PoolingParams
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, RSWASpec
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.request import Request

from kvoffd_client.vllm import config as connector_config
from kvoffd_client.vllm import connector as connector_module
from kvoffd_client.vllm.config import OWN_KEYS, ConnectorOptions, check_engine, check_groups, parse_options
from kvoffd_client.vllm.connector import KvoffdConnector
from tests.vllm.manager_harness import KEYS, ManagerHarness
from tests.vllm.vllm_config import cache_config, full_attention, make_config


@pytest.fixture(scope="module")
def served(model: Path) -> Any:
    config = make_config(model, {"directory": "/nowhere"})
    check_engine(config)
    return config


def copied(served: Any) -> Any:
    config = copy.copy(served)
    config.model_config = copy.copy(served.model_config)
    config.parallel_config = copy.copy(served.parallel_config)
    config.cache_config = copy.copy(served.cache_config)
    config.attention_config = copy.copy(served.attention_config)
    config.offload_config = copy.deepcopy(served.offload_config)
    return config


@pytest.fixture
def config(served: Any) -> Any:
    return copied(served)


def refused(config: Any, match: str) -> None:
    """It is refused when vLLM asks for the layout, before it builds anything, and by the constructor."""
    with pytest.raises(ValueError, match=f"kvoffd cannot serve this engine: .*{match}"):
        KvoffdConnector.get_required_kvcache_layout(config)
    with pytest.raises(ValueError, match=match):
        KvoffdConnector(config, KVConnectorRole.SCHEDULER, cache_config())


@pytest.mark.parametrize(
    ("option", "on_cpu", "layout"),
    [("vllm", False, "LBHNC"), ("block_outermost", False, "BLHNC"), ("block_outermost", True, "LBHNC")],
)
def test_a_layout_is_asked_for_where_it_helps(
    config: Any, monkeypatch: pytest.MonkeyPatch, option: str, on_cpu: bool, layout: str
) -> None:
    config.kv_transfer_config = copy.copy(config.kv_transfer_config)
    config.kv_transfer_config.kv_connector_extra_config = {"directory": "/nowhere", "kv_layout": option}
    machine = SimpleNamespace(is_cpu=lambda: on_cpu, is_cuda=lambda: not on_cpu, device_type="a machine")
    for module in (connector_module, connector_config):
        monkeypatch.setattr(module, "current_platform", machine)
    assert KvoffdConnector.get_required_kvcache_layout(config) == layout


def test_engines_that_cannot_be_served_are_refused(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def set_pooling(config: Any) -> None:
        config.model_config.runner_type = "pooling"
        config.model_config.pooler_config = PoolerConfig(seq_pooling_type="MEAN", tok_pooling_type="ALL")

    def set_images(config: Any) -> None:
        """They are numbered and not hashed."""
        images = SimpleNamespace(language_model_only=False, mm_processor_cache_gb=0)
        config.model_config.multimodal_config = images
        config.cache_config.enable_prefix_caching = False

    def set_external_launcher(config: Any) -> None:
        config.parallel_config.distributed_executor_backend = "external_launcher"
        config.parallel_config.world_size = 2

    def set_sleep(config: Any) -> None:
        monkeypatch.setattr(connector_config, "HAS_SLEEP_HOOKS", False)
        config.model_config.enable_sleep_mode = True

    def set_cumem(config: Any) -> None:
        monkeypatch.setattr(connector_config, "HAS_SLEEP_HOOKS", False)
        config.model_config.enable_cumem_allocator = True

    changes: dict[str, Callable[[Any], None]] = {
        "does not notify connectors before it sleeps": set_sleep,
        "without --enable-cumem-allocator": set_cumem,
        "a KV cache of int8_per_token_head": lambda config: setattr(
            config.cache_config, "cache_dtype", "int8_per_token_head"
        ),
        "a KV cache of bfloat16": lambda config: setattr(config.cache_config, "cache_dtype", "bfloat16"),
        "encoder-decoder": lambda config: config.model_config.__dict__.update(is_encoder_decoder=True),
        "on 2 nodes": lambda config: setattr(config.parallel_config, "nnodes", 2),
        "--distributed-executor-backend mp": set_external_launcher,
        "vLLM's own host pool": lambda config: setattr(config.attention_config, "hisparse_config", HiSparseConfig()),
        "--offload-group-size": lambda config: setattr(config.offload_config.prefetch, "offload_group_size", 8),
        "--enable-return-routed-experts": lambda config: setattr(
            config, "aux_output_config", AuxOutputConfig(enable_return_routed_experts=True)
        ),
        "mm_processor_cache_gb=0": set_images,
        "all tokens of a prompt": set_pooling,
        "vLLM runs on rocm": lambda _: monkeypatch.setattr(
            connector_config,
            "current_platform",
            SimpleNamespace(is_cuda=lambda: False, is_cpu=lambda: False, device_name="rocm"),
        ),
    }
    for match, change in changes.items():
        changed = copied(served)
        change(changed)
        refused(changed, match)


def test_the_cpu_backends_kv_cache_dtypes_are_served(config: Any) -> None:
    assert set(CPUAttentionBackend.supported_kv_cache_dtypes) == connector_config.CPU_CACHE_DTYPES
    for name in (*connector_config.CPU_CACHE_DTYPES, "float32"):
        config.cache_config.cache_dtype = name
        check_engine(config)


def test_engines_that_are_nearly_refused_are_served(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector_config, "HAS_SLEEP_HOOKS", True)
    config.model_config.enable_sleep_mode = True
    config.parallel_config.nnodes = 2
    config.parallel_config.data_parallel_size = 2
    config.parallel_config.data_parallel_size_local = 1
    config.parallel_config.distributed_executor_backend = "external_launcher"
    config.model_config.runner_type = "pooling"
    config.model_config.pooler_config = PoolerConfig(seq_pooling_type="LAST", tok_pooling_type="ALL")
    config.cache_config.enable_prefix_caching = False
    for images in ((False, 4), (True, 0)):
        config.model_config.multimodal_config = SimpleNamespace(
            language_model_only=images[0], mm_processor_cache_gb=images[1]
        )
        check_engine(config)


@pytest.mark.parametrize(("task", "stored"), [("embed", KEYS), ("token_embed", [])])
def test_prompts_that_are_pooled_by_token_are_not_stored(config: Any, task: Any, stored: list[OffloadKey]) -> None:
    config.model_config.pooler_config = PoolerConfig(seq_pooling_type="LAST", tok_pooling_type="ALL")
    params = PoolingParams(task=task)
    params.verify(config.model_config)
    connector, manager = KvoffdConnector(config, KVConnectorRole.SCHEDULER, cache_config()), ManagerHarness().manager
    connector.connector_scheduler.manager = connector._manager = manager
    connector.on_new_request(Request("r", [1] * 100, None, params))
    context = ReqContext("r")
    output = manager.prepare_store(KEYS, context)
    assert output is not None
    assert list(output.keys_to_store) == stored
    connector.shutdown()


def test_caches_that_cannot_be_served_are_refused(config: Any) -> None:
    prefix_lm = cache_config(KVCacheGroupSpec(["layer.0"], full_attention(non_causal=True)))
    empty = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    for role in KVConnectorRole:
        with pytest.raises(ValueError, match="kvoffd cannot serve this engine: its attention is not causal"):
            KvoffdConnector(config, role, prefix_lm)
    with pytest.raises(ValueError, match="kvoffd cannot serve this engine: its model has no KV cache group"):
        KvoffdConnector(config, KVConnectorRole.WORKER, empty)


def test_generated_tokens_of_reference_windows_are_refused() -> None:
    """They are computed with a window of their kind, and a prompt that has them sees them all."""
    heads = {name: getattr(full_attention(), name) for name in ("block_size", "num_kv_heads", "head_size", "dtype")}
    cache = cache_config(KVCacheGroupSpec(["layer.0"], RSWASpec(**heads, rswa_window=64)))
    check_groups(cache, {})
    check_groups(cache, {"offload_prompt_only": True})
    check_groups(cache_config(), {"offload_prompt_only": False})
    with pytest.raises(ValueError, match="Leave out offload_prompt_only"):
        check_groups(cache, {"offload_prompt_only": False})


# --- kv_connector_extra_config ---------------------------------------------------------------------


def test_options_are_read_and_vllms_pass() -> None:
    given = {"directory": "/run/other", "lookup_deadline_ms": 50, "disk_wait_ms": 0, "strict_version": True}
    options, unknown = parse_options({**given, "blocks_per_chunk": 4, "zeta": 1})
    assert options == ConnectorOptions("/run/other", lookup_deadline_ms=50.0, disk_wait_ms=0.0, strict_version=True)
    assert unknown == ["zeta"]
    assert parse_options({}) == (ConnectorOptions(), [])


def test_options_that_are_wrong_or_misspelt_are_refused_by_name() -> None:
    for key, value, sentence in (
        ("dirctory", 1, "did you mean 'directory'"),
        ("lookup_deadline", 1, "did you mean 'lookup_deadline_ms'"),
        ("kvoffd_pool", "1GiB", ", ".join(OWN_KEYS)),
        ("directory", 7, ""),
        ("salt", None, ""),
        ("lookup_deadline_ms", "fast", ""),
        ("lookup_deadline_ms", 0, ""),
        ("lookup_deadline_ms", True, ""),
        ("disk_wait_ms", -1, ""),
        ("store_fence_timeout_s", float("nan"), ""),
        ("strict_version", "yes", ""),
        ("kv_layout", "BLHNC", ""),
        ("kv_layout", True, ""),
        ("canonical_layout", 1, ": it keeps "),
        ("sync_load_budget_bytes", 1, ": a load "),
    ):
        with pytest.raises(ValueError, match=f"{key}.*{sentence}"):
            parse_options({key: value})
    assert parse_options({"canonical_layout": 0, "sync_load_budget_bytes": 0})[1] == []


def test_client_gives_no_lookup_up_before_its_deadline() -> None:
    for deadline_ms, waits_s, silent_s in ((200.0, 2.0, 5.0), (3000.0, 3.0, 5.0), (9e4, 90.0, 90.0)):
        options = ConnectorOptions(lookup_deadline_ms=deadline_ms).client_options
        assert (options.request_timeout_s, options.unresponsive_after_s) == (waits_s, silent_s)
