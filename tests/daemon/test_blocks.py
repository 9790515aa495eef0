"""Single blocks: what a listing has, and blocks that are read, written, exported and imported."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvoffd_client import (
    Block,
    BlockClient,
    BlockDamaged,
    BlockUnavailable,
    GroupKeys,
)
from kvoffd_client.testing import FakeEngine
from tests.kit.checked import flip
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import books, keys

PAGE_BYTES = 4096
BLOCKS = 8
LABEL = "tiny"
KEYS = keys(*range(1, BLOCKS + 1))
BLOCK_BYTES = 2 * 4 * PAGE_BYTES
"""Of two ranks with four layers each."""


def engine_on(daemon: DaemonProcess, **given: int) -> FakeEngine:
    return FakeEngine(daemon.directory, LABEL, **{"world_size": 2, "blocks": 256, "page_bytes": PAGE_BYTES, **given})


@pytest.fixture(scope="module")
def module_daemon() -> Iterator[DaemonProcess]:
    """What ``shared_daemon`` gives."""
    with DaemonProcess("2MiB", eviction_policy="lru", limits={"leased_share": 1}) as running:
        yield running


@pytest.fixture
def engine(shared_daemon: DaemonProcess) -> Iterator[FakeEngine]:
    with engine_on(shared_daemon) as fake:
        fake.fill(range(BLOCKS), seed=1)
        assert fake.store(KEYS, range(BLOCKS)).ok
        yield fake


@pytest.fixture
def desk(shared_daemon: DaemonProcess, engine: FakeEngine) -> Iterator[BlockClient]:
    with BlockClient(shared_daemon.directory) as client:
        yield client


def loaded(engine: FakeEngine, wanted: list[bytes]) -> list[int]:
    """Checksums of blocks that an engine loads."""
    assert engine.lookup(wanted) == len(wanted)
    blocks = range(100, 100 + len(wanted))
    assert engine.load(wanted, blocks).ok
    return engine.checksums(blocks)


def flood(engine: FakeEngine) -> None:
    """Store twice what the pool holds."""
    for first in range(1000, 1128, 16):
        assert engine.store(keys(*range(first, first + 16)), range(16)).ok


# --- reading ---------------------------------------------------------------------------------------


def test_a_long_listing_names_each_block_once_whatever_comes_and_goes() -> None:
    wanted = keys(*range(1500))
    shape = {"layers": 1, "blocks": len(wanted), "page_bytes": 512}
    with DaemonProcess("16MiB") as daemon, FakeEngine(daemon.directory, LABEL, **shape) as engine:
        assert engine.store(wanted, range(len(wanted))).ok
        with BlockClient(daemon.directory) as desk:
            found = []
            for info in desk.list_blocks(LABEL):
                if len(found) in (10, 1100):
                    first = 5000 + len(found)
                    engine.scheduler.invalidate([GroupKeys(0, b"".join(wanted[:5]))])
                    assert engine.store(keys(*range(first, first + 20)), range(20)).ok
                found.append(info.key)
            assert {len(list(desk.list_blocks(LABEL, prefix=key.hex()))) for key in wanted[5:10]} == {1}
            half_a_byte = [sum(1 for _ in desk.list_blocks(LABEL, prefix=digit)) for digit in "01"]
    assert len(found) == len(set(found)) >= len(wanted) - 5
    assert set(wanted[5:]) <= set(found)
    assert half_a_byte == [len(wanted) + 35, 0]


def test_a_block_is_read_as_it_was_stored(desk: BlockClient, engine: FakeEngine) -> None:
    """By rank and layer, with checksums that match."""
    mine = desk.get_block(LABEL, KEYS[0])
    assert [len(shard.layers) for shard in mine.shards] == [4, 4]
    with pytest.raises(BlockUnavailable, match="not in the pool"):
        desk.get_block(LABEL, keys(99)[0])
    assert desk.put_block(LABEL, keys(50)[0], mine)
    assert loaded(engine, keys(50)) == engine.checksums([0])


# --- writing ---------------------------------------------------------------------------------------


def test_a_block_is_put_once(desk: BlockClient, engine: FakeEngine) -> None:
    geometry = desk.geometry(LABEL)
    shards = [np.full(geometry.shard_bytes(rank, 0), rank + 1, np.uint8) for rank in range(geometry.world_size)]
    block = Block.of_bytes(geometry, 0, b"", shards)
    assert desk.put_block(LABEL, keys(60)[0], block)
    assert not desk.put_block(LABEL, keys(60)[0], block)
    assert not desk.put_block(LABEL, KEYS[0], block), "what is there stays"
    assert loaded(engine, KEYS[:1]) == engine.checksums([0])
    assert [np.unique(shard.data).tolist() for shard in desk.get_block(LABEL, keys(60)[0]).shards] == [[1], [2]]


def test_a_block_of_another_shape_is_refused(desk: BlockClient) -> None:
    with (
        DaemonProcess("8MiB") as other,
        engine_on(other, page_bytes=2 * PAGE_BYTES) as wide,
        BlockClient(other.directory) as there,
    ):
        assert wide.store(KEYS[:1], [0]).ok
        with pytest.raises(ValueError, match="fit"):
            desk.put_block(LABEL, keys(70)[0], there.get_block(LABEL, KEYS[0]))
    assert not list(desk.list_blocks(LABEL, prefix=keys(70)[0].hex()))


def test_a_full_pool_takes_no_block(shared_daemon: DaemonProcess, desk: BlockClient, engine: FakeEngine) -> None:
    flood(engine)
    there = [info.key for info in desk.list_blocks(LABEL)]
    block = desk.get_block(LABEL, there[0])
    wait_until(lambda: not books(shared_daemon.directory).pinned_blocks)  # a lease of two sessions has half of the pool
    assert engine.lookup(there) == len(there), "it leases all of the pool"
    with pytest.raises(BlockUnavailable, match="no space"):
        desk.put_block(LABEL, keys(80)[0], block)
    engine.release()
    wait_until(lambda: not books(shared_daemon.directory).pinned_blocks)
    assert books(shared_daemon.directory).writing_bytes == 0
    assert books(shared_daemon.directory).balanced


def test_changed_bytes_are_damaged(pool_file: Path) -> None:
    """Memory that changed under the daemon does not match its checksum."""
    with DaemonProcess("8MiB", pool_file=str(pool_file)) as daemon, engine_on(daemon) as engine:
        engine.fill(range(BLOCKS), seed=1)
        assert engine.store(KEYS, range(BLOCKS)).ok
        with BlockClient(daemon.directory) as desk:
            data = desk.get_block(LABEL, KEYS[0]).shards[1].data.tobytes()
            flip(pool_file, zlib.crc32(data), len(data))
            with pytest.raises(BlockDamaged):
                desk.get_block(LABEL, KEYS[0])
