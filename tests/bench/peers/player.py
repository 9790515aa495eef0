"""One side's client process: does what the comparison has it do, a JSON line in and one out. Standard library only.

The comparison never measures time itself: each side's client runs in a process and environment of its own, reads its
own clock around calls of its own library, and checks what came of them. Both have these methods:

* ``open(layers, blocks, page_bytes)``: connect and register memory, K and V of 16 tokens in a page.
* ``fill(tokens, keys)``: store one prompt; ``lookups(tokens, keys, hit, samples)``: the seconds of lookups of it, or of
  new ones. LMCache is asked with the tokens, kvoffd with the keys.
* ``warm(order, jobs)``: store so many prompts from the blocks ``order``, and drop them.
* ``verify(blocks)``: store and load once, and compare every byte.
* ``copies(order)``: store a new prompt from the blocks ``order``, and load it into them in reverse.
* ``facts()``: versions of this side; ``close()``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

BLOCK_TOKENS = 16


def measured(server_pid: int, work: Callable[[], None]) -> dict[str, float]:
    """The seconds that ``work`` took, and the CPU seconds of this process and the server in that time."""
    clock = (~server_pid << 3) | 2  # its CPU clock: clock_getcpuclockid(3)
    cpu_s, begin = time.process_time() + time.clock_gettime(clock), time.perf_counter()
    work()
    end = time.perf_counter()
    return {"seconds": end - begin, "cpu_s": time.process_time() + time.clock_gettime(clock) - cpu_s}


def play(player: Any) -> None:
    """Answer until standard input ends. What fails ends the process, with its traceback."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries that print must not be taken for answers
    try:
        for line in sys.stdin:
            method, *arguments = json.loads(line)
            print(json.dumps(getattr(player, method)(*arguments)), file=answers, flush=True)
    finally:
        player.close()
