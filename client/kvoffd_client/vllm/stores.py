"""Which stores are under way and whether more may be offered. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvoffd_client.vllm.request_lookups import GROUP_ID_BYTES, Key


class StoreWindow:
    """Counts the bytes of stores that vLLM was given and that no worker has reported as ended.

    The credit is soft: one offer may pass it. An offer is all the new blocks of a request's step, and a part of it
    would be worth little (vLLM does not offer the rest again, and a prefix without its sliding windows is no hit); an
    offer larger than the whole credit would otherwise never be made.

    Args:
        shard_bytes: bytes of one worker's shard of a block, by a key's last four bytes.
    """

    def __init__(self, shard_bytes: Mapping[bytes, int]) -> None:
        self._shard_bytes = shard_bytes
        self._in_flight: set[Key] = set()
        self.outstanding_bytes = 0
        self.credit_bytes = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._in_flight

    @property
    def open(self) -> bool:
        """Whether another store may be offered now."""
        return self.outstanding_bytes == 0 or self.outstanding_bytes < self.credit_bytes

    def begin(self, keys: Collection[Key]) -> None:
        """These keys, none of them in flight, were offered."""
        self._in_flight.update(keys)
        self.outstanding_bytes += self._bytes_of(keys)

    def end(self, keys: Collection[Key]) -> None:
        """A store ended, well or not. Keys that are not in flight (any more) are ignored."""
        ended = self._in_flight.intersection(keys)
        self._in_flight -= ended
        self.outstanding_bytes -= self._bytes_of(ended)

    def clear(self) -> None:
        """Forget all stores: vLLM does not tell how they end after a reset."""
        self._in_flight.clear()
        self.outstanding_bytes = 0

    def _bytes_of(self, keys: Collection[Key]) -> int:
        return sum(self._shard_bytes[key[-GROUP_ID_BYTES:]] for key in keys)
