"""Where a figure is with 95 %."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

DRAWS = 2000

Floats = npt.NDArray[np.float64]


def interval(measured: Floats, figure: Callable[[Floats], float]) -> tuple[float, float]:
    """The ends of the interval in which a figure of what was measured is with 95 % (bootstrap, by rows)."""
    rng = np.random.default_rng(1)
    drawn = [figure(rng.choice(measured, len(measured))) for _ in range(DRAWS)]
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(low), float(high)


def ratio_text(logs: Floats, figure: Callable[[Floats], float]) -> str:
    """A ratio with its interval, by a figure of its logarithms."""
    middle, low, high = np.exp([figure(logs), *interval(logs, figure)])
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"
