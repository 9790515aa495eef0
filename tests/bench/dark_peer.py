"""What lookups take while a peer is dark, beside a daemon without peers: ``python -m tests.bench.dark_peer``.

They are made in turn, of keys that are nowhere. The peer's daemon and helper are stopped.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory

from tests.kit.peer_node import DEADLINE_S, Node
from tests.kit.ports import free_port
from tests.kit.waiting import wait_until
from tests.kit.wire import keys

LOOKUPS, TURNS, KEYS = 1000, 8, 64


def lookup_s(node: Node) -> float:
    """Seconds that a lookup takes."""
    began = time.perf_counter()
    node.engine.lookup(keys(*range(10**6, 10**6 + KEYS)))
    return time.perf_counter() - began


def main() -> None:
    """Print the 99th percentiles of each turn."""
    with TemporaryDirectory() as place:
        (secret := Path(place) / "secret").write_text("a secret of a benchmark\n")
        peer = f"127.0.0.1:{free_port()}"
        with Node(secret, peer) as stopped, Node(secret, "", peer) as dark, Node(secret, "") as alone:
            dark.wait_up()
            pids = stopped.wait_helper(), stopped.daemon.pid
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            try:
                wait_until(lambda: dark.engine.lookup(keys(1)) == 0 and not dark.peer.up, DEADLINE_S)
                print("| turn | p99 without peers, ms | with one that is dark, ms | ratio |\n|---|---|---|---|")
                for turn in range(1, TURNS + 1):
                    taken = [(lookup_s(alone), lookup_s(dark)) for _ in range(LOOKUPS)]
                    without, beside = (1000 * quantiles(each, n=100)[98] for each in zip(*taken, strict=True))
                    print(f"| {turn} | {without:.2f} | {beside:.2f} | {beside / without:.2f} |", flush=True)
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    main()
