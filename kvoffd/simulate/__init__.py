"""Traces of requests, replayed through the daemon's cache."""
