"""Bytes that change in the pool behind the daemon's back: nobody gets them, and the operator learns of it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvoffd_client import AdminClient, ErrorCode, SharedMemory
from tests.kit.checked import SCRIBBLE, STEP, CheckedEngine, flip
from tests.kit.command import command
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import PAGE_BYTES, Books, WireClient, books, key, keys

PAGE = 65536
KEYS = 24


@pytest.fixture
def daemon_that(pool_file: Path) -> Callable[..., DaemonProcess]:
    """Makes a daemon with its pool in a file. ``verify_share``: of the loads that it compares."""
    return partial(DaemonProcess, "32MiB", pool_file=str(pool_file))


def balanced(daemon: DaemonProcess) -> Books:
    found = books(daemon.directory)
    assert found.balanced
    return found


def test_integrity_load_of_a_flipped_byte_fails_before_a_byte_moves(
    daemon_that: Callable[..., DaemonProcess], pool_file: Path
) -> None:
    """The block is dropped, its slot is not used again, and health and the log say so."""
    with daemon_that(verify_share="1") as daemon, CheckedEngine(daemon) as engine, CheckedEngine(daemon) as other:
        engine.put(range(3))
        flip(pool_file, engine.truth[1])
        assert other.lookup(keys(1)) == 1
        assert engine.lookup(keys(0, 1, 2)) == 3
        into = range(STEP, STEP + 3)
        engine.fill(into, SCRIBBLE)
        before = engine.checksums(into)
        result = engine.load(keys(0, 1, 2), into)
        assert (result.ok, result.error, result.bytes, result.failed_keys) == (False, ErrorCode.CHECKSUM, 0, keys(1))
        assert engine.checksums(into) == before, "bytes moved before they were compared"
        assert balanced(daemon).leaving_bytes == PAGE, "a lease holds it"
        other.release()
        assert engine.get(range(3)) == [0, 2]
        found = balanced(daemon)
        assert found.quarantined_bytes == PAGE
        assert found.pool.usable_bytes == found.pool.size_bytes - PAGE
        checks = found.integrity
        assert (checks.mismatches, checks.quarantined_slots, checks.checked_slots) == (1, 1, 5)
        with AdminClient(daemon.directory) as admin:
            health = admin.health()
        assert health.level == "degraded"
        assert "1 slot of the pool did not match the checksum" in health.problems[0]
        assert key(1).hex() in daemon.log
        engine.put([1])
        assert engine.has([1])


def test_integrity_scrub_finds_what_loads_do_not_compare(
    daemon_that: Callable[..., DaemonProcess], pool_file: Path
) -> None:
    with daemon_that(verify_share="0") as daemon, CheckedEngine(daemon) as engine:
        engine.put(range(KEYS))
        assert engine.has([3])
        assert balanced(daemon).integrity.checked_slots == 0
        for number in (4, 9):
            flip(pool_file, engine.truth[number])
        with AdminClient(daemon.directory) as admin:
            assert admin.scrub(start=False).slots == 0
            admin.scrub()
            wait_until(lambda: not admin.scrub(start=False).running)
            reply = admin.scrub(start=False)
            assert (reply.slots, reply.done_slots, reply.checked_slots, reply.mismatches) == (KEYS, KEYS, KEYS, 2)
            assert reply.checked_bytes == KEYS * PAGE
            assert reply.seconds > 0
        flip(pool_file, engine.truth[10])
        for status, said in ((1, "1 does not match"), (0, "all match")):
            found, text = command(daemon, "scrub")
            assert (found, said in text) == (status, True)
        assert engine.get([3, 4, 8, 9, 10]) == [3, 8]
        assert balanced(daemon).quarantined_bytes == 3 * PAGE


def test_integrity_a_share_of_the_loads_is_compared() -> None:
    with DaemonProcess("32MiB", verify_share="0.25") as daemon, CheckedEngine(daemon) as engine:
        engine.put([0])
        for _ in range(8):
            assert engine.has([0])
        assert balanced(daemon).integrity.checked_slots == 2


def test_integrity_no_flipped_byte_is_served_after_a_restart(
    daemon_that: Callable[..., DaemonProcess], pool_file: Path
) -> None:
    """Although no share of the loads is compared: blocks from before a restart always are. The log sums them up."""
    bad = range(0, KEYS, 2)
    with daemon_that(verify_share="0") as daemon:
        with CheckedEngine(daemon) as engine:
            engine.put(range(KEYS))
            daemon.kill()
        for number in bad:
            flip(pool_file, engine.truth[number], at=PAGE - 1)
        daemon.start()
        with CheckedEngine(daemon, engine.truth) as engine:
            # Whether the background or the load finds it first, nobody gets it.
            assert [number for number in range(KEYS) if engine.get([number])] == [*range(1, KEYS, 2)]
        found = balanced(daemon)
        assert found.integrity.mismatches == found.integrity.quarantined_slots == len(bad)
        assert found.quarantined_bytes == len(bad) * PAGE
        assert found.ready_bytes == (KEYS - len(bad)) * PAGE
        assert daemon.log.count(" ERROR ") == 1


def test_integrity_recovered_blocks_are_compared_in_the_background(
    daemon_that: Callable[..., DaemonProcess], pool_file: Path
) -> None:
    """The slot is not used in the next life either, and what was in it stays away."""
    with daemon_that(verify_share="0") as daemon:
        with CheckedEngine(daemon) as engine:
            engine.put(range(KEYS))
        daemon.stop()
        flip(pool_file, engine.truth[5])
        daemon.start()
        wait_until(lambda: balanced(daemon).integrity.unverified_slots == 0)
        checks = balanced(daemon).integrity
        assert (checks.checked_slots, checks.mismatches, checks.quarantined_slots) == (KEYS, 1, 1)
        daemon.stop()
        daemon.start()
        assert balanced(daemon).quarantined_bytes == PAGE
        assert daemon.log.count("Not using 1 slot with earlier checksum mismatches") == 1
        with CheckedEngine(daemon, engine.truth) as engine:
            assert engine.get(range(KEYS)) == [number for number in range(KEYS) if number != 5]
            engine.put([5])


def test_integrity_a_slot_that_a_lease_held_when_the_daemon_was_killed_is_not_used_again(
    daemon_that: Callable[..., DaemonProcess], pool_file: Path
) -> None:
    with daemon_that(verify_share="1") as daemon, CheckedEngine(daemon) as engine, CheckedEngine(daemon) as other:
        engine.put([1])
        flip(pool_file, engine.truth[1])
        assert other.lookup(keys(1)) == 1
        assert engine.get([1]) == []
        assert balanced(daemon).quarantined_bytes == 0, "the lease holds it"
        daemon.kill()
        daemon.start()
        assert balanced(daemon).quarantined_bytes == PAGE


def test_integrity_a_part_of_a_block_is_compared(daemon_that: Callable[..., DaemonProcess], pool_file: Path) -> None:
    """A load that begins within a block, and a block that was stored from its second engine block on."""
    with (
        daemon_that(verify_share="0") as daemon,
        WireClient(daemon.directory) as worker,
        WireClient(daemon.directory, "scheduler") as scheduler,
        SharedMemory(8 * PAGE_BYTES, "test") as memory,
    ):
        memory.view[:] = np.random.default_rng(1).integers(0, 256, memory.size_bytes, dtype=np.uint8)
        for client in (worker, scheduler):
            client.open_namespace()
        cache = worker.register(memory, blocks_per_key=2)
        assert worker.store(cache, keys(1), [0, 1]).ok
        assert worker.store(cache, keys(2), [2], first_block=1).ok
        stored = [zlib.crc32(memory.view[at : at + PAGE_BYTES]) for at in (PAGE_BYTES, 2 * PAGE_BYTES)]
        for number, checksum in enumerate(stored, 1):
            for lease, error in ((number, None), (10 + number, "checksum")):
                assert scheduler.lookup(lease, keys(number)).states == "R"
                loaded = worker.load(cache, scheduler.lease(lease), keys(number), [7], first_block=1)
                assert loaded.error == error
                if not error:
                    flip(pool_file, checksum, PAGE_BYTES)
