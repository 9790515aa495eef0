"""What the index of the blocks takes of memory now: a sum over the structures that it is made of.

For ``stats``: its time grows with the namespaces. What blocks count towards ``index_size``, which must be known before
they are there, the constants of ``namespace`` say: more than they take.
"""

from __future__ import annotations

import sys
from functools import cache

from kvoffd.cache.blocks import Blocks
from kvoffd.cache.namespace import Block, Namespace
from kvoffd.cache.policies import EvictionPolicy

PLACES_BYTES = 8 + 1
"""Of a slot, the place that names its block (``holders``) and the one that says that it is taken (``pool/slots``)."""


def index_memory(blocks: Blocks, policy: EvictionPolicy) -> int:
    """Bytes. Of what the policy counts as its own the part for keys with blocks is in it."""
    nbytes = PLACES_BYTES * len(blocks.holders) + blocks.quotas.nbytes
    for namespace in blocks.namespaces.values():
        nbytes += namespace.held_blocks * _nbytes_of_block(namespace.key_bytes, namespace.world_size) + sum(
            index.nbytes for index in namespace.index
        )
    return nbytes + policy.nbytes * len(policy) // max(1, len(policy) + policy.ghosts)


@cache
def _nbytes_of_block(key_bytes: int, world_size: int) -> int:
    """Of a block's own objects, to each of which Python gives a multiple of 16 bytes."""
    block = Block(Namespace(b"", "", world_size, key_bytes, [], ""), 0, bytes(key_bytes))
    return sum(-(-sys.getsizeof(one) // 16) * 16 for one in (block, block.key, block.words, 1 << 20))
