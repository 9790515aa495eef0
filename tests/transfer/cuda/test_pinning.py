"""The pool is pinned in the background, in chunks, while GPUs use it."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator

import pytest

from kvoffd.pool.memory import PoolMemory
from kvoffd.transfer.cuda.engine import STEP_BYTES
from kvoffd.transfer.cuda.pinning import PinnedPool
from tests.kit.stub_cuda import Ranges, StubCuda
from tests.kit.waiting import wait_until

CHUNK = STEP_BYTES
POOL = 5 * CHUNK + 3 * mmap.PAGESIZE


@pytest.fixture
def memory() -> Iterator[PoolMemory]:
    memory = PoolMemory.create(POOL, "test")
    yield memory
    memory.close()


def pinned_pool(stub: StubCuda, memory: PoolMemory, linger_s: float) -> Iterator[PinnedPool]:
    driver = stub.driver()
    driver.init()
    pool = PinnedPool(driver, memory.address, POOL, CHUNK, linger_s)
    yield pool
    stub.release()
    assert pool.close(10)


@pytest.fixture
def pool(stub: StubCuda, memory: PoolMemory) -> Iterator[PinnedPool]:
    """Unpinned at the last release."""
    yield from pinned_pool(stub, memory, 0.0)


@pytest.fixture
def lingering(stub: StubCuda, memory: PoolMemory) -> Iterator[PinnedPool]:
    """Pinned for minutes after the last release."""
    yield from pinned_pool(stub, memory, 600.0)


def test_nothing_happens_before_a_gpu_asks(stub: StubCuda, pool: PinnedPool) -> None:
    assert pool.progress == (0, 0, 0)
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
    assert pool.progress == (0, 0, 0)


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
        wait_until(lambda: sum(pool.progress[:2]) == POOL)
    assert pool.progress.refused_bytes == 2 * CHUNK
    assert pool.problem is not None
    assert "16.0 MiB" in pool.problem
    assert "limit" not in pool.problem, "NVIDIA's os_lock_user_pages looks at none"
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
    assert pool.progress == (0, POOL, 0)
    pool.release()


@pytest.mark.parametrize("call", ["cuCtxSetCurrent", "cuMemHostUnregister"])
@pytest.mark.parametrize("nth", [1, 2])
def test_whatever_fails_the_context_is_given_back(stub: StubCuda, pool: PinnedPool, call: str, nth: int) -> None:
    stub.fail(call, nth, status=999)
    pool.acquire(0)
    wait_until(lambda: pool.progress.pinned_bytes + pool.progress.refused_bytes == POOL)
    assert (pool.problem is not None) == ((call, nth) == ("cuCtxSetCurrent", 1))
    pool.release()
    assert pool.close(10)
    assert stub.contexts() == 0


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
    assert pool.progress == (0, 0, 0)
    assert stub.ranges(Ranges.HOST) == 0
    assert stub.calls("cuMemHostRegister_v2") == 3


def pins(stub: StubCuda) -> int:
    return sum(line.startswith("pin ") for line in stub.log())


def test_the_next_gpu_finds_a_pool_that_lingers_pinned(stub: StubCuda, lingering: PinnedPool) -> None:
    stub.set("devices", 2)
    lingering.acquire(0)
    wait_until(lambda: lingering.progress.pinned_bytes == POOL)
    lingering.release()
    assert lingering.progress.pinned_bytes == POOL
    chunks = pins(stub)
    lingering.acquire(1)
    assert lingering.chunks.flags.all(), "the first load must be fast"
    assert (pins(stub), stub.made_contexts()) == (chunks, 1)
    lingering.release()


@pytest.fixture
def brief(stub: StubCuda, memory: PoolMemory) -> Iterator[PinnedPool]:
    """Pinned for a moment after the last release."""
    yield from pinned_pool(stub, memory, 0.2)


def test_after_its_linger_the_pool_is_unpinned_by_itself(stub: StubCuda, brief: PinnedPool) -> None:
    brief.acquire(0)
    wait_until(lambda: brief.progress.pinned_bytes == POOL)
    brief.release()
    assert brief.chunks.flags.all()
    wait_until(lambda: stub.contexts() == 0)
    assert not brief.chunks.flags.any()
    assert stub.ranges(Ranges.HOST) == 0
    brief.acquire(0)
    wait_until(lambda: brief.progress.pinned_bytes == POOL)
    brief.release()


def test_a_pool_that_was_refused_in_part_does_not_linger(stub: StubCuda, lingering: PinnedPool) -> None:
    stub.fail("cuMemHostRegister_v2", 2, status=2)
    lingering.acquire(0)
    wait_until(lambda: sum(lingering.progress[:2]) == POOL)
    lingering.release()
    lingering.acquire(0)
    wait_until(lambda: lingering.progress.pinned_bytes == POOL)
    lingering.release()


def test_pinned_early_it_stays_so_until_the_first_engine_has_come_and_gone(stub: StubCuda, pool: PinnedPool) -> None:
    pool.pin(0)
    wait_until(lambda: pool.progress.pinned_bytes == POOL)
    chunks = pins(stub)
    pool.acquire(0)
    assert pool.chunks.flags.all()
    assert pins(stub) == chunks
    pool.release()
    wait_until(lambda: stub.contexts() == 0)


def test_what_pinning_takes_of_the_gpu_is_known_when_it_is_done(stub: StubCuda, pool: PinnedPool) -> None:
    stub.hang("cuMemHostRegister_v2", 2)
    pool.acquire(0)
    stub.wait_hanging()
    assert pool.progress.gpu_bytes == 0
    stub.release()
    wait_until(lambda: pool.progress.gpu_bytes == 1 << 20)
    pool.release()
    assert pool.close(10)
    assert pool.progress.gpu_bytes == 0


@pytest.mark.parametrize("nth", [1, 2])
def test_what_pinning_takes_is_not_known_where_the_driver_does_not_say(
    stub: StubCuda, pool: PinnedPool, nth: int
) -> None:
    stub.fail("cuMemGetInfo_v2", nth)
    pool.acquire(0)
    wait_until(lambda: pool.progress.pinned_bytes == POOL and stub.calls("cuMemGetInfo_v2") == 2)
    assert pool.progress.gpu_bytes == 0
    pool.release()
