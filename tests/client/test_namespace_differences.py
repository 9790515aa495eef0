"""Each field of the fingerprint has words, and what follows from another field is left out."""

from __future__ import annotations

import json

from kvoffd_client import NamespaceSpec
from kvoffd_proto.namespace_differences import FIELDS, explain
from tests.kit.factors import FACTS, GROUP, other

DIGESTS = ("model_config", "weights", "hash_probe", "live_weights", "computation", "multimodal", "speculative")
WHOLE = {**FACTS, "format": 2, **{name: f"{number:064x}" for number, name in enumerate(DIGESTS)}}


def words(was: dict[str, object], **changes: object) -> list[str]:
    return [each.sentence(", was") for each in explain(json.dumps({**was, **changes}), json.dumps(was))]


def test_a_field_that_differs_alone_is_named_with_words() -> None:
    for name in sorted((WHOLE.keys() | GROUP.keys()) - {"groups", "group_id"}):
        if name in GROUP:
            found = words(WHOLE, groups=[{**GROUP, name: other(GROUP[name])}])
        else:
            found = words(WHOLE, **{name: "ab" * 32 if name in DIGESTS else other(WHOLE[name])})
        assert len(found) == 1, name
        assert found[0].startswith(FIELDS[name].words + " differs" * (name in DIGESTS)), name


def test_the_words_of_a_rollout() -> None:
    group = {**GROUP, "tokens_per_block": 64, "page_bytes": 32768, "layout": "bb"}
    assert words(WHOLE, tokens_per_hash=64, groups=[group]) == ["tokens per block 64, was 32 (--block-size)"]
    assert words(WHOLE, hash_probe="07" * 32) == ["PYTHONHASHSEED differs"]
    assert words(WHOLE, hash_probe="07" * 32, hash_algorithm="sha256_cbor") == [
        "hash of the blocks sha256_cbor, was sha256 (--prefix-caching-hash-algo)"
    ]
    half = {"weights_dtype": "torch.float16", "kv_cache_dtype": "float16", "live_weights": "08" * 32}
    assert words(WHOLE, **half, groups=[{**GROUP, "layout": "cc"}]) == ["dtype float16, was bfloat16 (--dtype)"]
    assert words(WHOLE, **{**half, "kv_cache_dtype": "fp8"}) == [
        "dtype float16, was bfloat16 (--dtype)",
        "dtype of the KV cache fp8, was bfloat16 (--kv-cache-dtype)",
    ]
    assert words(WHOLE, live_weights="09" * 32) == ["weights in memory differs"]
    assert words(WHOLE, private="cpu-1") == [
        "random hash seed differs (set PYTHONHASHSEED, or --prefix-caching-hash-algo sha256_cbor)"
    ]
    two = words(WHOLE, tensor_parallel=4, world_size=4, groups=[{**GROUP, "page_bytes": 4096, "layout": "dd"}])
    assert two == ["tensor parallel size 4, was 2 (--tensor-parallel-size)"]


def test_what_nobody_foresaw_is_shown_as_it_is() -> None:
    assert words(WHOLE) == explain("", "no JSON") == explain("[1]", "{}") == []
    one, two = (NamespaceSpec.named("m", dtype=dtype, model="x" * 90).description for dtype in ("fp8", "bf16"))
    assert list(map(str, explain(one, two))) == ["dtype fp8 and bf16"], "of another engine"
    (found,) = explain('{"new_field": "a\\u001b[2J"}', '{"new_field": null}')
    assert str(found) == "new field a?[2J and none"
    (many,) = explain('{"groups": [1, 2]}', '{"groups": [{}]}')
    assert str(many) == "KV cache groups 2 and 1"
    assert explain('{"groups": [1]}', '{"groups": [{"kind": 3}]}')


def test_of_long_values_it_is_said_that_they_differ() -> None:
    """Such as digests. ``namespaces diff --json`` has them whole."""
    (found,) = explain(json.dumps({"model": "y" * 60}), json.dumps({"model": "z" * 61}))
    assert str(found) == "model differs (--model)"
