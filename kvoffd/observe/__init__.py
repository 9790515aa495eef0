"""Observability: logs, metrics, latencies and rates."""
