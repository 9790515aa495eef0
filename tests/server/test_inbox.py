"""Calls that other threads post to the loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from kvoffd.server.inbox import Inbox


class Loop:
    """Keeps what it is asked to call."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        self.due.append(call)

    def turn(self) -> bool:
        """Make the calls that are due; False where there were none."""
        due, self.due = self.due, []
        for call in due:
            call()
        return bool(due)


class Late(deque[Callable[[], None]]):
    """The loop's thread runs at the moment before something is appended."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self._loop = loop

    def append(self, call: Callable[[], None]) -> None:
        self._loop.turn()
        super().append(call)


def test_a_call_that_is_posted_while_the_loop_works_off_the_last_one_is_made() -> None:
    loop, made = Loop(), list[int]()
    inbox = Inbox(loop)  # type: ignore[arg-type]
    inbox._waiting = Late(loop)
    for number in range(3):
        inbox.post(lambda number=number: made.append(number))  # type: ignore[misc]
    while loop.turn():
        pass
    assert made == [0, 1, 2]


def test_what_a_call_posts_has_a_turn_of_its_own() -> None:
    loop, made = Loop(), list[str]()
    inbox = Inbox(loop)  # type: ignore[arg-type]
    inbox.on_work = lambda: made.append("sent")

    def first() -> None:
        made.append("first")
        inbox.post(lambda: made.append("second"))

    inbox.post(first)
    while loop.turn():
        pass
    assert made == ["first", "sent", "second", "sent"]


def test_sockets_are_served_between_many_calls_and_the_last_ones_are_made_in_one_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, made = Loop(), list[int]()
    inbox = Inbox(loop)  # type: ignore[arg-type]
    monkeypatch.setattr("kvoffd.server.inbox.WORK_S", 0.0)
    for number in range(4):
        inbox.post(lambda number=number: made.append(number))  # type: ignore[misc]
    assert loop.turn()
    assert made == [0]
    assert loop.turn()
    assert made == [0, 1]
    inbox.work_off()
    assert made == [0, 1, 2, 3]
    while loop.turn():
        pass
    assert made == [0, 1, 2, 3]
