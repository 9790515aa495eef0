"""One request's lookups: answers, deadlines, refreshes, leases."""

from __future__ import annotations

import dataclasses

from support.vllm_fakes import Clock, FakeSchedulerClient, block_hash, key

from kvoffd_client.vllm.connector_options import BEST_EFFORT, LIMIT, WAIT
from kvoffd_client.vllm.request_lookups import MAX_KEYS_PER_LOOKUP, KeyStatus, LookupSettings, RequestLookups

GROUPS = [[key(1), key(2), key(3)], [key(4, group_id=7)]]
ALL = {block_hash(number) for number in (1, 2, 3, 4)}


class Rig:
    """The lookups of one request over a fake client; deadline 0.1 s, refresh after 1 s."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.client = FakeSchedulerClient(self.clock)
        positions = {(0).to_bytes(4, "big"): 0, (7).to_bytes(4, "big"): 1}
        self.lookups = RequestLookups(LookupSettings(self.client, positions, 0.1, 1.0, self.clock))

    def statuses(self, *numbers: int) -> list[KeyStatus]:
        return [self.lookups.status(key(number, 7 if number == 4 else 0)) for number in numbers]


def test_one_lookup_asks_for_all_groups_with_positions_as_groups_on_the_wire() -> None:
    rig = Rig()
    assert rig.lookups.refresh(GROUPS)
    [(_, message)] = rig.client.asked
    assert [(group.group, group.keys) for group in message] == [
        (0, block_hash(1) + block_hash(2) + block_hash(3)),
        (1, block_hash(4)),
    ]


def test_keys_are_put_off_until_the_answer_is_taken_in() -> None:
    rig = Rig()
    rig.lookups.refresh(GROUPS)
    assert rig.statuses(1, 4) == [KeyStatus.RETRY] * 2
    rig.client.answer({block_hash(1), block_hash(4)})
    rig.lookups.refresh(GROUPS)
    assert rig.statuses(1, 2, 4) == [KeyStatus.HIT, KeyStatus.MISS, KeyStatus.HIT]


def test_without_an_answer_by_the_deadline_it_is_a_miss_and_a_later_answer_still_counts() -> None:
    rig = Rig()
    rig.lookups.refresh(GROUPS)
    rig.clock.now += 0.2
    assert rig.statuses(1) == [KeyStatus.TIMED_OUT]
    assert rig.lookups.count_timeout()
    assert not rig.lookups.count_timeout()
    rig.client.answer(ALL)
    rig.lookups.refresh(GROUPS)
    assert rig.statuses(1) == [KeyStatus.HIT]


def test_a_daemon_that_is_down_is_a_miss_at_once() -> None:
    rig = Rig()
    rig.client.ready = False
    assert not rig.lookups.refresh(GROUPS)
    assert rig.statuses(1, 4) == [KeyStatus.MISS] * 2
    assert rig.client.asked == []


def test_a_failed_lookup_is_a_miss_and_not_repeated_at_once() -> None:
    rig = Rig()
    rig.lookups.refresh(GROUPS)
    rig.client.fail()
    assert not rig.lookups.refresh(GROUPS)
    assert rig.statuses(1) == [KeyStatus.MISS]
    rig.clock.now += 1.1
    assert rig.lookups.refresh(GROUPS)


def test_an_answer_with_misses_is_refreshed_when_it_is_old_and_the_lease_is_kept_until_then() -> None:
    rig = Rig()
    rig.lookups.refresh(GROUPS)
    old = rig.client.answer({block_hash(1)})
    rig.lookups.refresh(GROUPS)
    rig.clock.now += 1.5
    assert rig.lookups.refresh(GROUPS)
    assert rig.statuses(1, 2) == [KeyStatus.HIT, KeyStatus.RETRY]
    assert rig.client.released == []
    rig.client.answer(ALL)
    rig.lookups.refresh(GROUPS)
    assert rig.statuses(1, 2, 3, 4) == [KeyStatus.HIT] * 4
    assert rig.client.released == [old.lease_id]


def test_a_complete_answer_is_not_refreshed() -> None:
    rig = Rig()
    rig.lookups.refresh(GROUPS)
    rig.client.answer(ALL)
    rig.lookups.refresh(GROUPS)
    rig.clock.now += 100
    assert not rig.lookups.refresh(GROUPS)


def test_a_lease_that_died_is_looked_up_again_and_not_loaded_from() -> None:
    rig = Rig()
    rig.lookups.refresh(GROUPS)
    ticket = rig.client.answer(ALL)
    rig.lookups.refresh(GROUPS)
    ticket.alive = False
    assert rig.lookups.refresh(GROUPS)
    assert rig.statuses(1) == [KeyStatus.RETRY]
    assert len(rig.client.asked) == 2


def test_a_load_takes_the_lease_and_the_next_lookup_makes_a_new_one() -> None:
    rig = Rig()
    rig.lookups.refresh(GROUPS)
    ticket = rig.client.answer(ALL)
    rig.lookups.refresh(GROUPS)
    taken = rig.lookups.take()
    assert taken is not None
    assert taken.ticket is ticket
    assert rig.client.released == []
    assert rig.lookups.refresh(GROUPS)
    assert rig.client.asked[-1][0].lease_id != ticket.lease_id


def test_a_key_no_lookup_held_is_put_off_then_asked_with_all_others_under_one_lease() -> None:
    rig = Rig()
    rig.lookups.refresh(GROUPS)
    rig.client.answer(ALL)
    rig.lookups.refresh(GROUPS)
    assert rig.statuses(9) == [KeyStatus.RETRY]
    assert rig.lookups.refresh(GROUPS)
    assert rig.client.asked[-1][1][0].keys.endswith(block_hash(3) + block_hash(9))
    rig.client.answer(ALL | {block_hash(9)})
    rig.lookups.refresh(GROUPS)
    assert rig.statuses(1, 9) == [KeyStatus.HIT] * 2
    assert not rig.lookups.refresh(GROUPS)


def test_a_key_nobody_answers_for_is_a_miss_after_the_deadline() -> None:
    rig = Rig()
    assert rig.statuses(9) == [KeyStatus.RETRY]
    rig.clock.now += 0.2
    assert rig.statuses(9) == [KeyStatus.TIMED_OUT]


def test_a_request_that_grew_is_asked_for_again() -> None:
    rig = Rig()
    rig.lookups.refresh(GROUPS)
    rig.client.answer(ALL)
    rig.lookups.refresh(GROUPS)
    assert rig.lookups.refresh([[*GROUPS[0], key(5)], GROUPS[1]])


def test_after_a_failed_load_a_request_is_never_looked_up_again() -> None:
    rig = Rig()
    rig.lookups.refresh(GROUPS)
    rig.client.answer(ALL)
    rig.lookups.refresh(GROUPS)
    rig.lookups.mark_load_failed()
    rig.clock.now += 100
    assert not rig.lookups.refresh(GROUPS)
    assert rig.statuses(1, 9) == [KeyStatus.MISS] * 2
    assert not rig.lookups.is_stored(key(1))


def test_releasing_ends_the_answer_and_the_lookup_on_its_way() -> None:
    rig = Rig()
    rig.lookups.refresh(GROUPS)
    rig.client.answer({block_hash(1)})
    rig.lookups.refresh(GROUPS)
    rig.clock.now += 2
    rig.lookups.refresh(GROUPS)
    rig.lookups.release()
    assert sorted(rig.client.released) == [ticket.lease_id for ticket, _ in rig.client.asked]
    assert rig.lookups.is_stored(key(1))


def test_keys_beyond_the_limit_of_one_lookup_are_absent_and_ask_no_end_of_lookups() -> None:
    rig = Rig()
    groups = [[key(number) for number in range(MAX_KEYS_PER_LOOKUP + 5)]]
    rig.lookups.refresh(groups)
    rig.client.answer({block_hash(0)})
    assert not rig.lookups.refresh(groups)
    assert rig.statuses(0, MAX_KEYS_PER_LOOKUP + 1) == [KeyStatus.HIT, KeyStatus.MISS]


class DiskRig(Rig):
    """A rig with a rule of its own for blocks that come up from disk."""

    def __init__(self, mode: str = LIMIT, limit_s: float = 1.0) -> None:
        super().__init__()
        settings = dataclasses.replace(self.lookups.settings, disk_wait=mode, disk_wait_s=limit_s)
        self.lookups = RequestLookups(settings)

    def ask(self, coming: int, wait_s: float = 0.0) -> None:
        """The first key is ready, the last ``coming`` of the others of its group come from disk."""
        names = [block_hash(number) for number in range(1, 4)]
        ready = set(names[: 3 - coming]) | {block_hash(4)}
        if self.lookups.refresh(GROUPS):
            self.client.answer(ready, coming=names[3 - coming :], wait_s=wait_s)
            self.lookups.refresh(GROUPS)


def test_blocks_on_their_way_from_disk_are_waited_for_and_asked_for_again() -> None:
    rig = DiskRig()
    rig.ask(coming=2)
    assert rig.statuses(1, 2, 3, 4) == [KeyStatus.HIT, KeyStatus.PENDING, KeyStatus.PENDING, KeyStatus.HIT]
    assert rig.client.again == [False]
    rig.clock.now += 0.001
    rig.ask(coming=1)
    assert len(rig.client.asked) == 1, "not in a hurry"
    rig.clock.now += 0.005
    rig.ask(coming=1)
    assert rig.client.again == [False, True]
    assert rig.statuses(1, 2, 3) == [KeyStatus.HIT, KeyStatus.HIT, KeyStatus.PENDING]
    rig.clock.now += 0.005
    rig.ask(coming=0)
    assert rig.statuses(1, 2, 3, 4) == [KeyStatus.HIT] * 4
    assert rig.lookups.from_disk == {key(2), key(3)}
    assert len(rig.client.released) == 2, "each new lease pins what the one before did"


def test_while_it_is_asked_again_the_answer_in_force_holds() -> None:
    rig = DiskRig()
    rig.ask(coming=2)
    rig.clock.now += 0.01
    assert rig.lookups.refresh(GROUPS)
    assert rig.statuses(1, 2, 3, 4) == [KeyStatus.HIT, KeyStatus.PENDING, KeyStatus.PENDING, KeyStatus.HIT]


def test_best_effort_takes_what_is_ready() -> None:
    rig = DiskRig(BEST_EFFORT)
    rig.ask(coming=2)
    assert rig.statuses(1, 2, 3) == [KeyStatus.HIT, KeyStatus.MISS, KeyStatus.MISS]
    assert rig.lookups.disk_wait_over


def test_the_limit_ends_the_waiting_for_good() -> None:
    rig = DiskRig()
    rig.ask(coming=2)
    assert rig.statuses(2) == [KeyStatus.PENDING]
    rig.clock.now += 0.6
    rig.ask(coming=1)
    assert rig.statuses(2, 3) == [KeyStatus.HIT, KeyStatus.PENDING]
    rig.clock.now += 0.6
    assert rig.statuses(2, 3) == [KeyStatus.HIT, KeyStatus.MISS]
    rig.clock.now += 2.0
    rig.ask(coming=1)
    assert rig.statuses(3) == [KeyStatus.MISS]


def test_where_the_daemon_expects_more_than_the_limit_nobody_waits() -> None:
    rig = DiskRig()
    rig.ask(coming=2, wait_s=1.5)
    assert rig.statuses(1, 2) == [KeyStatus.HIT, KeyStatus.MISS]


def test_wait_waits_until_the_daemon_gives_up() -> None:
    rig = DiskRig(WAIT)
    rig.ask(coming=2, wait_s=60.0)
    rig.clock.now += 30.0
    assert rig.statuses(2) == [KeyStatus.PENDING]
    rig.lookups.refresh(GROUPS)
    rig.client.answer({block_hash(1), block_hash(4)})
    rig.lookups.refresh(GROUPS)
    assert rig.statuses(1, 2) == [KeyStatus.HIT, KeyStatus.MISS]


def test_wait_does_not_outlast_the_daemon() -> None:
    rig = DiskRig(WAIT)
    rig.lookups.refresh(GROUPS)
    rig.client.answer(set(), coming=[block_hash(1), block_hash(2)])  # nothing is ready, so no lease can die
    rig.lookups.refresh(GROUPS)
    assert rig.statuses(1) == [KeyStatus.PENDING]
    rig.client.ready = False
    rig.lookups.refresh(GROUPS)
    assert rig.statuses(1, 2) == [KeyStatus.MISS] * 2


def test_wait_does_not_wait_for_a_daemon_that_does_not_answer() -> None:
    rig = DiskRig(WAIT)
    rig.ask(coming=2)
    rig.clock.now += 0.06
    assert rig.lookups.refresh(GROUPS)
    rig.clock.now += 0.05
    assert rig.statuses(1, 2) == [KeyStatus.HIT, KeyStatus.PENDING]
    rig.clock.now += 0.06
    assert rig.statuses(1, 2) == [KeyStatus.HIT, KeyStatus.MISS]
    rig.client.fail()
    rig.lookups.refresh(GROUPS)
    assert rig.statuses(1, 2) == [KeyStatus.HIT, KeyStatus.MISS]
