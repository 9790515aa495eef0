"""A client process of one side, as the comparison sees it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from typing import Any

from kvoffd_client.session import Closing
from tests.bench.peers.player import Copy, Geometry, Prompt
from tests.bench.peers.servers import Server
from tests.bench.report_file import ROOT

CLOSE_S = 20.0


class ClientFailed(Exception):
    """A client could not do what it was told; the message is its own."""


class Client(Closing):
    """Starts a player and speaks with it. ``tell`` and ``hear`` are apart so that several can work at once."""

    def __init__(self, server: Server) -> None:
        self.name = server.name
        self._process = subprocess.Popen(
            server.player(),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=server.player_environment,
        )

    def tell(self, what: str, **arguments: object) -> None:
        """Have it begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """Wait for its answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ClientFailed(f"{self.name}'s client ended; its error is above.")
        told = json.loads(line)
        if "error" in told:
            raise ClientFailed(f"{self.name}'s client: {told['error']}")
        return told["answer"]

    def ask(self, what: str, **arguments: object) -> Any:
        """Tell and hear."""
        self.tell(what, **arguments)
        return self.hear()

    def open(self, geometry: Geometry) -> None:
        """See Player."""
        self.ask("open", geometry=asdict(geometry))

    def lookups(self, prompt: Prompt, hit: bool, samples: int) -> list[float]:
        """Seconds of ``samples`` lookups, one after the other."""
        seconds: list[float] = self.ask("lookups", prompt=asdict(prompt), hit=hit, samples=samples)
        return seconds

    def copies(self, order: list[int]) -> tuple[Copy, Copy]:
        """See Player."""
        stored, loaded = self.ask("copies", order=order)
        return Copy(**stored), Copy(**loaded)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(CLOSE_S)
        self._process.stdout.close()
