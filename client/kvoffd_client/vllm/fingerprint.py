"""What must be equal before two engines may read each other's KV bytes, and the namespace made of it.

Every worker collects the factors on its own after it loaded the model. All workers of one engine must come to the same
result, as must an engine that starts again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
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
"""Raised when the meaning of a factor, or of the bytes in a slot, changes."""
MAX_DESCRIPTION_BYTES = 65_000
PROBE_TOKENS = tuple(range(1, 17))

# These say where a configuration came from, not what is in it.
VOLATILE_CONFIG_KEYS = frozenset({"_commit_hash", "_name_or_path", "transformers_version"})

# Fields of MultiModalConfig; see ``_multimodal``.
MULTIMODAL_FIELDS = (
    "language_model_only",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_hasher_algorithm",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)

# What transformers makes a local model's processor of; of a hub's model the commit tells.
PROCESSOR_FILES = "*processor_config.json"

# What makes embeddings of media, of which vLLM may hash the bytes that came.
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

# Fields of KernelConfig.
BACKENDS = ("linear_backend", "linear_backend_per_quant", "moe_backend")

# Functions of torch.cpu.
CPU_INSTRUCTIONS = ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported")

# Variables of vllm.envs that change numbers by more than rounding does, and that nothing else here shows.
ENVIRONMENT = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_BATCH_INVARIANT",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_USE_F16_ACCUM",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MEDIA_CONNECTOR",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_VIDEO_LOADER_BACKEND",
)

# Speculative methods that draft without a KV cache of their own.
METHODS_WITHOUT_KV = frozenset({"mlp_speculator", "medusa", "ngram", "ngram_gpu", "suffix"})

JUDGED_FIELDS = Path(__file__).with_name("judged_fields.txt")
"""Why each field of vLLM's configuration is a factor or none: a class, and below it its fields, four columns in."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py")
SAMPLES_PER_FILE = 256
SAMPLE_BYTES = 256


def namespace_of(factors: Mapping[str, Any], label: str) -> NamespaceSpec:
    """Return the namespace of an engine's factors. ``label`` is for display only and goes into no fingerprint."""
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
    """Return the namespace of an engine with these weights in memory: one digest for each worker, by rank."""
    canonical = canonical_json({**json.loads(namespace.description), "live_weights": digest(list(weights))})
    return dataclasses.replace(namespace, fingerprint=fingerprint_of(canonical), description=canonical)


def digest(value: object) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def collect_factors(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, salt: str) -> dict[str, Any]:
    """Return everything that decides which bytes an engine puts into a block of a given hash, as JSON values.

    ``vllm_config`` and ``kv_cache_config`` are a worker's; all workers of an engine get the same.
    """
    offloading = build_offloading_config(vllm_config, kv_cache_config)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    local_weights = weights_identity(model.model)
    # Layers with another dtype: groups and their specs may be the same without them.
    skipped = sorted(set(vllm_config.cache_config.kv_cache_dtype_skip_layers))
    return ({"unjudged": unjudged(vllm_config)} if untested() else {}) | {
        "vllm_release": version_factor(),
        # A hub's model by its name and commit, a local one by its files.
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
        # Tokens after a block that its hash covers too (0.33, speculative decoding).
        "hash_lookahead_tokens": int(getattr(vllm_config, "num_hash_lookahead_tokens", 0)),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "prefill_context_parallel": parallel.prefill_context_parallel_size,
        "decode_context_parallel": parallel.decode_context_parallel_size,
        # Tokens that a rank of context parallelism holds in a row.
        "context_parallel_interleave": parallel.cp_kv_cache_interleave_size,
        # Shards of a block: workers, or 1 where all of them have the same bytes.
        "world_size": 1 if offloading.replicated_layout else parallel.world_size,
        "kv_layout": str(kv_cache_config.kv_cache_layout or offloading.kv_cache_layout or ""),
        "device_type": str(current_platform.device_type),
        # Kernels of another device model may lay out pages differently.
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


def judged_fields() -> dict[str, dict[str, str]]:
    """Of each class in ``JUDGED_FIELDS`` its fields, each with the only release that has it, "" for all of them."""
    judged: dict[str, dict[str, str]] = {}
    fields: dict[str, str] = {}
    for line in JUDGED_FIELDS.read_text().splitlines():
        if line.startswith("    "):
            fields.update((field, release) for field, _, release in (each.partition("@") for each in line.split()))
        elif line and not line.startswith((" ", "#")):
            fields = judged[line] = {}
    return judged


def unjudged(vllm_config: VllmConfig) -> dict[str, object]:
    """Return what a release that nobody tested has in its configuration beside the fields that were judged, by path.

    Any of it may decide bytes of blocks. Where it does not, engines share less than they could.
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
    """Return the name for operators: the served name, else the model's; of a path only the directory's name."""
    served = vllm_config.model_config.served_model_name
    name = str((served[0] if isinstance(served, list) else served) or vllm_config.model_config.model)
    name = Path(name).name if Path(name).is_dir() else name
    return name.replace(" ", "_") if name.startswith(BENCH_LABEL) else name


def _hash_factors(vllm_config: VllmConfig) -> dict[str, str]:
    """Return what decides the engine's block hashes."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    function = get_hash_fn_by_name(algorithm)
    # vLLM draws a new seed at each call exactly where it draws one for each process.
    is_random = resolve_none_hash_seed(function) != resolve_none_hash_seed(function)
    if algorithm.startswith("xxhash"):
        logger.warning_once(  # type: ignore[attr-defined]
            "kvoffd: %s is not collision resistant: two prompts may share a block hash and read each other's KV. "
            "Use --prefix-caching-hash-algo sha256_cbor, above all where tenants share the daemon.",
            algorithm,
        )
    if is_random:
        logger.warning_once(  # type: ignore[attr-defined]
            "kvoffd: %s without PYTHONHASHSEED has a random seed in each process, so this engine's blocks can be used "
            "by no other engine and not after its restart. Set PYTHONHASHSEED, or use sha256_cbor.",
            algorithm,
        )
    # Workers do not know the scheduler's seed where it is random, and must agree all the same.
    seed = function("random" if is_random else resolve_none_hash_seed(function))
    return {
        "hash_algorithm": algorithm,
        # Algorithm, seed and scheme of the hashes in one value.
        "hash_probe": hash_block_tokens(function, seed, PROBE_TOKENS, None).hex(),
        # The engine's id, when nobody else can share its blocks.
        "private": str(vllm_config.kv_transfer_config.engine_id) if is_random else "",
    }


def _config_digest(model: ModelConfig) -> str:
    plain = _plain(model.hf_config.to_dict())
    text = canonical_json(plain)
    # Long RoPE chooses its factors by the longest context the engine was started for.
    length: object = model.max_model_len if "longrope" in text else None
    if "llama4" in text:
        # So does Llama 4 whether it scales queries by their position, unless its generation config says so. Where it
        # sees images it notes that in a copy of its configuration.
        generation = {**model.try_get_generation_config(), **model.override_generation_config}
        length = [model.max_model_len, _plain(generation.get("attn_temperature_tuning"))]
    return digest(
        {
            "config": plain,
            "max_model_len": length,
            "model_impl": str(model.model_impl),
            # Models whose layers are transformers' own code.
            "transformers": _versions("transformers") if model.using_transformers_backend() else "",
            "remote_code": _remote_code(model),
            "model_class_overrides": _plain(model.model_class_overrides),
            "quantization_config": _plain(model.quantization_config),
        }
    )


def _computation(vllm_config: VllmConfig) -> str:
    """Return a digest of settings outside the model's that change what a token attends to, or anything at all."""
    attention, kernels = vllm_config.attention_config, vllm_config.kernel_config
    is_quantized = bool(vllm_config.model_config.quantization)
    return digest(
        {
            "non_causal": _plain(attention.use_non_causal),
            "indexer_kv_dtype": _plain(attention.indexer_kv_dtype),
            "diffusion": _plain(vllm_config.diffusion_config),
            "additional": _plain(vllm_config.additional_config),
            "plugins": _plugins(),
            # Kernels for quantized weights differ in how they quantize the other factor.
            "backends": [_plain(getattr(kernels, name, None)) for name in BACKENDS] if is_quantized else [],
            "environment": {name: _plain(getattr(envs, name, None)) for name in ENVIRONMENT},
        }
    )


def _multimodal(model: ModelConfig) -> str:
    """Return a digest of what decides a request's embeddings beside the model, and is in no hash of an image or video.

    Of the arguments of the processor vLLM hashes those that come with a request, not those of the engine, and not
    those in the model's files. Of what came with its own bytes it hashes these, whatever decodes them.
    """
    if model.multimodal_config is None:
        return ""
    processor = {path.name: digest(path.read_text()) for path in Path(model.model).glob(PROCESSOR_FILES)}
    packages = _versions(*MEDIA_PACKAGES)
    fields = {name: _plain(getattr(model.multimodal_config, name, None)) for name in MULTIMODAL_FIELDS}
    return digest({**fields, "processor": processor, "packages": packages})


def _versions(*packages: str) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _plugins() -> list[str]:
    """Return others' plugins that vLLM loads into workers, with their versions: they may change models and kernels."""
    wanted = envs.VLLM_PLUGINS
    return sorted(
        f"{plugin.name} {plugin.value} {plugin.dist.version if plugin.dist else ''}"
        for plugin in importlib.metadata.entry_points(group=DEFAULT_PLUGINS_GROUP)
        if (wanted is None or plugin.name in wanted)
        and plugin.module.partition(".")[0] not in ("vllm", "kvoffd_client")
    )


def _remote_code(model: ModelConfig) -> dict[str, str]:
    """Return the commits of code that a model takes from a hub, by repository: its own, or another one it names.

    Code in the directory of a local model is in the digest of its files.
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
    """Return a digest of the draft model, whose layers have KV of their own; empty where nothing is added.

    How many tokens are drafted changes no block: what is kept was computed with the tokens that were accepted. Only
    drafts of several tokens in one pass of the draft model may write its layers' KV differently.
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
    """Return the backends of the offloaded layers; the configured one where layers differ from worker to worker."""
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
    """Return what of the device decides how attention's kernels lay out pages, and states of recurrent layers."""
    if current_platform.is_cpu():
        # What vLLM asks to choose its library, and the instructions of attention (cpu_attn.py, gdn_attention.py).
        asked = [name for name in CPU_INSTRUCTIONS if getattr(torch.cpu, name, lambda: False)()]
        cpu = torch.cpu.get_capabilities()
        wide = [name for name in ("bf16", "sve", "sve2", "sve_max_length", "rvv", "vlen") if cpu.get(name)]
        return " ".join([platform.machine(), *asked, *(f"{name}={cpu[name]}" for name in wide)])
    try:
        return str(current_platform.get_device_name())
    except Exception:  # any driver's error; the type alone must do then
        logger.warning("kvoffd: the name of the device is unknown; it is left out of the namespace.")
        return ""


def _group_factors(group: KVCacheGroupSpec, offloaded: Any, pipeline_parallel: int) -> dict[str, Any]:
    spec = group.kv_cache_spec
    mixed = isinstance(spec, UniformTypeKVCacheSpecs)
    layers = list(spec.kv_cache_specs.values()) if mixed else [spec]
    # With pipeline stages each worker has other layers, and of a mixed group perhaps other specs.
    staged = pipeline_parallel > 1
    return {
        "group_id": offloaded.group_id,
        "kind": str(get_kv_cache_spec_kind(layers[0]).value),
        "tokens_per_block": offloaded.tokens_per_block,
        "window_tokens": int(get_kv_cache_spec_sliding_window(layers[0]) or 0),
        # Of a page of one block on one worker, one layer's or a mixed group's.
        "page_bytes": 0 if staged and mixed else int(spec.page_size_bytes),
        "layers": 0 if staged else len(offloaded.layer_names),
        # Heads, head size, dtype, quantization, padding, states.
        "layout": "" if staged and mixed else digest([_plain(_spec_fields(layer)) for layer in layers]),
    }


def _spec_fields(spec: KVCacheSpec) -> dict[str, object]:
    return {"type": type(spec).__name__} | {item.name: getattr(spec, item.name) for item in dataclasses.fields(spec)}


def _plain(value: object) -> object:
    """Return anything found in configurations as JSON values, the same in every process."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if key not in VOLATILE_CONFIG_KEYS}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    # An object without a text of its own would print its address.
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text


def weights_identity(model: str) -> str | None:
    """Return a cheap digest of a local model's files, None when ``model`` is no local path.

    A model from a hub is its name, its revision and the commit its configuration came from. A local directory is
    identified by content, not by path or time, so that a copy, or another mount point in another container, shares
    blocks, and two checkpoints that follow each other at one path do not: names and sizes of all weight files, and 256
    pieces of 256 bytes spread over each. Training moves practically all of a checkpoint's numbers; change the ``salt``
    where you edit single ones in place.
    """
    path = Path(model)
    if path.is_file():
        return digest_of_files([path])
    if not path.is_dir():
        return None
    files = sorted(item for item in path.iterdir() if item.suffix in WEIGHT_SUFFIXES and item.is_file())
    if not any(item.suffix != ".py" for item in files):
        # Weights in a form not known here: the path is all there is to tell them apart.
        return hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    return digest_of_files(files)


def digest_of_files(files: list[Path]) -> str:
    """Return a digest of files' names, sizes and samples, as ``weights_identity`` describes."""
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
