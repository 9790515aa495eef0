"""The cache core: blocks, namespaces, leases, eviction. Pure: no I/O, no threads, no clock of its own."""

from __future__ import annotations

from kvoffd.cache.block import Block, BlockState, Shard
from kvoffd.cache.cache import BlockCache
from kvoffd.cache.invariants import PoolUsage
from kvoffd.cache.lease import Lease
from kvoffd.cache.listener import CacheListener
from kvoffd.cache.lookup import LookupAnswer
from kvoffd.cache.namespace import Counters, Namespace
from kvoffd.cache.policies import POLICY_NAMES, EvictionPolicy, make_policy
from kvoffd.cache.ticket import LoadTicket, StoreTicket

__all__ = [
    "POLICY_NAMES",
    "Block",
    "BlockCache",
    "BlockState",
    "CacheListener",
    "Counters",
    "EvictionPolicy",
    "Lease",
    "LoadTicket",
    "LookupAnswer",
    "Namespace",
    "PoolUsage",
    "Shard",
    "StoreTicket",
    "make_policy",
]
