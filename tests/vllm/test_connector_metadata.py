"""Block lists to wire jobs, and the workers' reports."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvoffd_client.jobs import GroupTransfer
from kvoffd_client.vllm.connector_metadata import (
    FailedJob,
    KeyedSpec,
    TransferMismatch,
    WorkerReport,
    group_transfers,
)
from kvoffd_proto.errors import ErrorCode
from tests.vllm.vllm_fakes import KEY_BYTES, block_hash, key

POSITIONS = {(0).to_bytes(4, "big"): 0, (5).to_bytes(4, "big"): 1}


def hashes(*numbers: int) -> bytes:
    return b"".join(block_hash(number) for number in numbers)


def convert(
    blocks: GPULoadStoreSpec, groups: tuple[bytes, ...], per_chunk: int = 1, *, is_store: bool = True
) -> list[GroupTransfer]:
    return group_transfers(blocks, KeyedSpec(groups), per_chunk, KEY_BYTES, is_store=is_store)


def ids(transfer: GroupTransfer) -> list[int]:
    return list(np.frombuffer(transfer.block_ids, "<i4"))


def test_keys_are_sorted_by_group_in_their_order_and_survive_the_way_to_the_workers() -> None:
    spec = KeyedSpec.of([key(3), key(1), key(9, 5), key(2)], POSITIONS)
    received = pickle.loads(pickle.dumps(spec))  # noqa: S301 - our own bytes
    assert received.groups == (hashes(3, 1, 2), hashes(9))


def test_blocks_go_to_their_groups_and_empty_groups_are_left_out() -> None:
    blocks = GPULoadStoreSpec([4, 5, 9], group_sizes=[2, 0, 1], block_indices=[10, 0, 3])
    first, second = convert(blocks, (hashes(1, 2), b"", hashes(3)))
    assert (first.group, ids(first), first.keys) == (0, [4, 5], hashes(1, 2))
    assert (second.group, ids(second), second.keys) == (2, [9], hashes(3))


def test_a_job_that_begins_inside_a_key_says_so() -> None:
    blocks = GPULoadStoreSpec([4, 5, 6], group_sizes=[3], block_indices=[9])
    [transfer] = convert(blocks, (hashes(1),), per_chunk=4)
    assert (transfer.first_block, ids(transfer)) == (1, [4, 5, 6])


def test_a_load_may_end_inside_its_last_key() -> None:
    blocks = GPULoadStoreSpec([4, 5, 6], group_sizes=[3], block_indices=[3])
    [transfer] = convert(blocks, (hashes(1, 2),), per_chunk=4, is_store=False)
    assert transfer.first_block == 3
    with pytest.raises(TransferMismatch):
        convert(blocks, (hashes(1, 2),), per_chunk=4, is_store=True)


@pytest.mark.parametrize("is_store", [True, False])
@pytest.mark.parametrize(("size", "keys"), [(2, 1), (1, 2), (0, 1), (1, 0)])
def test_blocks_and_keys_that_do_not_fit_are_refused(size: int, keys: int, is_store: bool) -> None:
    blocks = GPULoadStoreSpec(list(range(size)), group_sizes=[size], block_indices=[0])
    with pytest.raises(TransferMismatch, match="Group 0"):
        convert(blocks, (hashes(*range(keys)),), is_store=is_store)


def test_reports_of_ranks_are_merged_with_every_failure_and_the_least_credit() -> None:
    first, second = WorkerReport(credit_bytes=500, waited_s=0.1), WorkerReport(credit_bytes=300)
    for meta in (first, second):
        meta.mark_completed(1)
    second.mark_completed(2)
    second.failed_jobs[2] = FailedJob(ErrorCode.NOT_READY)
    first.load_times, second.load_times = {1: (64, 0.5), 3: (32, 0.1)}, {1: (64, 0.2)}
    merged = first.aggregate(second)
    assert merged.completed_jobs == {1: 2, 2: 1}
    assert merged.failed_jobs == {2: FailedJob(ErrorCode.NOT_READY)}
    assert merged.credit_bytes == 300
    assert merged.load_times == {1: (64, 0.5), 3: (32, 0.1)}, "the slowest rank's"
    assert merged.waited_s == 0.1
