"""An engine without a model in a process of its own: ``fleet_engine_main.py DIRECTORY``. Lines of JSON say what to do.

Each is a list: the name of a method of ``Engine``, and its arguments; the reply is the result. It imports nothing of
the tests, so that it also runs over the packages of an earlier release. Prompts share no blocks. What a block must hold
depends on its prompt, its place there, and an epoch: with each clear of all nodes the next one begins.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffd_client import AdminClient, KvoffdClientError
from kvoffd_client.testing import FakeEngine

BLOCKS, PAGE_BYTES = 32, 8192
CONNECT_S, JOB_S = 60.0, 10.0
Words = npt.NDArray[np.uint64]


def key_of(prompt: int, place: int) -> bytes:
    return (prompt << 16 | place).to_bytes(32, "big")


def words_of(prompt: int, place: int, epoch: int) -> Words:
    """Return the words of a block: what it is in plain numbers, then words that depend on each bit of these."""
    words = np.arange(PAGE_BYTES // 8, dtype=np.uint64)
    words ^= np.uint64((prompt << 32 | place << 16 | epoch) * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    words[:3] = prompt, place, epoch
    return words


class Engine(FakeEngine):
    """One rank of one layer, whose pages hold words."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory, "fleet", 1, 1, BLOCKS, PAGE_BYTES, connect_timeout_s=CONNECT_S)
        self._directory = directory
        self._words: Words = self._pages[0][0].view(np.uint64)

    def find(self, prompt: int, blocks: int, seconds: float) -> tuple[int, list[int], list[str]]:
        """Look a prompt up and load what is there. Return how many blocks, their epochs, and what is wrong."""
        keys = [key_of(prompt, place) for place in range(blocks)]
        ready = self.lookup(keys, seconds)
        self._words[:ready] = 0
        if not ready or not self.load(keys[:ready], range(ready), JOB_S).ok:
            self.release()
            return 0, [], []
        epochs, wrong = set(), []
        for place in range(ready):
            epoch = int(self._words[place, 2])
            if np.array_equal(self._words[place], words_of(prompt, place, epoch & 0xFFFF)):
                epochs.add(epoch)
            else:
                wrong.append(f"block {place} of prompt {prompt} begins with {self._words[place, :4].tolist()}")
        return ready, sorted(epochs), wrong

    def serve(self, prompt: int, blocks: int, epoch: int, seconds: float) -> tuple[int, list[int], list[str], bool]:
        """Find a prompt, and store the blocks that were not loaded, as of this epoch."""
        ready, epochs, wrong = self.find(prompt, blocks, seconds)
        rest = range(ready, blocks)
        for place in rest:
            self._words[place] = words_of(prompt, place, epoch)
        stored = self.store([key_of(prompt, place) for place in rest], rest, JOB_S)
        return ready, epochs, wrong, stored.ok

    def clear(self) -> str:
        """Clear all nodes; return why that was refused, or an empty text."""
        try:
            with AdminClient(self._directory) as admin:
                admin.reset_fleet(self.namespace.fingerprint)
        except KvoffdClientError as error:
            return str(error)
        return ""


def main(directory: str) -> None:
    with Engine(directory) as engine:
        calls: dict[str, Any] = {"serve": engine.serve, "find": engine.find, "clear": engine.clear}
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            print(json.dumps(calls[name](*arguments)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
