"""The scrubber beside stores that ended without their checksums."""

from __future__ import annotations

from kvoffd.server.scrubber import Scrubber
from tests.kit.cache_harness import CacheHarness, begin_store, keys_of
from tests.kit.invariants import check_invariants


def test_checksums_that_stores_left_out_are_taken_when_there_is_time() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    ticket = begin_store(rig.cache, namespace, 0, 0, keys_of(1, 2, 3))
    ticket.checksums = [0] * 3
    rig.cache.commit_store(ticket)
    scrubber = Scrubber(rig.cache, lambda: 0.0)
    assert scrubber.has_work
    checks = scrubber.next_step()
    assert {check.offset for check in checks} == set(ticket.offsets)
    sums = rig.slots.digests([(check.offset, check.length) for check in checks])
    scrubber.finish_step(checks, sums)
    assert not scrubber.has_work
    assert [rig.slots.checksums[check.offset] for check in checks] == sums
    assert rig.cache.integrity.checked_slots == 0, "there was nothing to compare with"
    scrubber.start()
    checks = scrubber.next_step()
    scrubber.finish_step(checks, rig.slots.digests([(check.offset, check.length) for check in checks]))
    assert scrubber.report(1).checked_slots == 3
    assert scrubber.report(1).mismatches == 0
    check_invariants(rig.cache)
