"""The bytes that every page of every block must hold, whichever engine stored it."""

from __future__ import annotations

import random
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvoffd.pool.allocator import page_up
from kvoffd_client import NamespaceSpec
from kvoffd_proto.messages import TOKEN_ID_BYTES, GroupSpec

Bytes = npt.NDArray[np.uint8]

PAGE_SIZES = (24, 64, 100, 256, 512, 1000)


class Content:
    """A namespace's geometry and bytes, which are a function of (namespace, rank, group, key, page, sub-block)."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.world_size = rng.choice((1, 1, 2, 2, 3))
        self.blocks_per_key = rng.choice((1, 1, 2, 3))
        groups = rng.choice((1, 1, 2))
        self.spec = NamespaceSpec.named(
            f"sim-{number}",
            self.world_size,
            rng.choice((8, 16, 32)),
            [GroupSpec("full_attention", 16 * self.blocks_per_key)] * groups,
            seed=rng.randrange(10**9),
        )
        # Slots begin at 8192 bytes: a shard factor makes some namespaces need larger ones.
        factor = rng.choice((1, 1, 1, 4, 8))
        self.pages = [
            [[rng.choice(PAGE_SIZES) * factor for _ in range(rng.randint(1, 3))] for _ in range(groups)]
            for _ in range(self.world_size)
        ]
        """For each rank and group, the sizes of the layers' pages in bytes."""
        self._shards: dict[tuple[int, int, bytes], Bytes] = {}

    @property
    def groups(self) -> range:
        return range(len(self.spec.groups))

    def tokens(self, key: bytes) -> bytes:
        """The token ids of a key's block, as stores tell them."""
        nbytes = self.spec.groups[0].tokens_per_block * TOKEN_ID_BYTES
        return (key * nbytes)[:nbytes]

    def shard_bytes(self, rank: int, group: int) -> int:
        return self.blocks_per_key * sum(self.pages[rank][group])

    def block_bytes(self, group: int) -> int:
        """What all shards of a block take, in whole pages."""
        return sum(page_up(self.shard_bytes(rank, group)) for rank in range(self.world_size))

    def shard(self, rank: int, group: int, key: bytes) -> Bytes:
        """A whole shard as it lies in a slot: layer, then sub-block. No eight bytes in a row are there twice."""
        found = self._shards.get((rank, group, key))
        if found is None:
            name = self.spec.fingerprint + bytes((rank, group)) + key
            base = np.uint64(int.from_bytes(blake2b(name, digest_size=8).digest(), "little"))
            words = -(-self.shard_bytes(rank, group) // 8)
            numbers = np.arange(words, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + base
            found = numbers.view(np.uint8)[: self.shard_bytes(rank, group)]
            found.flags.writeable = False
            self._shards[rank, group, key] = found
        return found

    def page(self, rank: int, group: int, key: bytes, layer: int, sub: int) -> Bytes:
        """The bytes of one layer of one engine block of a key."""
        pages = self.pages[rank][group]
        start = self.blocks_per_key * sum(pages[:layer]) + sub * pages[layer]
        return self.shard(rank, group, key)[start : start + pages[layer]]

    def wrong_at(self, rank: int, group: int, key: bytes, found: Bytes, first_block: int) -> int | None:
        """Where in a slot the first wrong byte is, of those that were stored; None when all are right."""
        expected = self.shard(rank, group, key)
        different = found[: expected.size] != expected
        if not different.any():
            return None
        start = 0
        for page in self.pages[rank][group]:
            wrong = np.flatnonzero(different[start + first_block * page : start + self.blocks_per_key * page])
            if wrong.size:
                return start + first_block * page + int(wrong[0])
            start += self.blocks_per_key * page
        return None


class Corpus:
    """Prompts of a namespace as chains of keys that share prefixes."""

    def __init__(self, content: Content, rng: random.Random) -> None:
        self._rng = rng
        size = content.spec.key_bytes
        self.chains: list[list[bytes]] = []
        for _ in range(rng.randint(2, 4)):
            chain: list[bytes] = []
            if self.chains and rng.random() < 0.6:
                parent = rng.choice(self.chains)
                chain = parent[: rng.randint(1, len(parent))]
            chain = chain + [rng.randbytes(size) for _ in range(rng.randint(1, 4))]
            self.chains.append(chain)

    def prompt(self) -> list[bytes]:
        """The keys of a random prompt, root first."""
        chain = self._rng.choice(self.chains)
        return chain[: self._rng.randint(1, len(chain))]
