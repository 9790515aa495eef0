"""The jobs in a Submit, as clients made them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffd_client.jobs import GroupTransfer, Job
from kvoffd_proto import messages as m

KEY_BYTES = 32


def stores_in(message: m.Submit, key_bytes: int = KEY_BYTES) -> list[Job]:
    parts = _parts_of(message.stores.groups, len(message.stores.job_ids), key_bytes)
    return [Job(job_id, groups) for job_id, groups in zip(message.stores.job_ids, parts, strict=True)]


def loads_in(message: m.Submit, key_bytes: int = KEY_BYTES) -> list[Job]:
    loads = message.loads
    parts = _parts_of(loads.groups, len(loads.job_ids), key_bytes)
    return [Job(*of_job) for of_job in zip(loads.job_ids, parts, loads.lease_ids, loads.keep_lease, strict=True)]


def jobs_in(message: m.Submit, key_bytes: int = KEY_BYTES) -> list[Job]:
    """Loads first."""
    return [*loads_in(message, key_bytes), *stores_in(message, key_bytes)]


def _parts_of(groups: Sequence[m.GroupBlocks], jobs: int, key_bytes: int) -> list[list[GroupTransfer]]:
    parts: list[list[GroupTransfer]] = [[] for _ in range(jobs)]
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
                parts[job].append(GroupTransfer(group.group, group.keys[chosen], ids, firsts[job], *told))
            key, block = key + keys[job], block + blocks[job]
    return parts
