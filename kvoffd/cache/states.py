"""States of blocks and of shards in the arrays of ``BlockTable``; blocks.h has the same numbers."""

from __future__ import annotations

from kvoffd_proto import messages

FREE, WRITING, READY = int(messages.ABSENT), int(messages.WRITING), int(messages.READY)
"""States of a block, as lookups report them: FREE means no block; a WRITING block lacks a shard."""
DROPPED = 5
"""State of a block that left the index while a pin or a running write still needs its slots."""
WITH_SLOTS = WRITING, READY, DROPPED
NOT_FIRST = 6
"""State of a slot that is not the first of its block."""
UNWRITTEN, WRITING_SHARD, WRITTEN = 0, 1, 2
"""States of a shard: no store has begun it; a store is writing it; it is complete."""
SHARD_STATE, UNVERIFIED, CORRUPT = 3, 4, 8
"""Bits of ``BlockTable.shard``: its state; its bytes were not compared yet, or have no checksum yet; they are wrong."""
NO_BLOCK = 2**32 - 1
"""Number instead of a block's where there is none."""
