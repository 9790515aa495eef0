"""The result of a comparison: rows, ratios with their spread, and text and JSON of it all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tests.bench.report_file import markdown_table, number


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        case: what was done.
        unit: of every value.
        kvoffd: its value in every round.
        lmcache: its value in the same rounds.
        floor: what the machine does at best in the same rounds, empty where there is no such thing.
        more_is_better: as for speeds.
    """

    case: str
    unit: str
    kvoffd: Sequence[float]
    lmcache: Sequence[float]
    floor: Sequence[float] = ()
    more_is_better: bool = False

    @property
    def ratios(self) -> list[float]:
        """How many times better kvoffd was, round by round; below 1 it was worse."""
        pairs = zip(self.kvoffd, self.lmcache, strict=True)
        return [own / other if self.more_is_better else other / own for own, other in pairs]

    def cells(self) -> list[str]:
        ratios = self.ratios
        return [
            self.case,
            self.unit,
            number(median(self.kvoffd)),
            number(median(self.lmcache)),
            spread(ratios),
            spread(self.floor) if self.floor else "",
        ]

    def to_object(self) -> dict[str, object]:
        """For JSON: medians, and every round."""
        return {
            "case": self.case,
            "unit": self.unit,
            "more_is_better": self.more_is_better,
            "kvoffd": median(self.kvoffd),
            "lmcache": median(self.lmcache),
            "ratio": median(self.ratios),
            "floor": median(self.floor) if self.floor else None,
            "rounds": {"kvoffd": list(self.kvoffd), "lmcache": list(self.lmcache), "floor": list(self.floor)},
        }


HEAD = ["case", "unit", "kvoffd", "LMCache", "times better (min to max)", "floor (min to max)"]


def table(rows: Sequence[Row]) -> str:
    return markdown_table([HEAD, *(row.cells() for row in rows)])


def spread(values: Sequence[float]) -> str:
    """Median, least and most."""
    return f"{number(median(values))} ({number(min(values))} to {number(max(values))})"
