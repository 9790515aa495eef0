"""One request's lookups: answers, deadlines, refreshes, leases."""

from __future__ import annotations

import dataclasses

import pytest

from kvoffd_client.vllm.connector_options import BEST_EFFORT, LIMIT, WAIT
from kvoffd_client.vllm.lookup_allowance import UNKNOWN_RATE_S, LookupAllowance
from kvoffd_client.vllm.prefill_rate import PrefillRate
from kvoffd_client.vllm.request_lookups import KeyStatus, LookupSettings, RequestLookups
from tests.kit.clock import Clock
from tests.kit.vllm_fakes import FakeSchedulerClient, block_hash, key

GROUPS = [[key(1), key(2), key(3)], [key(4, group_id=7)]]
ALL = {block_hash(number) for number in (1, 2, 3, 4)}


class Harness:
    """The lookups of one request over a fake client; deadline 0.1 s, refresh after 1 s."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.client = FakeSchedulerClient(self.clock)
        positions = {(0).to_bytes(4, "big"): 0, (7).to_bytes(4, "big"): 1}
        self.prefill = PrefillRate(dict.fromkeys(positions, 16), self.clock)
        self.allowance = LookupAllowance(self.prefill, 0.1, self.clock)
        settings = LookupSettings(self.client, positions, 0.1, 1.0, self.clock, self.prefill, self.allowance)
        self.lookups = RequestLookups(settings)

    def statuses(self, *numbers: int) -> list[KeyStatus]:
        return [self.lookups.status(key(number, 7 if number == 4 else 0)) for number in numbers]


def test_one_lookup_asks_for_all_groups_with_positions_as_groups_on_the_wire() -> None:
    harness = Harness()
    assert harness.lookups.refresh(GROUPS)
    [(_, message)] = harness.client.asked
    assert [(group.group, group.keys) for group in message] == [
        (0, block_hash(1) + block_hash(2) + block_hash(3)),
        (1, block_hash(4)),
    ]


def test_keys_are_put_off_until_the_answer_is_taken_in() -> None:
    harness = Harness()
    harness.lookups.refresh(GROUPS)
    assert harness.statuses(1, 4) == [KeyStatus.RETRY] * 2
    harness.client.answer({block_hash(1), block_hash(4)})
    harness.lookups.refresh(GROUPS)
    assert harness.statuses(1, 2, 4) == [KeyStatus.HIT, KeyStatus.MISS, KeyStatus.HIT]


def test_keys_that_vllm_asks_for_beside_those_of_whole_blocks_are_looked_up_also_where_a_prompt_fills_no_block() -> (
    None
):
    for groups in (GROUPS, [[], []]):
        harness = Harness()
        asked = harness.lookups.refresh(groups)
        assert asked == (groups is GROUPS)
        if asked:
            harness.client.answer(ALL)
            harness.lookups.refresh(groups)
        assert not harness.lookups.tail_unanswered
        tail = key(9, group_id=7)
        assert harness.lookups.status(tail) is KeyStatus.RETRY
        assert harness.lookups.refresh(groups)
        assert harness.client.asked[-1][1][-1].keys.endswith(block_hash(9))
        assert harness.lookups.tail_unanswered
        harness.client.answer(ALL | {block_hash(9)})
        harness.lookups.refresh(groups)
        assert harness.lookups.status(tail) is KeyStatus.HIT
        assert not harness.lookups.tail_unanswered


def test_keys_beside_those_of_whole_blocks_are_awaited_until_the_deadline() -> None:
    harness = Harness()
    harness.lookups.status(key(9, group_id=7))
    harness.lookups.refresh([[], []])
    assert harness.lookups.tail_unanswered
    harness.clock.now += 0.2
    assert not harness.lookups.tail_unanswered


def test_without_an_answer_by_the_deadline_it_is_a_miss_and_a_later_answer_still_counts() -> None:
    harness = Harness()
    harness.lookups.refresh(GROUPS)
    harness.clock.now += 0.2
    assert harness.statuses(1) == [KeyStatus.TIMED_OUT]
    assert harness.lookups.count_timeout()
    assert not harness.lookups.count_timeout()
    harness.client.answer(ALL)
    harness.lookups.refresh(GROUPS)
    assert harness.statuses(1) == [KeyStatus.HIT]


def test_an_answer_is_awaited_no_longer_than_computing_takes() -> None:
    harness = Harness()
    harness.prefill.tokens_per_second = 1000.0
    harness.lookups.missing_tokens = 64
    harness.lookups.refresh(GROUPS)
    harness.clock.now += 0.063
    assert harness.statuses(1) == [KeyStatus.RETRY]
    harness.clock.now += 0.002
    assert harness.statuses(1) == [KeyStatus.TIMED_OUT]
    assert harness.allowance.seconds_for(64) == 0.032


def test_what_was_given_up_stays_so_until_the_answer_comes() -> None:
    """An allowance that grew between two steps must not put a request off again."""
    harness = Harness()
    harness.lookups.refresh(GROUPS)
    harness.clock.now += UNKNOWN_RATE_S + 0.001
    assert harness.statuses(1) == [KeyStatus.TIMED_OUT]
    harness.prefill.tokens_per_second = 1.0
    harness.lookups.missing_tokens = 64
    assert harness.statuses(1) == [KeyStatus.TIMED_OUT]
    harness.client.answer(ALL)
    harness.lookups.refresh(GROUPS)
    assert harness.statuses(1) == [KeyStatus.HIT]


def test_a_daemon_that_is_down_is_a_miss_at_once() -> None:
    harness = Harness()
    harness.client.ready = False
    assert not harness.lookups.refresh(GROUPS)
    assert harness.statuses(1, 4) == [KeyStatus.MISS] * 2
    assert harness.client.asked == []


def test_a_failed_lookup_is_a_miss_and_not_repeated_at_once() -> None:
    harness = Harness()
    harness.lookups.refresh(GROUPS)
    harness.client.fail()
    assert not harness.lookups.refresh(GROUPS)
    assert harness.statuses(1) == [KeyStatus.MISS]
    harness.clock.now += 1.1
    assert harness.lookups.refresh(GROUPS)


def test_an_answer_with_misses_is_refreshed_when_it_is_old_and_the_lease_is_kept_until_then() -> None:
    harness = Harness()
    harness.lookups.refresh(GROUPS)
    old = harness.client.answer({block_hash(1)})
    harness.lookups.refresh(GROUPS)
    harness.clock.now += 1.5
    assert harness.lookups.refresh(GROUPS)
    assert harness.statuses(1, 2) == [KeyStatus.HIT, KeyStatus.RETRY]
    assert harness.client.released == []
    harness.client.answer(ALL)
    harness.lookups.refresh(GROUPS)
    assert harness.statuses(1, 2, 3, 4) == [KeyStatus.HIT] * 4
    assert harness.client.released == [old.lease_id]


def test_a_complete_answer_is_not_refreshed() -> None:
    harness = Harness()
    harness.lookups.refresh(GROUPS)
    harness.client.answer(ALL)
    harness.lookups.refresh(GROUPS)
    harness.clock.now += 100
    assert not harness.lookups.refresh(GROUPS)


def test_a_lease_that_died_is_looked_up_again_and_not_loaded_from() -> None:
    harness = Harness()
    harness.lookups.refresh(GROUPS)
    ticket = harness.client.answer(ALL)
    harness.lookups.refresh(GROUPS)
    ticket.alive = False
    assert harness.lookups.refresh(GROUPS)
    assert harness.statuses(1) == [KeyStatus.RETRY]
    assert len(harness.client.asked) == 2


def test_a_load_takes_the_lease_and_the_next_lookup_makes_a_new_one() -> None:
    harness = Harness()
    harness.lookups.refresh(GROUPS)
    ticket = harness.client.answer(ALL)
    harness.lookups.refresh(GROUPS)
    taken = harness.lookups.take()
    assert taken is not None
    assert taken.ticket is ticket
    assert harness.client.released == []
    assert harness.lookups.refresh(GROUPS)
    assert harness.client.asked[-1][0].lease_id != ticket.lease_id


def test_a_key_no_lookup_held_is_put_off_then_asked_with_all_others_under_one_lease() -> None:
    harness = Harness()
    harness.lookups.refresh(GROUPS)
    harness.client.answer(ALL)
    harness.lookups.refresh(GROUPS)
    assert harness.statuses(9) == [KeyStatus.RETRY]
    assert harness.lookups.refresh(GROUPS)
    assert harness.client.asked[-1][1][0].keys.endswith(block_hash(3) + block_hash(9))
    harness.client.answer(ALL | {block_hash(9)})
    harness.lookups.refresh(GROUPS)
    assert harness.statuses(1, 9) == [KeyStatus.HIT] * 2
    assert not harness.lookups.refresh(GROUPS)


def test_a_key_nobody_answers_for_is_a_miss_after_the_deadline() -> None:
    harness = Harness()
    assert harness.statuses(9) == [KeyStatus.RETRY]
    harness.clock.now += 0.2
    assert harness.statuses(9) == [KeyStatus.TIMED_OUT]


def test_a_request_that_grew_is_asked_for_again() -> None:
    harness = Harness()
    harness.lookups.refresh(GROUPS)
    harness.client.answer(ALL)
    harness.lookups.refresh(GROUPS)
    assert harness.lookups.refresh([[*GROUPS[0], key(5)], GROUPS[1]])


def test_after_a_failed_load_a_request_is_never_looked_up_again() -> None:
    harness = Harness()
    harness.lookups.refresh(GROUPS)
    harness.client.answer(ALL)
    harness.lookups.refresh(GROUPS)
    harness.lookups.mark_load_failed()
    harness.clock.now += 100
    assert not harness.lookups.refresh(GROUPS)
    assert harness.statuses(1, 9) == [KeyStatus.MISS] * 2
    assert not harness.lookups.is_stored(key(1))


def test_releasing_ends_the_answer_and_the_lookup_on_its_way() -> None:
    harness = Harness()
    harness.lookups.refresh(GROUPS)
    harness.client.answer({block_hash(1)})
    harness.lookups.refresh(GROUPS)
    harness.clock.now += 2
    harness.lookups.refresh(GROUPS)
    harness.lookups.release()
    assert sorted(harness.client.released) == [ticket.lease_id for ticket, _ in harness.client.asked]
    assert harness.lookups.is_stored(key(1))


def test_keys_beyond_the_daemons_limit_are_absent_and_ask_no_end_of_lookups_and_it_is_said(said: list[str]) -> None:
    harness = Harness()
    limit = harness.client.max_keys
    groups = [[key(number) for number in range(limit + 5)]]
    harness.lookups.refresh(groups)
    harness.client.answer({block_hash(0)})
    assert not harness.lookups.refresh(groups)
    assert harness.statuses(0, limit + 1) == [KeyStatus.HIT, KeyStatus.MISS]
    assert any(f"takes {limit} in one lookup" in line for line in said)


class DiskHarness(Harness):
    """A harness with a rule of its own for blocks that come up from disk."""

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
    harness = DiskHarness()
    harness.ask(coming=2)
    assert harness.statuses(1, 2, 3, 4) == [KeyStatus.HIT, KeyStatus.PENDING, KeyStatus.PENDING, KeyStatus.HIT]
    assert harness.client.again == [False]
    harness.clock.now += 0.001
    harness.ask(coming=1)
    assert len(harness.client.asked) == 1, "not in a hurry"
    harness.clock.now += 0.005
    harness.ask(coming=1)
    assert harness.client.again == [False, True]
    assert harness.statuses(1, 2, 3) == [KeyStatus.HIT, KeyStatus.HIT, KeyStatus.PENDING]
    harness.clock.now += 0.005
    harness.ask(coming=0)
    assert harness.statuses(1, 2, 3, 4) == [KeyStatus.HIT] * 4
    assert harness.lookups.from_disk == {key(2), key(3)}
    assert len(harness.client.released) == 2, "each new lease pins what the one before did"


def test_while_it_is_asked_again_the_answer_in_force_holds() -> None:
    harness = DiskHarness()
    harness.ask(coming=2)
    harness.clock.now += 0.01
    assert harness.lookups.refresh(GROUPS)
    assert harness.statuses(1, 2, 3, 4) == [KeyStatus.HIT, KeyStatus.PENDING, KeyStatus.PENDING, KeyStatus.HIT]


def test_while_blocks_come_from_disk_the_next_answer_has_the_whole_deadline() -> None:
    """Keys that the answer before lacked are asked for again with the others; seconds of computing hang on these."""
    harness = DiskHarness()
    harness.lookups.refresh(GROUPS)
    harness.client.answer({block_hash(1)}, coming=[block_hash(2)])
    harness.lookups.refresh(GROUPS)
    assert harness.statuses(1, 2, 3) == [KeyStatus.HIT, KeyStatus.PENDING, KeyStatus.MISS]
    harness.clock.now += 0.06
    assert harness.lookups.refresh(GROUPS)
    harness.clock.now += 4 * UNKNOWN_RATE_S
    assert harness.statuses(1, 2, 3) == [KeyStatus.HIT, KeyStatus.PENDING, KeyStatus.RETRY]
    harness.clock.now += 0.021
    assert harness.statuses(3) == [KeyStatus.TIMED_OUT]


def test_best_effort_takes_what_is_ready() -> None:
    harness = DiskHarness(BEST_EFFORT)
    harness.ask(coming=2)
    assert harness.statuses(1, 2, 3) == [KeyStatus.HIT, KeyStatus.MISS, KeyStatus.MISS]
    assert harness.lookups.disk_wait_over


@pytest.mark.parametrize(("tokens_per_second", "waits"), [(0.0, True), (100.0, True), (1000.0, False)])
def test_the_limit_is_no_more_than_computing_takes(tokens_per_second: float, waits: bool) -> None:
    harness = DiskHarness()
    harness.prefill.tokens_per_second = tokens_per_second
    harness.ask(coming=2, wait_s=0.1)  # 32 tokens
    assert harness.statuses(2) == [KeyStatus.PENDING if waits else KeyStatus.MISS]
    harness.clock.now += 0.35
    harness.ask(coming=1)
    assert harness.statuses(3) == [KeyStatus.MISS if tokens_per_second else KeyStatus.PENDING]


def test_the_limit_ends_the_waiting_for_good() -> None:
    harness = DiskHarness()
    harness.ask(coming=2)
    assert harness.statuses(2) == [KeyStatus.PENDING]
    harness.clock.now += 0.6
    harness.ask(coming=1)
    assert harness.statuses(2, 3) == [KeyStatus.HIT, KeyStatus.PENDING]
    harness.clock.now += 0.6
    assert harness.statuses(2, 3) == [KeyStatus.HIT, KeyStatus.MISS]
    harness.clock.now += 2.0
    harness.ask(coming=1)
    assert harness.statuses(3) == [KeyStatus.MISS]


def test_where_the_daemon_expects_more_than_the_limit_nobody_waits() -> None:
    harness = DiskHarness()
    harness.ask(coming=2, wait_s=1.5)
    assert harness.statuses(1, 2) == [KeyStatus.HIT, KeyStatus.MISS]


def test_wait_waits_until_the_daemon_gives_up() -> None:
    harness = DiskHarness(WAIT)
    harness.ask(coming=2, wait_s=60.0)
    harness.clock.now += 30.0
    assert harness.statuses(2) == [KeyStatus.PENDING]
    harness.lookups.refresh(GROUPS)
    harness.client.answer({block_hash(1), block_hash(4)})
    harness.lookups.refresh(GROUPS)
    assert harness.statuses(1, 2) == [KeyStatus.HIT, KeyStatus.MISS]


def test_wait_does_not_outlast_the_daemon() -> None:
    harness = DiskHarness(WAIT)
    harness.lookups.refresh(GROUPS)
    harness.client.answer(set(), coming=[block_hash(1), block_hash(2)])  # nothing is ready, so no lease can die
    harness.lookups.refresh(GROUPS)
    assert harness.statuses(1) == [KeyStatus.PENDING]
    harness.client.ready = False
    harness.lookups.refresh(GROUPS)
    assert harness.statuses(1, 2) == [KeyStatus.MISS] * 2


def test_wait_does_not_wait_for_a_daemon_that_does_not_answer() -> None:
    harness = DiskHarness(WAIT)
    harness.ask(coming=2)
    harness.clock.now += 0.06
    assert harness.lookups.refresh(GROUPS)
    harness.clock.now += 0.05
    assert harness.statuses(1, 2) == [KeyStatus.HIT, KeyStatus.PENDING]
    harness.clock.now += 0.06
    assert harness.statuses(1, 2) == [KeyStatus.HIT, KeyStatus.MISS]
    harness.client.fail()
    harness.lookups.refresh(GROUPS)
    assert harness.statuses(1, 2) == [KeyStatus.HIT, KeyStatus.MISS]
