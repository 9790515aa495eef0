"""What must be equal before two engines may read each other's KV bytes, and the namespace made of it. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from kvoffd_client.namespace import NamespaceSpec, canonical_json, fingerprint_of
from kvoffd_proto.messages import GroupSpec

FORMAT = 2
"""Raised when the meaning of a field, or of the bytes in a slot, changes."""

MAX_DESCRIPTION_BYTES = 65_000


@dataclass(frozen=True)
class GroupFactors:
    """One offloaded KV cache group.

    Attributes:
        group_id: its index among all groups of the engine; its position in EngineFactors.groups is that on the wire.
        kind: attention kind as vLLM names it.
        tokens_per_block: tokens of one engine block over all workers.
        window_tokens: sliding window, 0 for none.
        page_bytes: bytes of a page of one block on one worker, one layer's or a mixed group's; 0 where workers differ.
        layers: layers of the group on one worker; 0 where workers differ.
        layout: every field of vLLM's specs of the group (heads, head size, dtype, quantization, padding, states).
    """

    group_id: int
    kind: str
    tokens_per_block: int
    window_tokens: int
    page_bytes: int
    layers: int
    layout: str


@dataclass(frozen=True)
class EngineFactors:
    """Everything that decides which bytes an engine puts into a block of a given hash. All fields are fingerprinted.

    Attributes:
        vllm_release: major and minor version of vLLM.
        model: name of a hub's model; empty for a local one, which ``weights`` identifies.
        revision: the revision asked for.
        weights: digest of a local model's files, or the hub's commit (see ``factors.weights_identity``).
        model_config: digest of the model's configuration after overrides (rope scaling among it).
        quantization: weight quantization method, empty for none.
        kv_cache_dtype: dtype of the KV cache, resolved, and the layers that are left out of it.
        dummy_weights: the engine runs with made-up weights (load_format dummy).
        tokens_per_hash: tokens that one block hash covers.
        blocks_per_chunk: engine blocks under one key.
        hash_algorithm: prefix caching's hash.
        hash_probe: hash of a fixed token list, in hex: algorithm, seed and scheme in one value.
        hash_lookahead_tokens: tokens after a block that its hash covers too (0.33, speculative decoding).
        private: empty; or the engine's id, when nobody else can share its blocks (random hash seed).
        context_parallel_interleave: tokens that a rank of context parallelism holds in a row.
        world_size: shards of a block: workers, or 1 where all of them have the same bytes.
        device_name: the device model, since kernels of another one may lay out pages differently.
        attention_backend: the backends in use.
        computation: digest of what a token attends to beside the model's own configuration.
        model_runner: v1 or v2.
        multimodal: digest of what changes the embeddings of images and is not in their hashes, empty for text.
        speculative: digest of a draft model whose layers have KV, empty for none.
        groups: KV cache groups, by index on the wire.
    """

    vllm_release: str
    model: str
    revision: str
    weights: str
    model_config: str
    weights_dtype: str
    quantization: str
    kv_cache_dtype: str
    dummy_weights: bool
    tokens_per_hash: int
    blocks_per_chunk: int
    hash_algorithm: str
    hash_probe: str
    hash_lookahead_tokens: int
    private: str
    tensor_parallel: int
    pipeline_parallel: int
    prefill_context_parallel: int
    decode_context_parallel: int
    context_parallel_interleave: int
    world_size: int
    kv_layout: str
    device_type: str
    device_name: str
    attention_backend: str
    computation: str
    model_runner: str
    multimodal: str
    speculative: str
    salt: str
    groups: tuple[GroupFactors, ...]

    @property
    def key_bytes(self) -> int:
        return len(self.hash_probe) // 2


def digest(value: object) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def namespace_of(factors: EngineFactors, label: str) -> NamespaceSpec:
    """Return the namespace of an engine's configuration. ``label`` is for display only and goes into no fingerprint."""
    canonical = canonical_json({"format": FORMAT, **asdict(factors)})
    return NamespaceSpec(
        fingerprint=fingerprint_of(canonical),
        label=label[:256],
        world_size=factors.world_size,
        key_bytes=factors.key_bytes,
        groups=tuple(
            GroupSpec(
                kind=group.kind[:64],
                tokens_per_block=group.tokens_per_block * factors.blocks_per_chunk,
                window_tokens=group.window_tokens,
            )
            for group in factors.groups
        ),
        description=canonical
        if len(canonical) <= MAX_DESCRIPTION_BYTES
        else canonical_json({"digest": digest(canonical)}),
    )


def with_live_weights(namespace: NamespaceSpec, weights: Sequence[str]) -> NamespaceSpec:
    """Return the namespace of an engine with these weights in memory: one digest for each worker, by rank."""
    canonical = canonical_json({**json.loads(namespace.description), "live_weights": digest(list(weights))})
    return replace(namespace, fingerprint=fingerprint_of(canonical), description=canonical)
