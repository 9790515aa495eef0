"""Measures a running daemon: every result beside a floor, what the machine can do at best, measured in the same run.

Here are the sizes with which the benches measure unless they are told otherwise.
"""

from __future__ import annotations

KIB, MIB = 2**10, 2**20

LOOKUP_KEY_COUNTS = (64, 1_000, 10_000)
LOOKUP_ENGINES = 8
"""Processes that store and load while lookups are measured."""
LOOKUP_CLIENTS = 4
"""Processes that look keys up at the same time."""

HOST_PIECES = (16 * KIB, 64 * KIB, 256 * KIB, MIB)
HOST_JOB_BYTES = 64 * MIB
GPU_PIECES = (16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, MIB)
LANE_PIECES = (8 * KIB, 32 * KIB, 64 * KIB, 256 * KIB)
GPU_JOB_BYTES = 128 * MIB
STREAM_JOBS = 6
"""Jobs of a stream of stores or of loads, for each copy thread."""
POOL_JOBS = STREAM_JOBS + STREAM_JOBS // 2
"""Jobs whose bytes the pool must hold: a stream that is loaded, and half of one that is stored meanwhile."""

PAGE_BYTES = 4 * KIB
"""Of the blocks of the benches lookup and jobs."""
LOADED_KEYS = 1000
"""Keys of a lookup while engines store and load."""
ENGINE_KEYS = 8
"""Keys in each job of an engine that stores and loads."""
COPIED_BLOCK_BYTES = MIB
"""Bytes of each of them."""
KEPT_TURNS = 2
"""Stores after which such an engine drops what it stored."""
IN_FLIGHT_JOBS = 1000
"""Small stores after which the bench jobs drops what it stored."""
NEW_PROMPT_TOKENS = (64, 1024)
BLOCK_TOKENS = 32
"""Tokens of a block of the engines that the bench starts."""
DECODE_SEQUENCES, DECODE_RANKS = 256, 8
JOBS_STEP_S = 0.03
"""How long a step of the engine takes whose decoding is played."""
BLOCK_STEPS = 16
"""A sequence fills a block in so many steps."""

_LOAD_BYTES = LOOKUP_ENGINES * KEPT_TURNS * ENGINE_KEYS * COPIED_BLOCK_BYTES
POOL_BYTES = {
    "lookup": (max(LOOKUP_KEY_COUNTS) + LOADED_KEYS) * PAGE_BYTES + _LOAD_BYTES,
    "copy": POOL_JOBS * HOST_JOB_BYTES,
    "copy --memory cuda": POOL_JOBS * GPU_JOB_BYTES,
    "jobs": 2 * IN_FLIGHT_JOBS * PAGE_BYTES + _LOAD_BYTES,
}
"""Most bytes of the pool that a bench has at a time."""
