"""Explains why two namespaces of one model do not share blocks: the fields that differ, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvoffd_proto.units import printable

MAX_CHARACTERS = 60
"""Longest value shown in a sentence, which excludes SHA-256 digests."""


class _Field(NamedTuple):
    """A field in words.

    Attributes:
        cause: the option that sets it.
        follows_from: fields of which any that differs explains a difference of this one.
    """

    words: str
    cause: str = ""
    follows_from: tuple[str, ...] = ()


_MODEL = ("model", "revision", "weights", "dummy_weights")
_DTYPES = ("weights_dtype", "quantization")
_SIZES = ("kv_cache_dtype", "tokens_per_hash", "tokens_per_block", "model_config")
_RANKS = ("tensor_parallel", "pipeline_parallel", "prefill_context_parallel", "decode_context_parallel")
_ENGINE = (*_MODEL, *_DTYPES, *_RANKS)
_DEVICE = ("attention_backend", "device_type")

FIELDS = {
    "vllm_release": _Field("vLLM"),
    "model": _Field("model", "--model"),
    "revision": _Field("model revision", "--revision"),
    "weights": _Field("files of the model"),
    "weights_dtype": _Field("dtype", "--dtype"),
    "quantization": _Field("quantization", "--quantization"),
    "dummy_weights": _Field("random weights", "--load-format dummy"),
    "model_config": _Field("configuration of the model", "config.json, --hf-overrides, --max-model-len", _MODEL),
    "kv_cache_dtype": _Field("dtype of the KV cache", "--kv-cache-dtype"),
    "tokens_per_hash": _Field("tokens per block", "--block-size"),
    "blocks_per_chunk": _Field("engine blocks per block", "blocks_per_chunk"),
    "hash_algorithm": _Field("hash of the blocks", "--prefix-caching-hash-algo"),
    "hash_probe": _Field("PYTHONHASHSEED", "", ("hash_algorithm", "private")),
    "private": _Field("random hash seed", "set PYTHONHASHSEED, or --prefix-caching-hash-algo sha256_cbor"),
    "hash_lookahead_tokens": _Field("lookahead tokens of a hash", "--speculative-config"),
    "tensor_parallel": _Field("tensor parallel size", "--tensor-parallel-size"),
    "pipeline_parallel": _Field("pipeline parallel size", "--pipeline-parallel-size"),
    "prefill_context_parallel": _Field("prefill context parallel size", "--prefill-context-parallel-size"),
    "decode_context_parallel": _Field("decode context parallel size", "--decode-context-parallel-size"),
    "context_parallel_interleave": _Field("context parallel interleave", "--cp-kv-cache-interleave-size"),
    "world_size": _Field("shards of a block", "", _RANKS),
    "kv_layout": _Field("layout of the KV cache", "VLLM_KV_CACHE_LAYOUT", ("attention_backend",)),
    "device_type": _Field("kind of device"),
    "device_name": _Field("GPU", "", ("device_type",)),
    "attention_backend": _Field("attention backend", "--attention-backend", ("device_type",)),
    "computation": _Field("settings of the computation", "--attention-config, --additional-config, VLLM_ variables"),
    "model_runner": _Field("model runner", "VLLM_USE_V2_MODEL_RUNNER"),
    "multimodal": _Field("settings for images and video", "--mm-processor-kwargs, --media-io-kwargs", _MODEL),
    "speculative": _Field("draft model", "--speculative-config"),
    "salt": _Field("salt", "salt in kv_connector_extra_config"),
    "live_weights": _Field("weights in memory", "", (*_ENGINE, "model_config")),
    "format": _Field("format of the namespace", "release of kvoffd in the engine"),
    # Fields of a group.
    "kind": _Field("kind of attention"),
    "window_tokens": _Field("sliding window"),
    "tokens_per_block": _Field("tokens per block", "--block-size", ("tokens_per_hash", "blocks_per_chunk")),
    "layers": _Field("layers", "", (*_MODEL, "model_config", "pipeline_parallel")),
    "page_bytes": _Field("bytes of a layer's block", "", (*_ENGINE, *_SIZES)),
    "layout": _Field("layout of a layer's block", "", (*_ENGINE, *_SIZES, "page_bytes", *_DEVICE)),
}
"""Fields of the fingerprint (vllm/fingerprint.py), most frequent causes first."""


@dataclass(frozen=True)
class Difference:
    """A field that differs between two namespaces. ``one`` and ``other`` are empty if their values are not shown."""

    field: str
    words: str
    one: str
    other: str
    cause: str

    def __str__(self) -> str:
        """Return such as ``tokens per block 64 and 128 (--block-size)``."""
        return self.sentence(" and")

    def sentence(self, between: str) -> str:
        """Return the same with other words between the values."""
        values = f" {self.one}{between} {self.other}" if self.one or self.other else " differs"
        return f"{self.words}{values}" + (f" ({self.cause})" if self.cause else "")


def differences(one: str, other: str) -> list[tuple[str, object, object]]:
    """Return the fields that differ between two descriptions, with both values; None for a missing field."""
    fields, others = fields_of_description(one) or {}, fields_of_description(other) or {}
    names = dict.fromkeys([*fields, *others])
    return [(name, fields.get(name), others.get(name)) for name in names if fields.get(name) != others.get(name)]


def fields_of_description(description: str) -> dict[str, object] | None:
    """Return the fields of a description, which any client may have written; None if it is not a JSON object."""
    try:
        found = msgspec.json.decode(description)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def explain(one: str, other: str) -> list[Difference]:
    """Return the differences of two descriptions, most frequent causes first, without those that follow from others.

    Empty if the descriptions are equal or say nothing; never empty if a field differs.
    """
    found: dict[str, tuple[object, object]] = {}
    for name, here, there in differences(one, other):
        if name == "groups":
            found |= dict(_of_groups(here, there))
        elif name == "fields":  # of NamespaceSpec.named
            found |= dict(_of_groups([here], [there]))
        else:
            found[name] = here, there
    kv, weights = found.get("kv_cache_dtype"), found.get("weights_dtype")
    if kv and weights and [f"torch.{value}" for value in kv] == list(weights):
        del found["kv_cache_dtype"]  # --kv-cache-dtype auto
    causes = [name for name in found if name not in FIELDS or not set(FIELDS[name].follows_from) & found.keys()]
    causes = causes or list(found)
    order = list(FIELDS)
    causes.sort(key=lambda name: order.index(name) if name in FIELDS else len(order))
    return [_difference(name, *found[name]) for name in causes]


def how_they_differ(one: str, other: str) -> str:
    """Return the causes in words, such as ``dtype of the KV cache bfloat16 and fp8 (--kv-cache-dtype)``."""
    return "; ".join(map(str, explain(one, other))) or "their descriptions do not say how"


def _of_groups(one: object, other: object) -> Iterator[tuple[str, tuple[object, object]]]:
    """Yield the fields of KV cache groups that differ, each with its first pair of values."""
    if not (isinstance(one, list) and isinstance(other, list)) or len(one) != len(other):
        sizes = [len(groups) if isinstance(groups, list) else groups for groups in (one, other)]
        yield "KV cache groups", (sizes[0], sizes[1])
        return
    seen = set()
    for here, there in zip(one, other, strict=True):
        if not (isinstance(here, Mapping) and isinstance(there, Mapping)):
            here, there = {"KV cache groups": here}, {"KV cache groups": there}
        for name in dict.fromkeys([*here, *there]):
            if name not in seen and here.get(name) != there.get(name):
                seen.add(name)
                yield str(name), (here.get(name), there.get(name))


def _difference(name: str, one: object, other: object) -> Difference:
    field = FIELDS.get(name) or _Field(name.replace("_", " "))
    values = _text(one), _text(other)
    if name == "private" or max(map(len, values)) > MAX_CHARACTERS:
        values = "", ""
    return Difference(name, printable(field.words), *values, field.cause)


def _text(value: object) -> str:
    if value in (None, ""):
        return "none"
    return printable(value.removeprefix("torch.") if isinstance(value, str) else json.dumps(value))
