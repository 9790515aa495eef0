"""The jobs in a Submit, as clients made them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffd_client.worker_client import Job
from kvoffd_proto import messages as m
from kvoffd_proto.messages import GroupTransfer

KEY_BYTES = 32


def jobs_in(message: m.Submit) -> list[Job]:
    """Loads first; stores have no lease."""
    loads, stores = message.loads, message.stores
    of_loads, of_stores = (_parts_of(each.groups, len(each.job_ids)) for each in (loads, stores))
    jobs = zip(loads.job_ids, of_loads, loads.lease_ids, loads.keep_lease, strict=True)
    return [Job(*job) for job in (*jobs, *zip(stores.job_ids, of_stores, strict=True))]


def _parts_of(groups: Sequence[m.GroupBlocks], jobs: int) -> list[list[GroupTransfer]]:
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
                chosen = slice(key * KEY_BYTES, (key + keys[job]) * KEY_BYTES)
                ids = group.block_ids[block * 4 : (block + blocks[job]) * 4]
                origins = group.parents[chosen], group.tokens[key * tokens : (key + keys[job]) * tokens]
                before = group.before[job * KEY_BYTES : (job + 1) * KEY_BYTES].removeprefix(bytes(KEY_BYTES))
                parts[job].append(GroupTransfer(group.group, group.keys[chosen], ids, firsts[job], *origins, before))
            key, block = key + keys[job], block + blocks[job]
    return parts
