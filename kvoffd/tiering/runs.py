"""Which of the keys that a lookup asked for are worth bringing up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvoffd_proto.messages import PENDING, READY, GroupSpec


def prefix_run(states: bytes, keys: Sequence[bytes], available: Callable[[bytes], bool]) -> list[int]:
    """Places of the keys that continue the run of ready ones at the start: those not ready, up to the first gap."""
    places: list[int] = []
    start = len(states) - len(states.lstrip(bytes([READY])))
    for place in range(start, len(keys)):
        if states[place] == READY:
            continue
        if not available(keys[place]):
            break
        places.append(place)
    return places


def run_end(states: bytes | bytearray) -> int:
    """Keys in the unbroken run from the start that are ready, or will be."""
    return len(states) - len(states.lstrip(bytes([READY, PENDING])))


def window_run(
    states: bytes, keys: Sequence[bytes], spec: GroupSpec, limit: int, available: Callable[[bytes], bool]
) -> list[int]:
    """Places of the keys of the last whole window that ends within the first ``limit`` keys: those not ready.

    An engine with a sliding window needs its last blocks only, and takes the last place where all of them are there;
    one with a recurrent state needs one.
    """
    needed = max(1, -(-spec.window_tokens // spec.tokens_per_block)) if spec.tokens_per_block else len(keys)
    run = 0
    for place in range(min(limit, len(keys)) - 1, -1, -1):
        run = run + 1 if states[place] == READY or available(keys[place]) else 0
        if run == needed or (run and not place):
            return [at for at in range(place, place + run) if states[at] != READY]
    return []
