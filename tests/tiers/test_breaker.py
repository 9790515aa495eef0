"""The circuit breaker of a store."""

from __future__ import annotations

import pytest

from kvoffd.tiers.breaker import PAUSE_S, Breaker
from kvoffd.tiers.redis_connection import CONNECT_S
from kvoffd.tiers.store_health import PROBE_S
from tests.kit.clock import Clock

TICK_S = 0.25


def test_the_breaker_opens_after_three_failures_and_probes() -> None:
    clock = Clock()
    breaker = Breaker(clock, jitter=lambda: 0.5)
    assert breaker.open
    assert breaker.probe_at <= clock.now
    breaker.probed(True)
    for _ in range(2):
        breaker.failed("read")
    breaker.succeeded("read")
    for _ in range(2):
        breaker.failed("read")
        breaker.failed("ask")
        breaker.succeeded("ask")
        assert not breaker.open
    breaker.failed("read")
    assert breaker.open
    assert breaker.opened == 1
    for _ in range(4):
        assert breaker.probe_at - clock.now == pytest.approx(PAUSE_S)
        clock.now = breaker.probe_at
        breaker.failed("read")
        assert breaker.probe_at == clock.now, "only a probe's failure puts the next one off"
        breaker.probed(False)
    assert 1.25 * PAUSE_S + max(CONNECT_S, PROBE_S) + TICK_S < 5.0, "a server that is back is used within 5 s"
    breaker.probed(True)
    breaker.succeeded("ask")
    breaker.failed("read")
    assert breaker.open, "one more of what opened it"
    breaker.probed(True)
    breaker.succeeded("read")
    breaker.failed("read")
    assert not breaker.open
    breaker.failed("ask", at_once=True)
    assert breaker.open
