"""A worker with GPU memory in a process of its own, over a stub driver or a real one."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvoffd_client import SchedulerClient
from kvoffd_client.session import Closing
from kvoffd_proto.messages import GroupKeys

MAIN = Path(__file__).with_name("exporter_main.py")


class Exporter(Closing):
    """Starts it; ``ask`` has it do something.

    Args:
        directory: the daemon's.
        library: libcuda's path; "" for the system's.
        kind: "ordinary", "apart" with an allocation for each layer, or "chunks" of CUDA's virtual memory API.
        environ: of the process.
        under: a command that runs it, as ``unshare``; killed, it must take the process along.
    """

    def __init__(
        self,
        directory: Path,
        library: str,
        kind: str,
        *,
        layers: int = 3,
        blocks: int = 8,
        page_bytes: int = 65536,
        environ: Mapping[str, str] | None = None,
        under: Sequence[str] = (),
    ) -> None:
        self._jobs = itertools.count(1)
        arguments = [str(directory), library, kind, str(layers), str(blocks), str(page_bytes)]
        self.process = subprocess.Popen(
            [*under, sys.executable, str(MAIN), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=None if environ is None else dict(environ),
            text=True,
        )

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.send(command, **arguments)
        return self.answer()

    def send(self, command: str, **arguments: Any) -> None:
        """Have it do something and do not wait for its answer."""
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What it answers to what was sent first."""
        line = self.process.stdout.readline()
        assert line, f"the exporter ended with {self.process.wait(10)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def store(self, keys: bytes, *blocks: int, **more: Any) -> dict[str, Any]:
        """Store blocks under keys of 32 bytes; how it ended."""
        return self.ask("store", job_id=next(self._jobs), keys=keys.hex(), blocks=blocks, **more)

    def load(self, scheduler: SchedulerClient, keys: bytes, *blocks: int) -> dict[str, Any]:
        """Load keys, all of which are there; how it ended."""
        self.begin_load("load", scheduler, keys, *blocks)
        return self.answer()

    def begin_load(self, command: str, scheduler: SchedulerClient, keys: bytes, *blocks: int, **more: Any) -> None:
        """Have it load keys, and do not wait for its answer."""
        found = scheduler.lookup([GroupKeys(0, keys)])
        assert found.wait(10)
        assert found.leading_ready() == len(keys) // 32
        job = {"job_id": next(self._jobs), "lease_id": found.lease_id, "keys": keys.hex(), "blocks": blocks}
        self.send(command, **job, **more)

    def pages(self) -> list[str]:
        """A digest of each block."""
        return list(self.ask("pages")["pages"])

    def fill(self, seed: int) -> list[str]:
        """Write all blocks; their digests."""
        return list(self.ask("fill", seed=seed)["pages"])

    def wait_ready(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Until its memory is registered."""
        answer = self.ask("ready", timeout_s=timeout_s)
        assert answer["ready"], answer["problem"]
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
