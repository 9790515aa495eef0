"""A process that computes on GPU 0 as decoding does: how long its steps take while others use the GPU.

``python -m tests.bench.gpu.steps`` says "ready", goes on until its input ends, and prints what ``Steps.end`` returns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

from kvoffd_client.session import Closing
from tests.bench.gpu.driver import compute_load

END_S = 20.0


class Steps(Closing):
    """Runs the process; its steps from now to ``end`` count."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.bench.gpu.steps"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        said = self._process.stdout.readline()
        assert said == "ready\n", f"the steps did not begin: {said!r}"

    def end(self) -> dict[str, Any]:
        """Number of steps, and milliseconds of the median, of the slowest in a hundred and of the slowest."""
        out, _ = self._process.communicate(timeout=END_S)
        found: dict[str, Any] = json.loads(out)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait(END_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def main() -> None:
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    with compute_load(0) as step:
        print("ready", flush=True)
        threading.Thread(target=wait, daemon=True).start()
        took = []
        while not ended.is_set() or not took:
            began = time.perf_counter()
            step()
            took.append(1000 * (time.perf_counter() - began))
    p50, p99 = np.percentile(took, [50, 99]).tolist()
    print(json.dumps({"steps": len(took), "p50_ms": p50, "p99_ms": p99, "most_ms": max(took)}))


if __name__ == "__main__":
    main()
