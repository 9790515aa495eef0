"""The daemon's blocks as vLLM's KV events, for routers. These match prompts by token ids, which stores send along."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens, maybe_convert_block_hash

from kvoffd_client.vllm.chunk_groups import GROUP_ID_BYTES, ChunkGroup
from kvoffd_client.vllm.engine_namespace import EngineNamespace
from kvoffd_proto.events import MEDIUM_CPU, MEDIUM_STORAGE, AllBlocksCleared, KvEvent
from kvoffd_proto.events import BlockStored as DaemonStored
from kvoffd_proto.messages import TOKEN_ID_BYTES

MAX_KNOWN = 131_072
"""Most blocks whose tokens are kept, about 40 MiB: a disk's events have none, those of the store had."""
MAX_BLOCKS_PER_STEP = 1024
"""Most blocks of the engine's size published in one step, so that the scheduler is not delayed."""


class BlockTokens(NamedTuple):
    """The parent key of a block, zeros for the first one, and the block's token ids, uint32."""

    parent: bytes
    token_ids: bytes

    @property
    def begins_prompt(self) -> bool:
        """Whether no block is before it."""
        return not any(self.parent[:-GROUP_ID_BYTES])


def tokens_of(request: Any, keys: Sequence[bytes], place: int, tokens_per_chunk: int) -> BlockTokens:
    """Return parent and tokens of a block at an index of a request's ``keys``, root first."""
    parent = keys[place - 1] if place else bytes(len(keys[0]))
    token_ids = request.all_token_ids[place * tokens_per_chunk : (place + 1) * tokens_per_chunk]
    return BlockTokens(parent, array("I", token_ids).tobytes())


def hashed_by_tokens(request: Any) -> bool:
    """Return whether a request's block hashes depend on its tokens only: no adapter, image, salt or embeddings.

    Routers know tokens only and would confuse the blocks of others.
    """
    special = request.lora_request is not None or request.mm_features or request.cache_salt
    return not special and request.prompt_embeds is None


class HostBlockEvents:
    """The daemon's blocks as vLLM events for the engine's own stream.

    A block is published once its tokens are known and its parent was published, or if it begins a prompt: some routers
    require that. The tokens come with the event of its store; for older blocks, from the engine's own requests whose
    lookups find them.

    The daemon's events wait in ``_waiting``. ``take`` applies some of them in each step: a store's tokens go to
    ``_known``, its keys to ``_published`` and a vLLM event to ``_made``; a removal takes keys out of ``_published``.
    When all is cleared, the published keys go to ``_cleared``: ``take`` publishes their removal bit by bit, unless
    they are stored again before. It returns what is in ``_made``.

    Routers count in the engine's blocks. If a key covers several, the hashes before the last one are computed from the
    tokens as vLLM does.

    vLLM's ``AllBlocksCleared`` would include the engine's own cache, so cleared blocks are removed one by one.

    Args:
        groups: groups of full attention, by index on the wire. Of windows and states only the end of a prompt is
            usable, which routers do not look for, so their groups are not published.
        kinds: vLLM's kind of each group's cache.
        blocks_per_chunk: the engine's blocks per key.
        hash_function: vLLM's hash of blocks.
    """

    def __init__(
        self,
        groups: Mapping[int, ChunkGroup],
        kinds: Mapping[int, str],
        blocks_per_chunk: int = 1,
        hash_function: Callable[[Any], bytes] = sha256,
    ) -> None:
        self.groups = groups
        self._kinds = kinds
        self._blocks_per_chunk, self._hash_function = blocks_per_chunk, hash_function
        self._published: dict[str, dict[bytes, list[bytes]]] = {MEDIUM_CPU: {}, MEDIUM_STORAGE: {}}
        """Published keys by medium, with the hashes of the engine's blocks before the last one."""
        self._known: OrderedDict[bytes, BlockTokens] = OrderedDict()
        """Tokens of blocks by key, published or not, the oldest first."""
        self._waiting: deque[KvEvent] = deque()
        """Events of the daemon that are not applied yet."""
        self._made: list[KVCacheEvent] = []
        """Events of vLLM for the next ``take``."""
        self._cleared: dict[str, dict[bytes, tuple[int, list[bytes]]]] = {MEDIUM_CPU: {}, MEDIUM_STORAGE: {}}
        """Keys of cleared blocks by medium, whose removal is unpublished, with group and hashes as in _published."""

    def take(self, namespace: EngineNamespace) -> list[KVCacheEvent]:
        """Return the events since the last call, at most about MAX_BLOCKS_PER_STEP blocks."""
        if not self._waiting:
            self._waiting.extend(namespace.client.take_events())
        blocks = 0
        while blocks < MAX_BLOCKS_PER_STEP:
            if any(self._cleared.values()):
                keys = self._publish_cleared(max(1, (MAX_BLOCKS_PER_STEP - blocks) // self._blocks_per_chunk))
            elif self._waiting:
                keys = self._apply(self._waiting.popleft())
            else:
                break
            blocks += keys * self._blocks_per_chunk
        made, self._made = self._made, []
        return made

    def publish_found(self, request: Any, index: int, keys: Sequence[bytes], count: int) -> None:
        """Publish a request's first ``count`` blocks of one group, which a lookup found in the pool."""
        published, size = self._published[MEDIUM_CPU], self.groups[index].tokens_per_chunk
        unpublished = [at for at, key in enumerate(keys[:count]) if key not in published]
        if unpublished and hashed_by_tokens(request):
            for at in unpublished:
                self._remember(keys[at], tokens_of(request, keys, at, size))
            self._publish_stored(MEDIUM_CPU, index, [keys[at] for at in unpublished])

    def origins_of(self, request: Any, ends: Mapping[bytes, int]) -> dict[int, tuple[bytes, bytes]]:
        """Return the parents and token ids of a request's blocks by group, as in ``GroupBlocks``.

        ``ends`` has for each key the number of tokens up to the block's end.
        """
        origins: dict[int, tuple[bytes, bytes]] = {}
        if not hashed_by_tokens(request):
            return origins
        for index, group in self.groups.items():
            keys, size = group.keys(request.block_hashes), group.tokens_per_chunk
            places = [end // size - 1 for key, end in ends.items() if key.endswith(group.suffix)]
            blocks = [tokens_of(request, keys, place, size) for place in places]
            parents = b"".join([block.parent[:-GROUP_ID_BYTES] for block in blocks])
            origins[index] = parents, b"".join([block.token_ids for block in blocks])
        return origins

    def handle_engine_reset(self) -> None:
        """Handle a reset of vLLM's own cache. Its AllBlocksCleared is published before our next events, and after it
        routers know no blocks. Existing blocks are published again when a request finds them.
        """
        self._made.clear()
        for medium, published in self._published.items():
            published.clear()
            self._cleared[medium].clear()

    def _publish_cleared(self, most: int) -> int:
        """Publish the removal of at most ``most`` cleared keys; return their number."""
        medium, cleared = next((medium, keys) for medium, keys in self._cleared.items() if keys)
        batch = list(islice(cleared.items(), most))
        for index in self.groups:
            self._publish_removed(medium, index, {key: inner for key, (group, inner) in batch if group == index})
        for key, _ in batch:
            del cleared[key]
        return len(batch)

    def _apply(self, event: KvEvent) -> int:
        """Publish an event of the daemon; return the number of its keys, 1 for one without."""
        if isinstance(event, AllBlocksCleared):
            for medium, published in self._published.items():
                for index, group in self.groups.items():
                    gone = {key: (index, inner) for key, inner in published.items() if key.endswith(group.suffix)}
                    self._cleared[medium] |= gone
                published.clear()
            return 1
        index, medium = event.group_idx, event.medium
        if medium not in self._published or index not in self.groups:
            return 1
        suffix, size = self.groups[index].suffix, self.groups[index].tokens_per_chunk * TOKEN_ID_BYTES
        keys = [block_hash + suffix for block_hash in event.block_hashes]
        if not isinstance(event, DaemonStored):
            published = self._published[medium]
            self._publish_removed(medium, index, {key: published.pop(key) for key in keys if key in published})
            return len(keys)
        if len(event.parents) == len(keys) and len(event.token_ids) == size * len(keys):
            for at, (key, parent) in enumerate(zip(keys, event.parents, strict=True)):
                self._remember(key, BlockTokens(parent + suffix, event.token_ids[at * size : (at + 1) * size]))
        self._publish_stored(medium, index, keys)
        return len(keys)

    def _remember(self, key: bytes, tokens: BlockTokens) -> None:
        self._known[key] = tokens
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _publish_stored(self, medium: str, index: int, keys: Iterable[bytes]) -> None:
        """Publish blocks added to a medium, as far as they can be, one event per chain."""
        published, group = self._published[medium], self.groups[index]
        last, event = b"", None
        for key in keys:
            known = self._known.get(key)
            if known is None or key in published:
                continue
            may_follow = known.begins_prompt or any(known.parent in parents for parents in self._published.values())
            if not may_follow:
                continue
            if (cleared := self._cleared[medium].pop(key, None)) is not None:  # to readers it was never removed
                published[key], event = cleared[1], None  # the blocks behind it begin another event
                continue
            if (inner := self._inner_hashes(group, key, known)) is None:
                continue
            if event is None or known.parent != last:
                parent = None if known.begins_prompt else _external(known.parent)
                size = group.tokens_per_chunk // self._blocks_per_chunk
                event = BlockStored([], parent, [], size, None, medium, None)
                event.group_idx, event.kv_cache_spec_kind = group.group_id, self._kinds[index]
                self._made.append(event)
            event.block_hashes += _blocks_of(key, inner)
            event.token_ids.extend(memoryview(known.token_ids).cast("I"))
            published[key] = inner
            last = key

    def _publish_removed(self, medium: str, index: int, gone: Mapping[bytes, list[bytes]]) -> None:
        """Publish a removal. ``gone``: keys with the hashes of the engine's blocks before the last one."""
        if gone:
            hashes = chain.from_iterable(_blocks_of(key, inner) for key, inner in gone.items())
            self._made.append(BlockRemoved([*hashes], medium, self.groups[index].group_id))

    def _inner_hashes(self, group: ChunkGroup, key: bytes, known: BlockTokens) -> list[bytes] | None:
        """Return the hashes of the engine's blocks in a chunk, except the last one, which is in its key.

        None if the tokens do not produce the key, because its hash covers more than tokens.
        """
        if self._blocks_per_chunk == 1:
            return []
        tokens, size = memoryview(known.token_ids).cast("I"), group.tokens_per_chunk // group.hashes_per_chunk
        last = None if known.begins_prompt else BlockHash(known.parent[:-GROUP_ID_BYTES])
        hashes: list[bytes] = []
        for at in range(0, len(tokens), size):
            last = hash_block_tokens(self._hash_function, last, tokens[at : at + size])
            hashes.append(last)
        per_block = group.hashes_per_chunk // self._blocks_per_chunk
        *inner, own = hashes[per_block - 1 :: per_block]  # of 8 hashes and 4 per block: those at 3 and 7
        return inner if own == key[:-GROUP_ID_BYTES] else None


def _blocks_of(key: bytes, inner: Iterable[bytes]) -> list[Any]:
    """Return the hashes of the engine's blocks under a key, in the form of vLLM's events."""
    return [maybe_convert_block_hash(BlockHash(one)) for one in inner] + [_external(key)]


def _external(key: bytes) -> Any:
    """Return a key's hash in the form of vLLM's events."""
    return maybe_convert_block_hash(BlockHash(key[:-GROUP_ID_BYTES]))
