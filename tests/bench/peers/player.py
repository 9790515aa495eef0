"""One side's client process: does what the comparison tells it, one JSON line in and one out. Standard library only.

The comparison never measures time itself: each side's client runs in a process and environment of its own, reads its
own clock around calls of its own library, and says what it found.
"""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tests.bench.cpu_time import process_cpu_s

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Geometry:
    """The engine's KV cache: ``layers`` x ``blocks`` pages of ``page_bytes``, K and V of 16 tokens in one page."""

    layers: int
    blocks: int
    page_bytes: int


@dataclass(frozen=True)
class Prompt:
    """As many tokens as ``keys`` of the server's. LMCache is asked with the tokens, kvoffd with the keys."""

    tokens: int
    keys: int


@dataclass(frozen=True)
class Copy:
    """One measured store or load.

    Attributes:
        seconds: from the call to the client's knowledge that it is done.
        client_cpu_s: CPU seconds of the client's process in that time, all its threads.
        server_cpu_s: the same of the server's.
    """

    seconds: float
    client_cpu_s: float
    server_cpu_s: float


class Player(ABC):
    """One side's client. Every method waits until it is done and raises when the answer is not what it must be."""

    def __init__(self, server_pid: int) -> None:
        self._server_pid = server_pid

    @abstractmethod
    def open(self, geometry: Geometry) -> None:
        """Connect and register the engine's memory."""

    @abstractmethod
    def fill(self, prompt: Prompt) -> None:
        """Store one prompt for ``lookup(hit=True)``."""

    @abstractmethod
    def warm(self, order: list[int], jobs: int) -> None:
        """Store ``jobs`` prompts from the blocks ``order``, so that all but the whole pool is touched; drop them."""

    @abstractmethod
    def lookup(self, prompt: Prompt, hit: bool) -> float:
        """Seconds from the question for the filled prompt, or a new one, to the answer; its pins are let go after."""

    def lookups(self, prompt: Prompt, hit: bool, samples: int) -> list[float]:
        """Several, one after the other."""
        return [self.lookup(prompt, hit) for _ in range(samples)]

    @abstractmethod
    def copies(self, order: list[int]) -> tuple[Copy, Copy]:
        """Store a new prompt from the blocks ``order``, load it into them in reverse; then drop it from the server."""

    @abstractmethod
    def verify(self, blocks: int) -> None:
        """Store and load once and compare every byte."""

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Versions and settings of this side."""

    @abstractmethod
    def close(self) -> None:
        """End the session."""

    def measured(self, work: Callable[[], None]) -> Copy:
        server, client, begin = process_cpu_s(self._server_pid), time.process_time(), time.perf_counter()
        work()
        end = time.perf_counter()
        return Copy(end - begin, time.process_time() - client, process_cpu_s(self._server_pid) - server)


def play(player: Player) -> None:
    """Answer commands until standard input ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # libraries that print must not be taken for answers
    try:
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer = {"answer": _do(player, command.pop("do"), command)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        player.close()


def _do(player: Player, what: str, arguments: dict[str, Any]) -> object:
    if "prompt" in arguments:
        arguments["prompt"] = Prompt(**arguments["prompt"])
    match what:
        case "open":
            return player.open(Geometry(**arguments["geometry"]))
        case "lookups":
            return player.lookups(**arguments)
        case "copies":
            return [asdict(item) for item in player.copies(**arguments)]
        case "fill" | "warm" | "verify" | "facts":
            return getattr(player, what)(**arguments)
    raise ValueError(f"There is no command {what!r}.")
