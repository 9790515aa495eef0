"""A worker with GPU memory in a process of its own, over a stub driver or a real one."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvoffd_client import SchedulerClient
from kvoffd_client.session import Closing
from kvoffd_proto.messages import GroupKeys

from .exporter_main import run_forked
from .forked import Forked, fork_server

MAIN = Path(__file__).with_name("exporter_main.py")
_SERVER = fork_server(run_forked.__module__)


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
        environ = dict(os.environ if environ is None else environ)
        (commands, write), (read, answers) = os.pipe(), os.pipe()
        self._commands, self._answers = os.fdopen(write, "w"), os.fdopen(read)
        self.process: subprocess.Popen[bytes] | Forked
        try:
            if library and not under:  # over a stub: a process that uses a real driver begins anew
                self.process = Forked(_SERVER, run_forked, arguments, environ, fds=(commands, answers))
            else:
                command = [*under, sys.executable, str(MAIN), *arguments]
                self.process = subprocess.Popen(command, stdin=commands, stdout=answers, env=environ)
        finally:
            os.close(commands)
            os.close(answers)

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.send(command, **arguments)
        return self.answer()

    def send(self, command: str, **arguments: Any) -> None:
        """Have it do something and do not wait for its answer."""
        self._commands.write(json.dumps([command, arguments]) + "\n")
        self._commands.flush()

    def answer(self) -> dict[str, Any]:
        """What it answers to what was sent first."""
        line = self._answers.readline()
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
        for stream in (self._commands, self._answers):
            with suppress(BrokenPipeError):
                stream.close()
