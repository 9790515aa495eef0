"""JSON of the wire's structs."""

from __future__ import annotations

import json

import pytest

from kvoffd_client.cli.json_output import describe, to_json, to_plain
from kvoffd_proto.messages import StatsReply


def test_fields_have_their_names_and_fingerprints_are_hex(busy: StatsReply) -> None:
    found = json.loads(to_json(busy))
    assert found["pool"]["free_bytes"] == busy.pool.free_bytes
    assert found["store"]["bytes_per_second"] == busy.store.bytes_per_second
    assert found["namespaces"][0]["namespace"] == busy.namespaces[0].namespace.hex()
    assert found["errors"] == busy.errors
    assert found["epoch"] == busy.epoch
    assert "request_id" not in found


def test_every_key_is_documented_once(busy: StatsReply) -> None:
    keys = dict(describe(StatsReply))
    assert all(keys.values()), [key for key, text in keys.items() if not text]
    found = json.loads(to_json(busy))
    there = (
        set(found)
        | {f"pool.{key}" for key in found["pool"]}
        | {f"namespaces[].{key}" for key in found["namespaces"][0]}
    )
    there |= {f"below.{key}" for key in found["below"]} | {f"disks[].{key}" for key in found["disks"][0]}
    there |= {f"{where}.{key}" for where in ("recent[]", "namespaces[].recent[]") for key in found["recent"][0]}
    for part in ("store", "load", "lookup_latency", "integrity", "blocks", "loop_blocked", "lookup_seconds"):
        there |= {f"{part}.{key}" for key in found[part]}
    assert there == set(keys)


def test_what_json_cannot_say_is_refused() -> None:
    with pytest.raises(TypeError):
        to_plain(object())
