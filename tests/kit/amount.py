"""How much a test tries: a change waits for CI, a night has hours."""

from __future__ import annotations

import os

TIMES = int(os.environ.get("TESTS_TIMES", "1"))
"""So many times as many seeds and examples as in CI; ``make nightly`` sets it."""
