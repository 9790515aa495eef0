"""No two processes of tests draw the same port."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.kit.ports import BLOCK, free_ports

DRAWN = 20
DRAW = f"""
from tests.kit.ports import free_ports
print(*(port for _ in range({DRAWN}) for port in free_ports(2)), flush=True)
input()
"""


def test_ports_of_processes_differ() -> None:
    """Also while nobody has bound them yet."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", DRAW]
    others = [
        subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    drawn = [set(free_ports(BLOCK // 2))]
    for other in others:
        assert other.stdout is not None
        drawn.append(set(map(int, other.stdout.readline().split())))
    for other in others:
        other.communicate("\n")
    assert all(drawn)
    assert len(set.union(*drawn)) == sum(map(len, drawn))
