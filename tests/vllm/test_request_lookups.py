"""One request's lookups: answers, deadlines, refreshes, leases."""

from __future__ import annotations

import dataclasses

from support.vllm_fakes import Clock, FakeSchedulerClient, block_hash, key

from kvoffd_client.vllm.disk_wait import BEST_EFFORT, LIMIT, WAIT, WaitRule
from kvoffd_client.vllm.request_lookups import MAX_KEYS_PER_LOOKUP, RequestLookups, Setting, Verdict

GROUPS = [[key(1), key(2), key(3)], [key(4, group_id=7)]]
ALL = {block_hash(number) for number in (1, 2, 3, 4)}


class Rig:
    """An inquiry over a fake client; deadline 0.1 s, refresh after 1 s."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.client = FakeSchedulerClient(self.clock)
        positions = {(0).to_bytes(4, "big"): 0, (7).to_bytes(4, "big"): 1}
        self.inquiry = RequestLookups(Setting(self.client, positions, 0.1, 1.0, self.clock))

    def verdicts(self, *numbers: int) -> list[Verdict]:
        return [self.inquiry.verdict(key(number, 7 if number == 4 else 0)) for number in numbers]


def test_one_lookup_asks_for_all_groups_with_positions_as_groups_on_the_wire() -> None:
    rig = Rig()
    assert rig.inquiry.begin(GROUPS)
    [(_, message)] = rig.client.asked
    assert [(group.group, group.keys) for group in message] == [
        (0, block_hash(1) + block_hash(2) + block_hash(3)),
        (1, block_hash(4)),
    ]


def test_keys_are_put_off_until_the_answer_is_taken_in() -> None:
    rig = Rig()
    rig.inquiry.begin(GROUPS)
    assert rig.verdicts(1, 4) == [Verdict.LATER] * 2
    rig.client.answer({block_hash(1), block_hash(4)})
    rig.inquiry.begin(GROUPS)
    assert rig.verdicts(1, 2, 4) == [Verdict.HIT, Verdict.MISS, Verdict.HIT]


def test_without_an_answer_by_the_deadline_it_is_a_miss_and_a_later_answer_still_counts() -> None:
    rig = Rig()
    rig.inquiry.begin(GROUPS)
    rig.clock.now += 0.2
    assert rig.verdicts(1) == [Verdict.TOO_LATE]
    assert rig.inquiry.note_late()
    assert not rig.inquiry.note_late()
    rig.client.answer(ALL)
    rig.inquiry.begin(GROUPS)
    assert rig.verdicts(1) == [Verdict.HIT]


def test_a_daemon_that_is_down_is_a_miss_at_once() -> None:
    rig = Rig()
    rig.client.connected = False
    assert not rig.inquiry.begin(GROUPS)
    assert rig.verdicts(1, 4) == [Verdict.MISS] * 2
    assert rig.client.asked == []


def test_a_failed_question_is_a_miss_and_not_repeated_at_once() -> None:
    rig = Rig()
    rig.inquiry.begin(GROUPS)
    rig.client.fail()
    assert not rig.inquiry.begin(GROUPS)
    assert rig.verdicts(1) == [Verdict.MISS]
    rig.clock.now += 1.1
    assert rig.inquiry.begin(GROUPS)


def test_an_answer_with_misses_is_refreshed_when_it_is_old_and_the_lease_is_kept_until_then() -> None:
    rig = Rig()
    rig.inquiry.begin(GROUPS)
    old = rig.client.answer({block_hash(1)})
    rig.inquiry.begin(GROUPS)
    rig.clock.now += 1.5
    assert rig.inquiry.begin(GROUPS)
    assert rig.verdicts(1, 2) == [Verdict.HIT, Verdict.LATER]
    assert rig.client.released == []
    rig.client.answer(ALL)
    rig.inquiry.begin(GROUPS)
    assert rig.verdicts(1, 2, 3, 4) == [Verdict.HIT] * 4
    assert rig.client.released == [old.lease_id]


def test_a_complete_answer_is_not_refreshed() -> None:
    rig = Rig()
    rig.inquiry.begin(GROUPS)
    rig.client.answer(ALL)
    rig.inquiry.begin(GROUPS)
    rig.clock.now += 100
    assert not rig.inquiry.begin(GROUPS)


def test_a_lease_that_died_is_looked_up_again_and_not_loaded_from() -> None:
    rig = Rig()
    rig.inquiry.begin(GROUPS)
    ticket = rig.client.answer(ALL)
    rig.inquiry.begin(GROUPS)
    ticket.alive = False
    assert rig.inquiry.begin(GROUPS)
    assert rig.verdicts(1) == [Verdict.LATER]
    assert len(rig.client.asked) == 2


def test_a_load_takes_the_lease_and_the_next_lookup_makes_a_new_one() -> None:
    rig = Rig()
    rig.inquiry.begin(GROUPS)
    ticket = rig.client.answer(ALL)
    rig.inquiry.begin(GROUPS)
    taken = rig.inquiry.take()
    assert taken is not None
    assert taken.ticket is ticket
    assert rig.client.released == []
    assert rig.inquiry.begin(GROUPS)
    assert rig.client.asked[-1][0].lease_id != ticket.lease_id


def test_a_key_no_question_held_is_put_off_then_asked_with_all_others_under_one_lease() -> None:
    rig = Rig()
    rig.inquiry.begin(GROUPS)
    rig.client.answer(ALL)
    rig.inquiry.begin(GROUPS)
    assert rig.verdicts(9) == [Verdict.LATER]
    assert rig.inquiry.begin(GROUPS)
    assert rig.client.asked[-1][1][0].keys.endswith(block_hash(3) + block_hash(9))
    rig.client.answer(ALL | {block_hash(9)})
    rig.inquiry.begin(GROUPS)
    assert rig.verdicts(1, 9) == [Verdict.HIT] * 2
    assert not rig.inquiry.begin(GROUPS)


def test_a_key_nobody_answers_for_is_a_miss_after_the_deadline() -> None:
    rig = Rig()
    assert rig.verdicts(9) == [Verdict.LATER]
    rig.clock.now += 0.2
    assert rig.verdicts(9) == [Verdict.TOO_LATE]


def test_a_request_that_grew_is_asked_for_again() -> None:
    rig = Rig()
    rig.inquiry.begin(GROUPS)
    rig.client.answer(ALL)
    rig.inquiry.begin(GROUPS)
    assert rig.inquiry.begin([[*GROUPS[0], key(5)], GROUPS[1]])


def test_after_a_failed_load_a_request_is_never_looked_up_again() -> None:
    rig = Rig()
    rig.inquiry.begin(GROUPS)
    rig.client.answer(ALL)
    rig.inquiry.begin(GROUPS)
    rig.inquiry.bar()
    rig.clock.now += 100
    assert not rig.inquiry.begin(GROUPS)
    assert rig.verdicts(1, 9) == [Verdict.MISS] * 2
    assert not rig.inquiry.is_stored(key(1))


def test_letting_go_releases_the_answer_and_the_question_on_its_way() -> None:
    rig = Rig()
    rig.inquiry.begin(GROUPS)
    rig.client.answer({block_hash(1)})
    rig.inquiry.begin(GROUPS)
    rig.clock.now += 2
    rig.inquiry.begin(GROUPS)
    rig.inquiry.let_go()
    assert sorted(rig.client.released) == [ticket.lease_id for ticket, _ in rig.client.asked]
    assert rig.inquiry.is_stored(key(1))


def test_keys_beyond_the_limit_of_one_lookup_are_absent_and_ask_no_endless_questions() -> None:
    rig = Rig()
    groups = [[key(number) for number in range(MAX_KEYS_PER_LOOKUP + 5)]]
    rig.inquiry.begin(groups)
    rig.client.answer({block_hash(0)})
    assert not rig.inquiry.begin(groups)
    assert rig.verdicts(0, MAX_KEYS_PER_LOOKUP + 1) == [Verdict.HIT, Verdict.MISS]


class DiskRig(Rig):
    """A rig with a rule of its own for blocks that come up from disk."""

    def __init__(self, mode: str = LIMIT, limit_s: float = 1.0) -> None:
        super().__init__()
        setting = dataclasses.replace(self.inquiry.setting, wait_rule=WaitRule(mode, limit_s))
        self.inquiry = RequestLookups(setting)

    def ask(self, coming: int, wait_s: float = 0.0) -> None:
        """The first key is ready, the last ``coming`` of the others of its group come from disk."""
        names = [block_hash(number) for number in range(1, 4)]
        ready = set(names[: 3 - coming]) | {block_hash(4)}
        if self.inquiry.begin(GROUPS):
            self.client.answer(ready, coming=names[3 - coming :], wait_s=wait_s)
            self.inquiry.begin(GROUPS)


def test_blocks_on_their_way_from_disk_are_waited_for_and_asked_for_again() -> None:
    rig = DiskRig()
    rig.ask(coming=2)
    assert rig.verdicts(1, 2, 3, 4) == [Verdict.HIT, Verdict.COMING, Verdict.COMING, Verdict.HIT]
    assert rig.client.again == [False]
    rig.clock.now += 0.001
    rig.ask(coming=1)
    assert len(rig.client.asked) == 1, "not in a hurry"
    rig.clock.now += 0.005
    rig.ask(coming=1)
    assert rig.client.again == [False, True]
    assert rig.verdicts(1, 2, 3) == [Verdict.HIT, Verdict.HIT, Verdict.COMING]
    rig.clock.now += 0.005
    rig.ask(coming=0)
    assert rig.verdicts(1, 2, 3, 4) == [Verdict.HIT] * 4
    assert rig.inquiry.from_disk == {key(2), key(3)}
    assert len(rig.client.released) == 2, "each new lease pins what the one before did"


def test_while_it_is_asked_again_the_answer_in_force_holds() -> None:
    rig = DiskRig()
    rig.ask(coming=2)
    rig.clock.now += 0.01
    assert rig.inquiry.begin(GROUPS)
    assert rig.verdicts(1, 2, 3, 4) == [Verdict.HIT, Verdict.COMING, Verdict.COMING, Verdict.HIT]


def test_best_effort_takes_what_is_ready() -> None:
    rig = DiskRig(BEST_EFFORT)
    rig.ask(coming=2)
    assert rig.verdicts(1, 2, 3) == [Verdict.HIT, Verdict.MISS, Verdict.MISS]
    assert rig.inquiry.wait.over


def test_the_limit_ends_the_waiting_for_good() -> None:
    rig = DiskRig()
    rig.ask(coming=2)
    assert rig.verdicts(2) == [Verdict.COMING]
    rig.clock.now += 0.6
    rig.ask(coming=1)
    assert rig.verdicts(2, 3) == [Verdict.HIT, Verdict.COMING]
    rig.clock.now += 0.6
    assert rig.verdicts(2, 3) == [Verdict.HIT, Verdict.MISS]
    rig.clock.now += 2.0
    rig.ask(coming=1)
    assert rig.verdicts(3) == [Verdict.MISS]


def test_where_the_daemon_expects_more_than_the_limit_nobody_waits() -> None:
    rig = DiskRig()
    rig.ask(coming=2, wait_s=1.5)
    assert rig.verdicts(1, 2) == [Verdict.HIT, Verdict.MISS]


def test_wait_waits_until_the_daemon_gives_up() -> None:
    rig = DiskRig(WAIT)
    rig.ask(coming=2, wait_s=60.0)
    rig.clock.now += 30.0
    assert rig.verdicts(2) == [Verdict.COMING]
    rig.inquiry.begin(GROUPS)
    rig.client.answer({block_hash(1), block_hash(4)})
    rig.inquiry.begin(GROUPS)
    assert rig.verdicts(1, 2) == [Verdict.HIT, Verdict.MISS]


def test_wait_does_not_outlast_the_daemon() -> None:
    rig = DiskRig(WAIT)
    rig.inquiry.begin(GROUPS)
    rig.client.answer(set(), coming=[block_hash(1), block_hash(2)])  # nothing is ready, so no lease can die
    rig.inquiry.begin(GROUPS)
    assert rig.verdicts(1) == [Verdict.COMING]
    rig.client.connected = False
    rig.inquiry.begin(GROUPS)
    assert rig.verdicts(1, 2) == [Verdict.MISS] * 2


def test_wait_does_not_wait_for_a_daemon_that_does_not_answer() -> None:
    rig = DiskRig(WAIT)
    rig.ask(coming=2)
    rig.clock.now += 0.06
    assert rig.inquiry.begin(GROUPS)
    rig.clock.now += 0.05
    assert rig.verdicts(1, 2) == [Verdict.HIT, Verdict.COMING]
    rig.clock.now += 0.06
    assert rig.verdicts(1, 2) == [Verdict.HIT, Verdict.MISS]
    rig.client.fail()
    rig.inquiry.begin(GROUPS)
    assert rig.verdicts(1, 2) == [Verdict.HIT, Verdict.MISS]
