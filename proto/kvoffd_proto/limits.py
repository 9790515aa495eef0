"""Limits of the wire that settings are held to. Imports nothing heavy: the daemon's command line reads it first."""

MAX_JOBS = 2048
"""``max_jobs_per_message`` is never more."""
