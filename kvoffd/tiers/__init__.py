"""Tiers: stores of blocks below the pool. Each implements ``Tier``; the pool itself is not a tier.

A disk is ``disk.py``: ``disk_io.py`` reads and writes blocks, and ``disk_clearing.py`` removes them, as for a clear. A
store that nodes share is ``shared.py``, over Redis (``redis_store.py``), S3 (``s3_store.py``) or another node's pool
(``peer_store.py``): that is read by a helper process (``peer_process.py``, ``peer_helper.py``). What it asks the store
is in ``answers.py`` (which blocks are there), ``fleet_clears.py`` and ``store_health.py``.
"""

DISK_NAME = "kvoffd.disk"
"""File of a disk tier in its directory."""
