"""Sockets, sessions, jobs, requests and publishing. Decisions about blocks are in ``cache`` and ``tiering``."""
