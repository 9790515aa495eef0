"""What was counted lately, of each namespace and in all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from kvoffd.cache.cache import BlockCache
from kvoffd.cache.namespace import Namespace
from kvoffd.server.recent import Recent
from kvoffd_proto.messages import GroupSpec


def namespace(number: int) -> Namespace:
    return Namespace(bytes([number]) * 32, f"model {number}", 1, 32, [GroupSpec("full", 16)], "{}")


def test_sums_keep_what_a_forgotten_namespace_counted() -> None:
    now, one, other = 100.0, namespace(1), namespace(2)
    cache = SimpleNamespace(namespaces=[one, other])
    recent = Recent(cast(BlockCache, cache), lambda: now, lambda: now / 10)
    for _ in range(30):  # a second each: one asks for two keys and misses, the other finds its one
        now += 1
        one.counters.keys_asked += 2
        other.counters.keys_asked += 1
        other.counters.keys_ready += 1
        recent.tick()
    ten, hundred, _, whole = recent.in_all()
    assert (whole.window_seconds, whole.seconds) == (0, 30)
    assert [part.keys_asked for part in (ten, hundred, whole)] == [30, 90, 90]
    assert [part.keys_missing for part in (ten, hundred, whole)] == [20, 60, 60]
    assert round(ten.cpu_seconds, 6) == 1.0
    assert [(part.keys_asked, part.keys_ready) for part in recent.of_namespace(other)] == [(10, 10), (30, 30), (30, 30)]
    recent.namespace_forgotten(one)
    cache.namespaces.remove(one)
    assert recent.in_all()[3].keys_asked == 90
    now += 10
    recent.tick()
    assert [part.keys_asked for part in recent.in_all()] == [0, 90, 90, 90]
