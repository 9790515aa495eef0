"""The cache core: blocks, namespaces, leases, eviction. Pure: no I/O, no threads, no clock of its own."""

DEFAULT_POLICY = "learned"
POLICY_NAMES = (DEFAULT_POLICY, "lru", "arc")
"""Defined here because the command line needs them without importing numpy."""
