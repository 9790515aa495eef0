"""Parents and token ids that go with stores and loads, over vLLM's own requests and their block hashes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import GPULoadStoreSpec, ReqContext, RequestOffloadingContext
from vllm.v1.request import Request

from kvoffd_client import NamespaceSpec
from kvoffd_client.vllm import block_origins
from kvoffd_client.vllm.block_origins import ToldBlocks, tell_origins
from kvoffd_client.vllm.connector import KvoffdConnector
from kvoffd_client.vllm.connector_metadata import KeyedSpec, group_transfers
from kvoffd_client.vllm.engine_namespace import Unconnected
from kvoffd_proto.messages import WANTS_PARENTS, WANTS_TOKENS, GroupTransfer
from tests.kit.models import make_tiny_llama
from tests.kit.vllm_config import cache_config, make_config

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


def told(
    connector: KvoffdConnector,
    request: Request,
    chunks: list[int],
    wanted: frozenset[str] = BOTH,
    *,
    is_store: bool = True,
) -> GroupTransfer:
    """What goes over the wire for a store, or a load, of these chunks of a request."""
    status = RequestOffloadState(
        connector.connector_scheduler.config, request, ReqContext("r"), RequestOffloadingContext()
    )
    status.update_offload_keys()
    keys = b"".join([status.group_states[0].offload_keys[chunk][:KEY_BYTES] for chunk in chunks])
    blocks = GPULoadStoreSpec(list(chunks), group_sizes=[len(chunks)], block_indices=[chunks[0]])
    keyed = KeyedSpec((keys,))
    stores = [TransferJob("r", blocks, keyed)] if is_store else []
    loads = [] if is_store else [TransferJob("r", keyed, blocks)]
    tell_origins(stores, loads, {"r": status}, 1, wanted, ToldBlocks())
    (transfer,) = group_transfers(blocks, keyed, 1, KEY_BYTES, is_store=is_store)
    return transfer


def tokens_of(*chunks: int) -> bytes:
    return b"".join(
        [array("I", TOKEN_IDS[chunk * BLOCK_TOKENS : (chunk + 1) * BLOCK_TOKENS]).tobytes() for chunk in chunks]
    )


@pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
@pytest.mark.parametrize("chunks", [[0, 1, 2, 3, 4, 5], [0], [2, 3], [0, 2, 3, 5]])
def test_a_job_tells_the_hash_before_each_key_and_its_tokens(
    connector: KvoffdConnector, chunks: list[int], is_store: bool
) -> None:
    request = request_of()
    transfer = told(connector, request, chunks, is_store=is_store)
    before = [ROOT, *request.block_hashes]
    assert transfer.parents == b"".join([before[chunk] for chunk in chunks])
    assert transfer.tokens == tokens_of(*chunks)


@pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
def test_the_jobs_of_a_step_tell_tokens(
    connector: KvoffdConnector, is_store: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unconnected, "capabilities", BOTH)
    scheduler, request = connector.connector_scheduler, request_of()
    status = RequestOffloadState(scheduler.config, request, ReqContext("r"), RequestOffloadingContext())
    status.update_offload_keys()
    keyed = KeyedSpec((request.block_hashes[0],))
    blocks = GPULoadStoreSpec([0], group_sizes=[1], block_indices=[0])
    job = TransferJob("r", blocks, keyed) if is_store else TransferJob("r", keyed, blocks)
    monkeypatch.setitem(scheduler._req_status, "r", status)
    monkeypatch.setattr(scheduler, "_current_batch_load_jobs", {} if is_store else {1: job})
    monkeypatch.setattr(scheduler, "_build_store_jobs", lambda _: {1: job} if is_store else {})
    connector.build_connector_meta(SchedulerOutput.make_empty())
    assert (keyed.parents, keyed.tokens) == ((ROOT,), (tokens_of(0),))


def test_a_daemon_that_wants_only_parents_gets_no_tokens_and_one_that_wants_nothing_gets_neither(
    connector: KvoffdConnector,
) -> None:
    transfer = told(connector, request_of(), [0, 1], frozenset({WANTS_PARENTS}))
    assert (len(transfer.parents), transfer.tokens) == (2 * KEY_BYTES, b"")
    for is_store, wanted in [(True, {"kv_events"}), (False, {"kv_events"}), (False, {WANTS_PARENTS})]:
        transfer = told(connector, request_of(), [0, 1], frozenset(wanted), is_store=is_store)
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
    transfer = told(connector, request, [0, 1])
    assert (len(transfer.parents), transfer.tokens) == (2 * KEY_BYTES, b"")


def test_a_prompt_with_an_adapter_tells_nothing(connector: KvoffdConnector) -> None:
    request = request_of()
    request.lora_request = SimpleNamespace(name="adapter")
    transfer = told(connector, request, [0, 1])
    assert (transfer.parents, transfer.tokens) == (b"", b"")


def test_the_end_of_a_prompt_that_is_no_chunk_of_it_tells_nothing(connector: KvoffdConnector) -> None:
    request = request_of()
    status = RequestOffloadState(
        connector.connector_scheduler.config, request, ReqContext("r"), RequestOffloadingContext()
    )
    status.update_offload_keys()
    blocks = GPULoadStoreSpec([5], group_sizes=[1], block_indices=[5])
    job = TransferJob("r", blocks, KeyedSpec((b"partial tail".ljust(KEY_BYTES),)))
    tell_origins([job], [], {"r": status}, 1, BOTH, ToldBlocks())
    assert (job.dst_spec.parents, job.dst_spec.tokens) == ((b"",), (b"",))


def test_a_block_is_told_once_to_each_daemon_in_each_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_origins, "MAX_TOLD", 2)
    one, two, three, four = [bytes([number]) for number in range(4)]
    told, namespace = ToldBlocks(), NamespaceSpec.named("model")
    assert one in told, "nobody asked for tokens"
    told.begin_step(BOTH, 1, namespace)
    assert one not in told
    told.add([one])
    told.begin_step(BOTH, 1, namespace)
    assert (one in told, two in told) == (True, False)
    told.begin_step(BOTH, 2, namespace)
    assert one not in told, "a daemon that was restarted"
    told.add([one])
    told.begin_step(BOTH, 2, NamespaceSpec.named("other"))
    assert one not in told, "other weights"
    told.add([one])
    told.add([two])
    told.add([three])
    assert all(key in told for key in (one, two, three))
    told.add([four])
    assert [key in told for key in (one, two, three, four)] == [False, False, True, True]


def test_what_the_daemon_has_of_a_plain_prompt_is_told_again_and_of_others_not(connector: KvoffdConnector) -> None:
    for salt, wanted in (("", True), ("tenant", False)):
        request = request_of()
        request.cache_salt = salt
        connector.on_new_request(request)
        assert (connector._manager._requests["r"].told is not None) == wanted
        connector.connector_scheduler._req_status.pop("r")
        connector._manager._requests.pop("r")
