"""An engine's day in two acts, for daemons in other places: `traffic.py store|find DIRECTORY` prints the blocks it had.

`store` stores 16 blocks and loads them back; `find` asks for the same ones and compares their bytes.
"""

from __future__ import annotations

import sys

from kvoffd_client.testing import FakeEngine

COUNT = 16


def main(act: str, directory: str) -> int:
    keys = [bytes([number]) * 32 for number in range(COUNT)]
    blocks, others = list(range(COUNT)), list(range(COUNT, 2 * COUNT))
    with FakeEngine(directory, blocks=2 * COUNT) as engine:
        engine.fill(blocks, seed=7)
        if act == "store":
            result = engine.store(keys, blocks)
            assert result.ok, result
        found = engine.lookup(keys)
        if found:
            result = engine.load(keys[:found], others[:found])
            assert result.ok, result
            assert engine.checksums(others[:found]) == engine.checksums(blocks[:found])
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
