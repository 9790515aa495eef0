"""Calls to Linux (mappings, files, NUMA, systemd, limits), and shared queues and threads. Nothing here knows blocks."""
