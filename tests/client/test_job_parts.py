"""Jobs in parts: nothing is lost, nothing is there twice, and no part is larger than the daemon takes."""

from __future__ import annotations

import random

import pytest

from kvoffd_client.job_parts import PartSizes
from kvoffd_proto.messages import BLOCK_ID_BYTES, GroupTransfer, Limits
from tests.kit.struct_wire import ids, keys

LIMITS = Limits(1 << 20, 1000, 1000, 10, 48, 1000, 10, 10, 1000, 1, 1)
SIZES = PartSizes(32, 4, (3, 1))


def covered(part: GroupTransfer) -> list[tuple[bytes, int, bytes]]:
    """Key, place in the key and block id of every block."""
    found = []
    for number in range(len(part.block_ids) // BLOCK_ID_BYTES):
        at = part.first_block + number
        key = part.keys[at // 4 * 32 : (at // 4 + 1) * 32]
        assert len(key) == 32
        found.append((key, at % 4, part.block_ids[number * 4 : number * 4 + 4]))
    return found


@pytest.mark.parametrize("seed", range(50))
def test_the_parts_of_a_job_are_the_job(seed: int) -> None:
    rng = random.Random(seed)
    groups = []
    for group in (0, 1):
        count, first = rng.randrange(1, 60), rng.randrange(4)
        end = rng.randrange(4 * count - 3, 4 * count + 1)
        if end > first:
            told = (rng.randbytes(32 * count), rng.randbytes(64 * count)) if rng.random() < 0.7 else ()
            groups.append(GroupTransfer(group, keys(*range(count)), ids(*range(first, end)), first, *told))
    parts = SIZES.cut(groups, LIMITS)
    for group in groups:
        cut = [one for part in parts for one in part.groups if one.group == group.group]
        assert [block for one in cut for block in covered(one)] == covered(group)
        assert b"".join(one.keys for one in cut) == group.keys
        assert b"".join(one.parents for one in cut) == group.parents
        assert b"".join(one.tokens for one in cut) == group.tokens
        assert all(len(one.tokens) in (0, 2 * len(one.keys)) for one in cut)
    whole = len(parts) == 1
    for part in parts:
        pieces = sum(len(one.block_ids) // BLOCK_ID_BYTES * SIZES.pages[one.group] for one in part.groups)
        count = sum(len(one.keys) // 32 for one in part.groups)
        assert pieces <= LIMITS.max_pieces_per_job
        assert count <= LIMITS.max_keys_per_job
        assert part.pieces == max(pieces, 8 * count)
        assert whole or all(one.keys and one.block_ids for one in part.groups)


def test_a_job_within_the_limits_goes_out_as_it_is() -> None:
    groups = [GroupTransfer(0, keys(1, 2), ids(*range(8)))]
    (part,) = SIZES.cut(groups, LIMITS)
    assert part.groups == groups


def test_ids_that_do_not_fit_their_keys_are_left_for_the_daemon_to_refuse() -> None:
    few = SIZES.cut([GroupTransfer(1, keys(*range(25)), ids(1))], LIMITS)
    many = SIZES.cut([GroupTransfer(1, keys(1), ids(*range(200)))], LIMITS)
    assert [len(one.block_ids) for part in few for one in part.groups] == [4, 0, 0]
    assert [len(one.block_ids) for part in many for one in part.groups] == [800]
