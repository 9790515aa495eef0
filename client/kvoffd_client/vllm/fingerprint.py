"""The factors that must be equal for two engines to share KV bytes, and the namespace made from them.

Every worker collects the factors on its own after it has loaded the model. All workers of an engine must get the same
result, also after a restart.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import try_to_load_from_cache
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.platforms import current_platform
from vllm.plugins import DEFAULT_PLUGINS_GROUP
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens, resolve_none_hash_seed
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs, get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvoffd_client.namespace import NamespaceSpec, canonical_json, fingerprint_of
from kvoffd_client.vllm.compat import untested, version_factor
from kvoffd_client.vllm.log import logger
from kvoffd_proto.messages import BENCH_LABEL, GroupSpec

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

FORMAT = 3
"""Version of the factors. Raise it when the meaning of a factor, or of the bytes in a slot, changes."""
MAX_DESCRIPTION_BYTES = 65_000
"""Longest description of a namespace. A longer one is replaced by its digest."""
PROBE_TOKENS = tuple(range(1, 17))
"""Tokens whose hash shows how an engine hashes blocks."""
VOLATILE_CONFIG_KEYS = frozenset({"_commit_hash", "_name_or_path", "transformers_version"})
"""Keys of a configuration that say where it comes from, not what it is."""
PROCESSOR_FILES = "*processor_config.json"
"""Configuration of a local model's processor; a hub's model has a commit."""
MEDIA_PACKAGES = (
    "av",
    "librosa",
    "mistral_common",
    "opencv-python-headless",
    "pillow",
    "PyNvVideoCodec",
    "scipy",
    "soundfile",
    "soxr",
    "torchcodec",
    "torchvision",
    "transformers",
)
"""Packages that decode media; vLLM may hash only the encoded bytes."""
CPU_INSTRUCTIONS = ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported")
"""Functions of torch.cpu."""
METHODS_WITHOUT_KV = frozenset({"mlp_speculator", "medusa", "ngram", "ngram_gpu", "suffix"})
"""Speculative methods whose drafts have no KV cache."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py")
"""Suffixes of files that identify a local model: its weights, and its code."""
SAMPLES_PER_FILE, SAMPLE_BYTES = 256, 256
"""Samples from each file of weights, and their length."""
JUDGED_FIELDS = Path(__file__).with_name("judged_fields.toml")
"""Fields of vLLM's configuration by class, with the reason why each is a factor or not."""


def judged_fields(*verdicts: str) -> dict[str, dict[str, str]]:
    """Return the fields of each class in ``JUDGED_FIELDS`` that have one of these verdicts, or any if none is given.

    Each with the only release that has it, or ``""``. A verdict is ``in``, ``covered`` or ``out``, as that file
    explains.
    """
    judged: dict[str, dict[str, str]] = {}
    for name, by_verdict in tomllib.loads(JUDGED_FIELDS.read_text()).items():
        of_class = judged.setdefault(name, {})
        for verdict, by_reason in by_verdict.items():
            if not verdicts or verdict in verdicts:
                for text in " ".join(by_reason.values()).split():
                    field, _, release = text.partition("@")
                    of_class[field] = release
    return judged


FACTORS = judged_fields("in")
"""Fields by class that are factors. Of ``KernelConfig``, ``MultiModalConfig`` and the environment all are read."""


def namespace_of(factors: Mapping[str, Any], label: str) -> NamespaceSpec:
    """Return the namespace of an engine's factors. ``label`` is for display only, not part of the fingerprint."""
    canonical = canonical_json({"format": FORMAT, **factors})
    is_short = len(canonical) <= MAX_DESCRIPTION_BYTES
    return NamespaceSpec(
        fingerprint=fingerprint_of(canonical),
        label=label[:256],
        world_size=factors["world_size"],
        key_bytes=len(factors["hash_probe"]) // 2,
        groups=tuple(
            GroupSpec(
                kind=group["kind"][:64],
                tokens_per_block=group["tokens_per_block"] * factors["blocks_per_chunk"],
                window_tokens=group["window_tokens"],
            )
            for group in factors["groups"]
        ),
        description=canonical if is_short else canonical_json({"digest": digest(canonical)}),
    )


def with_live_weights(namespace: NamespaceSpec, weights: Sequence[str]) -> NamespaceSpec:
    """Return the namespace of an engine with these weights in memory: a digest for each worker, by rank."""
    canonical = canonical_json({**json.loads(namespace.description), "live_weights": digest(list(weights))})
    return dataclasses.replace(namespace, fingerprint=fingerprint_of(canonical), description=canonical)


def digest(value: object) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def collect_factors(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, salt: str) -> dict[str, Any]:
    """Return everything that determines the bytes of a block with a given hash, as JSON values.

    ``vllm_config`` and ``kv_cache_config`` are a worker's; all workers of an engine get the same.
    """
    offloading = build_offloading_config(vllm_config, kv_cache_config)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    local_weights = weights_identity(model.model)
    # Layers with another dtype, which groups and their specs need not show.
    skipped = sorted(set(vllm_config.cache_config.kv_cache_dtype_skip_layers))
    of_untested = {"unjudged": unjudged(vllm_config)} if untested() else {}
    return {
        **of_untested,
        "vllm_release": version_factor(),
        # Name and commit for a hub's model, files for a local one.
        "model": "" if local_weights else f"{model.model} {getattr(model, 'model_weights', '')}".strip(),
        "revision": " ".join(filter(None, (model.revision, model.code_revision))),
        "weights": local_weights or getattr(model.hf_config, "_commit_hash", None) or "",
        "model_config": _config_digest(model),
        "weights_dtype": str(model.dtype),
        "quantization": str(model.quantization or ""),
        "kv_cache_dtype": offloading.model.dtype + (f" but for layers {', '.join(skipped)}" if skipped else ""),
        "dummy_weights": str(vllm_config.load_config.load_format) == "dummy",
        "tokens_per_hash": offloading.cache.tokens_per_hash,
        "blocks_per_chunk": offloading.cache.blocks_per_chunk,
        **_hash_factors(vllm_config),
        # Tokens after a block that its hash includes (0.33, speculative decoding).
        "hash_lookahead_tokens": int(getattr(vllm_config, "num_hash_lookahead_tokens", 0)),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "prefill_context_parallel": parallel.prefill_context_parallel_size,
        "decode_context_parallel": parallel.decode_context_parallel_size,
        # Consecutive tokens on a rank of context parallelism.
        "context_parallel_interleave": parallel.cp_kv_cache_interleave_size,
        # Shards of a block: workers, or 1 if all have the same bytes.
        "world_size": 1 if offloading.replicated_layout else parallel.world_size,
        "kv_layout": str(kv_cache_config.kv_cache_layout or offloading.kv_cache_layout or ""),
        "device_type": str(current_platform.device_type),
        # Kernels for other devices may lay out pages differently.
        "device_name": _device_name(),
        "attention_backend": _attention_backend(vllm_config, kv_cache_config),
        "computation": _computation(vllm_config),
        "model_runner": "v2" if vllm_config.use_v2_model_runner else "v1",
        "multimodal": _multimodal(model),
        "speculative": _speculative(vllm_config),
        "salt": salt,
        # By index on the wire.
        "groups": [
            _group_factors(kv_cache_config.kv_cache_groups[group.group_id], group, parallel.pipeline_parallel_size)
            for group in offloading.groups
        ],
    }


def unjudged(vllm_config: VllmConfig) -> dict[str, object]:
    """Return the configuration fields of an untested release that are not in ``JUDGED_FIELDS``, by path.

    Any of them may influence the bytes of blocks. If not, engines share less than they could.
    """
    judged = judged_fields()

    def found_in(config: Any, path: str) -> dict[str, object]:
        found: dict[str, object] = {}
        for name in [item.name for item in dataclasses.fields(config)]:
            value, is_judged = getattr(config, name, None), name in judged.get(type(config).__name__, ())
            if dataclasses.is_dataclass(value) and (type(value).__name__ in judged or not is_judged):
                found |= found_in(value, f"{path}{name}.")
            elif not is_judged:
                found[f"{path}{name}"] = _plain(value)
        return found

    return found_in(vllm_config, "")


def label_of(vllm_config: VllmConfig) -> str:
    """Return the name for operators: the served name, else the model's, without the directories of a path."""
    served = vllm_config.model_config.served_model_name
    name = str((served[0] if isinstance(served, list) else served) or vllm_config.model_config.model)
    name = Path(name).name if Path(name).is_dir() else name
    return name.replace(" ", "_") if name.startswith(BENCH_LABEL) else name


def _hash_factors(vllm_config: VllmConfig) -> dict[str, str]:
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    function = get_hash_fn_by_name(algorithm)
    # vLLM draws a new seed at each call if each process has a random one.
    is_random = resolve_none_hash_seed(function) != resolve_none_hash_seed(function)
    if algorithm.startswith("xxhash"):
        logger.warning_once(  # type: ignore[attr-defined]
            "kvoffd: %s is not collision resistant: two prompts may share a block hash and read each other's KV. "
            "Use --prefix-caching-hash-algo sha256_cbor, especially if tenants share the daemon.",
            algorithm,
        )
    if is_random:
        logger.warning_once(  # type: ignore[attr-defined]
            "kvoffd: %s without PYTHONHASHSEED has a random seed in each process, so other engines, and this one after "
            "a restart, cannot use its blocks. Set PYTHONHASHSEED, or use sha256_cbor.",
            algorithm,
        )
    # Workers do not know the scheduler's random seed, but must agree.
    seed = function("random" if is_random else resolve_none_hash_seed(function))
    return {
        "hash_algorithm": algorithm,
        # Covers algorithm, seed and scheme of the hashes.
        "hash_probe": hash_block_tokens(function, seed, PROBE_TOKENS, None).hex(),
        # The engine's id, if no other engine can share its blocks.
        "private": str(vllm_config.kv_transfer_config.engine_id) if is_random else "",
    }


def _config_digest(model: ModelConfig) -> str:
    plain = _plain(model.hf_config.to_dict())
    text = canonical_json(plain)
    # Long RoPE chooses its factors by the engine's maximal context length.
    length: object = model.max_model_len if "longrope" in text else None
    if "llama4" in text:
        # By that length Llama 4 decides whether to scale queries by position, unless its generation config says so. For
        # images it records that in a copy of its configuration.
        generation = {**model.try_get_generation_config(), **model.override_generation_config}
        length = [model.max_model_len, _plain(generation.get("attn_temperature_tuning"))]
    return digest(
        {
            "config": plain,
            "max_model_len": length,
            "model_impl": str(model.model_impl),
            # For models whose layers are code of transformers.
            "transformers": _versions("transformers") if model.using_transformers_backend() else "",
            "remote_code": _remote_code(model),
            "model_class_overrides": _plain(model.model_class_overrides),
            "quantization_config": _plain(model.quantization_config),
        }
    )


def _computation(vllm_config: VllmConfig) -> str:
    """Return a digest of settings outside the model that change attention, or may change anything."""
    attention, kernels = vllm_config.attention_config, vllm_config.kernel_config
    backends = sorted(FACTORS["KernelConfig"]) if vllm_config.model_config.quantization else []
    return digest(
        {
            "non_causal": _plain(attention.use_non_causal),
            "indexer_kv_dtype": _plain(attention.indexer_kv_dtype),
            "diffusion": _plain(vllm_config.diffusion_config),
            "additional": _plain(vllm_config.additional_config),
            "plugins": _plugins(),
            # Kernels for quantized weights differ in how they quantize activations.
            "backends": [_plain(getattr(kernels, name, None)) for name in backends],
            "environment": {name: _plain(getattr(envs, name, None)) for name in FACTORS["environment"]},
        }
    )


def _multimodal(model: ModelConfig) -> str:
    """Return a digest of what influences a request's embeddings, besides the model and the hashes of images and videos.

    vLLM hashes the processor's arguments of a request, but not those of the engine or the model's files. It hashes
    encoded media, but not the versions of their decoders.
    """
    if model.multimodal_config is None:
        return ""
    processor = {path.name: digest(path.read_text()) for path in Path(model.model).glob(PROCESSOR_FILES)}
    packages = _versions(*MEDIA_PACKAGES)
    fields = {name: _plain(getattr(model.multimodal_config, name, None)) for name in FACTORS["MultiModalConfig"]}
    return digest({**fields, "processor": processor, "packages": packages})


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _plugins() -> list[str]:
    """Return third-party plugins that vLLM loads into workers, with versions: they may change models and kernels."""
    wanted = envs.VLLM_PLUGINS
    return sorted(
        f"{plugin.name} {plugin.value} {plugin.dist.version if plugin.dist else ''}"
        for plugin in importlib.metadata.entry_points(group=DEFAULT_PLUGINS_GROUP)
        if (wanted is None or plugin.name in wanted)
        and plugin.module.partition(".")[0] not in ("vllm", "kvoffd_client")
    )


def _remote_code(model: ModelConfig) -> dict[str, str]:
    """Return the commits of a model's code from a hub by repository: its own, or another one it names.

    The digest of a local model's files includes its code.
    """
    classes = getattr(model.hf_config, "auto_map", None) if model.trust_remote_code else None
    commits = {}
    for each in (classes or {}).values():
        for name in each if isinstance(each, list | tuple) else [each]:
            repository, _, path = str(name).rpartition("--")
            file = f"{path.partition('.')[0]}.py"
            try:
                found = try_to_load_from_cache(repository or model.model, file, revision=model.code_revision)
            except ValueError:  # a local path
                continue
            if isinstance(found, str):
                commits[repository or model.model] = Path(found).parent.name
    return commits


def _speculative(vllm_config: VllmConfig) -> str:
    """Return a digest of the draft model if its layers have KV of their own; else empty.

    The number of drafted tokens does not change blocks, which were computed with accepted tokens. Only drafts of
    several tokens in one pass of the draft model may write its layers' KV differently.
    """
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or str(speculative.method) in METHODS_WITHOUT_KV:
        return ""
    return digest(
        {
            "method": str(speculative.method),
            "model": weights_identity(draft.model) or f"{draft.model} {draft.revision or ''}",
            "config": _config_digest(draft),
            "tensor_parallel": speculative.draft_tensor_parallel_size,
            "tokens_in_parallel": speculative.num_speculative_tokens if speculative.parallel_drafting else 0,
        }
    )


def _attention_backend(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return the backends of the offloaded layers; the configured one if workers have different layers."""
    layers = vllm_config.compilation_config.static_forward_context
    backends = {
        str(layers[name].get_attn_backend().get_name())
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
        if hasattr(layers.get(name), "get_attn_backend")
    }
    if not backends or vllm_config.parallel_config.pipeline_parallel_size > 1:
        configured = vllm_config.attention_config.backend
        backends = {str(getattr(configured, "name", configured or ""))}
    return " ".join(sorted(backends))


def _device_name() -> str:
    """Return the properties of the device that determine the layout of pages and recurrent states."""
    if current_platform.is_cpu():
        # Criteria for vLLM's choice of library and attention instructions (cpu_attn.py, gdn_attention.py).
        asked = [name for name in CPU_INSTRUCTIONS if getattr(torch.cpu, name, lambda: False)()]
        cpu = torch.cpu.get_capabilities()
        wide = [name for name in ("bf16", "sve", "sve2", "sve_max_length", "rvv", "vlen") if cpu.get(name)]
        return " ".join([platform.machine(), *asked, *(f"{name}={cpu[name]}" for name in wide)])
    try:
        return str(current_platform.get_device_name())
    except Exception:  # any driver's error
        logger.warning("kvoffd: the name of the device is unknown and not part of the namespace.")
        return ""


def _group_factors(group: KVCacheGroupSpec, offloaded: Any, pipeline_parallel: int) -> dict[str, Any]:
    spec = group.kv_cache_spec
    mixed = isinstance(spec, UniformTypeKVCacheSpecs)
    layers = list(spec.kv_cache_specs.values()) if mixed else [spec]
    # With pipeline stages workers have different layers, and perhaps different specs of a mixed group.
    staged = pipeline_parallel > 1
    return {
        "group_id": offloaded.group_id,
        "kind": str(get_kv_cache_spec_kind(layers[0]).value),
        "tokens_per_block": offloaded.tokens_per_block,
        "window_tokens": int(get_kv_cache_spec_sliding_window(layers[0]) or 0),
        # Bytes of one block's page on one worker, of one layer or a mixed group.
        "page_bytes": 0 if staged and mixed else int(spec.page_size_bytes),
        "layers": 0 if staged else len(offloaded.layer_names),
        # Heads, head size, dtype, quantization, padding, states.
        "layout": "" if staged and mixed else digest([_plain(_spec_fields(layer)) for layer in layers]),
    }


def _spec_fields(spec: KVCacheSpec) -> dict[str, object]:
    return {"type": type(spec).__name__} | {item.name: getattr(spec, item.name) for item in dataclasses.fields(spec)}


def _plain(value: object) -> object:
    """Return any value of a configuration as JSON values, the same in every process."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if key not in VOLATILE_CONFIG_KEYS}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    # The default repr contains an address.
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text


def weights_identity(model: str) -> str | None:
    """Return a cheap digest of a local model's files; None if ``model`` is not a local path.

    A local model is identified by content, not by path or time: names and sizes of all weight files, and 256 samples of
    256 bytes from each. So copies and other mount points share blocks, and successive checkpoints at one path do not.
    Training changes nearly all numbers of a checkpoint; change the ``salt`` if you edit single ones in place.
    """
    path = Path(model)
    if path.is_file():
        return digest_of_files([path])
    if not path.is_dir():
        return None
    files = sorted(item for item in path.iterdir() if item.suffix in WEIGHT_SUFFIXES and item.is_file())
    if not any(item.suffix != ".py" for item in files):
        # Unknown format of weights: only the path identifies them.
        return hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    return digest_of_files(files)


def digest_of_files(files: list[Path]) -> str:
    """Return a digest of files' names, sizes and samples; see ``weights_identity``."""
    total = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        total.update(f"{path.name}\0{size}\0".encode())
        if path.suffix == ".py":
            total.update(path.read_bytes())
            continue
        with path.open("rb") as file:
            for offset in range(0, size, max(SAMPLE_BYTES, size // SAMPLES_PER_FILE)):
                file.seek(offset)
                total.update(file.read(SAMPLE_BYTES))
    return total.hexdigest()
