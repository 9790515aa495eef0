"""A fake engine for tests: real memory, real sockets, no model. Needs numpy only."""

from __future__ import annotations

import builtins
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvoffd_client.options import ClientOptions
from kvoffd_proto.errors import ErrorCode

DEFAULT_OPTIONS = ClientOptions()
KEY_BYTES = 32


@dataclass(frozen=True)
class EngineResult:
    """How a store or load of all ranks ended.

    Attributes:
        ok: every rank's job was ok.
        bytes: bytes copied, over all ranks.
        seconds: of the slowest rank, from the daemon's acceptance to the end.
        failed_keys: keys that failed on any rank, in the order given.
        error: the first rank's error, None when ok.
    """

    ok: bool
    bytes: int
    seconds: float
    failed_keys: list[builtins.bytes] = field(default_factory=list)
    error: ErrorCode | None = None


class FakeEngine:
    """An engine without a model: ``world_size`` workers of ``layers`` x ``blocks`` pages, and a scheduler.

    >>> with FakeEngine("/run/kvoffd") as engine:                                          # doctest: +SKIP
    ...     engine.fill([0, 1], seed=7)
    ...     engine.store([key_a, key_b], [0, 1])
    ...     engine.lookup([key_a, key_b])      # 2
    ...     engine.load([key_a, key_b], [8, 9])

    Args:
        directory: where the daemon's sockets are.
        namespace: engines of the same name and geometry share blocks.
        world_size: workers; every operation goes to all of them.
        layers: pages per block and worker.
        blocks: engine blocks.
        page_bytes: bytes of one layer's page of one block.
        options: timeouts; ``connect_timeout_s`` bounds the constructor.

    Raises:
        DaemonUnavailable: no daemon in time; the sentence names the directory.
        RequestRefused: the daemon refuses the namespace or the memory.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        namespace: str = "demo",
        world_size: int = 1,
        layers: int = 4,
        blocks: int = 512,
        page_bytes: int = 16384,
        *,
        options: ClientOptions = DEFAULT_OPTIONS,
    ) -> None:
        raise NotImplementedError

    def fill(self, block_ids: Sequence[int], seed: int) -> None:
        """Write pseudo-random bytes that depend on (seed, block, layer, rank) only."""
        raise NotImplementedError

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """One CRC-32 per block over all layers and ranks."""
        raise NotImplementedError

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], timeout_s: float = 10.0) -> EngineResult:
        """Copy block ``block_ids[i]`` into the pool under ``keys[i]``, on all ranks.

        Raises:
            ValueError: a key is not 32 bytes, or the lengths differ.
        """
        raise NotImplementedError

    def lookup(self, keys: Sequence[bytes], timeout_s: float = 10.0) -> int:
        """Number of leading keys that are ready. They are pinned until load() or release(); older pins go."""
        raise NotImplementedError

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], timeout_s: float = 10.0) -> EngineResult:
        """Copy ``keys[i]``, pinned by the last lookup, into block ``block_ids[i]``, on all ranks. Raises as store()."""
        raise NotImplementedError

    def release(self) -> None:
        """Let the pins of the last lookup go."""
        raise NotImplementedError

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until all clients are connected, as after a restart of the daemon."""
        raise NotImplementedError

    def close(self) -> None:
        """End all sessions and free the memory. Repeatable."""
        raise NotImplementedError

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
