"""The table of when a prompt is looked up again."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from kvoffd_client.vllm.next_lookup import (
    FAILED_PAUSE_S,
    MAX_RETRY_PAUSE_S,
    MIN_RETRY_PAUSE_S,
    REFRESH_KEYS,
    REFRESH_S,
    RENEW_BEFORE_S,
    RETRY_SHARE,
    LookupFacts,
    next_lookup_s,
    retry_pause_s,
)

STALE_S, ASK_S, AGE_S = 30.0, 0.02, 0.25
FAILED: dict[str, Any] = {"failed_s": FAILED_PAUSE_S / 4}


@pytest.mark.parametrize(
    ("facts", "until_s"),
    [
        ({"is_in_flight": True, "has_answer": False}, inf),
        ({"is_in_flight": True, "is_outdated": True}, inf),
        (FAILED | {"has_answer": False}, FAILED_PAUSE_S * 3 / 4),
        (FAILED | {"is_outdated": True}, FAILED_PAUSE_S * 3 / 4),
        ({"failed_s": FAILED_PAUSE_S, "has_answer": False}, 0.0),
        ({"has_answer": False, "may_wait": False}, 0.0),
        ({"is_outdated": True, "may_wait": False}, inf),
        ({"is_outdated": True, "awaits_tier": True, "has_all": True}, 0.0),
        ({"has_all": True}, STALE_S - RENEW_BEFORE_S),
        ({"awaits_tier": True}, ASK_S),
        ({}, REFRESH_S - AGE_S),
        ({"chunks": REFRESH_KEYS}, REFRESH_S - AGE_S),
        ({"chunks": 3 * REFRESH_KEYS}, 3 * REFRESH_S - AGE_S),
    ],
)
def test_when_a_prompt_is_looked_up_again(facts: dict[str, Any], until_s: float) -> None:
    known = LookupFacts(until_stale_s=STALE_S, until_ask_s=ASK_S, answered_s=AGE_S)
    assert next_lookup_s(known._replace(**facts)) == until_s


@pytest.mark.parametrize(
    ("waited_s", "expected_s", "pause_s"),
    [
        (0.0, 0.0, MIN_RETRY_PAUSE_S),
        (0.04, 0.0, 0.01),
        (1.0, 0.0, MAX_RETRY_PAUSE_S),
        (0.0, 0.04, 0.02),
        (0.0, 10.0, MAX_RETRY_PAUSE_S),
        (10.0, 0.001, MIN_RETRY_PAUSE_S),
        (100.0, 10.0, 100.0 * RETRY_SHARE),
    ],
)
def test_the_pause_before_blocks_that_come_up_are_looked_up_again(
    waited_s: float, expected_s: float, pause_s: float
) -> None:
    assert retry_pause_s(waited_s, expected_s) == pytest.approx(pause_s)
