"""Hands GPU memory of this process to the daemon, by the driver's own handles. No torch."""
