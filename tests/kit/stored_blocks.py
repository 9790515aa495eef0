"""Keys and bytes of the blocks that engines store, in namespaces of one group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvoffd_client import AdminClient
from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.testing import FakeEngine

from .wire import KvSubscriber


def keys_of(heard: KvSubscriber, namespace: bytes) -> list[bytes]:
    """The keys that were stored since ``heard`` was made, each once."""
    found = [one for message in heard.messages() if message.namespace == namespace for one in message.events]
    return list(dict.fromkeys(key for one in found if one.kind == "stored" for key in one.keys))


@contextmanager
def loaded(directory: Path, namespace: bytes, keys: Sequence[bytes]) -> Iterator[FakeEngine]:
    """An engine that has loaded a key into each of its blocks, and may store them under others."""
    with AdminClient(directory) as admin:
        known = admin.namespace(namespace.hex())
    groups = tuple(known.groups)
    spec = NamespaceSpec(namespace, known.label, known.world_size, known.key_bytes, groups, known.description)
    page_bytes = known.shard_bytes[0][0]
    with FakeEngine(directory, spec, layers=1, blocks=len(keys), page_bytes=page_bytes) as engine:
        assert engine.lookup(keys) == len(keys)
        assert engine.load(keys, range(len(keys))).ok
        yield engine
