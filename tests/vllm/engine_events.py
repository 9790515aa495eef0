"""KV events of an engine or of its daemon, read as vLLM's own example subscriber reads them."""

from __future__ import annotations

import warnings
from typing import Any

import msgspec
import zmq

from kvoffd_client.session import Closing
from tests.kit.engine import BLOCK_TOKENS


class EngineEvents(Closing):
    """Takes in what is published at ``endpoint``. Events of the engine's own cache do not count."""

    def __init__(self, endpoint: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from vllm.distributed.kv_events import KVEventBatch
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        self._events: list[Any] = []

    def read(self) -> None:
        """Take in what has come."""
        while self._socket.poll(0):
            _topic, sequence, payload = self._socket.recv_multipart()
            assert len(sequence) == 8
            self._events.extend(self._decoder.decode(payload).events)

    @property
    def cleared(self) -> bool:
        """Whether all blocks were removed at once."""
        return bool(self._of("AllBlocksCleared"))

    @property
    def stored(self) -> set[int]:
        """Hashes of the blocks that were stored."""
        return self._hashes("BlockStored")

    @property
    def removed(self) -> set[int]:
        return self._hashes("BlockRemoved")

    @property
    def described(self) -> dict[tuple[int, ...], int]:
        """Hashes of the blocks that were stored, by their tokens."""
        return {
            tuple(event.token_ids[number * BLOCK_TOKENS :][:BLOCK_TOKENS]): short_hash(item)
            for event in self._of("BlockStored")
            for number, item in enumerate(event.block_hashes)
        }

    def _of(self, kind: str) -> list[Any]:
        """Events of a kind, but for those of the engine's own cache."""
        return [one for one in self._events if type(one).__name__ == kind and getattr(one, "medium", "CPU") == "CPU"]

    def _hashes(self, kind: str) -> set[int]:
        return {short_hash(item) for event in self._of(kind) for item in event.block_hashes}

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def short_hash(item: int | bytes) -> int:
    """As the integer that vLLM's publisher makes of it by default."""
    return item if isinstance(item, int) else int.from_bytes(item, "big") & (1 << 64) - 1
