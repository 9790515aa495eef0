"""The scrubber beside stores that ended without their checksums."""

from __future__ import annotations

from kvoffd.server.scrubber import Scrubber
from tests.kit.slot_cache import CacheRig, keys_of


def test_checksums_that_stores_left_out_are_taken() -> None:
    rig = CacheRig(units=64, region_units=8)
    ticket = rig.begin(rig.open("one"), 0, 0, keys_of(1, 2, 3))
    slots = ticket.parts[0].slots.tolist()
    rig.commit(ticket, checksum=0)
    scrubber = Scrubber(rig.cache, lambda: 0.0)
    assert scrubber.has_work
    checks = scrubber.next_step()
    scrubber.finish_step(checks, [100 + check.slot for check in checks])
    assert not scrubber.has_work
    assert rig.table.records["checksum"][slots].tolist() == [100 + slot for slot in slots]
    assert rig.cache.checked_slots == 0, "there was nothing to compare with"
