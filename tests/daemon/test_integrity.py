"""Bytes that change in the pool behind the daemon's back: nobody gets them, and the operator learns of it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvoffd_client import AdminClient, SharedMemory
from tests.kit.command import run_cli
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import PAGE_BYTES as PAGE
from tests.kit.wire import Books, Result, WireClient, books, key, keys

KEYS = 24


class Engine:
    """A worker and a scheduler over the wire; blocks 0.. hold random bytes, blocks KEYS.. are loaded into."""

    def __init__(self, daemon: DaemonProcess, stack: ExitStack, seed: int = 1) -> None:
        self.memory = stack.enter_context(SharedMemory(2 * KEYS * PAGE, "test"))
        self.content = np.random.default_rng(seed).integers(0, 256, (KEYS, PAGE), dtype=np.uint8)
        self.memory.view[: KEYS * PAGE] = self.content.reshape(-1)
        self.worker = stack.enter_context(WireClient(daemon.directory))
        self.scheduler = stack.enter_context(WireClient(daemon.directory, "scheduler"))
        self.worker.open_namespace()
        self.scheduler.open_namespace()
        self.registration = self.worker.register(self.memory)
        self._lease = 0

    def store(self, *numbers: int) -> Result:
        return self.worker.store(self.registration, keys(*numbers), numbers)

    def lookup(self, *numbers: int) -> str:
        """States; what is ready is under a lease for the next load."""
        self._lease += 1
        return self.scheduler.lookup(self._lease, keys(*numbers)).states

    def release(self) -> None:
        """End the last lookup's lease."""
        self.scheduler.release(self._lease)

    def load(self, *numbers: int) -> Result:
        """Load what the last lookup found into blocks of its own, which are cleared before."""
        self.memory.view[KEYS * PAGE :] = 0
        into = [KEYS + number for number in numbers]
        return self.worker.load(self.registration, self.scheduler.lease(self._lease), keys(*numbers), into)

    def loaded(self, number: int) -> npt.NDArray[np.uint8]:
        start = (KEYS + number) * PAGE
        return np.array(self.memory.view[start : start + PAGE])

    def came(self, number: int) -> bool:
        return np.array_equal(self.loaded(number), self.content[number])


def flip(pool_file: Path, page: npt.NDArray[np.uint8], at: int = 5000) -> None:
    """Change one byte of the one place in the pool that holds ``page``."""
    held = pool_file.read_bytes()
    position = held.index(page.tobytes())
    with pool_file.open("r+b") as file:
        file.seek(position + at)
        file.write(bytes([held[position + at] ^ 1]))


def balanced(daemon: DaemonProcess) -> Books:
    found = books(daemon.directory)
    assert found.balanced
    return found


def test_integrity_load_of_a_flipped_byte_fails_before_a_byte_moves(pool_file: Path) -> None:
    """The block is dropped, its slot is not used again, and health and the log say so."""
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess("32MiB", pool_file=str(pool_file), verify_share="1"))
        engine = Engine(daemon, stack)
        assert engine.store(0, 1, 2).ok
        flip(pool_file, engine.content[1])
        assert engine.lookup(0, 1, 2) == "RRR"
        result = engine.load(0, 1, 2)
        assert (result.ok, result.error, result.nbytes, result.failed) == (False, "checksum", 0, [key(1)])
        assert not any(engine.loaded(number).any() for number in (0, 1, 2)), "bytes moved before they were compared"
        assert balanced(daemon).leaving_bytes == PAGE, "the lease holds it"
        engine.release()
        assert engine.lookup(0, 1, 2) == "R-R"
        assert engine.load(0, 2).ok
        assert engine.came(0)
        assert engine.came(2)
        found = balanced(daemon)
        assert found.quarantined_bytes == PAGE
        assert found.pool.usable_bytes == found.pool.size_bytes - PAGE
        checks = found.integrity
        assert (checks.mismatches, checks.quarantined_slots, checks.checked_slots) == (1, 1, 5)
        with AdminClient(daemon.directory) as admin:
            health = admin.health()
        assert not health.healthy
        assert "1 slot of the pool did not match the checksum" in health.problems[0]
        assert key(1).hex() in daemon.log
        assert engine.store(1).ok
        assert engine.lookup(1) == "R"
        assert engine.load(1).ok
        assert engine.came(1)


def test_integrity_scrub_finds_what_loads_do_not_compare(pool_file: Path) -> None:
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
            flip(pool_file, engine.content[10])
            for status, said in ((1, "1 does not match"), (0, "all match")):
                done = run_cli("scrub", "--directory", str(daemon.directory))
                assert (done.returncode, said in done.stdout, done.stderr) == (status, True, "")
        assert engine.lookup(3, 4, 8, 9, 10) == "R-R--"
        assert balanced(daemon).quarantined_bytes == 3 * PAGE


def test_integrity_a_share_of_the_loads_is_compared() -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess("32MiB", verify_share="0.25"))
        engine = Engine(daemon, stack)
        engine.store(0)
        for _ in range(8):
            engine.lookup(0)
            assert engine.load(0).ok
            assert engine.came(0)
        assert balanced(daemon).integrity.checked_slots == 2


def test_integrity_no_flipped_byte_is_served_after_a_restart(pool_file: Path) -> None:
    """Although no share of the loads is compared: blocks from before a restart always are."""
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
        # Whether the background or the load finds it first, nobody gets it.
        for number in range(KEYS):
            ok = again.lookup(number) == "R" and again.load(number).ok
            assert ok is (number not in bad)
            assert again.came(number) is ok
            assert ok or not again.loaded(number).any()
        found = balanced(daemon)
        assert found.integrity.mismatches == found.integrity.quarantined_slots == len(bad)
        assert found.quarantined_bytes == len(bad) * PAGE
        assert found.ready_bytes == (KEYS - len(bad)) * PAGE


def test_integrity_recovered_blocks_are_compared_in_the_background(pool_file: Path) -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess("32MiB", pool_file=str(pool_file), verify_share="0"))
        with ExitStack() as first:
            engine = Engine(daemon, first)
            engine.store(*range(KEYS))
        daemon.stop()
        flip(pool_file, engine.content[5])
        daemon.start()
        wait_until(lambda: balanced(daemon).integrity.unverified_slots == 0)
        found = balanced(daemon)
        checks = found.integrity
        assert (checks.checked_slots, checks.mismatches, checks.quarantined_slots) == (KEYS, 1, 1)
        # The slot is not used in the next life either, and what was in it stays away.
        daemon.stop()
        daemon.start()
        assert balanced(daemon).quarantined_bytes == PAGE
        assert daemon.log.count("1 slot not used: wrong bytes were found there") == 1
        again = Engine(daemon, stack)
        assert again.lookup(*range(KEYS)) == "".join("-" if number == 5 else "R" for number in range(KEYS))
        assert again.store(5).ok
