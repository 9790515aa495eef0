"""The disk tier: blocks in a preallocated file, read and written past the page cache."""

from kvoffd.tiers.disk.calls import DiskCalls, view_of
from kvoffd.tiers.disk.errors import DiskError, OpeningStopped
from kvoffd.tiers.disk.options import DiskOptions
from kvoffd.tiers.disk.report import AGE_BOUNDS_S, DiskReport, ShapeReport
from kvoffd.tiers.disk.tier import DiskTier
from kvoffd.tiers.disk.workers import StepWorkers

__all__ = [
    "AGE_BOUNDS_S",
    "DiskCalls",
    "DiskError",
    "DiskOptions",
    "DiskReport",
    "DiskTier",
    "OpeningStopped",
    "ShapeReport",
    "StepWorkers",
    "view_of",
]
