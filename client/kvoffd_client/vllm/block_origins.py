"""What stores and loads say of their blocks to a daemon that asks for it: parents and token ids."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.v1.kv_offload.base import OffloadKey

from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.vllm.connector_metadata import GROUP_ID_BYTES, KeyedSpec
from kvoffd_proto.messages import WANTS_PARENTS, WANTS_TOKENS

MAX_TOLD = 131_072
"""After so many blocks those that were told before them are forgotten, and told once more if they come again."""


class ToldBlocks:
    """Blocks of which this engine has told the daemon the tokens; all, where that wants none.

    What the engine has in its own cache it does not load, and the daemon may have it from an earlier one, or from
    elsewhere, without tokens: it is stored once more, which copies nothing, unless it is in here.
    """

    def __init__(self) -> None:
        self._keys: set[OffloadKey] = set()
        self._earlier: set[OffloadKey] = set()
        self._since: tuple[bool, int, NamespaceSpec | None] = False, 0, None

    def begin_step(self, capabilities: Collection[str], epoch: int, namespace: NamespaceSpec | None) -> None:
        """Forget all where the daemon, or the namespace, is another one than before."""
        since = WANTS_TOKENS in capabilities, epoch, namespace
        if since != self._since:
            self._since = since
            self._keys, self._earlier = set(), set()

    def __contains__(self, key: object) -> bool:
        return not self._since[0] or key in self._keys or key in self._earlier

    def add(self, keys: Iterable[OffloadKey]) -> None:
        self._keys.update(keys)
        if len(self._keys) >= MAX_TOLD:
            self._keys, self._earlier = set(), self._keys


def tell_origins(
    stores: Iterable[TransferJob],
    loads: Iterable[TransferJob],
    requests: Mapping[str, RequestOffloadState],
    blocks_per_chunk: int,
    capabilities: Collection[str],
    told: ToldBlocks,
) -> None:
    """Give the jobs of a step the parents and token ids of their keys, as far as the daemon wants them.

    Loads too: the daemon has no tokens of blocks that came from another node, or that an earlier daemon left. ``told``
    is kept of all of them.

    Prompts whose hashes do not follow from their tokens alone (adapters, images, salts, embeddings) tell no tokens: who
    knows the tokens only would take another prompt's blocks for theirs. With an adapter, no parents either.
    """
    tokens = WANTS_TOKENS in capabilities
    if not tokens and WANTS_PARENTS not in capabilities:
        return
    for request_id, keyed, blocks in [
        *[(job.req_id, job.dst_spec, job.src_spec) for job in stores],
        *[(job.req_id, job.src_spec, job.dst_spec) for job in loads if tokens],
    ]:
        status = requests.get(request_id)
        if status is None or status.req.lora_request is not None or not isinstance(keyed, KeyedSpec):
            continue
        found = [
            _origins(status, index, keys, first_block // blocks_per_chunk)
            for index, (keys, first_block) in enumerate(zip(keyed.groups, blocks.block_indices, strict=True))
        ]
        keyed.parents = tuple([parents for parents, _ in found])
        if tokens and is_told(status.req):
            keyed.tokens = tuple([_tokens(status, index, at) for index, (_, at) in enumerate(found)])
            for group, (_, places) in zip(status.group_states, found, strict=True):
                told.add([group.offload_keys[place] for place in places])


def _origins(status: RequestOffloadState, index: int, keys: bytes, first: int) -> tuple[bytes, list[int]]:
    """The parents of a job's keys of one group, and the places of their chunks in the request; empty where unknown.

    ``first`` is the place of the first one.
    """
    chain = status.group_states[index].offload_keys
    if not keys or first >= len(chain):
        return b"", []
    size = len(chain[0]) - GROUP_ID_BYTES
    count = len(keys) // size
    places = list(range(first, first + count))
    if b"".join([key[:size] for key in chain[first : first + count]]) != keys:  # some between them are stored already
        suffix, places = chain[0][size:], []
        for start in range(0, len(keys), size):
            try:
                first = chain.index(keys[start : start + size] + suffix, first)
            except ValueError:  # the end of a prompt, inside a chunk
                return b"", []
            places.append(first)
    root = bytes(size)
    return b"".join([chain[place - 1][:size] if place else root for place in places]), places


def _tokens(status: RequestOffloadState, index: int, places: list[int]) -> bytes:
    """The token ids of chunks of one group."""
    per_chunk = status.config.kv_group_configs[index].tokens_per_chunk
    token_ids = status.req.all_token_ids
    return b"".join([array("I", token_ids[place * per_chunk : (place + 1) * per_chunk]).tobytes() for place in places])


def is_told(request: Any) -> bool:
    """Whether the hashes of a request's blocks follow from its tokens alone."""
    special = request.lora_request is not None or request.mm_features or request.cache_salt
    return not special and request.prompt_embeds is None
