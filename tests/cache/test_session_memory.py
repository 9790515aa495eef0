"""How sessions share the daemon's own memory."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffd.cache.session_memory import SessionMemory
from kvoffd.errors import KvoffdError

LIMIT, SESSIONS = 16_000, 8
steps = st.lists(st.tuples(st.integers(1, SESSIONS), st.integers(0, 20_000), st.booleans()), max_size=60)


@given(steps)
def test_all_that_is_held_stays_below_the_limit_and_each_session_always_has_its_part(
    wanted: list[tuple[int, int, bool]],
) -> None:
    memory, held = SessionMemory(LIMIT, SESSIONS), Counter[int]()
    for owner, nbytes, gives_back in wanted:
        if gives_back:
            memory.take(owner, -held.pop(owner, 0))
        else:
            taken = min(nbytes, memory.room(owner))
            memory.check(owner, taken)
            memory.take(owner, taken)
            held[owner] += taken
        assert memory.held_bytes == held.total() <= LIMIT
        for one in range(1, SESSIONS + 1):
            assert memory.room(one) >= LIMIT // 2 // SESSIONS - held[one]


def test_who_needs_more_may_have_as_much_as_is_left_for_others() -> None:
    memory = SessionMemory(LIMIT, SESSIONS)
    assert memory.room(1) == 1000 + 4000
    memory.take(1, 5000)
    assert memory.room(1) == 0
    assert memory.room(2) == 1000 + 2000
    memory.take(2, 3000)
    memory.take(1, -4500)
    assert memory.room(1) == 500 + 3000
    with pytest.raises(KvoffdError, match="sessions_size"):
        memory.check(1, 3501)
