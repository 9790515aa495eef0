"""Tiers: where blocks live below the pool. Each is one implementation of ``Tier``; the pool itself is none.

A disk is ``disk.py``: a block's way down is ``disk_writes.py``, its way up ``disk_reads.py``, and what happens when
blocks go, as by a clear, ``disk_clearing.py``. A store that nodes share is ``shared.py``.
"""
