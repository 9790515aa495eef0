"""Sockets, sessions, jobs, requests and publishing. What decides about blocks lies in ``cache`` and ``tiering``."""
