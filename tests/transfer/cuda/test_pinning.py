"""The pool is pinned in the background, in chunks, while GPUs use it."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator

import pytest
from support.stub_cuda import Ranges, StubCuda
from support.waiting import wait_until

from kvoffd.pool.memory import PoolMemory
from kvoffd.transfer.cuda.gpu_copy import STEP_BYTES
from kvoffd.transfer.cuda.pinning import PinnedPool

CHUNK = STEP_BYTES
POOL = 5 * CHUNK + 3 * mmap.PAGESIZE


@pytest.fixture
def memory() -> Iterator[PoolMemory]:
    memory = PoolMemory.create(POOL, "test")
    yield memory
    memory.close()


@pytest.fixture
def pool(stub: StubCuda, memory: PoolMemory) -> Iterator[PinnedPool]:
    driver = stub.driver()
    driver.init()
    pool = PinnedPool(driver, memory.address, POOL, CHUNK)
    yield pool
    stub.release()
    assert pool.close(10)


def test_nothing_happens_before_a_gpu_asks(stub: StubCuda, pool: PinnedPool) -> None:
    assert pool.progress == (POOL, 0, 0)
    assert stub.made_contexts() == 0


def test_all_of_it_is_pinned_once_for_all_gpus_and_let_go_with_the_last(stub: StubCuda, pool: PinnedPool) -> None:
    stub.set("devices", 2)
    pool.acquire(1)
    pool.acquire(0)
    wait_until(lambda: pool.progress.pinned_bytes == POOL)
    assert stub.made_contexts() == 1
    pinned = [int(line.split()[1]) for line in stub.log() if line.startswith("pin ")]
    assert sum(pinned) == POOL
    assert max(pinned) == CHUNK
    pool.release()
    assert pool.progress.pinned_bytes == POOL
    pool.release()
    assert pool.close(10)
    assert (stub.ranges(Ranges.HOST), stub.contexts(1)) == (0, 0)
    assert pool.progress == (POOL, 0, 0)


def test_what_is_pinned_already_is_used_while_the_rest_is_not(stub: StubCuda, pool: PinnedPool) -> None:
    stub.hang("cuMemHostRegister_v2", 3)
    pool.acquire(0)
    stub.wait_hanging()
    done = pool.progress.pinned_bytes
    assert 0 < done <= 2 * CHUNK
    chunks = pool.chunks
    assert chunks.flags.tolist() == [True, True] + [False] * (len(pool._chunks) - 2)
    base = pool._chunks[0][0]
    assert [at // chunks.chunk_bytes - chunks.first for at in (base, base + done - 1, base + done)] == [0, 1, 2]
    stub.release()
    wait_until(lambda: pool.progress.pinned_bytes == POOL)
    pool.release()


def test_a_chunk_that_cannot_be_pinned_is_left_out_and_said_so(
    stub: StubCuda, pool: PinnedPool, caplog: pytest.LogCaptureFixture
) -> None:
    stub.fail("cuMemHostRegister_v2", 2, status=2)
    stub.fail("cuMemHostRegister_v2", 3, status=2)
    with caplog.at_level(logging.WARNING):
        pool.acquire(0)
        wait_until(lambda: sum(pool.progress[1:]) == POOL)
    assert pool.progress.refused_bytes == 2 * CHUNK
    assert pool.problem is not None
    assert "16.0 MiB" in pool.problem
    assert [record.message for record in caplog.records] == [
        "A part of the pool cannot be pinned and is used as it is: cuMemHostRegister_v2 failed: "
        "CUDA_ERROR_OUT_OF_MEMORY (2)."
    ]
    pool.release()
    assert pool.problem is None


def test_without_a_context_nothing_is_pinned_and_said_so(stub: StubCuda, pool: PinnedPool) -> None:
    stub.fail("cuDevicePrimaryCtxRetain", status=2)
    pool.acquire(0)
    wait_until(lambda: pool.problem is not None)
    assert pool.progress == (POOL, 0, POOL)
    pool.release()


def test_a_gpu_that_hangs_does_not_keep_another_from_the_pool(stub: StubCuda, pool: PinnedPool) -> None:
    stub.set("devices", 2)
    stub.hang("cuMemHostUnregister")
    pool.acquire(0)
    wait_until(lambda: pool.progress.pinned_bytes == POOL)
    pool.release()
    stub.wait_hanging()
    pool.acquire(1)  # returns
    assert pool.progress.pinned_bytes == 0, "it may be gone any moment, so no batch may use it"
    assert not pool.close(0.0)
    stub.release()
    wait_until(lambda: pool.progress.pinned_bytes == POOL)
    pool.release()


def test_giving_up_in_the_middle_unpins_what_was_pinned(stub: StubCuda, pool: PinnedPool) -> None:
    stub.hang("cuMemHostRegister_v2", 3)
    pool.acquire(0)
    stub.wait_hanging()
    pool.release()
    assert not pool.chunks.flags.any()
    assert pool.progress.pinned_bytes > 0, "operators are told what is still locked"
    stub.release()
    assert pool.close(10)
    assert pool.progress == (POOL, 0, 0)
    assert stub.ranges(Ranges.HOST) == 0
    assert stub.calls("cuMemHostRegister_v2") == 3
