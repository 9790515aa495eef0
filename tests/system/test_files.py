"""Many reads of a file in one call, with their checksums."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest

from kvoffd.pool.checksums import digest
from kvoffd.system.files import FileCalls, Run, ShortRead, address_of, aligned_buffer

PAGE = 4096
PAGES = 1024


@pytest.mark.parametrize("direct", [True, False])
def test_runs_are_read_at_once_and_each_has_its_own_end(tmp_path: Path, direct: bool) -> None:
    path, random = tmp_path / "file", Random(1)
    data = random.randbytes(PAGES * PAGE)
    path.write_bytes(data)
    pool, rest = aligned_buffer(PAGES * PAGE), aligned_buffer(2 * PAGE)
    calls, fd = FileCalls(), os.open(path, os.O_RDWR)
    try:
        calls.set_direct(fd, direct)
        places = random.sample(range(0, PAGES, 4), 200)  # more than the kernel is given at once
        runs = [
            Run(
                at * PAGE,
                [(address_of(pool) + at * PAGE, PAGE, 0), (address_of(pool) + (at + 1) * PAGE, 3 * PAGE, 9000)],
            )
            for at in places
        ]
        beyond = Run((PAGES - 1) * PAGE, [(address_of(rest), 2 * PAGE, 241)])
        misplaced = Run(-PAGE, [(address_of(pool), PAGE, 0)])
        *ends, short, failed = calls.read_runs(fd, [*runs, beyond, misplaced])
    finally:
        os.close(fd)
    assert isinstance(short, ShortRead)
    assert isinstance(failed, OSError)
    assert failed.errno == 22
    for at, sums in zip(places, ends, strict=True):
        begin, end = at * PAGE, (at + 4) * PAGE
        assert pool[begin:end] == data[begin:end]
        assert sums == [0, digest(memoryview(data)[begin + PAGE : begin + PAGE + 9000])]


def test_a_run_of_more_parts_than_the_kernel_takes(tmp_path: Path) -> None:
    path, data = tmp_path / "file", Random(2).randbytes(PAGES * PAGE)
    path.write_bytes(data)
    pool = aligned_buffer(PAGES * PAGE)
    fd = os.open(path, os.O_RDONLY)
    try:
        parts = [(address_of(pool) + at, PAGE // 2, PAGE // 2) for at in range(0, PAGES * PAGE, PAGE // 2)]
        sums, more = FileCalls().read_runs(fd, [Run(0, parts), Run(0, parts[:1])])
    finally:
        os.close(fd)
    assert pool == data
    assert sums == [digest(pool[at : at + PAGE // 2]) for at in range(0, PAGES * PAGE, PAGE // 2)]
    assert more == sums[:1]  # type: ignore[index]
