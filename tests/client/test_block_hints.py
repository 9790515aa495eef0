"""BlockClient on a key that no engine stored: which settings it names, from the namespace's description."""

from __future__ import annotations

import pytest

from kvoffd_client import BlockClient, NamespaceSpec
from kvoffd_client.namespace import canonical_json, fingerprint_of
from kvoffd_client.testing import FakeEngine
from kvoffd_proto.messages import GroupSpec
from tests.kit.daemon import DaemonProcess


@pytest.fixture(autouse=True)
def _torch() -> None:
    pytest.importorskip("torch")


@pytest.mark.parametrize("description", ["", "of a client that is no vLLM", "[]", "7"])
def test_a_namespace_whose_description_is_no_json_object_has_no_hints(
    description: str, shared_daemon: DaemonProcess
) -> None:
    groups = (GroupSpec(kind="full_attention", tokens_per_block=128),)
    spec = NamespaceSpec(fingerprint_of(description), "described", 1, 32, groups, description)
    with FakeEngine(shared_daemon.directory, spec, blocks=16, page_bytes=4096):
        with BlockClient(shared_daemon.directory, spec.fingerprint) as blocks:
            with pytest.raises(KeyError, match=r"tokens per block \(128 here\), hash algorithm, PYTHONHASHSEED"):
                blocks.get(bytes(32))


def test_a_key_that_was_never_stored_has_the_engine_s_hash() -> None:
    with DaemonProcess("8MiB") as daemon:
        groups = (GroupSpec(kind="full_attention", tokens_per_block=128),)
        for fields, sentence in (
            (
                {"tokens_per_hash": 128},
                r"compare with the engine's: tokens per block \(128 here\), hash algorithm \(sha256 ",
            ),
            ({"tokens_per_hash": 32}, r"tokens per block \(128 here\), tokens per hash \(32 here\), hash algorithm"),
        ):
            described = canonical_json({**fields, "hash_algorithm": "sha256"})
            spec = NamespaceSpec(fingerprint_of(described), "hashed", 1, 32, groups, described)
            with FakeEngine(daemon.directory, spec, blocks=16, page_bytes=4096):
                with BlockClient(daemon.directory, spec.fingerprint) as blocks:
                    with pytest.raises(KeyError, match=sentence):
                        blocks.get(bytes(32))
