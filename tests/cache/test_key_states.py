"""The table behind lookups is a dict of keys to bytes, whatever is done to it in whatever order."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffd.cache.key_states import KeyStates


def joined(keys: list[int], key_bytes: int) -> bytes:
    return b"".join(key.to_bytes(key_bytes, "little") for key in keys)


@settings(max_examples=200, deadline=None)
@given(
    key_bytes=st.sampled_from([1, 7, 8, 15, 16, 17, 32, 33, 64]),
    steps=st.lists(st.tuples(st.lists(st.integers(0, 255), max_size=60), st.integers(0, 2)), max_size=40),
)
def test_it_is_a_dict(key_bytes: int, steps: list[tuple[list[int], int]]) -> None:
    """Few keys and many removals: probing sequences overlap and close up all the time."""
    table, model = KeyStates(key_bytes), dict.fromkeys(range(0), 0)
    everything = joined(list(range(256)), key_bytes)
    for keys, state in steps:
        table.set(joined(keys, key_bytes), state)
        if state:
            model.update(dict.fromkeys(keys, state))
        else:
            for key in keys:
                model.pop(key, None)
        assert list(table.of(everything)) == [model.get(key, 0) for key in range(256)]
        assert len(table) == len(model)


@pytest.mark.parametrize("count", [1_000, 50_000])
def test_many_keys_come_and_go_in_any_order(count: int) -> None:
    table = KeyStates(32)
    keys = [os.urandom(32) for _ in range(count)]
    table.set(b"".join(keys), 1)
    table.set(b"".join(keys[::2]), 2)
    assert table.of(b"".join(keys)) == b"\2\1" * (count // 2)
    table.set(b"".join(keys[: count // 2]), 0)
    assert table.of(b"".join(keys)) == bytes(count // 2) + b"\2\1" * (count // 4)
    assert len(table) == count // 2
    assert not any(table.of(os.urandom(32 * count)))
    table.set(b"".join(keys), 0)
    assert len(table) == 0
    assert not any(table.of(b"".join(keys)))


def test_keys_that_begin_alike_are_told_apart() -> None:
    table = KeyStates(32)
    keys = [bytes(24) + number.to_bytes(8, "big") for number in range(5_000)]
    table.set(b"".join(keys[::2]), 2)
    assert table.of(b"".join(keys)) == b"\2\0" * 2_500


def test_an_empty_question_has_an_empty_answer() -> None:
    table = KeyStates(16)
    table.set(b"", 2)
    assert table.of(b"") == b""
