"""Bytes that change in the pool behind the daemon's back: nobody is given them, and the operator is told."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvoffd_client import AdminClient, SharedMemory
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from tests.kit.daemon import DaemonProcess
from tests.kit.struct_wire import WireClient, ids, key, keys, stats
from tests.kit.waiting import wait_until

PAGE = 16384
KEYS = 24


class Engine:
    """A worker and a scheduler over bare sockets; blocks 0.. hold random bytes, blocks KEYS.. are loaded into."""

    def __init__(self, daemon: DaemonProcess, stack: ExitStack, seed: int = 1) -> None:
        self.memory = stack.enter_context(SharedMemory(2 * KEYS * PAGE, "test"))
        self.content = np.random.default_rng(seed).integers(0, 256, (KEYS, PAGE), dtype=np.uint8)
        self.memory.view[: KEYS * PAGE] = self.content.reshape(-1)
        self.worker = stack.enter_context(WireClient(daemon.directory))
        self.scheduler = stack.enter_context(WireClient(daemon.directory, m.Role.SCHEDULER))
        self.worker.open_namespace()
        self.scheduler.open_namespace()
        self.registration = self.worker.register(self.memory)
        self._number = 0

    def store(self, *numbers: int) -> m.JobResult:
        self._number += 1
        return self.worker.store(self.registration, self._number, keys(*numbers), ids(*numbers))

    def lookup(self, *numbers: int) -> list[int]:
        """States; what is ready is under a lease for the next load."""
        self._number += 1
        return list(self.scheduler.lookup(self._number, keys(*numbers)).states[0])

    def release(self) -> None:
        """End the last lookup's lease."""
        self.scheduler.release(self._number)

    def load(self, *numbers: int) -> m.JobResult:
        """Load what the last lookup found into blocks of its own, which are cleared before."""
        self.memory.view[KEYS * PAGE :] = 0
        lease, into = self.scheduler.lease(self._number), ids(*[KEYS + number for number in numbers])
        return self.worker.load(self.registration, 1000 + self._number, lease, keys(*numbers), into)

    def loaded(self, number: int) -> np.ndarray:
        start = (KEYS + number) * PAGE
        return np.array(self.memory.view[start : start + PAGE])

    def came(self, number: int) -> bool:
        return np.array_equal(self.loaded(number), self.content[number])


def flip(pool_file: Path, page: np.ndarray, at: int = 5000) -> None:
    """Change one byte of the one place in the pool that holds ``page``."""
    held = pool_file.read_bytes()
    position = held.index(page.tobytes())
    with pool_file.open("r+b") as file:
        file.seek(position + at)
        file.write(bytes([held[position + at] ^ 1]))


def balanced(daemon: DaemonProcess) -> m.StatsReply:
    found = stats(daemon.directory)
    pool = found.pool
    parts = (pool.free_bytes, pool.writing_bytes, pool.ready_bytes, pool.leaving_bytes, pool.quarantined_bytes)
    assert sum(parts) == pool.pool_bytes
    return found


def test_a_verified_load_of_a_flipped_byte_fails_and_the_slot_is_quarantined(pool_file: Path) -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess("32MiB", pool_file=str(pool_file), verify_share="1"))
        engine = Engine(daemon, stack)
        assert engine.store(0, 1, 2).ok
        flip(pool_file, engine.content[1])
        assert engine.lookup(0, 1, 2) == [2, 2, 2]
        result = engine.load(0, 1, 2)
        assert (result.ok, result.error, result.bytes) == (False, ErrorCode.CHECKSUM, 0)
        assert result.failed == [m.GroupKeys(0, key(1))]
        assert not any(engine.loaded(number).any() for number in (0, 1, 2)), "bytes moved before they were compared"
        assert balanced(daemon).pool.leaving_bytes == PAGE, "the lease holds it"
        engine.release()
        assert engine.lookup(0, 1, 2) == [2, 0, 2]
        assert engine.load(0, 2).ok
        assert engine.came(0)
        assert engine.came(2)
        found = balanced(daemon)
        assert found.pool.quarantined_bytes == PAGE
        assert found.pool.usable_bytes == found.pool.pool_bytes - PAGE
        assert (found.integrity.mismatches, found.integrity.quarantined_slots) == (1, 1)
        assert found.integrity.checked_slots == 5
        with AdminClient(daemon.directory) as admin:
            health = admin.health()
        assert not health.healthy
        assert "1 slot of the pool did not match the checksum" in health.problems[0]
        assert key(1).hex() in daemon.log
        assert engine.store(1).ok
        assert engine.lookup(1) == [2]
        assert engine.load(1).ok
        assert engine.came(1)


def test_a_scrub_finds_what_loads_do_not_look_for(pool_file: Path) -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess("32MiB", pool_file=str(pool_file), verify_share="0"))
        engine = Engine(daemon, stack)
        engine.store(*range(KEYS))
        engine.lookup(3)
        assert engine.load(3).ok
        assert balanced(daemon).integrity.checked_slots == 0
        for number in (4, 9):
            flip(pool_file, engine.content[number])
        with AdminClient(daemon.directory) as admin:
            assert admin.scrub(start=False).slots == 0
            admin.scrub()
            wait_until(lambda: not admin.scrub(start=False).running)
            reply = admin.scrub(start=False)
            assert (reply.slots, reply.done_slots, reply.checked_slots, reply.mismatches) == (KEYS, KEYS, KEYS, 2)
            assert reply.checked_bytes == KEYS * PAGE
            assert reply.seconds > 0
            admin.scrub()
            wait_until(lambda: not admin.scrub(start=False).running)
            assert admin.scrub(start=False).mismatches == 0
        assert engine.lookup(3, 4, 8, 9) == [2, 0, 2, 0]
        assert balanced(daemon).pool.quarantined_bytes == 2 * PAGE


@pytest.mark.parametrize(("share", "checked"), [("0", 0), ("1", 8), ("0.25", 2)])
def test_that_share_of_the_loads_is_verified(share: str, checked: int) -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess("32MiB", verify_share=share))
        engine = Engine(daemon, stack)
        engine.store(0)
        for _ in range(8):
            engine.lookup(0)
            assert engine.load(0).ok
            assert engine.came(0)
        assert balanced(daemon).integrity.checked_slots == checked


def test_after_a_restart_no_flipped_byte_is_served_although_no_share_of_loads_is_verified(pool_file: Path) -> None:
    bad = (0, 7, KEYS - 1)
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess("32MiB", pool_file=str(pool_file), verify_share="0"))
        with ExitStack() as first:
            engine = Engine(daemon, first)
            assert engine.store(*range(KEYS)).ok
            daemon.kill()
        for number in bad:
            flip(pool_file, engine.content[number], at=PAGE - 1)
        daemon.start()
        again = Engine(daemon, stack)
        # Whether the background or the load finds it first, nobody is given it.
        for number in range(KEYS):
            (state,) = again.lookup(number)
            ok = state == 2 and again.load(number).ok
            assert ok is (number not in bad)
            assert again.came(number) is ok
            assert ok or not again.loaded(number).any()
        found = balanced(daemon)
        assert found.integrity.mismatches == found.integrity.quarantined_slots == len(bad)
        assert found.pool.quarantined_bytes == len(bad) * PAGE
        assert found.pool.ready_bytes == (KEYS - len(bad)) * PAGE


def test_what_was_taken_over_is_verified_in_the_background(pool_file: Path) -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess("32MiB", pool_file=str(pool_file), verify_share="0"))
        with ExitStack() as first:
            engine = Engine(daemon, first)
            engine.store(*range(KEYS))
        daemon.stop()
        flip(pool_file, engine.content[5])
        daemon.start()
        wait_until(lambda: balanced(daemon).integrity.unverified_slots == 0)
        found = balanced(daemon).integrity
        assert (found.checked_slots, found.mismatches, found.quarantined_slots) == (KEYS, 1, 1)
        # The slot is clean for the next life, and what was in it stays away.
        daemon.stop()
        daemon.start()
        assert balanced(daemon).pool.quarantined_bytes == 0
        again = Engine(daemon, stack)
        assert again.lookup(*range(KEYS)) == [0 if number == 5 else 2 for number in range(KEYS)]
        assert again.store(5).ok


def test_only_an_administrator_scrubs() -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess("32MiB"))
        worker = stack.enter_context(WireClient(daemon.directory))
        refusal = worker.refused(m.Scrub, True)
        assert refusal.code is ErrorCode.WRONG_ROLE
