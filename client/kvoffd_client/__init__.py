"""Clients of kvoffd: connection, scheduler and worker clients, shared memory, a testing engine."""
