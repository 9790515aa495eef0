"""Fields of the structures that C and Python share. Made by ``python -m tests.tools.structures``.

They are made from the C files, which say what they mean. That of a pointer is an address, and begins with ``at_``.
"""

from __future__ import annotations

import ctypes

VERSION = 0xF5D1160D
"""A library of another version is refused: it is made of other C files."""

SLOT_INDEX = (
    ("at_segments", ctypes.c_void_p),
    ("bits", ctypes.c_uint64),
    ("shift", ctypes.c_uint64),
    ("used", ctypes.c_uint64),
    ("nbytes", ctypes.c_uint64),
    ("seed", ctypes.c_uint64 * 2),
)
"""``struct slot_index`` of system/slot_index.h."""


class SlotIndex(ctypes.Structure):
    _fields_ = SLOT_INDEX


SLOTS = (
    ("pool_bytes", ctypes.c_uint64),
    ("region_bytes", ctypes.c_uint64),
    ("slots_per_region", ctypes.c_uint64),
    ("regions", ctypes.c_uint64),
    ("free_bytes", ctypes.c_uint64),
    ("slots_on_other_nodes", ctypes.c_uint64),
    ("at_slot_bytes", ctypes.c_void_p),
    ("at_in_use", ctypes.c_void_p),
    ("at_stack", ctypes.c_void_p),
    ("at_free", ctypes.c_void_p),
    ("at_node", ctypes.c_void_p),
    ("at_saved", ctypes.c_void_p),
)
"""``struct slots`` of pool/slots.h."""

STATE_COUNTS = (
    ("blocks", ctypes.c_uint64 * 6),
    ("bytes", ctypes.c_uint64 * 6),
)
"""``struct state_counts`` of cache/blocks.h."""


class StateCounts(ctypes.Structure):
    _fields_ = STATE_COUNTS


GROUP_BLOCKS = (
    ("by_state", StateCounts),
    ("at_of_namespace", ctypes.c_void_p),
    ("oldest", ctypes.c_uint32),
    ("newest", ctypes.c_uint32),
    ("retired", ctypes.c_uint64),
)
"""``struct group_blocks`` of cache/blocks.h."""

BLOCKS = (
    ("sequence", ctypes.c_uint64),
    ("pinned_blocks", ctypes.c_uint64),
    ("pinned_bytes", ctypes.c_uint64),
    ("leased_bytes", ctypes.c_uint64),
    ("pinned_dropped_bytes", ctypes.c_uint64),
    ("unverified_slots", ctypes.c_uint64),
    ("by_state", StateCounts),
    ("at_records", ctypes.c_void_p),
    ("at_state", ctypes.c_void_p),
    ("at_shard", ctypes.c_void_p),
    ("at_pins", ctypes.c_void_p),
    ("at_leases", ctypes.c_void_p),
    ("at_missing", ctypes.c_void_p),
    ("at_group", ctypes.c_void_p),
    ("at_next", ctypes.c_void_p),
    ("at_pages", ctypes.c_void_p),
    ("at_older", ctypes.c_void_p),
    ("at_newer", ctypes.c_void_p),
    ("at_misses", ctypes.c_void_p),
    ("at_prompt", ctypes.c_void_p),
    ("at_bytes", ctypes.c_void_p),
    ("at_numbers", ctypes.c_void_p),
    ("at_offsets", ctypes.c_void_p),
    ("at_counts", ctypes.c_void_p),
    ("index", SlotIndex),
    ("crc", ctypes.c_uint32 * 256 * 8),
)
"""``struct blocks`` of cache/blocks.h."""

RECOVERY = (
    ("pool_bytes", ctypes.c_uint64),
    ("region_bytes", ctypes.c_uint64),
    ("slots_per_region", ctypes.c_uint64),
    ("regions", ctypes.c_uint64),
    ("group_count", ctypes.c_uint64),
    ("at_slot_bytes", ctypes.c_void_p),
    ("at_groups", ctypes.c_void_p),
    ("at_blocks", ctypes.c_void_p),
    ("at_heads", ctypes.c_void_p),
    ("at_sequences", ctypes.c_void_p),
    ("at_discarded", ctypes.c_void_p),
    ("at_bad", ctypes.c_void_p),
    ("at_used", ctypes.c_void_p),
    ("heads_found", ctypes.c_uint64),
    ("discarded_found", ctypes.c_uint64),
    ("bad_found", ctypes.c_uint64),
    ("used_found", ctypes.c_uint64),
    ("next_number", ctypes.c_uint64),
    ("reset_found", ctypes.c_uint64),
    ("unwritten_found", ctypes.c_uint64),
    ("incomplete_found", ctypes.c_uint64),
)
"""``struct recovery`` of cache/recover.c."""

KNOWN = (
    ("lifetime", ctypes.c_uint64),
    ("now", ctypes.c_uint64),
    ("requests", ctypes.c_uint64),
    ("known_keys", ctypes.c_uint64),
    ("blocks", ctypes.c_uint64),
    ("spans", ctypes.c_uint64),
    ("known_bytes", ctypes.c_uint64),
    ("nbytes", ctypes.c_uint64),
    ("as_lru", ctypes.c_uint64),
    ("tier_lifetime", ctypes.c_uint64),
    ("lowest", ctypes.c_double),
)
"""``struct known`` of cache/learned.c."""

COUNTS = (
    ("returned", ctypes.c_double * 17 * 77),
    ("forgotten", ctypes.c_double * 17 * 77),
    ("accessed", ctypes.c_double * 77),
    ("hazard", ctypes.c_double * 17 * 77),
    ("score", ctypes.c_double * 17 * 77),
    ("edges", ctypes.c_double * 17),
    ("cell_bytes", ctypes.c_uint64 * 1309),
)
"""``struct counts`` of cache/learned.c."""

ASKERS = (
    ("at_of", ctypes.c_void_p),
    ("at_recent", ctypes.c_void_p),
    ("at_before", ctypes.c_void_p),
    ("bits", ctypes.c_uint64),
    ("used", ctypes.c_uint64),
    ("most", ctypes.c_uint64),
)
"""``struct askers`` of cache/askers.c."""

COMPUTING = (
    ("at_lacked", ctypes.c_void_p),
    ("bits", ctypes.c_uint64),
    ("seed", ctypes.c_uint64 * 2),
)
"""``struct computing`` of cache/computing.c."""

DISK_REGION = (
    ("at_keys", ctypes.c_void_p),
    ("at_key_bytes", ctypes.c_void_p),
    ("at_group", ctypes.c_void_p),
)
"""``struct disk_region`` of tiers/disk_index.c."""

DISK_INDEX = (
    ("index", SlotIndex),
    ("at_regions", ctypes.c_void_p),
    ("slots_per_region", ctypes.c_uint64),
)
"""``struct disk_index`` of tiers/disk_index.c."""

GPU_COPYING = (
    ("at_copy", ctypes.c_void_p),
    ("at_rows", ctypes.c_void_p),
    ("at_batch", ctypes.c_void_p),
    ("at_record", ctypes.c_void_p),
    ("at_wait", ctypes.c_void_p),
    ("at_sync", ctypes.c_void_p),
    ("at_attributes", ctypes.c_void_p),
    ("has_fail_index", ctypes.c_uint64),
    ("stream", ctypes.c_void_p),
    ("at_event", ctypes.c_void_p),
    ("in_flight", ctypes.c_uint64),
    ("at_pinned", ctypes.c_void_p),
    ("chunk_bytes", ctypes.c_uint64),
    ("first_chunk", ctypes.c_uint64),
    ("from_pool", ctypes.c_uint64),
    ("step_bytes", ctypes.c_uint64),
    ("step_pieces", ctypes.c_uint64),
    ("rows_bytes", ctypes.c_uint64),
    ("fewest_rows", ctypes.c_uint64),
    ("most_rows", ctypes.c_uint64),
    ("at_to", ctypes.c_void_p),
    ("at_from", ctypes.c_void_p),
    ("at_sizes", ctypes.c_void_p),
    ("at_destination", ctypes.c_void_p),
    ("at_source", ctypes.c_void_p),
    ("at_size", ctypes.c_void_p),
    ("at_allocation", ctypes.c_void_p),
    ("pieces", ctypes.c_uint64),
    ("allocations", ctypes.c_uint64),
    ("piece", ctypes.c_uint64),
    ("piece_done", ctypes.c_uint64),
    ("next_event", ctypes.c_uint64),
    ("steps", ctypes.c_uint64),
    ("refusals", ctypes.c_uint64),
    ("refused", ctypes.c_uint64 * 3),
    ("refused_status", ctypes.c_uint64 * 3),
    ("failed", ctypes.c_uint64),
    ("status", ctypes.c_uint64),
    ("lost", ctypes.c_uint64),
)
"""``struct gpu_copying`` of transfer/cuda/gpu_copy.c."""
