"""The index of a group's blocks is a dict of keys to blocks and states, whatever is done to it in whatever order."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffd.cache.key_index import KeyIndex

PARTS = 3 * 16384
"""Keys for which the table is split several times."""


class Item(NamedTuple):
    key: bytes


def items(keys: list[int], key_bytes: int) -> list[Item]:
    return [Item(key.to_bytes(key_bytes, "little")) for key in keys]


def joined(found: list[Item]) -> bytes:
    return b"".join([item.key for item in found])


@settings(max_examples=200, deadline=None)
@given(
    key_bytes=st.sampled_from([1, 7, 8, 15, 16, 17, 32, 33, 64]),
    steps=st.lists(st.tuples(st.sets(st.integers(0, 255), max_size=60), st.integers(0, 2)), max_size=40),
)
def test_it_is_a_dict(key_bytes: int, steps: list[tuple[set[int], int]]) -> None:
    """Few keys and many removals: probing sequences overlap and close up all the time."""
    index: KeyIndex[Item] = KeyIndex(key_bytes)
    model: dict[int, tuple[Item, int]] = {}
    everything = items(list(range(256)), key_bytes)
    for keys, state in steps:
        there, fresh = sorted(keys & model.keys()), sorted(keys - model.keys())
        if state:
            made = items(fresh, key_bytes)
            index.add(joined(made), made, state)
            index.set(joined(items(there, key_bytes)), state)
            model.update((key, (item, state)) for key, item in zip(fresh, made, strict=True))
            model.update((key, (model[key][0], state)) for key in there)
        else:
            index.remove(joined(items(there, key_bytes)))
            for key in there:
                del model[key]
        assert list(index.states(joined(everything))) == [model.get(key, (None, 0))[1] for key in range(256)]
        found = index.find(joined(everything))
        assert all(one is model.get(key, (None, 0))[0] for key, one in enumerate(found))
        assert len(index) == len(model) == len(index.blocks())
        assert set(index) == {item.key for item, _ in model.values()}


@pytest.mark.parametrize("count", [1_000, PARTS])
def test_many_keys_come_and_go_in_any_order(count: int) -> None:
    index: KeyIndex[Item] = KeyIndex(32)
    made = [Item(os.urandom(32)) for _ in range(count)]
    for start in range(0, count, 777):
        index.add(joined(made[start : start + 777]), made[start : start + 777], 1)
    index.set(joined(made[::2]), 2)
    assert index.states(joined(made)) == b"\2\1" * (count // 2)
    assert index.all(joined(made)) == made
    index.remove(joined(made[: count // 2]))
    assert index.states(joined(made)) == bytes(count // 2) + b"\2\1" * (count // 4)
    assert index.find(joined(made)) == [None] * (count // 2) + made[count // 2 :]
    assert len(index) == count // 2
    assert not any(index.states(os.urandom(32 * count)))
    index.add(joined(made[: count // 2]), made[: count // 2], 1)
    assert index.all(joined(made)) == made
    index.remove(joined(made))
    assert (len(index), index.blocks(), any(index.states(joined(made)))) == (0, [], False)


def test_keys_that_begin_alike_are_told_apart() -> None:
    index: KeyIndex[Item] = KeyIndex(32)
    made = [Item(bytes(24) + number.to_bytes(8, "big")) for number in range(5_000)]
    index.add(joined(made[::2]), made[::2], 2)
    assert index.states(joined(made)) == b"\2\0" * 2_500


def test_what_may_not_be_is_noticed() -> None:
    index: KeyIndex[Item] = KeyIndex(8)
    one, other = items([1, 2], 8)
    index.add(one.key, [one], 1)
    with pytest.raises(AssertionError):
        index.add(other.key + one.key, [other, one], 1)
    assert (list(index.states(other.key + one.key)), len(index)) == ([0, 1], 1), "none or all"
    for change in (index.remove, index.all, lambda keys: index.set(keys, 2)):
        with pytest.raises(AssertionError):
            change(bytes(8))
    assert one.key in index
    assert index.get(b"short") is None


def test_a_table_that_is_nearly_empty_is_small() -> None:
    """Else each group that once filled the index, and of which one block is held, would take memory for ever."""
    index: KeyIndex[Item] = KeyIndex(32)
    made = [Item(os.urandom(32)) for _ in range(PARTS)]
    index.add(joined(made), made, 1)
    full, taken = index.nbytes, index._native.index_nbytes(index.at)
    index.remove(joined(made[1:]))
    assert index._native.index_nbytes(index.at) < taken / 50
    assert index.nbytes < full
    assert index.all(made[0].key) == made[:1]
    index.add(joined(made[1:]), made[1:], 1)
    assert index.all(joined(made)) == made


def test_an_empty_question_has_an_empty_answer() -> None:
    index: KeyIndex[Item] = KeyIndex(16)
    index.add(b"", [], 2)
    index.set(b"", 2)
    index.remove(b"")
    assert index.states(b"") == b""
    assert index.find(b"") == []
