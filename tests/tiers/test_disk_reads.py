"""Blocks of real files: read by the kernel, many at once or by several threads, and compared."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvoffd.pool.checksums import digest
from kvoffd.system.files import FileCalls, aligned_buffer
from kvoffd.tiers.disk_io import End, Reads, SlotJob
from kvoffd.tiers.header import HEADER_BYTES, Block, encode_header, make_block_group
from kvoffd.tiers.tier import Result
from kvoffd_proto.stats import DiskFault
from tests.kit.waiting import deliver_until

BLOCKS, SLOT_BYTES = 300, HEADER_BYTES + 5 * 4096
GROUP = make_block_group(b"1" * 32, 0, 0, (9000, 0, 200, 4096))
PLACES, PADDED = (0, 12_288, 12_288, 16_384), (12_288, 0, 4096, 4096)


def block_of(number: int) -> tuple[Block, bytes]:
    data = Random(number).randbytes(SLOT_BYTES - HEADER_BYTES)
    sums = [digest(memoryview(data)[at : at + length]) for at, length in zip(PLACES, GROUP.lengths, strict=True)]
    return Block(GROUP, number.to_bytes(32, "big"), (0,) * 4, tuple(sums)), data


@pytest.mark.parametrize(("direct", "most"), [(True, 128), (True, 3), (False, 128), (False, 1)])
def test_each_block_is_read_and_ends_once(tmp_path: Path, direct: bool, most: int) -> None:
    path, posted, ended = tmp_path / "file", deque[Callable[[], None]](), dict[int, End]()
    blocks = list(map(block_of, range(BLOCKS)))
    path.write_bytes(b"".join(encode_header(block) + data for block, data in blocks))
    with path.open("r+b") as file:  # one has wrong bytes, in another's slot is another's header
        file.seek(7 * SLOT_BYTES + HEADER_BYTES + 100)
        file.write(b"wrong")
        file.seek(8 * SLOT_BYTES)
        file.write(encode_header(blocks[9][0]))
    fd, pool = os.open(path, os.O_RDWR), aligned_buffer((BLOCKS + 2) * SLOT_BYTES)
    FileCalls().set_direct(fd, direct)

    def end(job: SlotJob, end: End) -> None:
        assert job.slot not in ended
        ended[job.slot] = end
        if job.slot == 5:
            raise ZeroDivisionError("planted")

    reads = Reads(
        "reads",
        cast("Any", SimpleNamespace(fd=fd, direct=direct, path=path)),
        pool,
        most,
        end,
        posted.append,
        time.monotonic,
    )
    for number in range(BLOCKS + 2):
        offset = 2**63 - 4096 if number == BLOCKS + 1 else number * SLOT_BYTES
        shards = [number * SLOT_BYTES + at for at in PLACES]
        key = number.to_bytes(32, "big")
        reads.put(SlotJob(GROUP, key, number, offset, SLOT_BYTES, PADDED, shards, print))
    assert reads.waiting + len(reads._reading) == BLOCKS + 2
    deliver_until(posted, lambda: len(ended) == BLOCKS + 2)
    assert (reads.waiting, reads._reading, reads.longest_s) == (0, {}, 0.0)
    assert reads.close(time.monotonic() + 10)
    os.close(fd)
    assert ended.pop(7).fault is DiskFault.CORRUPT
    assert ended.pop(8).result is Result.GONE
    assert (ended.pop(BLOCKS).fault, ended.pop(BLOCKS + 1).fault) == (DiskFault.SHORT_READ, DiskFault.READ_FAILED)
    for number, one in ended.items():
        block, data = blocks[number]
        assert one == End(Result.DONE, block)
        for at, length in zip(PLACES, GROUP.lengths, strict=True):
            begin = number * SLOT_BYTES + at
            assert pool[begin : begin + length] == data[at : at + length]
