"""Queues of several owners who take turns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvoffd.system.turns import Turns

OWNERS = ["a", "b", "c", None]


@given(st.lists(st.tuples(st.sampled_from(OWNERS), st.booleans()), max_size=80))
def test_nobody_waits_for_two_turns_of_another(steps: list[tuple[str | None, bool]]) -> None:
    queue: Turns[tuple[str | None, int]] = Turns()
    left: dict[str | None, list[int]] = {owner: [] for owner in OWNERS}
    turns_since: dict[str | None, list[str | None]] = {owner: [] for owner in OWNERS}
    for number, (owner, puts) in enumerate([*steps, *[(None, False)] * len(steps)]):
        if puts:
            if not left[owner]:
                turns_since[owner] = []
            left[owner].append(number)
            queue.put(owner, (owner, number))
            continue
        taken = queue.take()
        if taken is None:
            assert not any(left.values())
            continue
        whose, what = taken
        assert left[whose].pop(0) == what, "the items of one owner keep their order"
        turns_since[whose] = []
        for one in OWNERS:
            if one != whose and left[one]:
                turns_since[one].append(whose)
                assert len(set(turns_since[one])) == len(turns_since[one])
    assert not queue


def test_items_are_taken_out_and_put_first() -> None:
    queue: Turns[int] = Turns()
    queue.put("a", 1)
    queue.put("a", 2)
    queue.put("a", 3, first=True)
    queue.put("b", 4)
    assert len(queue) == 4
    assert list(queue) == [3, 1, 2, 4]
    assert queue.remove("a", 1)
    assert not queue.remove("a", 1)
    assert not queue.remove("nobody", 1)
    assert list(queue.turn()) == [3, 2]
    queue.end_turn("a")
    assert list(queue.turn()) == [4]
    assert queue.remove("b", 4)
    assert queue.has_other("b")
    assert not queue.has_other("a")
    assert [queue.take(), queue.take(), queue.take()] == [3, 2, None]
