"""What the pool and the cache tell each other: the records that outlive the daemon."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvoffd_proto.admin import ShardSpec
from kvoffd_proto.messages import GroupSpec


class Kind(ctypes.Structure):
    """What many slots have in common; ``struct kind`` of scan.c. ``name`` is a number of a namespace."""

    slot_bytes: int
    length: int
    name: int
    group: int
    rank: int
    world_size: int
    key_bytes: int
    has_checksum: bool
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("slot_bytes", "length")),
        ("name", ctypes.c_int32),
        *((name, ctypes.c_uint16) for name in ("group", "rank", "world_size")),
        *((name, ctypes.c_uint8) for name in ("key_bytes", "has_checksum")),
    )


Ints: TypeAlias = npt.NDArray[np.int64]
Rows: TypeAlias = npt.NDArray[np.void]
"""An array of RECORD of ``table_format``: records of the slot table."""


class InheritedSlots(NamedTuple):
    """The slots that an earlier daemon left whole, by offset: one item of each array for each."""

    names: Sequence[bytes]
    """Fingerprints of namespaces, by number."""
    kinds: Sequence[Kind]
    """By number."""
    kind_of: npt.NDArray[np.uint32]
    offsets: Ints
    generations: Ints
    """They grow with every slot that is written."""
    identities: npt.NDArray[np.uint64]
    """The same for the shards of one block, others for others."""


class NamespaceRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A namespace without its blocks, as the slot table keeps it for the daemon's successor."""

    fingerprint: bytes
    label: str
    world_size: int
    key_bytes: int
    groups: tuple[GroupSpec, ...]
    description: str
    shard_bytes: tuple[tuple[int, ...] | None, ...]
    """Bytes of a shard by rank and group; None for a rank of which no worker has registered."""
    shards: tuple[tuple[ShardSpec, ...] | None, ...] = ()
    """The parts of a shard by rank and group; empty, or None for a rank, where no engine sent them."""
    generation: int = 0
    """Of its blocks, as the daemon counts them: raised whenever all that there are become stale."""
