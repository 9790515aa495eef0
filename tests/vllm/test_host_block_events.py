"""Parents and token ids that go with stores, over vLLM's own requests, and the daemon's events as vLLM's own."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import Request

from kvoffd_client.vllm import host_block_events
from kvoffd_client.vllm.chunk_groups import ChunkGroup
from kvoffd_client.vllm.host_block_events import HostBlockEvents
from kvoffd_proto import events

BLOCK_TOKENS, KEY_BYTES = 32, 32
ROOT = bytes(KEY_BYTES)
TOKEN_IDS = [7 * number % 1000 for number in range(6 * BLOCK_TOKENS + 3)]
CPU, STORAGE = events.MEDIUM_CPU, events.MEDIUM_STORAGE


def request_of(**arguments: Any) -> Request:
    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(BLOCK_TOKENS, hash_function)
    request = Request("r", list(TOKEN_IDS), SamplingParams(max_tokens=1), None, block_hasher=hasher)
    for name, value in arguments.items():
        setattr(request, name, value)
    return request


def chain_of(request: Request) -> list[bytes]:
    return [make_offload_key(block_hash, 0) for block_hash in request.block_hashes]


def made_events() -> HostBlockEvents:
    """The events of an engine with one group, of full attention."""
    return HostBlockEvents({0: ChunkGroup(0, 1, BLOCK_TOKENS)}, {0: "full_attention"})


def passed_on(request: Request, chunks: list[int]) -> tuple[bytes, bytes]:
    """The parents and tokens that a store of these chunks of a request tells."""
    ends = {chain_of(request)[chunk]: (chunk + 1) * BLOCK_TOKENS for chunk in chunks}
    return made_events().origins_of(request, ends).get(0, (b"", b""))


def tokens_of(*chunks: int) -> bytes:
    return b"".join(
        [array("I", TOKEN_IDS[chunk * BLOCK_TOKENS : (chunk + 1) * BLOCK_TOKENS]).tobytes() for chunk in chunks]
    )


SPECIAL: list[dict[str, Any]] = [
    {"cache_salt": "tenant"},
    {"mm_features": [SimpleNamespace(identifier="image", mm_hash="image", modality="image", data=None)]},
    {"lora_request": SimpleNamespace(name="adapter")},
    {"prompt_embeds": object()},
]


def test_a_store_tells_the_hash_before_each_key_and_its_tokens() -> None:
    request = request_of()
    before = [ROOT, *request.block_hashes]
    for chunks in ([0, 1, 2, 3, 4, 5], [0], [2, 3], [0, 2, 3, 5]):
        assert passed_on(request, chunks) == (b"".join([before[chunk] for chunk in chunks]), tokens_of(*chunks))


def test_a_prompt_whose_hashes_hold_more_than_tokens_tells_none() -> None:
    for arguments in SPECIAL:
        assert passed_on(request_of(**arguments), [0, 1]) == (b"", b""), arguments


# --- the daemon's events as vLLM's -----------------------------------------------------------------


class Rig:
    """The events of one group, of what a daemon publishes of a prompt's chunks by number."""

    def __init__(self) -> None:
        self.host = made_events()
        self.client = self
        self.request = request_of()
        self.hashes = self.request.block_hashes
        self.pending: list[events.KvEvent] = []
        self.published: dict[str, set[int]] = {CPU: set(), STORAGE: set()}
        """By medium, the numbers of the blocks that a reader of the stream knows."""

    def take_events(self) -> list[events.KvEvent]:
        taken, self.pending = self.pending, []
        return taken

    def stored(self, *chunks: int, medium: str = CPU, tells: bool = True) -> None:
        parents = [[ROOT, *self.hashes][chunk] for chunk in chunks] if tells else []
        tokens = tokens_of(*chunks) if tells else b""
        names = [self.hashes[chunk] for chunk in chunks]
        self.pending.append(events.BlockStored(names, BLOCK_TOKENS, medium, 0, parents, tokens))

    def removed(self, *chunks: int, medium: str = CPU) -> None:
        self.pending.append(events.BlockRemoved([self.hashes[chunk] for chunk in chunks], medium, 0))

    def cleared(self) -> None:
        self.pending.append(events.AllBlocksCleared())

    def take(self) -> list[KVCacheEvent]:
        """What is published, read as a router does: a parent is known, nothing comes twice or goes unknown."""
        found = self.host.take(self)  # type: ignore[arg-type]
        chain = [maybe_convert_block_hash(one) for one in self.hashes]
        for event in found:
            assert isinstance(event, BlockStored | BlockRemoved)
            assert event.medium in (CPU, STORAGE)
            assert event.group_idx == 0
            numbers = [chain.index(one) for one in event.block_hashes]
            known = self.published[event.medium]
            if isinstance(event, BlockRemoved):
                assert known.issuperset(numbers)
                known.difference_update(numbers)
                continue
            assert known.isdisjoint(numbers)
            first = numbers[0]
            assert numbers == list(range(first, first + len(numbers)))
            assert event.parent_block_hash == (chain[first - 1] if first else None)
            assert not first or first - 1 in self.published[CPU] | self.published[STORAGE]
            assert event.token_ids == TOKEN_IDS[first * BLOCK_TOKENS : (first + len(numbers)) * BLOCK_TOKENS]
            assert (event.block_size, event.kv_cache_spec_kind) == (BLOCK_TOKENS, "full_attention")
            known.update(numbers)
        return found


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_nothing_is_published_twice(rig: Rig) -> None:
    rig.stored(0, 1, 2)
    rig.stored(1)
    rig.removed(1)
    rig.take()
    assert rig.published[CPU] == {0, 2}, "the child of what was removed stays: a router's search ends before it"
    rig.removed(1)
    assert rig.take() == []
    rig.stored(1, tells=False)
    rig.take()
    assert rig.published[CPU] == {0, 1, 2}, "its tokens are known"


def test_a_disk_has_the_tokens_of_the_blocks_that_were_stored(rig: Rig) -> None:
    rig.stored(0, 1)
    rig.removed(0, 1)
    rig.stored(0, 1, medium=STORAGE, tells=False)
    rig.take()
    assert rig.published == {CPU: set(), STORAGE: {0, 1}}
    rig.removed(0, medium=STORAGE)
    rig.take()
    assert rig.published[STORAGE] == {1}
    rig.cleared()
    rig.stored(0)
    rig.take()
    assert rig.published == {CPU: {0}, STORAGE: set()}, "what goes at once is removed by name"


def test_a_block_without_tokens_is_published_once_it_is_found(rig: Rig) -> None:
    rig.stored(0, 1, tells=False)
    rig.stored(2, 3)
    assert rig.take() == []
    rig.host.publish_found(rig.request, 0, chain_of(rig.request), 3)
    assert len(rig.take()) == 1
    assert rig.published[CPU] == {0, 1, 2}
    rig.host.publish_found(rig.request, 0, chain_of(rig.request), 4)
    rig.take()
    assert rig.published[CPU] == {0, 1, 2, 3}
    rig.host.publish_found(rig.request, 0, chain_of(rig.request), 4)
    assert rig.take() == []
    rig.removed(0, 1, 2, 3)
    rig.take()
    assert rig.published[CPU] == set()


def test_after_the_engines_own_clear_blocks_are_published_anew(rig: Rig) -> None:
    """vLLM's AllBlocksCleared means ours to routers too."""
    rig.stored(0, 1)
    rig.take()
    rig.host.handle_engine_reset()
    rig.published[CPU].clear()  # as a router does
    rig.host.publish_found(rig.request, 0, chain_of(rig.request), 2)
    rig.take()
    assert rig.published[CPU] == {0, 1}
    rig.removed(0)
    rig.take()
    assert rig.published[CPU] == {1}


def test_a_step_publishes_a_part_of_very_much(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_block_events, "MAX_BLOCKS_PER_STEP", 2)
    for chunk in range(5):
        rig.stored(chunk)
    for known in (2, 4, 5):
        rig.take()
        assert rig.published[CPU] == set(range(known))


def test_tokens_of_a_block_that_is_stored_again_are_kept_as_those_of_a_new_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_block_events, "MAX_KNOWN", 2)
    rig.stored(0, 1)
    rig.removed(0)
    rig.stored(0)
    rig.stored(2)
    rig.take()
    rig.stored(0, medium=STORAGE, tells=False)
    rig.take()
    assert rig.published == {CPU: {0, 1, 2}, STORAGE: {0}}


def test_a_clear_of_very_much_is_published_in_parts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_block_events, "MAX_BLOCKS_PER_STEP", 2)
    chunks = set(range(5))
    for chunk in chunks:
        rig.stored(chunk)
    for medium in (STORAGE, CPU):
        rig.stored(0, medium=medium)
    while rig.host._waiting or rig.pending:
        rig.take()
    assert rig.published == {CPU: chunks, STORAGE: {0}}
    rig.cleared()
    left = []
    for _ in range(4):
        rig.take()
        left.append(len(rig.published[CPU]) + len(rig.published[STORAGE]))
    assert left == [5, 3, 1, 0]


def test_a_block_that_is_back_before_its_clear_was_published_stays(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_block_events, "MAX_BLOCKS_PER_STEP", 2)
    for chunk in range(5):
        rig.stored(chunk)
    for _ in range(3):
        rig.take()
    rig.cleared()
    rig.take()  # which notes it
    rig.host.publish_found(rig.request, 0, rig.host.groups[0].keys(rig.hashes), 3)
    for _ in range(4):
        rig.take()
    assert rig.published[CPU] == {0, 1, 2}


def test_events_that_do_not_fit_the_model_are_left_out(rig: Rig) -> None:
    name = [self_made := b"k" * KEY_BYTES]
    rig.pending += [
        events.BlockStored(name, 2**62, CPU, 2**62),
        events.BlockStored(name, 3, CPU, 0, [ROOT], b"12345"),
        events.BlockStored(name * 2, 3, CPU, 0, [ROOT], tokens_of(0)),
        events.BlockStored([b""], 3, "elsewhere", 0),
        events.BlockStored([], 0, "", 0),
        events.BlockRemoved([self_made], CPU, 7),
    ]
    assert rig.take() == []


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_blocks_of_several_are_published_in_the_engine_s_block_size(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own events of the same prompt name the same blocks."""
    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    hasher = get_request_block_hasher(BLOCK_TOKENS, function)
    request = Request("r", list(TOKEN_IDS), SamplingParams(max_tokens=1), None, block_hasher=hasher)
    hashes = [maybe_convert_block_hash(one) for one in request.block_hashes]
    group = ChunkGroup(0, 2, 2 * BLOCK_TOKENS)
    made = HostBlockEvents({0: group}, {0: "full_attention"}, 2, function)
    made.publish_found(request, 0, group.keys(request.block_hashes), 2)
    keys = request.block_hashes[1::2]
    parents, tokens = [bytes(len(keys[0])), *keys], [tokens_of(0, 1), tokens_of(2, 3), tokens_of(4, 5)]
    stored = events.BlockStored(keys[2:], 2 * BLOCK_TOKENS, CPU, 0, parents[2:3], b"".join(tokens[2:]))
    removed = events.BlockRemoved(keys[1:2], CPU, 0)
    told = iter([[stored, removed], [events.AllBlocksCleared()]])
    namespace: Any = SimpleNamespace(client=SimpleNamespace(take_events=lambda: next(told, [])))
    first, second, gone = made.take(namespace)
    for event, places in ((first, range(4)), (second, range(4, 6))):
        assert event.block_hashes == [hashes[place] for place in places]
        assert (event.block_size, len(event.token_ids)) == (BLOCK_TOKENS, len(places) * BLOCK_TOKENS)
        assert event.parent_block_hash == (hashes[places[0] - 1] if places[0] else None)
    assert gone.block_hashes == hashes[2:4]
    monkeypatch.setattr(host_block_events, "MAX_BLOCKS_PER_STEP", 2)
    assert [[one.block_hashes for one in made.take(namespace)] for _ in range(3)] == [[], [hashes[:2]], [hashes[4:6]]]
