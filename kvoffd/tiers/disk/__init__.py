"""The disk tier: blocks in a preallocated file, read and written past the page cache."""

from kvoffd.tiers.disk.disk_tier import DiskOptions, DiskTier
from kvoffd.tiers.disk.file import DiskError, OpeningStopped
from kvoffd.tiers.disk.opening import open_disk_tier
from kvoffd.tiers.disk.workers import StepWorkers

__all__ = ["DiskError", "DiskOptions", "DiskTier", "OpeningStopped", "StepWorkers", "open_disk_tier"]
