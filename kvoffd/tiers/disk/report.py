"""What an operator may ask of a disk tier beyond its figures as a tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvoffd.tiers.disk.index import AGE_STEP_S, DiskIndex

AGE_BOUNDS_S: tuple[int, ...] = (3600, 6 * 3600, 86400, 3 * 86400, 7 * 86400, 30 * 86400)


class ShapeReport(NamedTuple):
    """The regions whose slots have one size."""

    slot_bytes: int
    regions: int
    slots: int
    used_slots: int


class DiskReport(NamedTuple):
    """One disk tier, as it is now."""

    path: str
    direct: bool
    """Whether it goes past the page cache."""
    region_bytes: int
    regions: int
    free_regions: int
    shapes: Sequence[ShapeReport]
    put_aside_bytes: int
    """Slots that could not be written, not used again until the tier is opened anew."""
    created_at: float
    """The file's birth, in seconds since 1970."""
    lifetime_written_bytes: int
    """Since the file's birth, records included: as of the last minute, should the machine fail."""
    lifetime_written_blocks: int
    oldest_age_s: float
    """Time since the oldest block was written, to the hour; 0 without blocks."""
    ages: Sequence[int]
    """Blocks written up to so many seconds ago: one number for each of AGE_BOUNDS_S, not cumulative, and the rest."""
    hangs: bool
    """A call does not come back; nothing is taken until it does."""
    draining: bool
    open_seconds: float
    """What opening took, making the file or reading its index included."""
    found_blocks: int
    """Blocks that an earlier daemon had left."""


def shapes_of(book: DiskIndex) -> list[ShapeReport]:
    """By slot size."""
    found: dict[int, list[int]] = {}
    for region in book.regions:
        if region.shape is not None:
            sums = found.setdefault(region.shape.slot_bytes, [0, 0, 0])
            for index, value in enumerate((1, region.slots, len(region.entries))):
                sums[index] += value
    return [ShapeReport(slot_bytes, *sums) for slot_bytes, sums in sorted(found.items())]


def ages_of(book: DiskIndex, now: float) -> list[int]:
    """See ``DiskReport.ages``."""
    ages = [0] * (len(AGE_BOUNDS_S) + 1)
    for step, count in book.ages.items():
        age_s = now - step * AGE_STEP_S - AGE_STEP_S // 2
        ages[next((index for index, bound in enumerate(AGE_BOUNDS_S) if age_s <= bound), len(AGE_BOUNDS_S))] += count
    return ages


def oldest_age_s(book: DiskIndex, now: float) -> float:
    """See ``DiskReport.oldest_age_s``."""
    oldest = book.oldest()
    return 0.0 if oldest is None else max(0.0, now - oldest * AGE_STEP_S)
