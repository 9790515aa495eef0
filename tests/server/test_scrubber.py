"""The scrubber beside stores that ended without their checksums."""

from __future__ import annotations

import pytest

from kvoffd.server.scrubber import Scrubber
from tests.kit.slot_cache import CacheRig, keys_of


def test_checksums_that_stores_left_out_are_taken_when_there_is_time() -> None:
    rig = CacheRig(units=64, region_units=8)
    space = rig.open("one")
    ticket = rig.begin(space, 0, 0, keys_of(1, 2, 3))
    slots = ticket.parts[0].slots.tolist()
    rig.commit(ticket, checksum=0)
    scrubber = Scrubber(rig.cache, lambda: 0.0)
    assert scrubber.has_work
    checks = scrubber.next_step()
    assert sorted(check.slot for check in checks) == sorted(slots)
    scrubber.finish_step(checks, [100 + check.slot for check in checks])
    assert not scrubber.has_work
    assert rig.table.records["checksum"][slots].tolist() == [100 + slot for slot in slots]
    assert rig.cache.checked_slots == 0, "there was nothing to compare with"
    scrubber.start()
    checks = scrubber.next_step()
    scrubber.finish_step(checks, [100 + check.slot for check in checks])
    assert (scrubber.report(1).checked_slots, scrubber.report(1).mismatches) == (3, 0)


def test_wrong_bytes_are_found_counted_and_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffd.server.jobs._wrong_slots._next_at", 0.0)
    rig = CacheRig(units=64, region_units=8)
    space = rig.open("one")
    rig.store(space, keys_of(1, 2, 3, 4))
    scrubber = Scrubber(rig.cache, lambda: 0.0)
    scrubber.start()
    checks = scrubber.next_step()
    scrubber.finish_step(checks, [7, 8, 8, 8])
    report = scrubber.report(1)
    assert (report.running, report.slots, report.checked_slots, report.mismatches) == (False, 4, 4, 3)
    assert (rig.cache.quarantined_slots, space.ready_blocks) == (3, 1)
    assert caplog.text.count("do not match their checksum") == 1
