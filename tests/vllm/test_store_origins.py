"""Parents and token ids that go with stores, over vLLM's own requests and their block hashes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.kv_offload.base import GPULoadStoreSpec, ReqContext, RequestOffloadingContext
from vllm.v1.request import Request

from kvoffd_client.vllm.connector import KvoffdConnector
from kvoffd_client.vllm.connector_metadata import KeyedSpec, group_transfers
from kvoffd_client.vllm.store_origins import tell_origins
from kvoffd_proto.codec import encode
from kvoffd_proto.events import MEDIUM_CPU, MEDIUM_STORAGE
from kvoffd_proto.messages import WANTS_PARENTS, WANTS_TOKENS, GroupTransfer
from kvoffd_proto.router_events import (
    ClearedBlocks,
    RemovedBlocks,
    RouterBatch,
    StoredBlocks,
    router_hash,
)
from tests.support.models import make_tiny_llama
from tests.support.vllm_config import cache_config, make_config

BLOCK_TOKENS, KEY_BYTES = 32, 32
ROOT = bytes(KEY_BYTES)
TOKEN_IDS = [7 * number % 1000 for number in range(6 * BLOCK_TOKENS + 3)]
BOTH = frozenset({WANTS_PARENTS, WANTS_TOKENS})


@pytest.fixture(scope="module")
def connector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvoffdConnector]:
    root = tmp_path_factory.mktemp("origins")
    config = make_config(make_tiny_llama(root / "tiny-llama"), {"directory": str(root)})
    connector = KvoffdConnector(config, KVConnectorRole.SCHEDULER, cache_config())
    yield connector
    connector.shutdown()


def request_of(**arguments: Any) -> Request:
    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(BLOCK_TOKENS, hash_function)
    return Request("r", list(TOKEN_IDS), SamplingParams(max_tokens=1), None, block_hasher=hasher, **arguments)


def stored(
    connector: KvoffdConnector, request: Request, chunks: list[int], wanted: frozenset[str] = BOTH
) -> GroupTransfer:
    """What goes over the wire for a store of these chunks of a request."""
    status = RequestOffloadState(
        connector.connector_scheduler.config, request, ReqContext("r"), RequestOffloadingContext()
    )
    status.update_offload_keys()
    keys = b"".join([status.group_states[0].offload_keys[chunk][:KEY_BYTES] for chunk in chunks])
    blocks = GPULoadStoreSpec(list(chunks), group_sizes=[len(chunks)], block_indices=[chunks[0]])
    job = TransferJob("r", blocks, KeyedSpec((keys,)))
    tell_origins({1: job}, {"r": status}, 1, wanted)
    (transfer,) = group_transfers(blocks, job.dst_spec, 1, KEY_BYTES, is_store=True)
    return transfer


def tokens_of(*chunks: int) -> bytes:
    return b"".join(
        [array("I", TOKEN_IDS[chunk * BLOCK_TOKENS : (chunk + 1) * BLOCK_TOKENS]).tobytes() for chunk in chunks]
    )


@pytest.mark.parametrize("chunks", [[0, 1, 2, 3, 4, 5], [0], [2, 3], [0, 2, 3, 5]])
def test_a_store_tells_the_hash_before_each_key_and_its_tokens(connector: KvoffdConnector, chunks: list[int]) -> None:
    request = request_of()
    transfer = stored(connector, request, chunks)
    before = [ROOT, *request.block_hashes]
    assert transfer.parents == b"".join([before[chunk] for chunk in chunks])
    assert transfer.tokens == tokens_of(*chunks)


def test_a_daemon_that_wants_only_parents_gets_no_tokens_and_one_that_wants_nothing_gets_neither(
    connector: KvoffdConnector,
) -> None:
    transfer = stored(connector, request_of(), [0, 1], frozenset({WANTS_PARENTS}))
    assert (len(transfer.parents), transfer.tokens) == (2 * KEY_BYTES, b"")
    transfer = stored(connector, request_of(), [0, 1], frozenset({"kv_events"}))
    assert (transfer.parents, transfer.tokens) == (b"", b"")


@pytest.mark.parametrize(
    "arguments",
    [
        {"cache_salt": "tenant"},
        {"mm_features": [SimpleNamespace(identifier="image", mm_hash="image", modality="image", data=None)]},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_a_prompt_whose_hashes_hold_more_than_tokens_tells_none(
    connector: KvoffdConnector, arguments: dict[str, Any]
) -> None:
    request = request_of()
    for name, value in arguments.items():
        setattr(request, name, value)
    transfer = stored(connector, request, [0, 1])
    assert (len(transfer.parents), transfer.tokens) == (2 * KEY_BYTES, b"")


def test_a_prompt_with_an_adapter_tells_nothing(connector: KvoffdConnector) -> None:
    request = request_of()
    request.lora_request = SimpleNamespace(name="adapter")
    transfer = stored(connector, request, [0, 1])
    assert (transfer.parents, transfer.tokens) == (b"", b"")


def test_the_end_of_a_prompt_that_is_no_chunk_of_it_tells_nothing(connector: KvoffdConnector) -> None:
    request = request_of()
    status = RequestOffloadState(
        connector.connector_scheduler.config, request, ReqContext("r"), RequestOffloadingContext()
    )
    status.update_offload_keys()
    blocks = GPULoadStoreSpec([5], group_sizes=[1], block_indices=[5])
    job = TransferJob("r", blocks, KeyedSpec((b"partial tail".ljust(KEY_BYTES),)))
    tell_origins({1: job}, {"r": status}, 1, BOTH)
    assert (job.dst_spec.parents, job.dst_spec.tokens) == ((b"",), (b"",))


def test_vllms_own_types_read_what_routers_are_sent() -> None:
    """With the hashes that vLLM's own publisher would send of the same blocks."""
    request = request_of()
    chain = [maybe_convert_block_hash(one) for one in request.block_hashes[:2]]
    assert [router_hash(one) for one in request.block_hashes[:2]] == chain
    stored = StoredBlocks(chain, None, TOKEN_IDS[:64], 32, None, MEDIUM_CPU, None, 0, "full_attention")
    batch = RouterBatch(1.5, [stored, RemovedBlocks(chain, MEDIUM_STORAGE, 0), ClearedBlocks()])
    read = msgspec.msgpack.decode(encode(batch), type=kv_events.KVEventBatch)
    assert (read.ts, read.data_parallel_rank) == (1.5, 0)
    assert read.events == [
        kv_events.BlockStored(
            block_hashes=chain,
            parent_block_hash=None,
            token_ids=TOKEN_IDS[:64],
            block_size=32,
            lora_id=None,
            medium=kv_events.MEDIUM_CPU,
            lora_name=None,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        ),
        kv_events.BlockRemoved(block_hashes=chain, medium=kv_events.MEDIUM_STORAGE, group_idx=0),
        kv_events.AllBlocksCleared(),
    ]
