"""The stores and loads in a Submit, as clients made them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffd_proto import messages as m

KEY_BYTES = 32


def stores_in(message: m.Submit, key_bytes: int = KEY_BYTES) -> list[m.Store]:
    parts = _parts_of(message.stores.groups, len(message.stores.job_ids), key_bytes)
    return [m.Store(job_id, groups) for job_id, groups in zip(message.stores.job_ids, parts, strict=True)]


def loads_in(message: m.Submit, key_bytes: int = KEY_BYTES) -> list[m.Load]:
    loads = message.loads
    parts = _parts_of(loads.groups, len(loads.job_ids), key_bytes)
    found = zip(loads.job_ids, loads.lease_ids, parts, loads.keep_lease, strict=True)
    return [m.Load(job_id, lease_id, groups, keep_lease) for job_id, lease_id, groups, keep_lease in found]


def jobs_in(message: m.Submit, key_bytes: int = KEY_BYTES) -> list[m.Store | m.Load]:
    """Loads first."""
    return [*loads_in(message, key_bytes), *stores_in(message, key_bytes)]


def _parts_of(groups: Sequence[m.GroupBlocks], jobs: int, key_bytes: int) -> list[list[m.GroupTransfer]]:
    parts: list[list[m.GroupTransfer]] = [[] for _ in range(jobs)]
    for group in groups:
        keys, blocks, firsts = (
            np.frombuffer(data or bytes(4 * jobs), "<u4").tolist()
            for data in (group.key_counts, group.block_counts, group.first_blocks)
        )
        tokens = len(group.tokens) // max(1, sum(keys))
        key = block = 0
        for job in range(jobs):
            if keys[job]:
                chosen = slice(key * key_bytes, (key + keys[job]) * key_bytes)
                ids = group.block_ids[block * 4 : (block + blocks[job]) * 4]
                told = group.parents[chosen], group.tokens[key * tokens : (key + keys[job]) * tokens]
                parts[job].append(m.GroupTransfer(group.group, group.keys[chosen], ids, firsts[job], *told))
            key, block = key + keys[job], block + blocks[job]
    return parts
