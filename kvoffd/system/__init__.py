"""What talks to Linux: mappings, NUMA, systemd, directories, limits; and queues and threads that several packages need.

Knows nothing of blocks.
"""
