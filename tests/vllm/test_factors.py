"""Factors read from vLLM's own configuration objects. No engine runs; the configuration is the real one."""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import vllm
import vllm.config
from vllm import envs
from vllm.config import MultiModalConfig, VllmConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import CpuArchEnum
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

from kvoffd_client.vllm import compat, fingerprint
from kvoffd_client.vllm.compat import release_of
from kvoffd_client.vllm.fingerprint import (
    CPU_INSTRUCTIONS,
    FACTORS,
    JUDGED_FIELDS,
    collect_factors,
    judged_fields,
    label_of,
    namespace_of,
    weights_identity,
)
from tests.kit.models import make_draft
from tests.kit.shapes import make_tiny_gemma3
from tests.vllm.vllm_config import HEADS, cache_config, full_attention, make_config


@pytest.fixture(scope="module")
def engine_config(model: Path) -> Any:
    """The configuration of an engine that was never started."""
    return make_config(model)


def factors_of(config: Any, cache: KVCacheConfig | None = None, salt: str = "") -> dict[str, Any]:
    return collect_factors(config, cache or cache_config(), salt)


def test_workers_of_other_ranks_and_pipeline_stages_come_to_the_same_factors(engine_config: Any) -> None:
    config = copy.deepcopy(engine_config)
    config.parallel_config.pipeline_parallel_size = 2
    worker = copy.deepcopy(config)
    worker.parallel_config.rank = 1
    for layers in (["other.7", "other.8"], ["2"]):
        cache = cache_config(KVCacheGroupSpec(layer_names=layers, kv_cache_spec=full_attention()))
        assert factors_of(worker, cache) == factors_of(config)


@pytest.mark.parametrize(("tested", "differ"), [(((0, 32),), False), ((), True)])
def test_of_a_release_that_nobody_tested_what_nobody_judged_counts(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch, tested: tuple[tuple[int, int], ...], differ: bool
) -> None:
    monkeypatch.setattr(compat, "TESTED", tested)
    monkeypatch.setattr(compat, "release_of", lambda _: (0, 32))

    def factors(value: int, seed: int = 0) -> dict[str, Any]:
        config = copy.deepcopy(engine_config)
        config.model_config.seed = seed  # judged: no block differs by it
        cache = config.cache_config
        cache.__class__ = dataclasses.make_dataclass("CacheConfig", [("newest", int, 0)], bases=(type(cache),))
        cache.newest = value
        return factors_of(config)

    assert (factors(1) != factors(2)) is differ
    assert factors(1) == factors(1, seed=7)
    if differ:
        assert factors(1)["unjudged"] == {"cache_config.newest": 1}


def test_of_a_mixed_group_every_layers_spec_counts(engine_config: Any) -> None:
    def factors(head_size: int) -> dict[str, Any]:
        per_layer = {"a": full_attention(), "b": full_attention(head_size=head_size)}
        specs = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=per_layer)
        return factors_of(engine_config, cache_config(KVCacheGroupSpec(layer_names=["a", "b"], kv_cache_spec=specs)))

    assert factors(32) == factors(32)
    assert factors(32)["groups"][0]["layout"] != factors(64)["groups"][0]["layout"]


def test_the_longest_context_counts_only_where_rope_or_llama_4_depends_on_it(engine_config: Any) -> None:
    def factors(length: int, *, rope: str = "default", tuning: bool | None = None, kind: str = "") -> dict[str, Any]:
        config = copy.deepcopy(engine_config)
        config.model_config.max_model_len = length
        config.model_config.hf_config.rope_parameters = {"rope_type": rope}
        config.model_config.override_generation_config = {"attn_temperature_tuning": tuning}
        config.model_config.hf_config.text_config = {"model_type": kind}
        return factors_of(config)

    assert factors(1024) == factors(2048)
    assert factors(1024, rope="longrope") != factors(2048, rope="longrope")
    llama = {"kind": "llama4_text"}
    assert factors(1024, **llama) == factors(1024, **llama) != factors(2048, **llama)
    assert factors(2048, tuning=True, **llama) != factors(2048, tuning=False, **llama)
    assert factors(1024, tuning=True, kind="llama") == factors(2048, tuning=False, kind="llama")


def set_path(config: Any, path: str, value: object) -> None:
    """Change one attribute deep in the configuration."""
    *parents, name = path.split(".")
    for parent in parents:
        config = getattr(config, parent)
    setattr(config, name, value)


CHANGES: dict[str, tuple[str, object]] = {
    "revision": ("model_config.revision", "v2"),
    "weights_dtype": ("model_config.dtype", torch.bfloat16),
    "quantization": ("model_config.quantization", "fp8"),
    "kv_cache_dtype": ("cache_config.cache_dtype", "fp8"),
    "dummy_weights": ("load_config.load_format", "dummy"),
    "hash_algorithm": ("cache_config.prefix_caching_hash_algo", "sha256_cbor"),
    "tensor_parallel": ("parallel_config.tensor_parallel_size", 2),
    "pipeline_parallel": ("parallel_config.pipeline_parallel_size", 2),
    "prefill_context_parallel": ("parallel_config.prefill_context_parallel_size", 2),
    "decode_context_parallel": ("parallel_config.decode_context_parallel_size", 2),
    "world_size": ("parallel_config.world_size", 2),
    "model_config": ("model_config.hf_config.rope_theta", 50_000.0),
    "computation": ("attention_config.use_non_causal", True),
    "blocks_per_chunk": ("kv_transfer_config.kv_connector_extra_config", {"blocks_per_chunk": 4}),
    "context_parallel_interleave": ("parallel_config.cp_kv_cache_interleave_size", 16),
    "attention_backend": ("attention_config.backend", "another"),
    "multimodal": ("model_config.multimodal_config", MultiModalConfig()),
}


@pytest.mark.parametrize("name", CPU_INSTRUCTIONS)
def test_the_instructions_that_vllm_finds_on_a_cpu_count(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It lays pages out by them."""
    found = []
    for supported in (False, True):
        monkeypatch.setattr(torch.cpu, name, lambda supported=supported: supported)
        found.append(factors_of(engine_config)["device_name"])
    assert found[0] != found[1]
    assert all(found)


@pytest.mark.skipif(CpuPlatform.get_cpu_architecture() != CpuArchEnum.X86, reason="its instructions are x86's")
def test_where_vllm_lays_pages_out_otherwise_the_device_has_another_name(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, set[str]] = {}
    for tiles in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda tiles=tiles: tiles)
        layout = _get_attn_isa(torch.bfloat16, 32, 64)
        names.setdefault(layout, set()).add(factors_of(engine_config)["device_name"])
    assert len(names) == 2
    assert not set.intersection(*names.values())


def test_machines_of_other_kinds_differ(engine_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for machine, capabilities in (("x86_64", {}), ("aarch64", {}), ("aarch64", {"bf16": True})):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda capabilities=capabilities: capabilities)
        found.add(factors_of(engine_config)["device_name"])
    assert len(found) == 3


def test_kernels_count_where_weights_are_quantized(engine_config: Any) -> None:
    """Under data parallelism the digest of live weights leaves the experts out, by which it would see them."""
    for name in FACTORS["KernelConfig"]:
        found = []
        for quantization in (None, "fp8"):
            for backend in ("auto", "another"):
                config = copy.deepcopy(engine_config)
                config.model_config.quantization = quantization
                setattr(config.kernel_config, name, backend)
                found.append(factors_of(config)["computation"])
        assert found[0] == found[1], "of others they only round differently"
        assert found[2] != found[3], name


def test_plugins_of_others_count(engine_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(wanted: list[str] | None, *plugins: tuple[str, str, str]) -> str:
        points = [
            SimpleNamespace(name=name, value=f"{module}:register", module=module, dist=SimpleNamespace(version=version))
            for name, module, version in plugins
        ]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points if "general" in group else [])
        monkeypatch.setattr(envs, "VLLM_PLUGINS", wanted, raising=False)
        return str(factors_of(engine_config)["computation"])

    one, newer = ("one", "acme.models", "1.0"), ("one", "acme.models", "1.1")
    none = found(None)
    assert found(None, ("lora", "vllm.plugins.lora", "1"), ("kvoffd", "kvoffd_client.vllm", "2")) == none
    assert len({none, found(None, one), found(None, newer)}) == 3
    assert found([], one) == none


def test_code_from_a_hub_counts_by_its_commit(
    engine_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(commit: str, *, trusted: bool = True) -> str:
        def look(repository: str, file: str, revision: str | None = None) -> str | None:
            assert (repository, file) == ("acme/code", "modeling.py")
            return str(tmp_path / commit / file)

        monkeypatch.setattr(fingerprint, "try_to_load_from_cache", look)
        config = copy.deepcopy(engine_config)
        config.model_config.trust_remote_code = trusted
        config.model_config.hf_config.auto_map = {"AutoModel": "acme/code--modeling.Model"}
        return str(factors_of(config)["model_config"])

    assert found("a") == found("a") != found("b")
    assert found("a", trusted=False) == found("b", trusted=False)


def test_transformers_counts_where_its_code_computes_or_preprocesses(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(package: str, version: str) -> list[str]:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == package else "1")
        return [str(factors_of(each)[name]) for each, name in configs]

    plain, layers, media = (copy.deepcopy(engine_config) for _ in range(3))
    layers.model_config.using_transformers_backend = lambda: True
    media.model_config.multimodal_config = MultiModalConfig()
    configs = [(plain, "model_config"), (layers, "model_config"), (plain, "multimodal"), (media, "multimodal")]
    for package, counts in (
        ("transformers", [False, True, False, True]),
        ("torchvision", [False, False, False, True]),
        ("pillow", [False, False, False, True]),
    ):
        pairs = zip(found(package, "5"), found(package, "6"), strict=True)
        assert [before != after for before, after in pairs] == counts, package


def test_layers_left_out_of_the_kv_cache_dtype_count(engine_config: Any) -> None:
    """vLLM puts layer 1, or 2, into a group of its own, and that is all that the groups' specs tell."""

    def dtype(*layers: str) -> str:
        config = copy.deepcopy(engine_config)
        config.cache_config.kv_cache_dtype_skip_layers = list(layers)
        return str(factors_of(config)["kv_cache_dtype"])

    assert dtype("1", "2") == dtype("2", "1", "1")
    assert len({dtype(), dtype("1"), dtype("2"), dtype("1", "2")}) == 4


def test_each_setting_reaches_its_factor(engine_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = factors_of(engine_config)
    for name, change in CHANGES.items():
        config = copy.deepcopy(engine_config)
        set_path(config, *change)
        assert factors_of(config)[name] != before[name], name
    layout = dataclasses.replace(cache_config(), kv_cache_layout="LBNHC")
    assert factors_of(engine_config, layout)["kv_layout"] != before["kv_layout"]
    for name in FACTORS["environment"]:
        with monkeypatch.context() as patch:
            patch.setattr(envs, name, "another", raising=False)
            assert factors_of(engine_config)["computation"] != before["computation"], name
    # What vLLM derives from several settings.
    for name, attribute in (
        ("model_runner", "use_v2_model_runner"),
        ("hash_lookahead_tokens", "num_hash_lookahead_tokens"),
    ):
        found = []
        for value in (0, 1):
            monkeypatch.setattr(type(engine_config), attribute, property(lambda _, value=value: value), raising=False)
            found.append(factors_of(engine_config)[name])
        assert found[0] != found[1], name


def test_of_a_multimodal_model_what_makes_its_embeddings_counts(engine_config: Any, tmp_path: Path) -> None:
    def multimodal(**settings: Any) -> str:
        config = copy.deepcopy(engine_config)
        config.model_config.multimodal_config = MultiModalConfig(**settings)
        return factors_of(config)["multimodal"]

    assert multimodal() == multimodal(mm_processor_cache_gb=1)
    assert multimodal() != multimodal(mm_processor_kwargs={"max_pixels": 100})

    # vLLM's hash of an image is of what a request brings: another mean of its pixels is another embedding.
    config = copy.deepcopy(engine_config)
    config.model_config.multimodal_config = MultiModalConfig()
    config.model_config.model = str(tmp_path)
    digests = []
    for mean in (0.4, 0.5):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [mean] * 3}))
        digests.append(factors_of(config)["multimodal"])
    assert digests[0] != digests[1]


def test_only_a_draft_model_with_a_kv_cache_counts(model: Path, tmp_path: Path) -> None:
    drafts = {eagle: str(make_draft(tmp_path / f"draft-{eagle}", eagle)) for eagle in (False, True)}
    drafter = {"method": "draft_model", "model": drafts[False]}

    def speculative(tokens: int = 3, in_parallel: bool = False, **settings: Any) -> str:
        config = make_config(model, speculative_config={**settings, "num_speculative_tokens": tokens})
        config.speculative_config.parallel_drafting = in_parallel
        return factors_of(config)["speculative"]

    assert factors_of(make_config(model))["speculative"] == ""
    assert speculative(method="ngram", prompt_lookup_max=4) == ""
    found = [
        speculative(**drafter),
        speculative(method="eagle", model=drafts[True]),
        speculative(method="draft_model", model=str(model)),
        # Tokens that are drafted in one pass see each other's places.
        speculative(3, True, **drafter),
        speculative(4, True, **drafter),
    ]
    assert all(found)
    assert len(set(found)) == len(found)
    assert speculative(4, **drafter) == found[0]
    assert speculative(4, method="eagle", model=drafts[True]) == found[1]


def test_a_copy_of_a_model_has_the_same_factors(model: Path, tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere"
    shutil.copytree(model, copied, copy_function=shutil.copyfile)
    os.utime(copied / "model.safetensors", (1, 1))
    assert factors_of(make_config(copied)) == factors_of(make_config(model))
    gemma = make_tiny_gemma3(tmp_path / "gemma")
    assert factors_of(make_config(gemma))["model_config"] != factors_of(make_config(model))["model_config"]


def test_a_random_hash_seed_makes_the_namespace_private(engine_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = copy.deepcopy(engine_config)
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert factors_of(config)["private"] == config.kv_transfer_config.engine_id
    assert factors_of(config) == factors_of(config), "workers do not know the scheduler's seed, and must agree"
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert factors_of(config)["private"] == ""


def test_weak_hashes_are_warned_of(engine_config: Any, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    for algorithm, warned in (("sha256", 0), ("xxhash_cbor", 1)):
        config = copy.deepcopy(engine_config)
        config.cache_config.prefix_caching_hash_algo = algorithm
        factors_of(config)
        assert sum(f"{algorithm} is not collision resistant" in line for line in said) == warned


def test_namespace_is_made_of_every_factor(engine_config: Any) -> None:
    window = KVCacheGroupSpec(["0"], SlidingWindowSpec(block_size=32, sliding_window=256, **HEADS))
    factors = factors_of(engine_config, cache_config(KVCacheGroupSpec(["1"], full_attention()), window), salt="blue")
    spec = namespace_of(factors, "tiny")
    assert (spec.label, spec.world_size, spec.key_bytes) == ("tiny", 1, 32)
    groups = [(group.kind, group.tokens_per_block, group.window_tokens) for group in spec.groups]
    assert groups == [("full_attention", 32, 0), ("sliding_window", 32, 256)]
    assert '"salt":"blue"' in spec.description
    assert namespace_of(factors, "other").fingerprint == spec.fingerprint
    for name in factors.keys() - {"groups", "world_size", "hash_probe", "blocks_per_chunk"}:
        assert namespace_of({**factors, name: "another"}, "tiny").fingerprint != spec.fingerprint, name
    assert namespace_of({**factors, "groups": factors["groups"][::-1]}, "tiny").fingerprint != spec.fingerprint


def test_a_model_is_never_called_a_bench() -> None:
    """What is called so is in no sum."""
    for served, label in (
        ("bench me", "bench_me"),
        ("benchmark", "benchmark"),
        (["owner/model", "alias"], "owner/model"),
    ):
        model_config = SimpleNamespace(served_model_name=served, model="m")
        assert label_of(cast(VllmConfig, SimpleNamespace(model_config=model_config))) == label


# --- a model's files -------------------------------------------------------------------------------


def test_every_character_of_code_beside_a_model_counts(tmp_path: Path) -> None:
    found = set()
    for last in "ab":
        (tmp_path / "model.bin").write_bytes(b"\0")
        (tmp_path / "modeling.py").write_text(f"{'#' * 200_000}{last}{'#' * 300}")
        found.add(weights_identity(str(tmp_path)))
    assert len(found) == 2


@pytest.mark.parametrize("name", ["model.bin", "model.gguf", "model.safetensors", "modeling.py"])
def test_files_of_a_model_are_told_apart_by_content(name: str, tmp_path: Path) -> None:
    """Two checkpoints of one shape at one path, say, one after the other; and code beside them."""
    found = set()
    for content in (None, b"\1", b"\2"):
        (tmp_path / "other.bin").write_bytes(b"\0" * 1000)
        if content:
            (tmp_path / name).write_bytes(content * 100_000)
        found.add(weights_identity(str(tmp_path)))
    assert len(found) == 3
    for place in ("a", "b"):  # where no weights are found the path tells models apart
        (tmp_path / place).mkdir()
    assert weights_identity(str(tmp_path / "a")) != weights_identity(str(tmp_path / "b"))


RELEASE = ".".join(map(str, release_of(vllm.__version__) or ()))


def test_fingerprint_judges_every_field() -> None:
    for name, found in vars(vllm.config).items():
        if isinstance(found, type) and dataclasses.is_dataclass(found):
            judged = {field for field, only in judged_fields().get(name, {}).items() if only in ("", RELEASE)}
            fields = {field.name for field in dataclasses.fields(found)}
            assert fields <= judged, f"judge {fields - judged} of {name} in {JUDGED_FIELDS.name}"


def test_every_judged_field_has_a_verdict() -> None:
    """Also where the reason is long."""
    assert judged_fields("in", "covered", "out") == judged_fields()


def test_fingerprint_judges_every_variable() -> None:
    names = judged_fields()["environment"]
    missing = [each for each in envs.environment_variables if not any(fnmatchcase(each, name) for name in names)]
    assert not missing, f"judge them in {JUDGED_FIELDS.name}"
