"""The pool is pinned in the background, in chunks, while GPUs use it."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterator

import pytest

from kvoffd.pool.memory import PoolMemory
from kvoffd.transfer.cuda.engine import STEP_BYTES
from kvoffd.transfer.cuda.pinning import PinnedPool
from tests.kit.stub_cuda import Ranges, StubCuda
from tests.kit.waiting import wait_until

CHUNK = STEP_BYTES
POOL = 5 * CHUNK + 3 * mmap.PAGESIZE


@pytest.fixture
def make_pool(stub: StubCuda) -> Iterator[Callable[[float], PinnedPool]]:
    """Makes the test's pool, which stays pinned so long after its last release."""
    memory, driver, pools = PoolMemory.create(POOL, "test"), stub.driver(), list[PinnedPool]()
    driver.init()

    def make(linger_s: float) -> PinnedPool:
        pools.append(PinnedPool(driver, memory.mapping.address, POOL, CHUNK, linger_s))
        return pools[0]

    yield make
    stub.release()
    assert pools[0].close(10)
    memory.close()


@pytest.fixture
def pool(make_pool: Callable[[float], PinnedPool]) -> PinnedPool:
    """Unpinned at the last release."""
    return make_pool(0.0)


def wait_pinned(pool: PinnedPool) -> None:
    wait_until(lambda: pool.progress.pinned_bytes == POOL)


def pins(stub: StubCuda) -> list[int]:
    return [int(line.split()[1]) for line in stub.log() if line.startswith("pin ")]


def test_the_pool_is_pinned_once_until_the_last_gpu(stub: StubCuda, pool: PinnedPool) -> None:
    assert pool.progress == (0, 0, 0)
    assert stub.made_contexts() == 0
    stub.set("devices", 2)
    pool.acquire(1)
    pool.acquire(0)
    wait_pinned(pool)
    assert stub.made_contexts() == 1
    assert (sum(pins(stub)), max(pins(stub))) == (POOL, CHUNK)
    wait_until(lambda: pool.progress.gpu_bytes == 1 << 20)
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
    wait_pinned(pool)
    pool.release()


def test_a_chunk_that_cannot_be_pinned_is_left_out(
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
        "A part of the pool cannot be pinned and is used unpinned: cuMemHostRegister_v2 failed: "
        "CUDA_ERROR_OUT_OF_MEMORY (2)."
    ]
    pool.release()
    assert pool.problem is None


@pytest.mark.parametrize(
    ("call", "nth", "refused"),
    [
        ("cuDevicePrimaryCtxRetain", 1, True),
        ("cuCtxSetCurrent", 1, True),
        ("cuCtxSetCurrent", 2, False),
        ("cuMemHostUnregister", 2, False),
        ("cuMemGetInfo_v2", 1, False),
        ("cuMemGetInfo_v2", 2, False),
    ],
)
def test_failures_give_the_context_back(stub: StubCuda, pool: PinnedPool, call: str, nth: int, refused: bool) -> None:
    stub.fail(call, nth, status=999)
    pool.acquire(0)
    wait_until(lambda: pool.progress.pinned_bytes + pool.progress.refused_bytes == POOL)
    assert (pool.problem is not None) == refused
    if call == "cuMemGetInfo_v2":
        wait_until(lambda: stub.calls(call) == 2)
        assert pool.progress.gpu_bytes == 0
    pool.release()
    assert pool.close(10)
    assert stub.contexts() == 0


def test_a_gpu_that_hangs_does_not_keep_another_from_the_pool(stub: StubCuda, pool: PinnedPool) -> None:
    stub.set("devices", 2)
    stub.hang("cuMemHostUnregister")
    pool.acquire(0)
    wait_pinned(pool)
    pool.release()
    stub.wait_hanging()
    pool.acquire(1)  # returns
    assert pool.progress.pinned_bytes == 0, "it may be gone any moment, so no batch may use it"
    assert not pool.close(0.0)
    stub.release()
    wait_pinned(pool)
    pool.release()


def test_giving_up_in_the_middle_unpins_what_was_pinned(stub: StubCuda, pool: PinnedPool) -> None:
    stub.hang("cuMemHostRegister_v2", 3)
    pool.acquire(0)
    stub.wait_hanging()
    pool.release()
    assert not pool.chunks.flags.any()
    assert pool.progress.pinned_bytes > 0, "operators see what is still locked"
    stub.release()
    assert pool.close(10)
    assert pool.progress == (0, 0, 0)
    assert stub.ranges(Ranges.HOST) == 0
    assert stub.calls("cuMemHostRegister_v2") == 3


def test_after_its_linger_the_pool_is_unpinned(stub: StubCuda, make_pool: Callable[[float], PinnedPool]) -> None:
    pool = make_pool(0.2)
    for _ in range(2):
        pool.acquire(0)
        wait_pinned(pool)
        pool.release()
        assert pool.chunks.flags.all()
        wait_until(lambda: stub.contexts() == 0)
        assert not pool.chunks.flags.any()
        assert stub.ranges(Ranges.HOST) == 0


def test_a_pool_that_was_refused_in_part_does_not_linger(
    stub: StubCuda, make_pool: Callable[[float], PinnedPool]
) -> None:
    pool = make_pool(600.0)
    stub.fail("cuMemHostRegister_v2", 2, status=2)
    pool.acquire(0)
    wait_until(lambda: sum(pool.progress[:2]) == POOL)
    pool.release()
    pool.acquire(0)
    wait_pinned(pool)
    pool.release()


def test_pinned_early_it_stays_so_for_the_first_engine(stub: StubCuda, pool: PinnedPool) -> None:
    pool.pin(0)
    wait_pinned(pool)
    chunks = len(pins(stub))
    pool.acquire(0)
    assert pool.chunks.flags.all()
    assert len(pins(stub)) == chunks
    pool.release()
    wait_until(lambda: stub.contexts() == 0)
