"""Keys that a prompt lacks while another one computes them."""

from __future__ import annotations

import os

from kvoffd.cache.block_table import FOUND
from kvoffd.cache.computing import BITS, MOST_S, Computing
from kvoffd.cache.namespace import MissReason
from kvoffd.simulate.trace import KEY_BYTES
from tests.cache.test_curve import group_of

COUNT = 8000


def test_each_key_of_a_long_prompt_is_known_and_found_ones_are_left() -> None:
    computing, group, keys = Computing(lambda: 5.0), group_of(), os.urandom(COUNT * KEY_BYTES)
    first = bytearray([MissReason.UNKNOWN, MissReason.EVICTED, FOUND, MissReason.PARTIAL]) * (COUNT // 4)
    before = bytes(first)
    computing.mark_computing(group, keys, first, 1)
    assert first == before, "nobody computes them yet"
    second = bytearray(before)
    computing.mark_computing(group, keys, second, 2)
    assert second == bytes([MissReason.COMPUTING, MissReason.COMPUTING, FOUND, MissReason.PARTIAL]) * (COUNT // 4)
    other = bytearray(before)
    computing.mark_computing(group_of(name=1), keys, other, 3)
    assert other == before, "another namespace's keys"
    computing.offered(group, keys[: COUNT // 2 * KEY_BYTES])
    third = bytearray(before)
    computing.mark_computing(group, keys, third, 3)
    assert third.count(MissReason.COMPUTING) == COUNT // 4, "the half that was not offered"


def test_memory_is_bounded_and_the_oldest_keys_go() -> None:
    now = [0.0]
    computing, group = Computing(lambda: now[0]), group_of()
    old, recent = (os.urandom(COUNT * KEY_BYTES) for _ in range(2))
    computing.mark_computing(group, old, bytearray(COUNT), 1)
    for _ in range((1 << BITS) // COUNT):
        now[0] += 1.0
        computing.mark_computing(group, os.urandom(COUNT * KEY_BYTES), bytearray(COUNT), 2)
    now[0] += 1.0
    computing.mark_computing(group, recent, bytearray(COUNT), 3)
    for keys, least, most in ((recent, COUNT, COUNT), (old, 0, COUNT // 2)):
        reasons = bytearray(COUNT)
        computing.mark_computing(group, keys, reasons, 4)
        assert least <= reasons.count(MissReason.COMPUTING) <= most
    now[0] += MOST_S
    reasons = bytearray(COUNT)
    computing.mark_computing(group, recent, reasons, 5)
    assert not any(reasons), "its prompt has given up"
