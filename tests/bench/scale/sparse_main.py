"""``kvoffd`` over a pool that is larger than this machine's memory, since no page of it is ever touched.

Left out are what reads or writes the pool without being asked: touching at the start, and reading an earlier daemon's
slots for their checksums. Whoever starts it must not load blocks.
"""

from __future__ import annotations

import sys

from kvoffd.cli import main
from kvoffd.pool import pool
from kvoffd.server.scrubber import Scrubber

if __name__ == "__main__":
    pool.check_fits = lambda wanted_bytes, limit: None
    pool.Pool.touch = lambda *arguments: 0  # type: ignore[method-assign]
    Scrubber.has_work = property(lambda scrubber: False)  # type: ignore[method-assign, assignment]
    sys.exit(main())
