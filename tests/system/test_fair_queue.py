"""Queues of several owners who take turns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvoffd.system.fair_queue import FairQueue

OWNERS = st.sampled_from(["a", "b", "c", None])
MOST = 100


@given(st.lists(st.tuples(OWNERS, st.integers(1, MOST)), max_size=60))
def test_owners_that_wait_are_given_the_same_but_for_one_item(work: list[tuple[str | None, int]]) -> None:
    queue: FairQueue[tuple[int, str | None, int]] = FairQueue()
    left = dict.fromkeys(["a", "b", "c", None], 0)
    for number, (owner, cost) in enumerate(work):
        queue.put(owner, (number, owner, cost))
        left[owner] += 1
    given_to = dict.fromkeys(left, 0)
    order: dict[str | None, list[int]] = {owner: [] for owner in left}
    for _ in work:
        item = queue.take()
        assert item is not None
        number, owner, cost = item
        assert given_to[owner] <= min(given_to[one] for one, count in left.items() if count)
        given_to[owner] += cost
        queue.charge(owner, cost)
        order[owner].append(number)
        left[owner] -= 1
    assert queue.take() is None
    assert all(numbers == sorted(numbers) for numbers in order.values())


def test_one_that_comes_later_has_saved_nothing_up() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(4):
        queue.put("early", number)
    for number in range(3):
        assert queue.take() == number
        queue.charge("early", 10)
    queue.put("late", 10)
    queue.put("late", 11)
    assert queue.is_before("early")
    queue.charge("early", 1)
    assert queue.take() == 10
    queue.charge("late", 10)
    assert [queue.take(), queue.take()] == [3, 11]


def test_one_that_was_given_more_waits_until_the_others_had_as_much() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in (1, 2, 3, 4):
        queue.put("polite", number)
    queue.charge("greedy", 30)
    queue.put("greedy", 5)
    taken = []
    for _ in range(5):
        item = queue.take()
        assert item is not None
        taken.append(item)
        queue.charge("greedy" if item == 5 else "polite", 10)
    assert taken in ([1, 2, 3, 4, 5], [1, 2, 3, 5, 4])


def test_what_one_was_given_while_nobody_waited_is_not_held_against_it() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.charge("alone", 1000)
    queue.put("new", 1)
    queue.put("alone", 2)
    queue.put("new", 3)
    taken = []
    for _ in range(3):
        item = queue.take()
        taken.append(item)
        queue.charge("alone" if item == 2 else "new", 10)
    assert taken == [1, 2, 3]


def test_items_are_taken_out_and_put_first() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.put("a", 1)
    queue.put("a", 2)
    queue.put("a", 3, first=True)
    queue.put("b", 4)
    assert len(queue) == 4
    assert sorted(queue) == [1, 2, 3, 4]
    assert queue.remove("a", 1)
    assert not queue.remove("a", 1)
    assert not queue.remove("nobody", 1)
    assert queue.remove("b", 4)
    assert not queue.is_before("a")
    assert queue.is_before("b"), "both were given nothing, and a waits"
    assert queue.has_other("b")
    assert not queue.has_other("a")
    assert [queue.take(), queue.take(), queue.take()] == [3, 2, None]
