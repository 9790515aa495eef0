"""What operators see: logs, metrics, latencies and rates."""
