"""What talks to Linux: mappings, NUMA, systemd, directories, limits. Knows nothing of blocks."""
