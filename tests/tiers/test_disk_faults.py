"""What a disk may do to its tier: every call that fails, hangs or lies becomes a miss and a count."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest

from kvoffd.system.files import FileCalls
from kvoffd.tiers.disk.file import DiskError
from kvoffd.tiers.tier import TierResult
from tests.kit.memory_disk import Killed, MemoryDisk
from tests.tiers.makers import DiskMaker, SteppedMaker, removals_are_durable, step
from tests.tiers.rig import ONE, OTHER, TierRig, block_of, content

DONE = TierResult.DONE
Fault = Callable[[str, int], int | None]


def failing(name: str, number: int, code: int) -> Fault:
    def fault(called: str, count: int) -> int | None:
        if called == name and count == number:
            raise OSError(code, os.strerror(code))
        return None

    return fault


def short(name: str, number: int, nbytes: int) -> Fault:
    return lambda called, count: nbytes if (called, count) == (name, number) else None


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


@pytest.fixture
def rig(tmp_path: Path, disk: MemoryDisk) -> TierRig:
    return TierRig(SteppedMaker(tmp_path, disk))


def store(rig: TierRig, *numbers: int, fingerprint: bytes = ONE) -> None:
    for number in numbers:
        rig.write(block_of(number, fingerprint=fingerprint))
    rig.settle()
    rig.tier.tick()
    rig.settle()
    assert all(rig.has(block_of(number, fingerprint=fingerprint).id) for number in numbers)


def load(rig: TierRig, number: int) -> TierResult | None:
    ending = rig.read(block_of(number))
    rig.settle()
    return ending.result if ending is not None else None


def die_and_return(rig: TierRig, disk: MemoryDisk) -> TierRig:
    disk.fault = lambda name, number: None
    disk.locked = False
    return rig.after_death()


FAULTS = {
    "read EIO": lambda number: failing("read", number, errno.EIO),
    "read nothing": lambda number: short("read", number, 0),
    "read short": lambda number: short("read", number, 4096),
    "write EIO": lambda number: failing("write", number, errno.EIO),
    "write ENOSPC": lambda number: failing("write", number, errno.ENOSPC),
    "write nothing": lambda number: short("write", number, 0),
    "write short": lambda number: short("write", number, 4096),
    "sync EIO": lambda number: failing("sync", number, errno.EIO),
}


@pytest.mark.parametrize("what", FAULTS)
def test_the_nth_call_that_fails_is_a_miss_at_most(tmp_path: Path, what: str) -> None:
    """For every n until none is left: one day of a tier, in which the n-th call fails."""
    name, harmless = what.split()[0], what.endswith("short")
    noticed = 0
    for number in range(1, 200):
        disk = MemoryDisk()
        rig = TierRig(SteppedMaker(tmp_path, disk))
        opened = disk.counts[name]
        disk.fault = FAULTS[what](opened + number)
        one_day(rig)
        hit = disk.counts[name] >= opened + number
        disk.fault = lambda name, number: None
        kinds = set(rig.fold.kinds)
        assert not kinds or (hit and not harmless), (number, kinds)
        # One of several that were done in one call may not even be noticed: they are done again one by one.
        noticed += bool(kinds)
        assert kinds <= {"read_failed", "write_failed", "record_failed", "no_space", "short_read"}
        # It goes on: when the disk is well again, and the pause after the failure is over.
        rig.now += 100
        rig.tier.tick()
        rig.settle()
        store(rig, 50)
        assert load(rig, 50) is DONE
        known = rig.ids()
        rig.restart()
        assert rig.ids() == known
        assert not {block_of(1).id, block_of(7, fingerprint=OTHER).id} & known
        assert rig.close()
        if not hit:
            assert (noticed == 0) if harmless else (noticed > 0)
            assert number > 1
            return
    raise AssertionError("the day has no end")


def one_day(rig: TierRig) -> None:
    for number in range(6):
        rig.write(block_of(number))
    rig.write(block_of(7, fingerprint=OTHER))
    rig.settle()
    rig.tier.tick()
    reads = [rig.read(block_of(number)) for number in (3, 4, 5, 0)]
    rig.settle()
    assert all(ending is None or ending.result in (DONE, TierResult.FAILED) for ending in reads)
    rig.tier.remove([block_of(1).id])
    rig.settle()
    rig.tier.remove_namespace(OTHER)
    rig.settle()
    rig.now += 5
    rig.tier.tick()
    rig.settle()


@pytest.mark.parametrize("name", ["read", "write", "sync", "allocate", "open", "truncate"])
def test_the_nth_call_that_fails_while_opening_stops_it_with_a_sentence_or_not_at_all(
    tmp_path: Path, name: str
) -> None:
    for number in range(1, 50):
        disk = MemoryDisk()
        rig = TierRig(SteppedMaker(tmp_path, disk))
        store(rig, 1, 2, 3)
        assert rig.close()
        if name in ("allocate", "truncate"):
            disk.data[:] = b""  # else nothing is to be made
        before = disk.counts[name]
        disk.fault = failing(name, before + number, errno.EIO)
        refusal = ""
        try:
            rig.open()
        except DiskError as error:
            refusal = error.message
        if refusal:
            assert "Input/output error" in refusal
            assert not disk.locked
            disk.fault = lambda name, number: None
            rig.open()
        if disk.counts[name] < before + number:
            assert number > 1
            return
        disk.fault = lambda name, number: None
        rig.settle()
        rig.restart()
        store(rig, 9)
        assert load(rig, 9) is DONE
        assert rig.close()
    raise AssertionError("opening has no end")


def test_a_flipped_bit_is_never_served(rig: TierRig, disk: MemoryDisk) -> None:
    random = Random(3)
    store(rig, *range(10))
    for number in range(10):
        data = bytes(disk.data)
        at = data.index(rig_content(number))
        disk.flip(at + random.randrange(10_000), random.randrange(8))
    assert [load(rig, number) for number in range(10)] == [TierResult.CORRUPT] * 10
    assert not rig.ids()
    assert rig.fold.kinds == {"corrupt": 10}
    rig.restart()
    assert not rig.ids()


def rig_content(number: int) -> bytes:
    return content(block_of(number).id, 0, 10_000, 0)


def test_one_bad_sector_costs_one_block_of_those_that_are_read_together(rig: TierRig, disk: MemoryDisk) -> None:
    store(rig, *range(6))
    before = disk.counts["read"]
    bad = bytes(disk.data).index(rig_content(2))
    original = disk.read

    def read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset <= bad < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(fd, buffers, offset)

    disk.read = read  # type: ignore[method-assign]
    endings = [rig.read(block_of(number)) for number in range(6)]
    assert disk.counts["read"] == before
    rig.settle()
    results = [ending.result for ending in endings if ending is not None]
    assert results == [DONE, DONE, TierResult.FAILED, DONE, DONE, DONE]
    assert rig.fold.kinds == {"read_failed": 1}


def test_neighbours_are_read_and_written_in_one_call(rig: TierRig, disk: MemoryDisk) -> None:
    writes = disk.counts["write"]
    for number in range(6):
        rig.write(block_of(number, (5000, 3000)))
    rig.settle()
    assert disk.counts["write"] == writes + 1
    reads = disk.counts["read"]
    endings = [rig.read(block_of(number, (5000, 3000))) for number in range(6)]
    rig.settle()
    assert disk.counts["read"] == reads + 1
    assert all(ending is not None and ending.result is DONE for ending in endings)


def test_reads_go_before_writes_and_a_write_has_its_turn_at_last(rig: TierRig) -> None:
    store(rig, 1, 2, 3)
    writing = rig.write(block_of(9))
    reading = rig.read(block_of(1))
    assert step(rig.tier)
    run_posted(rig)
    assert reading.result is DONE
    assert writing.result is None
    rig.now += 1
    reading = rig.read(block_of(2))
    assert step(rig.tier)
    run_posted(rig)
    assert writing.result is DONE
    assert reading.result is None
    rig.settle()


def run_posted(rig: TierRig) -> None:
    while not rig.posted.empty():
        rig.posted.get()()


def test_after_a_failed_write_there_is_a_pause_and_another_slot(rig: TierRig, disk: MemoryDisk) -> None:
    store(rig, 1)
    disk.fault = failing("write", disk.counts["write"] + 1, errno.EIO)
    ending = rig.write(block_of(2))
    rig.settle()
    assert ending.result is TierResult.FAILED
    assert rig.write(block_of(3)) is None
    assert load(rig, 1) is DONE
    rig.now += 2
    store(rig, 3)
    assert rig.fold.kinds == {"write_failed": 1}


def test_a_namespace_is_forgotten_when_the_head_is_written(rig: TierRig, disk: MemoryDisk) -> None:
    """However many records it has, one page is enough."""
    store(rig, 1, 2, 3)
    store(rig, 4, fingerprint=OTHER)
    rig.tier.remove_namespace(ONE)
    written = disk.counts["write"]

    def fault(name: str, number: int) -> int | None:
        if name == "write" and number == written + 2:
            raise Killed(0)
        return None

    disk.fault = fault
    with pytest.raises(Killed):
        rig.settle()
    disk.lose_power(Random(1))
    heir = die_and_return(rig, disk)
    assert heir.ids() == {block_of(4, fingerprint=OTHER).id}
    store(heir, 1)
    heir.restart()
    assert load(heir, 1) is DONE


def test_what_could_not_be_forgotten_is_tried_again(rig: TierRig, disk: MemoryDisk) -> None:
    store(rig, 1, 2)
    disk.fault = failing("sync", disk.counts["sync"] + 1, errno.EIO)
    rig.tier.remove([block_of(1).id])
    rig.settle()
    assert not removals_are_durable(rig.tier)
    rig.now += 5
    rig.tier.tick()
    rig.settle()
    assert removals_are_durable(rig.tier)
    disk.lose_power(Random(2))
    assert die_and_return(rig, disk).ids() == {block_of(2).id}


def test_a_file_that_cannot_forget_is_emptied(rig: TierRig, disk: MemoryDisk) -> None:
    store(rig, 1, 2)

    def fault(name: str, number: int) -> int | None:
        if name == "write":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return None

    disk.fault = fault
    rig.tier.remove([block_of(1).id])
    rig.settle()
    assert rig.close()
    disk.fault = lambda name, number: None
    rig.open()
    assert not rig.ids()


def test_a_block_has_no_record_before_its_bytes_are_written(rig: TierRig, disk: MemoryDisk) -> None:
    store(rig, 1)
    rig.write(block_of(2))
    assert rig.tier.remove([block_of(1).id]) == 1
    # The update of the records goes first; then death.
    assert step(rig.tier)
    heir = die_and_return(rig, disk)
    assert not heir.ids()


def test_the_wear_outlives_a_kill(rig: TierRig, disk: MemoryDisk) -> None:
    store(rig, 1, 2, 3)
    before = rig.tier.lifetime_written_bytes
    heir = die_and_return(rig, disk)
    # The last update itself is not in the head that it wrote.
    assert before - 32_768 <= heir.tier.lifetime_written_bytes <= before
    assert heir.tier._file.head.written_blocks == 3


@pytest.mark.parametrize("restarts", [0, 2])
@pytest.mark.parametrize(("ended", "kind"), [("machine", "torn"), ("daemon", "corrupt")])
def test_what_a_failing_machine_may_tear_is_told_from_a_bad_disk(
    rig: TierRig, disk: MemoryDisk, monkeypatch: pytest.MonkeyPatch, restarts: int, ended: str, kind: str
) -> None:
    store(rig, 1)
    if ended == "machine":
        monkeypatch.setattr("kvoffd.tiers.disk.file.read_boot_id", lambda: b"another boot....")
    heir = die_and_return(rig, disk)
    for _ in range(restarts):
        heir.restart()
    heir = die_and_return(heir, disk)
    disk.flip(bytes(disk.data).index(rig_content(1)), 0)
    assert load(heir, 1) is TierResult.CORRUPT
    store(heir, 2)
    disk.flip(bytes(disk.data).index(rig_content(2)), 0)
    assert load(heir, 2) is TierResult.CORRUPT
    assert heir.fold.kinds == Counter([kind, "corrupt"])


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize(("length", "removed"), [(10_000, 0), (10_000, 1), (20_000, 0)])
def test_a_kill_tears_nothing_on_a_full_disk(
    rig: TierRig, disk: MemoryDisk, length: int, removed: int, steps: int
) -> None:
    """Blocks are evicted for others, of the same and of another size, whose bytes go where theirs were."""
    held = 0
    while not rig.tier.stats().evicted_blocks:
        held += 1
        store(rig, held)
    for number in range(removed):
        rig.tier.remove([block_of(held - number).id])
    new = [block_of(number, (length,)) for number in range(held + 1, held + 7)]
    for block in new:
        assert rig.write(block) is not None
    while not rig.posted.empty():
        rig.posted.get()()
    for _ in range(steps):
        step(rig.tier)
        while not rig.posted.empty():
            rig.posted.get()()
    heir = die_and_return(rig, disk)
    blocks = {block.id: block for block in (*map(block_of, range(1, held + 1)), *new)}
    assert len(heir.ids()) > held // 2
    for block_id in heir.ids():
        ending = heir.read(blocks[block_id])
        heir.settle()
        assert ending.result is DONE
    assert not heir.fold.kinds


@pytest.mark.parametrize("fault", ["fails", "hangs", "closes"])
def test_writes_that_wait_for_records_end_with_them(
    rig: TierRig, disk: MemoryDisk, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    held = 0
    while not rig.tier.stats().evicted_blocks:
        held += 1
        store(rig, held)
    endings = [rig.write(block_of(number)) for number in range(held + 1, held + 4)]
    assert rig.tier.stats().queued_writes == 3
    if fault == "fails":
        disk.fault = failing("write", disk.counts["write"] + 1, errno.EIO)
        rig.settle()
        assert rig.write(block_of(held + 9)) is None, "not before its records can be written"
    elif fault == "hangs":
        load = rig.tier.workers.load()._replace(longest_s=11.0)
        with monkeypatch.context() as patch:
            patch.setattr(rig.tier.workers, "load", lambda: load)
            rig.tier.tick()
            rig.settle()
    else:
        rig.close()
    result = {"fails": TierResult.FAILED, "hangs": TierResult.DEADLINE, "closes": TierResult.CANCELLED}[fault]
    assert [ending.result for ending in endings if ending is not None] == [result] * 3
    rig.now += 5
    if fault != "closes":
        rig.tier.tick()
        rig.settle()
        store(rig, held + 9)


class Hanging(FileCalls):
    """Reads do not come back until they are let go."""

    def __init__(self) -> None:
        self.hangs = False
        self.let_go = threading.Event()
        self.reading = threading.Event()

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.hangs:
            self.reading.set()
            assert self.let_go.wait(60)
        return super().read(fd, buffers, offset)


def test_a_disk_that_hangs_keeps_nobody_waiting(tmp_path: Path) -> None:
    calls = Hanging()
    maker = DiskMaker(tmp_path, calls)
    maker.options = maker.options._replace(reads_in_flight=1, merge_bytes=1)
    rig = TierRig(maker)
    store(rig, 1, 2, 3)
    calls.hangs = True
    stuck = rig.read(block_of(1))
    assert calls.reading.wait(60)
    waiting, writing = rig.read(block_of(2)), rig.write(block_of(8))
    rig.now += 11
    rig.tier.tick()
    run_posted(rig)
    assert waiting.result is writing.result is TierResult.DEADLINE
    assert rig.fold.kinds == {"hung": 1}
    assert rig.read(block_of(3)) is None
    assert rig.write(block_of(9)) is None
    assert block_of(3).id.key in rig.tier.index(ONE, 0)
    assert not rig.tier.readable(ONE, 0)
    # Its memory is in use for as long as it hangs: it has not ended, and nobody may unmap the pool.
    assert stuck.result is None
    rig.tier.tick()
    assert rig.fold.kinds == {"hung": 1}
    calls.hangs = False
    calls.let_go.set()
    rig.settle()
    assert stuck.result is DONE
    rig.tier.tick()
    assert block_of(3).id.key in rig.tier.readable(ONE, 0)
    assert load(rig, 3) is DONE
    assert rig.close()


def test_closing_a_disk_that_hangs_says_so_and_can_be_asked_again(tmp_path: Path) -> None:
    calls = Hanging()
    rig = TierRig(DiskMaker(tmp_path, calls))
    store(rig, 1)
    calls.hangs = True
    stuck = rig.read(block_of(1))
    assert calls.reading.wait(60)
    assert not rig.tier.close(0.05)
    assert stuck.result is None
    with pytest.raises(DiskError, match="in use"):
        DiskMaker(tmp_path).open(rig)
    calls.let_go.set()
    assert rig.close()
    assert stuck.result is DONE
    rig.open()
    assert load(rig, 1) is DONE
    assert rig.close()


class Slow(FileCalls):
    """It takes its time to empty the device's cache."""

    def sync(self, fd: int) -> None:
        threading.Event().wait(0.05)
        super().sync(fd)


def test_a_slow_disk_can_be_closed_in_short_steps(tmp_path: Path) -> None:
    rig = TierRig(DiskMaker(tmp_path, Slow()))
    store(rig, 1, 2, 3)
    known = rig.ids()
    rig.tier.remove([block_of(2).id])
    steps = 0
    while not rig.tier.close(0.001):
        steps += 1
        threading.Event().wait(0.01)
        assert steps < 1000
    assert steps > 1
    rig.open()
    assert rig.ids() == known - {block_of(2).id}
    assert not {"torn", "started_anew"} & set(rig.fold.kinds)
    assert rig.close()


def test_a_disk_whose_threads_end_late_is_closed_though_its_last_update_leaves_more_to_write(tmp_path: Path) -> None:
    """Once all of it is synced a tick forgets the floor of the namespace, and writes the head."""
    rig = TierRig(DiskMaker(tmp_path))
    store(rig, 1, 2)
    rig.tier.remove_namespace(ONE)
    steps = 0
    while not rig.tier.close(0.0):
        steps += 1
        threading.Event().wait(0.01)
        assert steps < 100
        rig.tier.tick()
    rig.open()
    assert rig.ids() == set()
    assert rig.close()


class SlowlyFailing(Slow):
    """From some time on it takes its time and fails then."""

    fails = False

    def sync(self, fd: int) -> None:
        super().sync(fd)
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_disk_that_fails_slowly_can_be_closed_in_short_steps(tmp_path: Path) -> None:
    calls = SlowlyFailing()
    rig = TierRig(DiskMaker(tmp_path, calls))
    store(rig, 1, 2)
    calls.fails = True
    steps = 0
    while not rig.tier.close(0.001):
        steps += 1
        threading.Event().wait(0.01)
        assert steps < 1000
    assert rig.tier.stats().errors == {"record_failed": 3}
    calls.fails = False
    rig.open()
    assert rig.ids() == set(), "what could not be told was given up"
    assert rig.close()


def test_a_disk_that_cannot_be_closed_is_closed(tmp_path: Path) -> None:
    class Stubborn(FileCalls):
        def close(self, fd: int) -> None:
            super().close(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    rig = TierRig(DiskMaker(tmp_path, Stubborn()))
    store(rig, 1)
    assert rig.close()
    assert rig.tier.close(0.0)
    rig.open()
    assert load(rig, 1) is DONE


def test_closing_in_short_steps_is_short_with_much_to_forget_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffd.tiers.disk.index._FREED_AT_ONCE", 1)
    rig = TierRig(DiskMaker(tmp_path))
    store(rig, 1, 2, 3, 4, 5, 6, 7, 8)
    assert rig.tier.remove_namespace(ONE) == 8
    steps = 0
    while not rig.tier.close(0.0):
        steps += 1
        threading.Event().wait(0.01)
        assert steps < 1000
    assert steps > 5
    rig.open()
    assert rig.ids() == set()
    assert "torn" not in rig.fold.kinds
    assert rig.close()


def none_left(nbytes: int) -> memoryview:
    """In place of ``aligned_buffer``: there is no memory."""
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_without_memory_for_its_records_a_disk_goes_on_and_records_them_later(
    rig: TierRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(rig, 1, 2)

    with monkeypatch.context() as patch:
        patch.setattr("kvoffd.tiers.disk.record_updates.aligned_buffer", none_left)
        assert rig.tier.remove([block_of(1).id]) == 1
        rig.tier.tick()
        rig.settle()
    assert rig.fold.kinds["no_memory"] >= 1
    rig.now += 2.0
    rig.tier.tick()
    rig.settle()
    assert rig.close()
    rig.open()
    assert rig.ids() == {block_of(2).id}


def test_without_memory_for_its_last_records_a_disk_is_closed_and_brings_nothing_back(
    rig: TierRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(rig, 1, 2)

    with monkeypatch.context() as patch:
        patch.setattr("kvoffd.tiers.disk.record_updates.aligned_buffer", none_left)
        assert rig.tier.remove([block_of(1).id]) == 1
        assert rig.close()
    rig.open()
    assert rig.ids() == set()
