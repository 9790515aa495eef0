"""What is known of one request: answers, deadlines, refreshes, leases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.v1.kv_offload.base import LookupResult

from kvoffd_client.vllm.do_no_harm import PrefillRate
from kvoffd_client.vllm.lookup_allowance import LEAST_UNKNOWN_S, LookupAllowance
from kvoffd_client.vllm.manager import ChunkGroup, LookupSettings, RequestState
from tests.kit.clock import Clock
from tests.kit.vllm_fakes import FakeSchedulerClient, block_hash, key

HIT, MISS, PENDING, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING, LookupResult.RETRY
GROUPS = [[key(1), key(2), key(3)], [key(4, group_id=7)]]
ALL = {block_hash(number) for number in (1, 2, 3, 4)}


class Harness:
    """One request over a fake client; deadline 0.1 s, refresh after 1 s."""

    def __init__(self, do_no_harm: bool = True, disk_wait_s: float = 1.0) -> None:
        self.clock = Clock()
        self.client = FakeSchedulerClient(self.clock)
        groups = (ChunkGroup(0, 1, 16, 1), ChunkGroup(7, 1, 16, 1))
        self.prefill = PrefillRate({group.suffix: group.tokens_per_chunk for group in groups}, self.clock)
        self.allowance = LookupAllowance(self.prefill, 0.1, self.clock, active=do_no_harm)
        namespace: Any = SimpleNamespace(client=self.client)
        settings = LookupSettings(namespace, groups, 0.1, self.clock, self.allowance, disk_wait_s)
        self.lookups = RequestState(settings, keys=cast(Any, tuple(GROUPS)))

    def statuses(self, *numbers: int) -> list[LookupResult]:
        return [self.lookups.result(key(number, 7 if number == 4 else 0)) for number in numbers]


def test_one_lookup_asks_for_all_groups_with_positions_as_groups_on_the_wire() -> None:
    harness = Harness()
    assert harness.lookups.refresh()
    [(_, message)] = harness.client.asked
    assert [(group.group, group.keys) for group in message] == [
        (0, block_hash(1) + block_hash(2) + block_hash(3)),
        (1, block_hash(4)),
    ]


def test_keys_are_put_off_until_the_answer_is_taken_in() -> None:
    harness = Harness()
    harness.lookups.refresh()
    assert harness.statuses(1, 4) == [RETRY] * 2
    harness.client.answer({block_hash(1), block_hash(4)})
    harness.lookups.refresh()
    assert harness.statuses(1, 2, 4) == [HIT, MISS, HIT]


def test_without_an_answer_by_the_deadline_it_is_a_miss_and_a_later_answer_still_counts() -> None:
    harness = Harness()
    harness.lookups.refresh()
    harness.clock.now += 0.2
    harness.lookups.refresh()
    assert harness.lookups.late
    assert harness.statuses(1) == [MISS]
    harness.client.answer(ALL)
    harness.lookups.refresh()
    assert harness.statuses(1) == [HIT]


def test_an_answer_is_awaited_no_longer_than_computing_takes() -> None:
    harness = Harness()
    harness.prefill.tokens_per_second = 1000.0
    harness.lookups.missing_tokens = 64
    harness.lookups.refresh()
    harness.clock.now += 0.063
    harness.lookups.refresh()
    assert harness.statuses(1) == [RETRY]
    harness.clock.now += 0.002
    harness.lookups.refresh()
    assert harness.statuses(1) == [MISS]
    assert harness.allowance.seconds_for(64) == 0.032


def test_what_was_given_up_stays_so_until_the_answer_comes() -> None:
    """An allowance that grew between two steps must not put a request off again."""
    harness = Harness()
    harness.lookups.refresh()
    harness.clock.now += LEAST_UNKNOWN_S + 0.001
    harness.lookups.refresh()
    assert harness.statuses(1) == [MISS]
    harness.prefill.tokens_per_second = 1.0
    harness.lookups.missing_tokens = 64
    harness.lookups.refresh()
    assert harness.statuses(1) == [MISS]
    harness.client.answer(ALL)
    harness.lookups.refresh()
    assert harness.statuses(1) == [HIT]


def test_a_daemon_that_is_down_is_a_miss_at_once() -> None:
    harness = Harness()
    harness.client.ready = False
    assert not harness.lookups.refresh()
    assert harness.statuses(1, 4) == [MISS] * 2
    assert harness.client.asked == []


def test_a_failed_lookup_is_a_miss_and_not_repeated_at_once() -> None:
    harness = Harness()
    harness.lookups.refresh()
    harness.client.fail()
    assert not harness.lookups.refresh()
    assert harness.statuses(1) == [MISS]
    harness.clock.now += 1.1
    assert harness.lookups.refresh()


def test_an_answer_with_misses_is_refreshed_when_it_is_old_and_the_lease_is_kept_until_then() -> None:
    harness = Harness()
    harness.lookups.refresh()
    old = harness.client.answer({block_hash(1)})
    harness.lookups.refresh()
    harness.clock.now += 1.5
    assert harness.lookups.refresh()
    assert harness.statuses(1, 2) == [HIT, RETRY]
    assert harness.client.released == []
    harness.client.answer(ALL)
    harness.lookups.refresh()
    assert harness.statuses(1, 2, 3, 4) == [HIT] * 4
    assert harness.client.released == [old.lease_id]


def test_a_complete_answer_is_not_refreshed() -> None:
    harness = Harness()
    harness.lookups.refresh()
    harness.client.answer(ALL)
    harness.lookups.refresh()
    harness.clock.now += 100
    assert not harness.lookups.refresh()


def test_a_lease_that_died_is_looked_up_again_and_not_loaded_from() -> None:
    harness = Harness()
    harness.lookups.refresh()
    ticket = harness.client.answer(ALL)
    harness.lookups.refresh()
    ticket.alive = False
    assert harness.lookups.refresh()
    assert harness.statuses(1) == [RETRY]
    assert len(harness.client.asked) == 2


def test_a_load_takes_the_lease_and_the_next_lookup_makes_a_new_one() -> None:
    harness = Harness()
    harness.lookups.refresh()
    ticket = harness.client.answer(ALL)
    harness.lookups.refresh()
    taken = harness.lookups.take()
    assert taken is not None
    assert taken.ticket is ticket
    assert harness.client.released == []
    assert harness.lookups.refresh()
    assert harness.client.asked[-1][0].lease_id != ticket.lease_id


def test_a_request_that_grew_is_asked_for_again() -> None:
    harness = Harness()
    harness.lookups.refresh()
    harness.client.answer(ALL)
    harness.lookups.refresh()
    harness.lookups.keys = cast(Any, ([*GROUPS[0], key(5)], GROUPS[1]))
    assert harness.lookups.refresh()


def test_after_a_failed_load_a_request_is_never_looked_up_again() -> None:
    harness = Harness()
    harness.lookups.refresh()
    harness.client.answer(ALL)
    harness.lookups.refresh()
    harness.lookups.mark_load_failed()
    harness.clock.now += 100
    assert not harness.lookups.refresh()
    assert harness.statuses(1, 2) == [MISS] * 2
    assert not harness.lookups.is_stored(key(1))


def test_releasing_ends_the_answer_and_the_lookup_on_its_way_whose_answer_still_tells_what_is_stored() -> None:
    harness = Harness()
    harness.lookups.refresh()
    harness.client.answer({block_hash(1)})
    harness.lookups.refresh()
    assert harness.lookups.is_stored(key(1))
    harness.clock.now += 2
    harness.lookups.refresh()
    assert harness.lookups.is_answer_near
    harness.lookups.release()
    assert sorted(harness.client.released) == [ticket.lease_id for ticket, _ in harness.client.asked]
    assert not harness.lookups.is_stored(key(1)), "it may have gone since"
    harness.client.answer({block_hash(2)})
    assert not harness.lookups.is_answer_near
    assert [harness.lookups.is_stored(key(number)) for number in (1, 2)] == [False, True]


def test_keys_beyond_the_daemons_limit_are_absent_and_ask_no_end_of_lookups_and_it_is_said(said: list[str]) -> None:
    harness = Harness()
    limit = harness.client.max_keys
    harness.lookups.keys = ([key(number) for number in range(limit + 5)],)
    harness.lookups.refresh()
    harness.client.answer({block_hash(0)})
    assert not harness.lookups.refresh()
    assert harness.statuses(0, limit + 1) == [HIT, MISS]
    assert any(f"takes {limit} in one lookup" in line for line in said)


class DiskHarness(Harness):
    """With blocks that come up from disk."""

    def ask(self, coming: int, wait_s: float = 0.0) -> None:
        """The first key is ready, the last ``coming`` of the others of its group come from disk."""
        names = [block_hash(number) for number in range(1, 4)]
        ready = set(names[: 3 - coming]) | {block_hash(4)}
        if self.lookups.refresh():
            self.client.answer(ready, coming=names[3 - coming :], wait_s=wait_s)
            self.lookups.refresh()


def test_blocks_on_their_way_from_disk_are_waited_for_and_asked_for_again() -> None:
    harness = DiskHarness()
    harness.ask(coming=2)
    assert harness.statuses(1, 2, 3, 4) == [HIT, PENDING, PENDING, HIT]
    assert harness.client.again == [False]
    harness.clock.now += 0.001
    harness.ask(coming=1)
    assert len(harness.client.asked) == 1, "not in a hurry"
    harness.clock.now += 0.005
    harness.ask(coming=1)
    assert harness.client.again == [False, True]
    assert harness.statuses(1, 2, 3) == [HIT, HIT, PENDING]
    harness.clock.now += 0.005
    harness.ask(coming=0)
    assert harness.statuses(1, 2, 3, 4) == [HIT] * 4
    assert harness.lookups.from_disk == {key(2), key(3)}
    assert len(harness.client.released) == 2, "each new lease pins what the one before did"


def test_while_it_is_asked_again_the_answer_in_force_holds() -> None:
    harness = DiskHarness()
    harness.ask(coming=2)
    harness.clock.now += 0.01
    assert harness.lookups.refresh()
    assert harness.statuses(1, 2, 3, 4) == [HIT, PENDING, PENDING, HIT]


def test_while_blocks_come_from_disk_the_next_answer_has_the_whole_deadline() -> None:
    """Keys that the answer before lacked are asked for again with the others; seconds of computing hang on these."""
    harness = DiskHarness()
    harness.lookups.refresh()
    harness.client.answer({block_hash(1)}, coming=[block_hash(2)])
    harness.lookups.refresh()
    assert harness.statuses(1, 2, 3) == [HIT, PENDING, MISS]
    harness.clock.now += 0.06
    assert harness.lookups.refresh()
    harness.clock.now += 4 * LEAST_UNKNOWN_S
    harness.lookups.refresh()
    assert harness.statuses(1, 2, 3) == [HIT, PENDING, RETRY]
    harness.clock.now += 0.021
    harness.lookups.refresh()
    assert harness.statuses(3) == [MISS]


@pytest.mark.parametrize(("tokens_per_second", "waits"), [(0.0, True), (100.0, True), (1000.0, False)])
def test_the_limit_is_no_more_than_computing_takes(tokens_per_second: float, waits: bool) -> None:
    harness = DiskHarness()
    harness.prefill.tokens_per_second = tokens_per_second
    harness.ask(coming=2, wait_s=0.1)  # 32 tokens
    assert harness.statuses(2) == [PENDING if waits else MISS]
    harness.clock.now += 0.35
    harness.ask(coming=1)
    assert harness.statuses(3) == [MISS if tokens_per_second else PENDING]


def test_the_limit_ends_the_waiting_for_good() -> None:
    harness = DiskHarness()
    harness.ask(coming=2)
    assert harness.statuses(2) == [PENDING]
    harness.clock.now += 0.6
    harness.ask(coming=1)
    assert harness.statuses(2, 3) == [HIT, PENDING]
    harness.clock.now += 0.6
    harness.lookups.refresh()
    assert harness.statuses(2, 3) == [HIT, MISS]
    harness.clock.now += 2.0
    harness.ask(coming=1)
    assert harness.statuses(3) == [MISS]


def test_where_the_daemon_expects_more_than_the_limit_nobody_waits() -> None:
    harness = DiskHarness()
    harness.ask(coming=2, wait_s=1.5)
    assert harness.statuses(1, 2) == [HIT, MISS]


def test_wait_does_not_outlast_the_daemon() -> None:
    harness = DiskHarness(do_no_harm=False, disk_wait_s=100.0)
    harness.lookups.refresh()
    harness.client.answer(set(), coming=[block_hash(1), block_hash(2)])  # nothing is ready, so no lease can die
    harness.lookups.refresh()
    assert harness.statuses(1) == [PENDING]
    harness.client.ready = False
    harness.lookups.refresh()
    assert harness.statuses(1, 2) == [MISS] * 2


def test_wait_does_not_wait_for_a_daemon_that_does_not_answer() -> None:
    harness = DiskHarness(do_no_harm=False, disk_wait_s=100.0)
    harness.ask(coming=2)
    harness.clock.now += 0.06
    assert harness.lookups.refresh()
    harness.clock.now += 0.05
    harness.lookups.refresh()
    assert harness.statuses(1, 2) == [HIT, PENDING]
    harness.clock.now += 0.06
    harness.lookups.refresh()
    assert harness.statuses(1, 2) == [HIT, MISS]
    harness.client.fail()
    harness.lookups.refresh()
    assert harness.statuses(1, 2) == [HIT, MISS]


@pytest.mark.parametrize(("expected_s", "waits"), [(99.0, True), (101.0, False)])
def test_with_no_word_of_harm_the_limit_is_what_the_user_gives(expected_s: float, waits: bool) -> None:
    harness = DiskHarness(do_no_harm=False, disk_wait_s=100.0)
    harness.prefill.tokens_per_second = 1e6
    harness.ask(coming=2, wait_s=expected_s)
    assert harness.statuses(2) == [PENDING if waits else MISS]


def test_where_nothing_may_be_waited_for_what_is_ready_is_taken() -> None:
    harness = DiskHarness(disk_wait_s=0.0)
    harness.ask(coming=2)
    assert harness.statuses(1, 2, 3) == [HIT, MISS, MISS]
