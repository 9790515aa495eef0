"""No turn of the loop is long at a large pool, and the program that measures it works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvoffd_proto import messages as m
from tests.bench.loop import CASES, GIB, LONGEST_MS, Daemon, child, page


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_no_turn_is_long(case: str) -> None:
    """The best of three: others on the machine take caches and cores."""
    found = [child(case)]
    while min(one["longest"] for one in found) > LONGEST_MS and len(found) < 3:
        found.append(child(case))
    print(page(found))
    assert min(one["longest"] for one in found) <= LONGEST_MS


def test_no_turn_has_more_than_512_blocks_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of 1,024 took 6 to 12 ms. Clients split their stores. For a quota that was lowered no more go, either."""
    daemon = Daemon(4 * GIB)
    worker = daemon.session(m.Role.WORKER)
    daemon.fill(worker)
    (namespace,) = worker.namespaces.values()
    counters, turn, of_turns = namespace.counters, daemon.turn, list[tuple[int, int]]()

    def counted(call: Callable[[], Any]) -> Any:
        evicted, stored = counters.evicted_blocks, counters.stored_blocks
        result = turn(call)
        of_turns.append((counters.evicted_blocks - evicted, counters.stored_blocks - stored))
        return result

    monkeypatch.setattr(daemon, "turn", counted)
    daemon.store(worker, daemon.keys(2048))
    assert [max(of_turn) for of_turn in zip(*of_turns, strict=True)] == [512, 512]
    daemon.cache.quotas[namespace.fingerprint] = GIB
    of_turns.clear()
    daemon.store(worker, daemon.keys(8))
    assert [max(of_turn) for of_turn in zip(*of_turns, strict=True)] == [512, 0]
