"""The cache core: blocks, namespaces, leases, eviction. Pure: no I/O, no threads, no clock of its own."""
